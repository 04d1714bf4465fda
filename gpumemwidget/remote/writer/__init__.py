"""Measure this process, and tell of it: to a file, or through an engine."""
