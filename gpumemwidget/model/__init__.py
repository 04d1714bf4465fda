"""Frozen records and enums that the other packages share. No words, no formatting."""
