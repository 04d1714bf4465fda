"""Callbacks for trainers: each module needs its library, and is imported by the user alone."""
