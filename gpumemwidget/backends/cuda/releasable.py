"""Find the reserved memory that ``empty_cache`` gives back, and the memory that it can't.

``empty_cache`` first waits for what other streams may still use, so such blocks hold nothing back.
Then it gives back each segment without a block in use; of a segment that grows (expandable
segments) it gives back the whole pages between blocks in use, counted from the segment's start:
https://github.com/pytorch/pytorch/blob/main/c10/cuda/CUDACachingAllocator.cpp
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from gpumemwidget.model.segments import Segment

_MIB = 1024**2
_SMALL_PAGE_BYTES = 2 * _MIB
_LARGE_PAGE_BYTES = 20 * _MIB


@dataclass(frozen=True, slots=True)
class Unallocated:
    """Reserved memory of a device, summed up by its state."""

    reserved_bytes: int
    allocated_bytes: int
    #: Freed, but another stream may still use it; pools included.
    pending_bytes: int
    #: Given back by ``empty_cache``, and not; ``None`` where a segment's size of pages is unknown.
    releasable_bytes: int | None
    fragmented_bytes: int | None
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


def list_releasable_ranges(
    blocks: Sequence[tuple[int, int, str]],
    *,
    is_expandable: bool,
    is_small: bool | None,
    page_bytes: int | None = None,
) -> list[tuple[int, int]] | None:
    """Return the ranges of a segment that ``empty_cache`` gives back, for a segment of no pool.

    Args:
        blocks: offset, bytes and state of each block, from the segment's first byte on.
        is_expandable: whether the segment grows.
        is_small: whether the segment is for small requests; ``None``: not known.
        page_bytes: the size of the segment's pages; PyTorch's default where it is not given.

    Returns:
        Start and end of each range, in bytes from the segment's start; ``None`` where the size of
        the pages is not known.
    """
    is_free = not any(state == "active_allocated" for _, _, state in blocks)
    if not is_expandable:
        return [(at, at + size) for at, size, state in blocks if is_free and state == "inactive"]
    if not any(state == "inactive" for _, _, state in blocks):
        return []
    if is_small is None:
        return None
    page = page_bytes or (_SMALL_PAGE_BYTES if is_small else _LARGE_PAGE_BYTES)
    given = []
    for run in _list_free_runs(blocks):
        # The blocks of a run are one block as soon as all of them are free.
        first = -(-run[0][0] // page) * page
        last = (run[-1][0] + run[-1][1]) // page * page
        for at, size, state in run:
            start, end = max(at, first), min(at + size, last)
            if state == "inactive" and start < end:
                given.append((start, end))
    return given


def _sum_releasable(segment: Segment) -> int | None:
    given = list_releasable_ranges(
        [(block.address - segment.address, block.n_bytes, block.state) for block in segment.blocks],
        is_expandable=segment.is_expandable,
        is_small=segment.is_small,
        page_bytes=segment.page_bytes,
    )
    return None if given is None else sum(end - start for start, end in given)


def _list_free_runs(
    blocks: Iterable[tuple[int, int, str]],
) -> Iterator[list[tuple[int, int, str]]]:
    run: list[tuple[int, int, str]] = []
    for block in blocks:
        if block[2] != "active_allocated":
            run.append(block)
        elif run:
            yield run
            run = []
    if run:
        yield run
