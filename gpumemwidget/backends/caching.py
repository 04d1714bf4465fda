"""One device's caching allocator in miniature, with all of its counters.

The rules and sizes are those of PyTorch's own (CUDACachingAllocator.cpp, and
https://docs.pytorch.org/docs/stable/notes/cuda.html#memory-management), less streams and private
pools: requests are rounded to 512 bytes, small ones share segments of 2 MiB, larger ones segments
of 20 MiB, the largest have their own; freed blocks stay reserved; a full device flushes its cache
and tries once more.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NoReturn

from gpumemwidget.errors import BackendError

__all__ = ["Block", "CachingAllocator", "DeviceFullError", "Segment"]

_MIB = 1024 * 1024
#: Every block is a multiple of this.
_ROUNDING_BYTES = 512
#: Up to this a request is small.
_SMALL_BYTES = _MIB
_SMALL_SEGMENT_BYTES = 2 * _MIB
#: From this on a request has a segment of its own.
_OWN_SEGMENT_BYTES = 10 * _MIB
_SHARED_SEGMENT_BYTES = 20 * _MIB
_SEGMENT_ROUNDING_BYTES = 2 * _MIB
#: Where the first segment lies; none lies where another one lay.
_FIRST_ADDRESS = 0x7F00_0000_0000

_STATS = (
    *("allocated_bytes", "reserved_bytes", "active_bytes", "inactive_split_bytes"),
    *("requested_bytes", "allocation", "segment", "active", "inactive_split"),
)
_POOLS = ("all", "small_pool", "large_pool")


class DeviceFullError(BackendError):
    """The simulated device has no room for a request."""


class _Stat:
    """One counter: what it is, was at most, and all that it ever rose and fell."""

    __slots__ = ("allocated", "current", "freed", "peak")

    def __init__(self) -> None:
        self.current = self.peak = self.allocated = self.freed = 0

    def add(self, amount: int) -> None:
        self.current += amount
        self.peak = max(self.peak, self.current)
        if amount >= 0:
            self.allocated += amount
        else:
            self.freed -= amount

    def to_dict(self) -> dict[str, int]:
        return {
            "current": self.current,
            "peak": self.peak,
            "allocated": self.allocated,
            "freed": self.freed,
        }


# Blocks and segments are compared by identity: two of the same size are not the same.
@dataclass(slots=True, eq=False)
class Block:
    """A piece of a segment."""

    segment: Segment
    n_bytes: int
    requested_bytes: int = 0
    is_free: bool = True


@dataclass(slots=True, eq=False)
class Segment:
    """One allocation of the driver's, and its pieces from left to right."""

    address: int
    n_bytes: int
    pool: str
    blocks: list[Block]
    is_expandable: bool = False


