"""PyTorch's caching allocator on CUDA and ROCm: counters, peaks, limits, snapshots, history."""
