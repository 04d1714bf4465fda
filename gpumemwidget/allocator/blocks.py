"""The blocks of a simulated allocator: how they are split, joined, cached and counted."""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass, field
from typing import Literal


class Statistic:
    """One counter of ``torch.cuda.memory_stats``: its value, its peak, the sum of its increases."""

    __slots__ = ("allocated", "current", "peak")

    def __init__(self) -> None:
        self.current = self.peak = self.allocated = 0

    def add(self, amount: int) -> None:
        """Change the current value by a positive or negative amount."""
        self.current += amount
        if amount > 0:
            self.allocated += amount
            if self.current > self.peak:  # noqa: PLR1730 - max() takes three times as long
                self.peak = self.current

    def to_dict(self) -> dict[str, int]:
        """Return the counter as ``torch.cuda.memory_stats_as_nested_dict`` does."""
        return {
            "current": self.current,
            "peak": self.peak,
            "allocated": self.allocated,
            "freed": self.allocated - self.current,
        }


@dataclass(slots=True, eq=False)
class BlockPool:
    """The cached blocks for requests of one class: small or large, of one pool and stream."""

    is_small: bool
    pool_id: tuple[int, int]
    stream: int
    #: Size and address of each cached block, ascending.
    cached: list[tuple[int, int]] = field(default_factory=list)
    #: The cached blocks by address.
    cached_blocks: dict[int, SimulatedBlock] = field(default_factory=dict)
    #: The unmapped parts of expandable segments, by ascending address.
    unmapped: list[SimulatedBlock] = field(default_factory=list)

    def add(self, block: SimulatedBlock) -> None:
        """Add a block to the cached ones, or to the unmapped ones if that is its state."""
        if block.state == "unmapped":
            insort(self.unmapped, block, key=_get_address)
        else:
            insort(self.cached, (block.n_bytes, block.address))
            self.cached_blocks[block.address] = block

    def remove(self, block: SimulatedBlock) -> None:
        """Take a block out of the cached or of the unmapped ones."""
        if block.state == "unmapped":
            del self.unmapped[bisect_left(self.unmapped, block.address, key=_get_address)]
        else:
            del self.cached[bisect_left(self.cached, (block.n_bytes, block.address))]
            del self.cached_blocks[block.address]

    def list_cached(self) -> list[SimulatedBlock]:
        """Return the cached blocks by ascending size."""
        return [self.cached_blocks[address] for _, address in self.cached]

    def list_free_segments(self) -> list[SimulatedBlock]:
        """Return the segments that are one cached block, by ascending size.

        Expandable segments are left out.
        """
        return [
            block
            for block in self.list_cached()
            if not block.is_split and block.address_range is None
        ]


@dataclass(frozen=True, slots=True)
class AddressRange:
    """The addresses of one expandable segment, of which some are mapped."""

    address: int
    #: The address behind the range.
    end: int
    #: The unit in which memory is mapped and unmapped, counted from the range's start.
    page_bytes: int

    def make_unmapped(self, pool: BlockPool, address: int) -> SimulatedBlock:
        """Return an unmapped block with all addresses from one on, in no list of its pool."""
        return SimulatedBlock(pool, address, self.end - address, "unmapped", address_range=self)


# Two blocks with equal values are different ones, so they are compared by identity.
@dataclass(slots=True, eq=False)
class SimulatedBlock:
    """A piece of a segment, in a list of neighbours.

    This object represents a block while it is in use. A freed block may have become part of its
    lower neighbour.
    """

    pool: BlockPool
    address: int
    n_bytes: int
    state: Literal["active_allocated", "active_pending_free", "inactive", "unmapped"] = "inactive"
    requested_bytes: int = 0
    #: The expandable segment that the block is in; ``None`` in other segments.
    address_range: AddressRange | None = None
    lower: SimulatedBlock | None = None
    upper: SimulatedBlock | None = None

    @property
    def is_split(self) -> bool:
        """Return whether the block is only a part of its segment."""
        return self.lower is not None or self.upper is not None

    @property
    def end(self) -> int:
        """The address behind the block."""
        return self.address + self.n_bytes

    @property
    def growable_bytes(self) -> int:
        """The block's size with the unmapped addresses above it."""
        upper = self.upper
        if upper is None or upper.state != "unmapped":
            return self.n_bytes
        return self.n_bytes + upper.n_bytes

    def split(self, n_bytes: int) -> SimulatedBlock:
        """Cut the block to ``n_bytes``, and return what was above, in the same state."""
        above = SimulatedBlock(
            self.pool,
            self.address + n_bytes,
            self.n_bytes - n_bytes,
            self.state,
            address_range=self.address_range,
            lower=self,
            upper=self.upper,
        )
        if self.upper is not None:
            self.upper.lower = above
        self.upper = above
        self.n_bytes = n_bytes
        return above

    def join_neighbours(self) -> SimulatedBlock:
        """Join this block with the blocks on both sides that are in the same state.

        The block itself is in no list of its pool; neighbours that are joined are taken out.

        Returns:
            The joined block, which is in no list either: the lowest of those that were joined.
        """
        upper = self.upper
        if upper is not None and upper.state == self.state:
            self.pool.remove(upper)
            self.absorb_upper(upper)
        lower = self.lower
        if lower is not None and lower.state == self.state:
            self.pool.remove(lower)
            lower.absorb_upper(self)
            return lower
        return self

    def absorb_upper(self, upper: SimulatedBlock) -> None:
        """Make the block above a part of this one."""
        self.n_bytes += upper.n_bytes
        self.upper = upper.upper
        if self.upper is not None:
            self.upper.lower = self


def _get_address(block: SimulatedBlock) -> int:
    return block.address
