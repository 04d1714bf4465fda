"""A zoo of leaks: what keeps memory alive in notebooks, each pattern as a person writes it."""
