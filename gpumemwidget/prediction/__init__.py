"""Predict the memory that a cell will take, before it runs."""
