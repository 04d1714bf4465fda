"""Measure this process, and record it: to a file, or through an engine."""
