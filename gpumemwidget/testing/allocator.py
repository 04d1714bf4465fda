"""The caching allocator of one simulated GPU, with the counters that PyTorch's own keeps.

Rules and sizes are those of PyTorch's CUDACachingAllocator.cpp, described at
https://docs.pytorch.org/docs/stable/notes/cuda.html#memory-management: requests are rounded to 512
bytes; small ones share segments of 2 MiB, larger ones segments of 20 MiB, the largest have a
segment each; freed blocks stay reserved; a full device gives its cache back and tries once more.
With expandable segments each pool has one range of addresses, into which pages are mapped at its
end; unlike PyTorch's allocator, this one never maps a page into a gap between others.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from gpumemwidget.errors import BackendError

MIB = 1024 * 1024
#: The size of every block is a multiple of this.
BLOCK_ROUNDING_BYTES = 512
#: Requests of up to this size go to the small pool.
MAX_SMALL_BYTES = MIB
SMALL_SEGMENT_BYTES = 2 * MIB
#: Requests of at least this size get a segment of their own.
MIN_OWN_SEGMENT_BYTES = 10 * MIB
SHARED_SEGMENT_BYTES = 20 * MIB
SEGMENT_ROUNDING_BYTES = 2 * MIB
#: Address of the first segment. Addresses are never used twice, except within expandable ranges.
FIRST_ADDRESS = 0x7F00_0000_0000
#: Distance between expandable ranges: a multiple of both page sizes, larger than any device.
RANGE_BYTES = 20 * MIB << 19

_STATISTICS = (
    *("allocated_bytes", "reserved_bytes", "active_bytes", "inactive_split_bytes"),
    *("requested_bytes", "allocation", "segment"),
)


class DeviceFullError(BackendError):
    """The simulated GPU has no room for a request."""


class Statistic(dict[str, int]):
    """One counter in the form of ``torch.cuda.memory_stats``: current, peak, and both totals."""

    def __init__(self) -> None:
        super().__init__(current=0, peak=0, allocated=0, freed=0)

    def add(self, amount: int) -> None:
        """Change the current value by a positive or negative amount."""
        self["current"] += amount
        self["peak"] = max(self["peak"], self["current"])
        self["allocated"] += max(amount, 0)
        self["freed"] += max(-amount, 0)


@dataclass(frozen=True, slots=True)
class Pool:
    """The segments that serve the same requests: small or large, of one pool and one stream."""

    is_small: bool
    pool_id: int = 0
    stream: int = 0

    @property
    def name(self) -> str:
        """The pool's name in the counters."""
        return "small_pool" if self.is_small else "large_pool"

    @property
    def page_bytes(self) -> int:
        """The unit in which an expandable segment of this pool grows and shrinks."""
        return SMALL_SEGMENT_BYTES if self.is_small else SHARED_SEGMENT_BYTES


# Two blocks or segments of equal values are different ones, so they are compared by identity.
@dataclass(slots=True, eq=False)
class SimulatedBlock:
    """A piece of a segment."""

    segment: SimulatedSegment
    address: int
    n_bytes: int
    requested_bytes: int = 0
    state: Literal["active_allocated", "active_pending_free", "inactive"] = "inactive"
    #: The stack of the allocation, in PyTorch's form, if a history was kept.
    frames: Sequence[Mapping[str, Any]] = ()

    @property
    def is_free(self) -> bool:
        """Return whether the block can serve a request."""
        return self.state == "inactive"


@dataclass(slots=True, eq=False)
class SimulatedSegment:
    """Memory that the allocator got from the driver, as blocks that lie side by side."""

    address: int
    pool: Pool
    blocks: list[SimulatedBlock]

    @property
    def n_bytes(self) -> int:
        """The size of all blocks together."""
        return sum(block.n_bytes for block in self.blocks)


