"""A release or a restore: planned, carried out, measured."""
