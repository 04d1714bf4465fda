"""What becomes of the memory that PyTorch has reserved and that no tensor holds.

``empty_cache`` first waits for what other streams may still use, so such blocks hold nothing back.
Then it gives back each segment without a block in use, and of one that grows (expandable segments)
the whole pages between blocks in use, counted from the segment's start:
https://github.com/pytorch/pytorch/blob/main/c10/cuda/CUDACachingAllocator.cpp
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from gpumemwidget.records import Block, Segment

__all__ = ["Unallocated", "divide_unallocated"]

_MIB = 1024**2
_SMALL_PAGE_BYTES = 2 * _MIB
_LARGE_PAGE_BYTES = 20 * _MIB


@dataclass(frozen=True, slots=True)
class Unallocated:
    """A device's segments in bytes."""

    reserved_bytes: int
    allocated_bytes: int
    #: Freed, but another stream may still use it; in pools too.
    pending_bytes: int
    #: The two are ``None`` where it is not known how large the pages of a segment are.
    releasable_bytes: int | None
    fragmented_bytes: int | None
    #: Unallocated in pools of CUDA graphs and of ``MemPool``.
    pools_bytes: int
    #: Outside of the pools; 0 where there is none.
    largest_free_block_bytes: int


def divide_unallocated(segments: Iterable[Segment]) -> Unallocated:
    """The segments of one device, summed up.

    Args:
        segments: all that the device has.
    """
    reserved = allocated = pending = pools = free = releasable = largest = 0
    is_known = True
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
        if not segment.is_private:
            given = _sum_releasable(segment)
            is_known = is_known and given is not None
            releasable += given or 0
    return Unallocated(
        reserved_bytes=reserved,
        allocated_bytes=allocated,
        pending_bytes=pending,
        releasable_bytes=releasable if is_known else None,
        fragmented_bytes=free - releasable if is_known else None,
        pools_bytes=pools,
        largest_free_block_bytes=largest,
    )


def _sum_releasable(segment: Segment) -> int | None:
    """What ``empty_cache`` gives of the free blocks; ``None``: the pages are not known."""
    if not segment.is_expandable:
        if any(block.state == "active_allocated" for block in segment.blocks):
            return 0
        return sum(block.n_bytes for block in segment.blocks if block.state == "inactive")
    runs = list(_list_free_runs(segment))
    if not any(block.state == "inactive" for run in runs for block in run):
        return 0
    if segment.is_small is None:
        return None
    page = _SMALL_PAGE_BYTES if segment.is_small else _LARGE_PAGE_BYTES
    given = 0
    for run in runs:
        # The blocks of a run are one block as soon as all of them are free.
        start = run[0].address - segment.address
        end = run[-1].address + run[-1].n_bytes - segment.address
        first, last = -(-start // page) * page, end // page * page
        for block in run:
            if block.state == "inactive":
                at = block.address - segment.address
                given += max(min(at + block.n_bytes, last) - max(at, first), 0)
    return given


def _list_free_runs(segment: Segment) -> Iterator[list[Block]]:
    """Blocks side by side of which none is in use."""
    run: list[Block] = []
    for block in segment.blocks:
        if block.state != "active_allocated":
            run.append(block)
        elif run:
            yield run
            run = []
    if run:
        yield run
