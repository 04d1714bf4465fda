"""How a device's segments are cut into blocks, at one moment of a replay."""

from __future__ import annotations

import bisect
from collections.abc import Iterable

from gpumemwidget.records import Segment

__all__ = ["Layout"]


class Layout:
    """The blocks by their addresses. Free neighbours of one segment are always one block.

    Args:
        segments: what stands.
        is_sorted: keep the free blocks sorted, for who often asks which one an address is in.
    """

    def __init__(self, segments: Iterable[Segment], *, is_sorted: bool = False) -> None:
        #: Bytes of the blocks in use, and of those that were freed but wait for another stream.
        self.active: dict[int, int] = {}
        self.pending: dict[int, int] = {}
        #: Bytes of the free ones; where one begins that ends there.
        self.free_at: dict[int, int] = {}
        self.free_end: dict[int, int] = {}
        #: Where segments begin: nothing is joined across that.
        self.starts: set[int] = set()
        self.reserved_bytes = 0
        self._order: list[int] | None = [] if is_sorted else None
        kept = {"active_allocated": self.active, "active_pending_free": self.pending}
        for segment in segments:
            self.starts.add(segment.address)
            self.reserved_bytes += segment.n_bytes
            for block in segment.blocks:
                if block.state in kept:
                    kept[block.state][block.address] = block.n_bytes
                else:
                    self.give(block.address, block.n_bytes)

    @property
    def allocated_bytes(self) -> int:
        """What is in use."""
        return sum(self.active.values())

    def give(self, address: int, n_bytes: int) -> None:
        """Add a free block, joined with its free neighbours."""
        end = address + n_bytes
        if address not in self.starts:
            left = self.free_end.get(address)
            if left is not None:
                self._drop(left)
                address = left
        if end not in self.starts and end in self.free_at:
            end += self._drop(end)
        self._put(address, end)

    def find_free(self, address: int) -> tuple[int, int] | None:
        """Where the free block begins and ends that an address is in."""
        n_bytes = self.free_at.get(address)
        if n_bytes is not None:
            return address, address + n_bytes
        order = sorted(self.free_at) if self._order is None else self._order
        place = bisect.bisect_right(order, address) - 1
        if place < 0:
            return None
        start = order[place]
        end = start + self.free_at[start]
        return (start, end) if address < end else None

    def take(self, address: int, n_bytes: int) -> bool:
        """Cut something out of a free block; False where not all of it is free."""
        found = self.find_free(address)
        if found is None or found[1] < address + n_bytes:
            return False
        start, end = found
        self._drop(start)
        self._put(start, address)
        self._put(address + n_bytes, end)
        return True

    def map(self, address: int, n_bytes: int) -> None:
        """Add to a segment that grows; what lies on both sides is of the same one."""
        self.starts.discard(address + n_bytes)
        self.give(address, n_bytes)

    def _put(self, start: int, end: int) -> None:
        if start < end:
            self.free_at[start] = end - start
            self.free_end[end] = start
            if self._order is not None:
                bisect.insort(self._order, start)

    def _drop(self, start: int) -> int:
        n_bytes = self.free_at.pop(start)
        del self.free_end[start + n_bytes]
        if self._order is not None:
            del self._order[bisect.bisect_left(self._order, start)]
        return n_bytes
