"""PyTorch's caching allocator: replayed from a recorded trace, or simulated for requests."""
