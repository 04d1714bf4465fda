"""A cell that ran out of memory: what was there, and the remedies."""
