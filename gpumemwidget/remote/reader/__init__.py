"""Read the recordings of many processes, and bring them together."""
