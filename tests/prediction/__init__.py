"""Predictions of memory, and the simulated allocator they are made with."""
