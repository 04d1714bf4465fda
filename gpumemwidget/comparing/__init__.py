"""Two results of this package beside each other."""
