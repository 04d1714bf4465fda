"""Find which lines of a cell took memory."""
