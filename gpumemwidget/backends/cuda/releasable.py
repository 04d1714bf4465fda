"""Find the reserved memory that ``empty_cache`` gives back, and the memory that it can't.

``empty_cache`` first waits for what other streams may still use, so such blocks hold nothing back.
Then it gives back each segment without a block in use; of a segment that grows (expandable
segments) it gives back the whole pages between blocks in use, counted from the segment's start:
https://github.com/pytorch/pytorch/blob/main/c10/cuda/CUDACachingAllocator.cpp
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import groupby

from gpumemwidget.model.devices import Segment


@dataclass(frozen=True, slots=True)
class Unallocated:
    """Reserved memory of a device, summed up by its state."""

    reserved_bytes: int
    allocated_bytes: int
    #: Freed, but another stream may still use it; pools included.
    pending_bytes: int
    #: Given back by ``empty_cache``, and not.
    releasable_bytes: int
    fragmented_bytes: int
    #: Unallocated in the pools of CUDA graphs and of ``MemPool``.
    pools_bytes: int
    #: Outside of the pools; 0 where no block is free.
    largest_free_block_bytes: int


def divide_unallocated(segments: Iterable[Segment]) -> Unallocated:
    """Return one device's reserved memory by its state.

    Args:
        segments: all segments of the device.
    """
    reserved = allocated = pending = pools = free = releasable = largest = 0
    for segment in segments:
        reserved += segment.n_bytes
        for block in segment.blocks:
            if block.state == "active_allocated":
                allocated += block.n_bytes
            elif block.state == "active_pending_free":
                pending += block.n_bytes
            elif segment.is_private:
                pools += block.n_bytes
            else:
                free += block.n_bytes
                largest = max(largest, block.n_bytes)
        releasable += sum(end - start for start, end in list_releasable_ranges(segment))
    return Unallocated(
        reserved_bytes=reserved,
        allocated_bytes=allocated,
        pending_bytes=pending,
        releasable_bytes=releasable,
        fragmented_bytes=free - releasable,
        pools_bytes=pools,
        largest_free_block_bytes=largest,
    )


def list_releasable_ranges(segment: Segment) -> list[tuple[int, int]]:
    """Return the ranges of a segment that ``empty_cache`` gives back; none of a private pool's.

    Returns:
        Start and end of each range, in bytes from the segment's start.
    """
    if segment.is_private:
        return []
    page = segment.page_bytes
    if page is None and any(block.state == "active_allocated" for block in segment.blocks):
        return []
    given = []
    for is_in_use, blocks in groupby(
        segment.blocks, key=lambda block: block.state == "active_allocated"
    ):
        if is_in_use:
            continue
        run = [(block.address - segment.address, block) for block in blocks]
        first, last = run[0][0], run[-1][0] + run[-1][1].n_bytes
        if page is not None:
            # The blocks of a run are one block as soon as all of them are free.
            first, last = -(-first // page) * page, last // page * page
        for at, block in run:
            start, end = max(at, first), min(at + block.n_bytes, last)
            if block.state == "inactive" and start < end:
                given.append((start, end))
    return given
