"""Simulate PyTorch's caching allocator on one GPU, with the counters that PyTorch keeps.

Rules and sizes are those of
https://github.com/pytorch/pytorch/blob/main/c10/cuda/CUDACachingAllocator.cpp, described at
https://docs.pytorch.org/docs/stable/notes/cuda.html#memory-management: requests are rounded to 512
bytes; small ones share segments of 2 MiB, larger ones segments of 20 MiB, the largest have a
segment each; the smallest cached block that is large enough serves a request; freed blocks stay
reserved; a full device gives its cache back and tries once more. An expandable segment is a range
of addresses, into which pages are mapped where they are needed.

What the simulation does not know: which address the driver gives to a segment, and when another
stream is done with a block. Of two cached blocks of one size PyTorch takes the lower address, so a
replay sets ``next_address`` before each segment and calls ``complete_free`` where PyTorch did.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import Any

from gpumemwidget.allocator.blocks import AddressRange, BlockPool, SimulatedBlock, Statistic
from gpumemwidget.allocator.rules import (
    SMALL_BYTES,
    AllocatorSettings,
    choose_fitting,
    choose_rounding,
)
from gpumemwidget.backends.snapshot import SMALL_PAGE_BYTES
from gpumemwidget.errors import BackendError, BadInputError
from gpumemwidget.model.devices import Block, Segment
from gpumemwidget.model.traces import TraceAction

#: The size of a segment for a single block is a multiple of this.
_SEGMENT_ROUNDING_BYTES = 2 << 20
#: Id of the pool that serves all requests outside of CUDA graphs and of ``MemPool``.
_COMMON_POOL = (0, 0)

#: The arguments of ``CachingAllocator.on_event``: the action, the address (for ``oom`` the free
#: memory), the bytes (of a block the requested ones), the stream, and the block, if there is one.
EventHandler = Callable[[TraceAction, int, int, int, SimulatedBlock | None], None]


class DeviceFullError(BackendError, RuntimeError):
    """The simulated GPU has no room for a request."""


class CachingAllocator:
    """The caching allocator of one GPU, with PyTorch's default settings if none are given.

    Attributes:
        total_bytes: the GPU's memory.
        allowed_bytes: the maximum that may be reserved; ``None`` without a limit of the process.
        outside_bytes: memory of the GPU that other allocators and processes hold.
        active_blocks: all blocks that are in use or wait to be freed, by address.
        next_address: the address of the next segment that is not expandable. A replay may set it.
        addresses_fall: each segment lies below all others, as mostly where the driver places large
            ones; otherwise at ``next_address``. Of two cached blocks of one size the lower serves.
        on_event: is called after each step with what PyTorch's history would note.
    """

    def __init__(self, total_bytes: int, *, settings: AllocatorSettings | None = None) -> None:
        self.total_bytes = total_bytes
        self.outside_bytes = 0
        self.active_blocks: dict[int, SimulatedBlock] = {}
        # Addresses are never used twice, except within an expandable range.
        self.next_address = self._lowest_address = 0x7F00_0000_0000
        self.addresses_fall = False
        self.on_event: EventHandler | None = None
        self._settings = settings or AllocatorSettings()
        self.allowed_bytes = self._settings.allowed_bytes
        self._round_request = choose_rounding(self._settings)
        self._fit = choose_fitting(self._settings)
        self._allocated, self._reserved = Statistic(), Statistic()
        self._n_retries = self._n_ooms = 0
        self._pools: dict[tuple[bool, tuple[int, int], int], BlockPool] = {}
        #: The first block of each segment and of each expandable range, by address.
        self._first_blocks: dict[int, SimulatedBlock] = {}
        #: Blocks that wait for another stream, the oldest first.
        self._pending: dict[SimulatedBlock, None] = {}

    @classmethod
    def from_snapshot(
        cls,
        segments: Iterable[Segment],
        *,
        total_bytes: int,
        settings: AllocatorSettings | None = None,
    ) -> CachingAllocator:
        """Return an allocator in the state that a snapshot shows.

        Addresses are kept, so that ``active_blocks`` finds what a live tensor holds. Peaks and sums
        of increases begin with what is there. Private pools are taken for ones still in use, and an
        expandable range for beginning where its first mapped page is: a snapshot has neither.
        """
        allocator = cls(total_bytes, settings=settings)
        for segment in sorted(segments, key=lambda segment: segment.address):
            allocator._restore_segment(segment)
        for block in allocator.active_blocks.values():
            if block.state == "active_allocated":
                allocator._allocated.add(block.n_bytes)
        return allocator

    @property
    def reserved_bytes(self) -> int:
        """The bytes of all segments, which any thread may read."""
        return self._reserved.current

    @property
    def reserved_peak_bytes(self) -> int:
        """The highest ``reserved_bytes`` since ``reset_peaks``."""
        return self._reserved.peak

    @property
    def allocated_bytes(self) -> int:
        """The bytes of all blocks in use."""
        return self._allocated.current

    # -- What a program does -----------------------------------------------------------------------

    def allocate(
        self, n_bytes: int, *, stream: int = 0, pool_id: tuple[int, int] = _COMMON_POOL
    ) -> SimulatedBlock:
        """Return a block of at least ``n_bytes``.

        Args:
            n_bytes: the request, before rounding.
            stream: the stream that asks; cached blocks of other streams are not taken.
            pool_id: the private pool of a CUDA graph or a ``MemPool``, where one is in use.

        Raises:
            DeviceFullError: there is no room, even after the cache was given back.
        """
        block_bytes = self._round_request(n_bytes)
        pool = self._find_pool(block_bytes <= SMALL_BYTES, pool_id, stream)
        block = self._take_cached(pool, block_bytes) or self._reserve_more(pool, block_bytes)
        if (fitting_bytes := self._fit(n_bytes, block.n_bytes)) < block.n_bytes:
            pool.add(block.split(fitting_bytes))
        block.state = "active_allocated"
        block.requested_bytes = n_bytes
        self.active_blocks[block.address] = block
        self._allocated.add(block.n_bytes)
        if self.on_event is not None:
            self.on_event(TraceAction.ALLOC, block.address, n_bytes, stream, block)
        return block

    def free(self, block: SimulatedBlock, *, is_used_elsewhere: bool = False) -> None:
        """Put a block back into the cache.

        Args:
            block: a block in use.
            is_used_elsewhere: another stream still works on the block, so it waits for
                ``complete_free`` or ``synchronize``.

        Raises:
            BadInputError: the block is not in use.
        """
        if block.state != "active_allocated":
            raise BadInputError(f"block {block.address:#x} is not in use: free each block once")
        block.state = "active_pending_free"
        self._allocated.add(-block.n_bytes)
        if self.on_event is not None:
            stream = block.pool.stream
            self.on_event(
                TraceAction.FREE_REQUESTED, block.address, block.requested_bytes, stream, block
            )
        if is_used_elsewhere:
            self._pending[block] = None
        else:
            self._make_free(block)

    def complete_free(self, block: SimulatedBlock) -> None:
        """Complete the freeing of a block that another stream worked on.

        Raises:
            BadInputError: the block does not wait to be freed.
        """
        if block not in self._pending:
            raise BadInputError(f"block {block.address:#x} does not wait: free it first")
        del self._pending[block]
        self._make_free(block)

    def synchronize(self) -> None:
        """Complete the freeing of all blocks that other streams worked on."""
        for block in list(self._pending):
            self.complete_free(block)

    def empty_cache(self) -> None:
        """Give unused memory back to the driver: whole segments, and pages of expandable ones."""
        self.synchronize()
        # PyTorch empties those of large blocks first.
        for pool in sorted(self._pools.values(), key=lambda pool: (pool.is_small, pool.stream)):
            if pool.pool_id == _COMMON_POOL:
                self._release_pool(pool)

    # -- What PyTorch reports ----------------------------------------------------------------------

    def to_stats(self) -> dict[str, Any]:
        """Return some counters, as ``torch.cuda.memory_stats_as_nested_dict`` does."""
        return {
            "allocated_bytes": {"all": self._allocated.to_dict()},
            "reserved_bytes": {"all": self._reserved.to_dict()},
            "num_alloc_retries": self._n_retries,
            "num_ooms": self._n_ooms,
        }

    def list_segments(self, device: str) -> tuple[Segment, ...]:
        """Return the segments with their blocks, as of a device, by ascending address."""
        return tuple(
            Segment(
                device=device,
                address=run[0].address,
                n_bytes=sum(block.n_bytes for block in run),
                is_private=run[0].pool.pool_id != _COMMON_POOL,
                pool_id=run[0].pool.pool_id,
                blocks=tuple(
                    Block(
                        block.address,
                        block.n_bytes,
                        None if block.state == "inactive" else block.requested_bytes,
                        block.state,
                    )
                    for block in run
                    if block.state != "unmapped"
                ),
                page_bytes=None if (pages := run[0].address_range) is None else pages.page_bytes,
                stream=run[0].pool.stream,
            )
            for run in self._list_runs()
        )

    def reset_peaks(self) -> None:
        """Set every peak to the current value."""
        for statistic in (self._allocated, self._reserved):
            statistic.peak = statistic.current

    def _list_runs(self) -> Iterator[list[SimulatedBlock]]:
        """Yield the blocks of each segment; an expandable range has a segment between its gaps."""
        for _, first in sorted(self._first_blocks.items()):
            run: list[SimulatedBlock] = []
            block: SimulatedBlock | None = first
            while block is not None:
                if block.state != "unmapped":
                    run.append(block)
                elif run:
                    yield run
                    run = []
                block = block.upper
            if run:
                yield run

    # -- Cached blocks -----------------------------------------------------------------------------

    def _find_pool(self, is_small: bool, pool_id: tuple[int, int], stream: int) -> BlockPool:
        key = (is_small, pool_id, stream)
        pool = self._pools.get(key)
        if pool is None:
            pool = self._pools[key] = BlockPool(is_small, pool_id, stream)
        return pool

    def _take_cached(self, pool: BlockPool, block_bytes: int) -> SimulatedBlock | None:
        """Take the smallest block that is large enough out of the cache; of equals the lowest."""
        place = bisect_left(pool.cached, (block_bytes, 0))
        if place == len(pool.cached):
            return None
        block = pool.cached_blocks[pool.cached[place][1]]
        if block.address_range is not None:
            chosen = self._choose_expandable(pool, place)
            if chosen is None:
                return None
            block = chosen
        limit = self._settings.max_split_bytes
        if limit is not None:
            if block_bytes < limit <= block.n_bytes:
                return None
            most_bytes = block_bytes + self._settings.max_non_split_rounding_bytes
            if block_bytes >= limit and block.n_bytes >= most_bytes:
                return None
        block.pool.remove(block)
        return block

    def _choose_expandable(self, pool: BlockPool, place: int) -> SimulatedBlock | None:
        """Return the best cached block from ``place`` on, which is in an expandable segment.

        The block at the end of an expandable segment is taken last, so that it can grow. Where
        ``expandable_segments`` was switched off, no block of such segments is taken.
        """
        blocks = (pool.cached_blocks[address] for _, address in islice(pool.cached, place, None))
        if not self._settings.is_expandable:
            return next((block for block in blocks if block.address_range is None), None)
        best = next(blocks)
        for block in blocks:
            if best.address_range is None or block.growable_bytes >= best.growable_bytes:
                break
            best = block
        return best

    def _make_free(self, block: SimulatedBlock) -> None:
        """Cache a block that nothing uses any more, joined with its free neighbours."""
        address, pool = block.address, block.pool
        del self.active_blocks[address]
        block.state = "inactive"
        joined = block.join_neighbours()
        joined.pool.add(joined)
        if self.on_event is not None:
            self.on_event(
                TraceAction.FREE_COMPLETED, address, block.requested_bytes, pool.stream, block
            )

    # -- Memory from the driver --------------------------------------------------------------------

    def _reserve_more(self, pool: BlockPool, block_bytes: int) -> SimulatedBlock:
        """Return a free block from newly reserved memory, for which the cache may be given back."""
        block = self._reserve(pool, block_bytes)
        if block is None and self._release_oversize(pool, block_bytes):
            block = self._reserve(pool, block_bytes)
        if block is None:
            self.empty_cache()
            self._n_retries += 1
            block = self._reserve(pool, block_bytes)
        if block is None:
            self._n_ooms += 1
            if self.on_event is not None:
                self.on_event(
                    TraceAction.OOM, self._driver_free_bytes, block_bytes, pool.stream, None
                )
            room_bytes = self.total_bytes - self.outside_bytes
            if self.allowed_bytes is not None:
                room_bytes = min(self.allowed_bytes, room_bytes)
            raise DeviceFullError(
                f"no room for {block_bytes} bytes: of {room_bytes} bytes "
                f"{self.reserved_bytes} are reserved and in use"
            )
        return block

    @property
    def _driver_free_bytes(self) -> int:
        return self.total_bytes - self.outside_bytes - self.reserved_bytes

    def _reserve(self, pool: BlockPool, block_bytes: int) -> SimulatedBlock | None:
        """Return a free block of new memory that is in no cache, or ``None`` without room."""
        # Requests of 10 MiB and more have a segment of their own.
        if pool.is_small:
            n_bytes = SMALL_PAGE_BYTES
        elif block_bytes < 10 << 20:
            n_bytes = self._settings.large_segment_bytes
        else:
            n_bytes = _round_up(block_bytes, _SEGMENT_ROUNDING_BYTES)
        limit = self.allowed_bytes
        if limit is not None and self.reserved_bytes + n_bytes > limit:
            return None
        if self._settings.is_expandable:
            return self._expand(pool, block_bytes)
        if n_bytes > self._driver_free_bytes:
            return None
        if self.addresses_fall:
            self._lowest_address -= n_bytes
        address = self._lowest_address if self.addresses_fall else self.next_address
        block = SimulatedBlock(pool, address, n_bytes)
        self.next_address = max(self.next_address, block.end)
        self._first_blocks[block.address] = block
        self._note_reserved(TraceAction.SEGMENT_ALLOC, block.address, n_bytes, pool)
        return block

    def _release_oversize(self, pool: BlockPool, block_bytes: int) -> bool:
        """Give cached segments above ``max_split_bytes`` back; return whether these are enough."""
        limit = self._settings.max_split_bytes
        if limit is None:
            return False
        wanted_bytes = max(block_bytes, limit)
        segments = [block for block in pool.list_free_segments() if block.n_bytes >= limit]
        for block in segments:
            if block.n_bytes >= wanted_bytes:
                self._release_segment(block)
                return True
        while wanted_bytes > 0 and segments:
            wanted_bytes -= segments[-1].n_bytes
            self._release_segment(segments.pop())
        return wanted_bytes <= 0

    def _release_pool(self, pool: BlockPool) -> None:
        """Give a pool's free segments, and free pages of expandable segments, to the driver."""
        for block in pool.list_free_segments():
            self._release_segment(block)
        for block in pool.list_cached():
            if block.address_range is not None:
                self._unmap_pages(block, block.address_range)

    def _release_segment(self, block: SimulatedBlock) -> None:
        block.pool.remove(block)
        del self._first_blocks[block.address]
        self._note_reserved(TraceAction.SEGMENT_FREE, block.address, -block.n_bytes, block.pool)

    def _note_reserved(
        self, action: TraceAction, address: int, n_bytes: int, pool: BlockPool
    ) -> None:
        """Count and report memory that came from the driver, or, below zero, went back."""
        self._reserved.add(n_bytes)
        if self.on_event is not None:
            self.on_event(action, address, abs(n_bytes), pool.stream, None)

    # -- Expandable segments -----------------------------------------------------------------------

    def _expand(self, pool: BlockPool, block_bytes: int) -> SimulatedBlock | None:
        """Map pages at the lowest address where a block fits; return it, or ``None`` without room.

        Pages that were mapped before the driver refused one stay in the cache.
        """
        block = self._find_unmapped(pool, block_bytes)
        if block.state == "unmapped":
            mapped = self._map_pages(block, min(block.n_bytes, block_bytes))
            if mapped is None:
                return None
            block = mapped
        while block.n_bytes < block_bytes:
            above = block.upper
            if above is None:  # the device has fewer addresses in all
                return None
            mapped = self._map_pages(above, min(above.n_bytes, block_bytes - block.n_bytes))
            if mapped is None:
                return None
            block = mapped
        block.pool.remove(block)
        return block

    def _find_unmapped(self, pool: BlockPool, block_bytes: int) -> SimulatedBlock:
        """Return the lowest block from which on enough addresses are free or unmapped."""
        for unmapped in pool.unmapped:
            first = unmapped
            if first.lower is not None and first.lower.state == "inactive":
                first = first.lower
            n_bytes = 0
            block: SimulatedBlock | None = first
            while block is not None and block.state in ("inactive", "unmapped"):
                n_bytes += block.n_bytes
                if n_bytes >= block_bytes:
                    return first
                block = block.upper
        address_range = self._make_range(pool, self.next_address)
        self.next_address = address_range.end
        unmapped = address_range.make_unmapped(pool, address_range.address)
        self._first_blocks[unmapped.address] = unmapped
        pool.add(unmapped)
        return unmapped

    def _make_range(self, pool: BlockPool, address: int) -> AddressRange:
        """Return the addresses of a new expandable segment.

        As in PyTorch, these are an eighth more than the device has memory.
        """
        page_bytes = SMALL_PAGE_BYTES if pool.is_small else self._settings.large_segment_bytes
        n_bytes = _round_up(self.total_bytes + self.total_bytes // 8, page_bytes)
        return AddressRange(address, address + n_bytes, page_bytes)

    def _map_pages(self, block: SimulatedBlock, n_bytes: int) -> SimulatedBlock | None:
        """Map pages at the start of an unmapped block; return the cached block that has them."""
        address_range, address, pool = block.address_range, block.address, block.pool
        assert address_range is not None  # only parts of expandable segments are unmapped
        n_bytes = _round_up(n_bytes, address_range.page_bytes)
        if n_bytes > self._driver_free_bytes:
            return None
        block.pool.remove(block)
        if n_bytes < block.n_bytes:
            pool.add(block.split(n_bytes))
        block.state = "inactive"
        joined = block.join_neighbours()
        joined.pool.add(joined)
        self._note_reserved(TraceAction.SEGMENT_MAP, address, n_bytes, pool)
        return joined

    def _unmap_pages(self, block: SimulatedBlock, address_range: AddressRange) -> None:
        """Unmap the whole pages of a cached block; what remains of it stays cached."""
        start, page_bytes = address_range.address, address_range.page_bytes
        first = start + _round_up(block.address - start, page_bytes)
        end = start + (block.end - start) // page_bytes * page_bytes
        if first >= end:
            return
        block.pool.remove(block)
        if block.address < first:
            pages = block.split(first - block.address)
            block.pool.add(block)
            block = pages
        if end < block.end:
            block.pool.add(block.split(end - first))
        block.state = "unmapped"
        joined = block.join_neighbours()
        if joined.is_split:
            joined.pool.add(joined)
        else:
            del self._first_blocks[joined.address]
        self._note_reserved(TraceAction.SEGMENT_UNMAP, first, first - end, block.pool)

    # -- A live state ------------------------------------------------------------------------------

    def _restore_segment(self, segment: Segment) -> None:
        """Add a segment of a snapshot; segments come by ascending address."""
        address = segment.address
        # A segment for large requests has at least 10 MiB, and one for small requests 2 MiB.
        is_small = (segment.page_bytes or segment.n_bytes) <= SMALL_PAGE_BYTES
        pool = self._find_pool(is_small, segment.pool_id, segment.stream)
        address_range, below = None, None
        if segment.page_bytes is not None:
            address_range, below = self._restore_range(pool, address, segment.n_bytes)
        for restored in segment.blocks:
            block = SimulatedBlock(
                pool,
                address,
                restored.n_bytes,
                restored.state,
                restored.requested_bytes or restored.n_bytes,
                address_range=address_range,
            )
            self._restore_block(block, below)
            address, below = block.end, block
        if address_range is not None and address < address_range.end:
            unmapped = address_range.make_unmapped(pool, address)
            self._restore_block(unmapped, below)
            address = unmapped.end
        self._reserved.add(segment.n_bytes)
        self.next_address = max(self.next_address, _round_up(address, _SEGMENT_ROUNDING_BYTES))
        self._lowest_address = min(self._lowest_address, segment.address)

    def _restore_block(self, block: SimulatedBlock, below: SimulatedBlock | None) -> None:
        """Add a block of a snapshot above the one ``below``, if that is of the same segment."""
        if below is None:
            self._first_blocks[block.address] = block
        else:
            below.upper, block.lower = block, below
        if block.state in ("inactive", "unmapped"):
            block.pool.add(block)
            return
        self.active_blocks[block.address] = block
        if block.state == "active_pending_free":
            self._pending[block] = None

    def _restore_range(
        self, pool: BlockPool, address: int, n_bytes: int
    ) -> tuple[AddressRange, SimulatedBlock | None]:
        """Return the range of a mapped part, and the unmapped block below it in the same range.

        Mapped parts of one pool are taken for parts of one range if its addresses reach to both.
        """
        if pool.unmapped:
            # Until the next part is known, all addresses above a part are one unmapped block.
            below = pool.unmapped[-1]
            if below.address_range is not None and address + n_bytes <= below.end:
                below.n_bytes = address - below.address
                return below.address_range, below
        return self._make_range(pool, address), None


def _round_up(n_bytes: int, multiple: int) -> int:
    return -(-n_bytes // multiple) * multiple
