"""What can only be seen on a machine with an NVIDIA GPU: run with ``python -m pytest -m gpu``."""
