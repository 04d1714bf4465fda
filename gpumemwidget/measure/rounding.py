"""How many bytes a request takes: the caching allocator's rules for rounding and splitting.

From ``round_size`` and ``should_split`` in
https://github.com/pytorch/pytorch/blob/main/c10/cuda/CUDACachingAllocator.cpp
"""

from __future__ import annotations

from collections.abc import Callable

from gpumemwidget.traces import AllocatorRules

__all__ = ["MIN_BLOCK_BYTES", "MOST_BYTES", "SMALL_BYTES", "UNLIMITED_BYTES", "choose_rounding"]

#: Every block is a multiple of this.
MIN_BLOCK_BYTES = 512
#: Up to this a request is small, and comes from segments of its kind.
SMALL_BYTES = 1 << 20
#: No device has so much: who says it has more is wrong, and sums of it would not fit.
MOST_BYTES = 1 << 42
#: Stands for "no limit".
UNLIMITED_BYTES = 1 << 62


def choose_rounding(rules: AllocatorRules) -> Callable[[int], int]:
    """A function from the bytes that are asked for to those of the block, before what is left over.

    Args:
        rules: the allocator's settings.
    """
    if all(n_divisions <= 1 for _, n_divisions in rules.roundup_divisions):
        return _round_up

    def round_by_divisions(n_bytes: int) -> int:
        divisions = 0
        for start, n_divisions in rules.roundup_divisions:
            if n_bytes < start:
                break
            divisions = n_divisions
        if divisions <= 1 or n_bytes <= MIN_BLOCK_BYTES * divisions:
            return _round_up(n_bytes)
        floor = 1 << (n_bytes.bit_length() - 1)
        step = floor >> (divisions.bit_length() - 1)
        return -(-n_bytes // step) * step

    return round_by_divisions


def _round_up(n_bytes: int) -> int:
    return max(n_bytes + MIN_BLOCK_BYTES - 1 & -MIN_BLOCK_BYTES, MIN_BLOCK_BYTES)
