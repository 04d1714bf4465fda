"""Common GPUs by their names: the memory that PyTorch finds there, and what sizes workspaces.

The total is what PyTorch tells in its out-of-memory messages ("total capacity"), less than the name
promises: the driver keeps a part, and newer drivers keep more. Of the totals that public messages
and printed device properties tell of a GPU on Linux, this is the lowest common one: a prediction
must not promise too much. Cards with error correction (ECC) switched on have less.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass

from gpumemwidget.errors import BadInputError
from gpumemwidget.model.devices import Chip
from gpumemwidget.units import parse_bytes

_GIB = 1 << 30
#: Taken by the CUDA context and by the libraries' kernels, of no allocator.
CONTEXT_BYTES = 600 << 20


@dataclass(frozen=True, slots=True)
class KnownGpu:
    """A GPU that one can rent or buy."""

    name: str
    total_bytes: int
    chip: Chip


def _known(
    name: str, total_gib: float, capability: tuple[int, int], n_multiprocessors: int, n_threads: int
) -> KnownGpu:
    chip = Chip(capability, n_multiprocessors, n_threads)
    return KnownGpu(name, round(total_gib * _GIB), chip)


_GPUS = (
    _known("T4", 14.56, (7, 5), 40, 1024),
    _known("P100", 15.89, (6, 0), 56, 2048),
    _known("V100-16GB", 15.75, (7, 0), 80, 2048),
    _known("V100-32GB", 31.73, (7, 0), 80, 2048),
    _known("L4", 21.96, (8, 9), 58, 1536),
    _known("A10", 21.98, (8, 6), 72, 1536),
    _known("A10G", 21.98, (8, 6), 80, 1536),
    _known("A30", 23.49, (8, 0), 56, 2048),
    _known("A100-40GB", 39.38, (8, 0), 108, 2048),
    _known("A100-80GB", 79.14, (8, 0), 108, 2048),
    _known("L40S", 44.31, (8, 9), 142, 1536),
    _known("RTX-3060", 11.62, (8, 6), 28, 1536),
    _known("RTX-3090", 23.55, (8, 6), 82, 1536),
    _known("RTX-4090", 23.49, (8, 9), 128, 1536),
    _known("RTX-5090", 31.34, (12, 0), 170, 1536),
    _known("RTX-A6000", 47.40, (8, 6), 84, 1536),
    _known("H100", 79.10, (9, 0), 132, 2048),
    _known("H200", 139.72, (9, 0), 132, 2048),
    _known("B200", 178.35, (10, 0), 148, 2048),
)


def find_gpu(name: str) -> KnownGpu | None:
    """Return the GPU of a name, however it is written: ``t4``, ``RTX 4090``, ``NVIDIA L4``."""
    wanted = _simplify(name)
    return next((gpu for gpu in _GPUS if _simplify(gpu.name) == wanted), None)


def list_names() -> tuple[str, ...]:
    """Return the names of the known GPUs."""
    return tuple(gpu.name for gpu in _GPUS)


def parse_device(on: object) -> KnownGpu | int:
    """Return the GPU, or the bytes, that a person's ``"T4"``, ``"15GiB"`` or number of bytes means.

    Raises:
        BadInputError: neither a known GPU nor an amount of memory.
    """
    n_bytes = on if type(on) is int else 0
    if isinstance(on, str):
        gpu = find_gpu(on)
        if gpu is not None:
            return gpu
        with contextlib.suppress(BadInputError):
            n_bytes = parse_bytes(on)
    if n_bytes <= 0:
        raise BadInputError(
            f"{on!r} is neither an amount of memory, as in 15GiB, nor a GPU that is known here: "
            f"{', '.join(list_names())}"
        )
    return n_bytes


def _simplify(name: str) -> str:
    return "".join(each for each in name.lower() if each.isalnum()).removeprefix("nvidia")
