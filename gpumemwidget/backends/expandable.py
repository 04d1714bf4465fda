"""The simulated allocator with segments that grow: ``expandable_segments:True``.

There is one range of addresses for small requests and one for others, and memory is mapped into it
page by page at its end. What is given back are whole pages within free blocks, so that a range may
have gaps; what lies between two gaps is a segment of the snapshot
(https://docs.pytorch.org/docs/stable/notes/cuda.html#optimizing-memory-usage-with-pytorch-alloc-conf).
Unlike PyTorch's, gaps are not filled again.
"""

from __future__ import annotations

import itertools

from gpumemwidget.backends.caching import Block, CachingAllocator, Segment

__all__ = ["ExpandableAllocator"]

_MIB = 1024 * 1024
_PAGE_BYTES = {"small_pool": 2 * _MIB, "large_pool": 20 * _MIB}
#: Where the ranges begin: a multiple of both pages.
_FIRST_ADDRESSES = {"small_pool": 20 * _MIB << 19, "large_pool": 20 * _MIB << 21}


class ExpandableAllocator(CachingAllocator):
    """The allocator of one device, whose segments grow."""

    def flush(self) -> None:
        """Give whole pages within free blocks back to the driver."""
        for segment in list(self._segments):
            page = _PAGE_BYTES[segment.pool]
            starts = itertools.accumulate(
                (block.n_bytes for block in segment.blocks), initial=segment.address
            )
            gaps = []
            for start, block in zip(starts, segment.blocks, strict=False):
                first, last = -(-start // page) * page, (start + block.n_bytes) // page * page
                if block.is_free and first < last:
                    gaps.append((first, last))
            if gaps:
                self._unmap(segment, gaps)

    def _unmap(self, segment: Segment, gaps: list[tuple[int, int]]) -> None:
        """Take whole pages of free blocks out of a segment; what is left are segments of its."""
        self._count_splits(segment, -1)
        pieces = [Segment(segment.address, 0, segment.pool, [], is_expandable=True)]
        at = segment.address
        for block in segment.blocks:
            end = at + block.n_bytes
            gap = next((gap for gap in gaps if at <= gap[0] < end), None)
            if gap is None:
                _append(pieces[-1], block)
            else:
                first, last = gap
                if first > at:
                    _append(pieces[-1], Block(segment, first - at))
                pieces.append(Segment(last, 0, segment.pool, [], is_expandable=True))
                if last < end:
                    _append(pieces[-1], Block(segment, end - last))
            at = end
        place = self._segments.index(segment)
        self._segments[place : place + 1] = [piece for piece in pieces if piece.blocks]
        for piece in pieces:
            self._count_splits(piece, 1)
        for first, last in gaps:
            self._num_device_free += 1
            self._tell_range("segment_unmap", first, last - first)
            self._add(segment.pool, reserved_bytes=first - last)

    def _add_segment(self, pool: str, block_bytes: int) -> Block:
        """Map what a block lacks at the end of the range."""
        page = _PAGE_BYTES[pool]
        for is_second_try in (False, True):
            segment = self._find_last(pool)
            last = None if segment is None else segment.blocks[-1]
            has_bytes = last.n_bytes if last is not None and last.is_free else 0
            n_bytes = -(-(block_bytes - has_bytes) // page) * page
            if self._has_room(n_bytes):
                break
            if is_second_try:
                self._refuse(block_bytes)
            self.retry()
        if segment is None:
            segment = Segment(_FIRST_ADDRESSES[pool], 0, pool, [], is_expandable=True)
            self._segments.append(segment)
        self._count_splits(segment, -1)
        end = segment.address + segment.n_bytes
        if has_bytes:
            block = segment.blocks[-1]
            block.n_bytes += n_bytes
            segment.n_bytes += n_bytes
        else:
            block = Block(segment, n_bytes)
            _append(segment, block)
        self._count_splits(segment, 1)
        self._num_device_alloc += 1
        self._tell_range("segment_map", end, n_bytes)
        self._add(pool, reserved_bytes=n_bytes)
        return block

    def _find_last(self, pool: str) -> Segment | None:
        """What lies at the end of the range."""
        own = (segment for segment in self._segments if segment.pool == pool)
        return max(own, key=lambda segment: segment.address, default=None)

    def _count_splits(self, segment: Segment, sign: int) -> None:
        if len(segment.blocks) > 1:
            for block in segment.blocks:
                if block.is_free:
                    self._count_split(block, sign)

    def _tell_range(self, action: str, address: int, n_bytes: int) -> None:
        if self.on_event is not None:
            self.on_event(action, address, n_bytes)


def _append(segment: Segment, block: Block) -> None:
    block.segment = segment
    segment.blocks.append(block)
    segment.n_bytes += block.n_bytes