class CachingAllocator:
    """The allocator of one GPU.

    Args:
        total_bytes: the GPU's memory.
        is_expandable: whether segments grow, as with ``expandable_segments:True``.
        max_split_bytes: as ``max_split_size_mb``, in bytes; ``None`` is no limit.

    Attributes:
        segments: everything that is reserved.
        allowed_bytes: how much may be reserved.
        outside_bytes: memory of the GPU that other allocators and processes hold.
        on_event: is called after each step with what PyTorch's history would note: the action, the
            address (for ``oom`` the free memory), the size (for blocks the requested size), the
            stream; and with the block, where there is one.
    """

    def __init__(
        self, total_bytes: int, *, is_expandable: bool = False, max_split_bytes: int | None = None
    ) -> None:
        self.total_bytes = total_bytes
        self.allowed_bytes = total_bytes
        self.outside_bytes = 0
        self.segments: list[SimulatedSegment] = []
        self.on_event: Callable[[str, int, int, int, SimulatedBlock | None], None] | None = None
        self._is_expandable = is_expandable
        self._max_split_bytes = max_split_bytes
        self._statistics = {
            name: {pool: Statistic() for pool in ("all", "small_pool", "large_pool")}
            for name in _STATISTICS
        }
        self._totals = dict.fromkeys(
            ("num_alloc_retries", "num_ooms", "num_device_alloc", "num_device_free"), 0
        )
        self._next_address = FIRST_ADDRESS
        #: First address of each pool's range, with expandable segments.
        self._ranges: dict[Pool, int] = {}

    @property
    def reserved_bytes(self) -> int:
        """The bytes of all segments, which any thread may read."""
        return self._statistics["reserved_bytes"]["all"]["current"]

    def allocate(self, n_bytes: int, *, stream: int = 0, pool_id: int = 0) -> SimulatedBlock:
        """Return a block of at least ``n_bytes``.

        Raises:
            DeviceFullError: there is no room, even after the cache was given back.
        """
        block_bytes = _round_up(n_bytes, BLOCK_ROUNDING_BYTES)
        pool = Pool(block_bytes <= MAX_SMALL_BYTES, pool_id, stream)
        block = self._find_free(pool, block_bytes) or self._grow(pool, block_bytes)
        self._split(block, block_bytes)
        block.state = "active_allocated"
        block.requested_bytes = n_bytes
        self._end_step("alloc", block.address, n_bytes, stream, block)
        return block

    def free(self, block: SimulatedBlock, *, is_used_elsewhere: bool = False) -> None:
        """Put a block back into the cache.

        Args:
            block: one in use.
            is_used_elsewhere: another stream still works on it, so it waits for ``synchronize``.
        """
        block.state = "active_pending_free"
        stream = block.segment.pool.stream
        self._end_step("free_requested", block.address, block.requested_bytes, stream, block)
        if not is_used_elsewhere:
            self._complete_free(block)

    def synchronize(self) -> None:
        """Complete the freeing of blocks that other streams worked on."""
        for segment in self.segments:
            for block in list(segment.blocks):
                if block.state == "active_pending_free":
                    self._complete_free(block)

    def empty_cache(self) -> None:
        """Give unused memory back to the driver: whole segments, or pages of expandable ones."""
        for segment in list(self.segments):
            if self._is_expandable:
                self._unmap_free_pages(segment)
            elif len(segment.blocks) == 1 and segment.blocks[0].is_free:
                self.segments.remove(segment)
                self._totals["num_device_free"] += 1
                self._end_step(
                    "segment_free", segment.address, segment.n_bytes, segment.pool.stream
                )

    # -- What PyTorch tells ------------------------------------------------------------------------

    def to_stats(self) -> dict[str, Any]:
        """Return the counters as ``torch.cuda.memory_stats_as_nested_dict`` does."""
        nested = {
            name: {pool: dict(each) for pool, each in pools.items()}
            for name, pools in self._statistics.items()
        }
        return {**nested, **self._totals}

    def to_snapshot(self, index: int) -> list[dict[str, Any]]:
        """Return the segments of device ``index`` as ``torch.cuda.memory_snapshot`` does."""
        return [
            {
                "device": index,
                "address": segment.address,
                "total_size": segment.n_bytes,
                "segment_type": "small" if segment.pool.is_small else "large",
                "segment_pool_id": (segment.pool.pool_id, 0),
                "stream": segment.pool.stream,
                "is_expandable": self._is_expandable,
                "blocks": [
                    {
                        "address": each.address,
                        "size": each.n_bytes,
                        "requested_size": each.requested_bytes,
                        "state": each.state,
                        "frames": each.frames,
                    }
                    for each in segment.blocks
                ],
            }
            for segment in self.segments
        ]

    def reset_peaks(self) -> None:
        """Set every peak to the current value."""
        for pools in self._statistics.values():
            for each in pools.values():
                each["peak"] = each["current"]

    # -- Blocks ------------------------------------------------------------------------------------

    def _find_free(self, pool: Pool, block_bytes: int) -> SimulatedBlock | None:
        """Return the smallest free block that is large enough; of equals the lowest address."""
        fitting = (
            block
            for segment in self.segments
            if segment.pool == pool
            for block in segment.blocks
            if block.is_free and block.n_bytes >= block_bytes
        )
        return min(fitting, key=lambda block: (block.n_bytes, block.address), default=None)

    def _split(self, block: SimulatedBlock, block_bytes: int) -> None:
        """Cut a free block to size, unless PyTorch would leave the remainder unused."""
        segment = block.segment
        remainder_bytes = block.n_bytes - block_bytes
        if segment.pool.is_small or self._is_expandable:
            is_split = remainder_bytes >= BLOCK_ROUNDING_BYTES
        else:
            limit = self._max_split_bytes
            is_split = remainder_bytes > MAX_SMALL_BYTES and (limit is None or block_bytes < limit)
        if is_split:
            block.n_bytes = block_bytes
            remainder = SimulatedBlock(segment, block.address + block_bytes, remainder_bytes)
            segment.blocks.insert(segment.blocks.index(block) + 1, remainder)

    def _complete_free(self, block: SimulatedBlock) -> None:
        """Make a block free, and join it with the free blocks on both sides."""
        segment, address = block.segment, block.address
        block.state = "inactive"
        place = segment.blocks.index(block)
        for other in (place + 1, place - 1):
            if 0 <= other < len(segment.blocks) and segment.blocks[other].is_free:
                neighbour = segment.blocks.pop(other)
                block.address = min(block.address, neighbour.address)
                block.n_bytes += neighbour.n_bytes
        # The address of the block itself, and not of what it has become part of.
        stream = segment.pool.stream
        self._end_step("free_completed", address, block.requested_bytes, stream, block)
        block.frames = ()

    # -- Segments ----------------------------------------------------------------------------------

    def _grow(self, pool: Pool, block_bytes: int) -> SimulatedBlock:
        """Reserve more memory; return a free block of at least ``block_bytes``."""
        add = self._map_pages if self._is_expandable else self._add_segment
        block = add(pool, block_bytes)
        if block is None:
            self.empty_cache()
            self._totals["num_alloc_retries"] += 1
            block = add(pool, block_bytes)
        if block is None:
            self._totals["num_ooms"] += 1
            free_bytes = self.total_bytes - self.outside_bytes - self.reserved_bytes
            self._end_step("oom", free_bytes, block_bytes)
            raise DeviceFullError(
                f"no room for {block_bytes} bytes: of {self._room_bytes} bytes "
                f"{self.reserved_bytes} are reserved and in use"
            )
        return block

    def _add_segment(self, pool: Pool, block_bytes: int) -> SimulatedBlock | None:
        if pool.is_small:
            n_bytes = SMALL_SEGMENT_BYTES
        elif block_bytes < MIN_OWN_SEGMENT_BYTES:
            n_bytes = SHARED_SEGMENT_BYTES
        else:
            n_bytes = _round_up(block_bytes, SEGMENT_ROUNDING_BYTES)
        if self.reserved_bytes + n_bytes > self._room_bytes:
            return None
        segment = SimulatedSegment(self._next_address, pool, [])
        self._next_address += n_bytes
        segment.blocks.append(SimulatedBlock(segment, segment.address, n_bytes))
        self.segments.append(segment)
        self._totals["num_device_alloc"] += 1
        self._end_step("segment_alloc", segment.address, n_bytes, pool.stream)
        return segment.blocks[0]

    def _map_pages(self, pool: Pool, block_bytes: int) -> SimulatedBlock | None:
        """Map the pages that a block lacks at the end of its pool's range."""
        own = [segment for segment in self.segments if segment.pool == pool]
        segment = max(own, key=lambda each: each.address, default=None)
        last = segment.blocks[-1] if segment is not None else None
        free_bytes = last.n_bytes if last is not None and last.is_free else 0
        n_bytes = _round_up(block_bytes - free_bytes, pool.page_bytes)
        if self.reserved_bytes + n_bytes > self._room_bytes:
            return None
        if segment is None:
            start = self._ranges.setdefault(pool, RANGE_BYTES * (len(self._ranges) + 1))
            segment = SimulatedSegment(start, pool, [])
            self.segments.append(segment)
        end = segment.address + segment.n_bytes
        if last is None or not last.is_free:
            last = SimulatedBlock(segment, end, 0)
            segment.blocks.append(last)
        last.n_bytes += n_bytes
        self._totals["num_device_alloc"] += 1
        self._end_step("segment_map", end, n_bytes, pool.stream)
        return last

    def _unmap_free_pages(self, segment: SimulatedSegment) -> None:
        """Take the whole pages of free blocks out of a segment, the lowest first."""
        page = segment.pool.page_bytes
        for block in list(segment.blocks):
            end = block.address + block.n_bytes
            first, last = _round_up(block.address, page), end // page * page
            if block.is_free and first < last:
                self._unmap(block, first, last)

    def _unmap(self, block: SimulatedBlock, first: int, last: int) -> None:
        """Unmap the addresses from ``first`` to ``last`` of a free block.

        What remains below and above them are segments of their own.
        """
        segment = block.segment
        pool = segment.pool
        place = segment.blocks.index(block)
        lower = SimulatedSegment(segment.address, pool, segment.blocks[:place])
        upper = SimulatedSegment(last, pool, segment.blocks[place + 1 :])
        if block.address < first:
            lower.blocks.append(SimulatedBlock(lower, block.address, first - block.address))
        if last < block.address + block.n_bytes:
            remainder_bytes = block.address + block.n_bytes - last
            upper.blocks.insert(0, SimulatedBlock(upper, last, remainder_bytes))
        for piece in (lower, upper):
            for each in piece.blocks:
                each.segment = piece
        at = self.segments.index(segment)
        self.segments[at : at + 1] = [piece for piece in (lower, upper) if piece.blocks]
        self._totals["num_device_free"] += 1
        self._end_step("segment_unmap", first, last - first, pool.stream)

    @property
    def _room_bytes(self) -> int:
        return min(self.allowed_bytes, self.total_bytes - self.outside_bytes)

    # -- Events and counters -----------------------------------------------------------------------

    def _end_step(
        self,
        action: str,
        address: int,
        n_bytes: int,
        stream: int = 0,
        block: SimulatedBlock | None = None,
    ) -> None:
        """Count what stands after a step, and report the step."""
        counts = {name: {"small_pool": 0, "large_pool": 0} for name in _STATISTICS}
        for segment in self.segments:
            pool = segment.pool.name
            counts["reserved_bytes"][pool] += segment.n_bytes
            counts["segment"][pool] += not self._is_expandable
            for each in segment.blocks:
                if each.state == "active_allocated":
                    counts["allocated_bytes"][pool] += each.n_bytes
                    counts["requested_bytes"][pool] += each.requested_bytes
                    counts["allocation"][pool] += 1
                if not each.is_free:
                    counts["active_bytes"][pool] += each.n_bytes
                elif len(segment.blocks) > 1:
                    counts["inactive_split_bytes"][pool] += each.n_bytes
        for name, pools in counts.items():
            for pool, count in (*pools.items(), ("all", sum(pools.values()))):
                statistic = self._statistics[name][pool]
                statistic.add(count - statistic["current"])
        if self.on_event is not None:
            self.on_event(action, address, n_bytes, stream, block)


def _round_up(n_bytes: int, multiple: int) -> int:
    return -(-n_bytes // multiple) * multiple
