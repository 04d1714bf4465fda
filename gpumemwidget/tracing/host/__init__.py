"""The host's memory, read as each line of a cell begins."""
