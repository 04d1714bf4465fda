"""Recorded programs, their files, and processes elsewhere."""