class CachingAllocator:
    """The allocator of one device.

    Args:
        total_bytes: the device's memory.
    """

    def __init__(self, total_bytes: int) -> None:
        self.total_bytes = total_bytes
        #: What may be reserved of it.
        self.allowed_bytes = total_bytes
        #: Told what torch's history would note: the action, the address (of an ``oom`` what is
        #: free) and the bytes, of a block those that were asked for.
        self.on_event: Callable[[str, int, int], None] | None = None
        self._segments: list[Segment] = []
        self._stats = {name: {pool: _Stat() for pool in _POOLS} for name in _STATS}
        self._next_address = _FIRST_ADDRESS
        self._num_alloc_retries = 0
        self._num_ooms = 0
        self._num_device_alloc = 0
        self._num_device_free = 0

    @property
    def reserved_bytes(self) -> int:
        """What it has from the driver."""
        return self._stats["reserved_bytes"]["all"].current

    def allocate(self, n_bytes: int) -> Block:
        """Take a block.

        Raises:
            DeviceFullError: there is no room, the cache given back included.
        """
        block_bytes = _round_up(n_bytes, _ROUNDING_BYTES)
        pool = "small_pool" if block_bytes <= _SMALL_BYTES else "large_pool"
        block = self._find_free(pool, block_bytes)
        if block is None:
            block = self._add_segment(pool, block_bytes)
        self._cut(block, block_bytes)
        block.is_free = False
        block.requested_bytes = n_bytes
        self._count_use(block, 1)
        self._tell(block, "alloc")
        return block

    def free(self, block: Block) -> None:
        """Give a block back to the cache, and join it with its free neighbours."""
        self._count_use(block, -1)
        # There are no streams to wait for.
        self._tell(block, "free_requested", "free_completed")
        block.is_free = True
        segment = block.segment
        place = segment.blocks.index(block)
        for neighbour in (place + 1, place - 1):
            if 0 <= neighbour < len(segment.blocks) and segment.blocks[neighbour].is_free:
                joined = segment.blocks.pop(neighbour)
                self._count_split(joined, -1)
                block.n_bytes += joined.n_bytes
        if len(segment.blocks) > 1:
            self._count_split(block, 1)

    def flush(self) -> None:
        """Give segments that hold nothing back to the driver."""
        for segment in list(self._segments):
            if len(segment.blocks) == 1 and segment.blocks[0].is_free:
                self._segments.remove(segment)
                self._num_device_free += 1
                self._tell_segment(segment, "segment_free")
                self._add(segment.pool, reserved_bytes=-segment.n_bytes, segment=-1)

    def retry(self) -> None:
        """Flush because the device is full, and try again."""
        self.flush()
        self._num_alloc_retries += 1

    def fail(self, n_bytes: int = 0) -> None:
        """Give up on an allocation of so many bytes."""
        self._num_ooms += 1
        if self.on_event is not None:
            self.on_event("oom", self.total_bytes - self.reserved_bytes, n_bytes)

    def to_dict(self) -> dict[Any, Any]:
        """The counters, nested as ``torch.cuda.memory_stats_as_nested_dict`` nests them."""
        nested: dict[Any, Any] = {
            name: {pool: stat.to_dict() for pool, stat in pools.items()}
            for name, pools in self._stats.items()
        }
        nested["oversize_allocations"] = _Stat().to_dict()
        nested["oversize_segments"] = _Stat().to_dict()
        nested.update(
            num_alloc_retries=self._num_alloc_retries,
            num_ooms=self._num_ooms,
            num_sync_all_streams=0,
            num_device_alloc=self._num_device_alloc,
            num_device_free=self._num_device_free,
            max_split_size=-1,
        )
        return nested

    def find_address(self, block: Block) -> int:
        """Where a block lies."""
        return next(address for address, each in _list_addresses(block.segment) if each is block)

    def to_snapshot(self, index: int) -> list[dict[str, Any]]:
        """The segments as ``torch.cuda.memory_snapshot`` gives those of one device."""
        return [
            {
                "device": index,
                "address": segment.address,
                "total_size": segment.n_bytes,
                "allocated_size": sum(each.n_bytes for each in segment.blocks if not each.is_free),
                "segment_type": segment.pool.removesuffix("_pool"),
                "segment_pool_id": (0, 0),
                "is_expandable": segment.is_expandable,
                "blocks": [
                    {
                        "address": address,
                        "size": each.n_bytes,
                        "requested_size": each.requested_bytes,
                        "state": "inactive" if each.is_free else "active_allocated",
                        "frames": [],
                    }
                    for address, each in _list_addresses(segment)
                ],
            }
            for segment in self._segments
        ]

    def reset_peak(self) -> None:
        """Set every mark back to what it marks."""
        for stat in self._list_stats():
            stat.peak = stat.current

    def reset_totals(self) -> None:
        """Begin the running totals anew."""
        for stat in self._list_stats():
            stat.allocated = stat.freed = 0
        self._num_alloc_retries = self._num_ooms = 0
        self._num_device_alloc = self._num_device_free = 0

    # -- Segments and blocks ------------------------------------------------------------------

    def _find_free(self, pool: str, block_bytes: int) -> Block | None:
        """The smallest free block that is large enough, the oldest of equals."""
        fitting = (
            block
            for segment in self._segments
            if segment.pool == pool
            for block in segment.blocks
            if block.is_free and block.n_bytes >= block_bytes
        )
        return min(fitting, key=lambda block: block.n_bytes, default=None)

    def _add_segment(self, pool: str, block_bytes: int) -> Block:
        if pool == "small_pool":
            n_bytes = _SMALL_SEGMENT_BYTES
        elif block_bytes < _OWN_SEGMENT_BYTES:
            n_bytes = _SHARED_SEGMENT_BYTES
        else:
            n_bytes = _round_up(block_bytes, _SEGMENT_ROUNDING_BYTES)
        if not self._has_room(n_bytes):
            self.retry()
        if not self._has_room(n_bytes):
            self._refuse(block_bytes)
        segment = Segment(self._next_address, n_bytes, pool, [])
        self._next_address += n_bytes
        segment.blocks.append(Block(segment, n_bytes))
        self._segments.append(segment)
        self._num_device_alloc += 1
        self._tell_segment(segment, "segment_alloc")
        self._add(pool, reserved_bytes=n_bytes, segment=1)
        return segment.blocks[0]

    def _has_room(self, n_bytes: int) -> bool:
        return self.reserved_bytes + n_bytes <= min(self.allowed_bytes, self.total_bytes)

    def _refuse(self, block_bytes: int) -> NoReturn:
        self.fail(block_bytes)
        raise DeviceFullError(
            f"no room for {block_bytes} bytes: of {min(self.allowed_bytes, self.total_bytes)} "
            f"bytes {self.reserved_bytes} are reserved and in use"
        )

    def _cut(self, block: Block, block_bytes: int) -> None:
        """Leave what a free block has over as another block, if it is worth it."""
        segment = block.segment
        if len(segment.blocks) > 1:
            self._count_split(block, -1)
        over_bytes = block.n_bytes - block_bytes
        worth_bytes = _ROUNDING_BYTES if segment.pool == "small_pool" else _SMALL_BYTES + 1
        if over_bytes >= worth_bytes:
            rest = Block(segment, over_bytes)
            segment.blocks.insert(segment.blocks.index(block) + 1, rest)
            block.n_bytes = block_bytes
            self._count_split(rest, 1)

    # -- Events -------------------------------------------------------------------------------

    def _tell(self, block: Block, *actions: str) -> None:
        if self.on_event is not None:
            address = self.find_address(block)
            for action in actions:
                self.on_event(action, address, block.requested_bytes)

    def _tell_segment(self, segment: Segment, action: str) -> None:
        if self.on_event is not None:
            self.on_event(action, segment.address, segment.n_bytes)

    # -- Counters -----------------------------------------------------------------------------

    def _add(self, pool: str, **amounts: int) -> None:
        for name, amount in amounts.items():
            self._stats[name]["all"].add(amount)
            self._stats[name][pool].add(amount)

    def _count_use(self, block: Block, sign: int) -> None:
        self._add(
            block.segment.pool,
            allocated_bytes=sign * block.n_bytes,
            active_bytes=sign * block.n_bytes,
            requested_bytes=sign * block.requested_bytes,
            allocation=sign,
            active=sign,
        )

    def _count_split(self, block: Block, sign: int) -> None:
        self._add(
            block.segment.pool, inactive_split_bytes=sign * block.n_bytes, inactive_split=sign
        )

    def _list_stats(self) -> Iterator[_Stat]:
        for pools in self._stats.values():
            yield from pools.values()


def _list_addresses(segment: Segment) -> Iterator[tuple[int, Block]]:
    """The blocks of a segment and where each lies."""
    sizes = (block.n_bytes for block in segment.blocks)
    starts = itertools.accumulate(sizes, initial=segment.address)
    return zip(starts, segment.blocks, strict=False)


def _round_up(n_bytes: int, multiple: int) -> int:
    return -(-n_bytes // multiple) * multiple
