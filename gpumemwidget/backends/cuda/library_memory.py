"""How much the libraries of NVIDIA GPUs keep for PyTorch: cuBLAS and cuBLASLt.

PyTorch allocates it in C++ with its own allocator, so no object of Python's leads to it, and
nothing but its size shows what it is.
"""

from __future__ import annotations

import os
import re

_KIB, _MIB = 1 << 10, 1 << 20


def count_cublas_bytes(major: int) -> int:
    """Return the size of a cuBLAS workspace, of which there is one for each thread and stream.

    By the environment, else by the GPU's generation: 32 MiB on Hopper and Blackwell, 8.125 MiB
    (``:4096:2:16:8``) on others. ``getChosenWorkspaceSize`` in
    https://github.com/pytorch/pytorch/blob/main/aten/src/ATen/cuda/CublasHandlePool.cpp

    Args:
        major: the first number of the GPU's compute capability, 9 of an H100.

    Returns:
        Its size, in bytes.
    """
    default = 32 * _MIB if major in (9, 10, 12) else 8 * _MIB + 128 * _KIB
    return parse_workspace_config(os.environ.get("CUBLAS_WORKSPACE_CONFIG"), default)


def count_cublaslt_bytes() -> int:
    """Return the size of a cuBLASLt workspace, in bytes: by the environment, else 1 MiB."""
    return parse_kib(os.environ.get("CUBLASLT_WORKSPACE_SIZE"), _MIB)


def parse_workspace_config(config: str | None, default: int) -> int:
    """Return the bytes of ``:4096:2:16:8``: two times 4096 KiB and eight times 16."""
    pairs = re.findall(r":(\d+):(\d+)", config or "")
    if not pairs:
        return default
    return sum(int(n_kib) * int(count) for n_kib, count in pairs) * _KIB


def parse_kib(text: str | None, default: int) -> int:
    """Return the bytes of a number of KiB; ``default`` for what is none."""
    return int(text) * _KIB if text is not None and text.isdigit() else default
