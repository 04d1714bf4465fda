"""Commands for developers: recordings, pictures, notebooks, the built wheel, kernels, a browser."""
