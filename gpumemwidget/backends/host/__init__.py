"""The memory of this process: resident size, malloc, control groups."""
