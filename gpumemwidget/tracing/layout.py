"""Cut segments into blocks by the rules of PyTorch's caching allocator.

The rules are those of ``round_size`` and ``should_split`` in
https://github.com/pytorch/pytorch/blob/main/c10/cuda/CUDACachingAllocator.cpp
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Iterable

from gpumemwidget.model.devices import Segment
from gpumemwidget.model.traces import AllocatorRules

#: Size of the smallest block; every block is a multiple of it.
MIN_BLOCK_BYTES = 512
#: Largest request that comes from segments for small blocks.
SMALL_BYTES = 1 << 20
#: Larger sizes than any device has: an event with such a size is wrong, and sums would overflow.
MAX_DEVICE_BYTES = 1 << 42
#: More than any device has: "no limit".
_UNLIMITED_BYTES = 1 << 62


class BlockLayout:
    """The blocks of a device's segments, by address. Free neighbours are always joined.

    Events that contradict each other may free a range twice, or two that overlap: then the blocks
    are wrong, and nothing fails.

    Attributes:
        active: bytes of each block in use.
        pending: bytes of each block that was freed but waits for another stream.
        free: bytes of each free block.
        segment_starts: addresses of segments; free blocks on both sides of one are not joined.
        reserved_bytes: bytes of all segments.
    """

    def __init__(self, segments: Iterable[Segment]) -> None:
        self.active: dict[int, int] = {}
        self.pending: dict[int, int] = {}
        self.free: dict[int, int] = {}
        self.segment_starts: set[int] = set()
        self.reserved_bytes = 0
        #: Addresses of the free blocks, ascending.
        self._starts: list[int] = []
        used = {"active_allocated": self.active, "active_pending_free": self.pending}
        for segment in segments:
            self.segment_starts.add(segment.address)
            self.reserved_bytes += segment.n_bytes
            for block in segment.blocks:
                if block.state in used:
                    used[block.state][block.address] = block.n_bytes
                else:
                    self.add_free(block.address, block.n_bytes)

    @property
    def allocated_bytes(self) -> int:
        """Bytes of the blocks in use."""
        return sum(self.active.values())

    def add_free(self, address: int, n_bytes: int) -> None:
        """Add a free block, and join it with its free neighbours."""
        end = address + n_bytes
        if address not in self.segment_starts:
            left = self.find_free(address - 1)
            if left is not None and left[1] == address:
                address = left[0]
                self._remove_free(address)
        if end not in self.segment_starts and end in self.free:
            end += self._remove_free(end)
        self._insert_free(address, end)

    def find_free(self, address: int) -> tuple[int, int] | None:
        """Return the start and end of the free block that contains ``address``."""
        n_bytes = self.free.get(address)
        if n_bytes is not None:
            return address, address + n_bytes
        place = bisect.bisect_right(self._starts, address) - 1
        if place < 0:
            return None
        start = self._starts[place]
        end = start + self.free[start]
        return (start, end) if address < end else None

    def take_free(self, address: int, n_bytes: int) -> bool:
        """Cut a range out of a free block; return ``False`` if part of the range is not free."""
        block = self.find_free(address)
        if block is None or block[1] < address + n_bytes:
            return False
        start, end = block
        self._remove_free(start)
        self._insert_free(start, address)
        self._insert_free(address + n_bytes, end)
        return True

    def map_range(self, address: int, n_bytes: int) -> None:
        """Grow a segment by a free range, joined with free blocks on both sides."""
        self.segment_starts.discard(address + n_bytes)
        self.add_free(address, n_bytes)

    def _insert_free(self, start: int, end: int) -> None:
        if start < end:
            if start not in self.free:
                bisect.insort(self._starts, start)
            self.free[start] = end - start

    def _remove_free(self, start: int) -> int:
        n_bytes = self.free.pop(start)
        del self._starts[bisect.bisect_left(self._starts, start)]
        return n_bytes


def choose_fitting(rules: AllocatorRules) -> Callable[[int, int], int]:
    """Return the function that gives the bytes of a block, by its request and its free block's.

    These are the request, rounded up, and what is left of the free block if that is not split off.
    """
    round_up = choose_rounding(rules)
    # Blocks up to the one size are split from any larger free block, blocks from the other never.
    always_split = _UNLIMITED_BYTES if rules.is_expandable else SMALL_BYTES
    max_split = rules.max_split_bytes
    never_split = _UNLIMITED_BYTES if max_split is None else max_split

    def fit(requested_bytes: int, free_bytes: int) -> int:
        n_bytes = round_up(requested_bytes)
        rest_bytes = free_bytes - n_bytes
        is_split = rest_bytes >= MIN_BLOCK_BYTES and (
            n_bytes <= always_split or (rest_bytes > SMALL_BYTES and n_bytes < never_split)
        )
        return n_bytes if is_split else max(n_bytes, free_bytes)

    return fit


def choose_rounding(rules: AllocatorRules) -> Callable[[int], int]:
    """Return the function that rounds a request up: its block has as many bytes, or more."""
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
