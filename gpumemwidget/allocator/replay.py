"""Replay the allocator's recorded events, so that every block has its exact bytes.

An event holds the bytes that were asked for. The bytes of the block follow from the allocator's
rules and from the free block at its address. The result is compared with the blocks at the end.

Where the oldest events are missing, what was in use before the others follows from the end: blocks
that are gone by then have the bytes of their requests, at least as many as they had.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from dataclasses import dataclass, field

from gpumemwidget.allocator.rules import (
    SMALL_BYTES,
    UNLIMITED_BYTES,
    choose_fitting,
    choose_rounding,
)
from gpumemwidget.model.devices import Segment
from gpumemwidget.model.traces import AllocatorTrace, TraceAction, TraceEvents
from gpumemwidget.progress import Stage, follow


@dataclass(frozen=True, slots=True, eq=False)
class Blocks:
    """The blocks that were in use at some time, as columns: a million of them have to fit."""

    #: Type ``Q``.
    addresses: array[int] = field(default_factory=lambda: array("Q"))
    #: Type ``q``, in bytes.
    sizes: array[int] = field(default_factory=lambda: array("q"))
    #: Type ``i``: the index of the event that allocated it; -1 if it is older than all events.
    begun_at: array[int] = field(default_factory=lambda: array("i"))
    #: Type ``i``: the index of the event that freed it; -1 if it is in use at the end.
    freed_at: array[int] = field(default_factory=lambda: array("i"))

    def add(self, address: int, n_bytes: int, *, begun_at: int = -1) -> int:
        """Add a block; return its index."""
        self.addresses.append(address)
        self.sizes.append(n_bytes)
        self.begun_at.append(begun_at)
        self.freed_at.append(-1)
        return len(self.sizes) - 1


@dataclass(frozen=True, slots=True, eq=False)
class Replay:
    """A device's events and what each of them did.

    Attributes:
        events: the events.
        blocks: those that were in use when the first event came, and all that were allocated.
        event_blocks: for each event (type ``i``), the index of the block that it allocated or
            freed; -1 for other events.
        changes: for each event (type ``q``), by how many bytes it changed allocated.
        reserved_changes: for each event (type ``q``), by how many bytes it changed reserved.
        start_allocated_bytes: allocated before the first event.
        start_reserved_bytes: reserved before the first event.
        lost: the blocks that an event allocated which is missing.
        agrees: whether each event can follow from those before it, and the replay ends with the
            blocks that were read at the end.
    """

    events: TraceEvents
    blocks: Blocks
    event_blocks: array[int]
    changes: array[int]
    reserved_changes: array[int]
    start_allocated_bytes: int
    start_reserved_bytes: int
    lost: frozenset[int] = frozenset()
    agrees: bool = True


def replay(trace: AllocatorTrace) -> Replay:
    """Replay one device's trace.

    From the start where that is known; a history without segments before it may have begun with
    the process. Else the blocks at the end say what was there at the start.
    """
    if trace.is_whole or not trace.before:
        found = _replay_from(BlockLayout(trace.before), trace)
        if found.agrees or trace.is_whole:
            return found
    layout = BlockLayout(())
    layout.active.update(_find_first_blocks(trace))
    return _replay_from(layout, trace, is_whole=False)


def begins_with_events(trace: AllocatorTrace) -> bool:
    """Return whether the span begins with its first event, so that every initial block is older."""
    return len(trace.events) > 0 and trace.start_us >= trace.events.times_us[0]


def _find_first_blocks(trace: AllocatorTrace) -> dict[int, int]:
    """Return the bytes of the blocks in use before the first event, by address.

    These are the blocks at the end, without those that the events allocated, and with those that
    the events freed.
    """
    events, round_up = trace.events, choose_rounding(trace.rules)
    in_use = dict(BlockLayout(trace.after).active)
    alloc, free_requested = TraceAction.ALLOC, TraceAction.FREE_REQUESTED
    columns = zip(events.actions[::-1], events.addresses[::-1], events.sizes[::-1], strict=True)
    for action, address, size in columns:
        if action == alloc:
            in_use.pop(address, None)
        elif action == free_requested and 0 <= size <= UNLIMITED_BYTES:
            in_use[address] = round_up(size)
    return in_use


def _replay_from(layout: BlockLayout, trace: AllocatorTrace, *, is_whole: bool = True) -> Replay:
    """Replay events from a layout on; unless it ``is_whole``, what is free in it is not known."""
    events = trace.events
    free, pending = layout.free, layout.pending
    blocks = Blocks()
    sizes = blocks.sizes
    #: The index of each block in use, by its address.
    in_use = {address: blocks.add(address, n_bytes) for address, n_bytes in layout.active.items()}
    changes = array("q", bytes(8 * len(events)))
    reserved_changes = array("q", bytes(8 * len(events)))
    event_blocks = array("i", [-1]) * len(events)
    n_initial = len(sizes)
    fit = choose_fitting(trace.rules)
    n_contradictions = 0
    # Local names: looking up an enum's member costs more than handling most events.
    alloc, free_requested = TraceAction.ALLOC, TraceAction.FREE_REQUESTED
    free_completed, last_change = TraceAction.FREE_COMPLETED, TraceAction.SEGMENT_UNMAP

    columns = zip(events.actions, events.addresses, events.sizes, strict=True)
    for place, (action, address, size) in enumerate(
        follow(columns, Stage.REPLAY_EVENTS, len(events))
    ):
        if not 0 <= size <= UNLIMITED_BYTES:
            # Other actions change nothing, and their size may be anything.
            n_contradictions += action <= last_change
        elif action == alloc:
            free_bytes = free.get(address, 0)
            n_bytes = fit(size, free_bytes)
            n_contradictions += address in in_use or (is_whole and n_bytes > free_bytes)
            layout.take_free(address, n_bytes)
            in_use[address] = event_blocks[place] = blocks.add(address, n_bytes, begun_at=place)
            changes[place] = n_bytes
        elif action == free_requested:
            block = event_blocks[place] = in_use.pop(address, -1)
            if block < 0:
                n_contradictions += 1
                continue
            blocks.freed_at[block] = place
            changes[place] = -sizes[block]
            pending[address] = sizes[block]
        elif action == free_completed:
            if address in pending:
                layout.add_free(address, pending.pop(address))
            else:
                n_contradictions += is_whole
        elif action <= last_change:
            reserved_changes[place], is_possible = _follow_driver(layout, action, address, size)
            n_contradictions += is_whole and not is_possible

    after = BlockLayout(trace.after)
    if not is_whole:
        _correct_sizes(blocks, changes, in_use, after)
        layout.reserved_bytes = after.reserved_bytes - sum(reserved_changes)
    active = {address: sizes[block] for address, block in in_use.items()}
    reserved_bytes = layout.reserved_bytes + sum(reserved_changes)
    agrees = active == after.active and reserved_bytes == after.reserved_bytes
    is_lost = not is_whole and not begins_with_events(trace)
    return Replay(
        events=events,
        blocks=blocks,
        event_blocks=event_blocks,
        changes=changes,
        reserved_changes=reserved_changes,
        start_allocated_bytes=sum(sizes[:n_initial]),
        start_reserved_bytes=layout.reserved_bytes,
        lost=_find_lost(trace, blocks, n_initial) if is_lost else frozenset(),
        agrees=agrees and not n_contradictions,
    )


def _follow_driver(
    layout: BlockLayout, action: int, address: int, n_bytes: int
) -> tuple[int, bool]:
    """Return the change of reserved bytes by a range that came or went, and whether it could."""
    if action in (TraceAction.SEGMENT_FREE, TraceAction.SEGMENT_UNMAP):
        if action == TraceAction.SEGMENT_FREE:
            layout.segment_starts.discard(address)
        return -n_bytes, layout.take_free(address, n_bytes)
    if action == TraceAction.SEGMENT_ALLOC:
        layout.segment_starts.add(address)
    else:
        # The range becomes a part of the segments on both sides.
        layout.segment_starts.discard(address + n_bytes)
    layout.add_free(address, n_bytes)
    return n_bytes, True


def _correct_sizes(
    blocks: Blocks, changes: array[int], in_use: dict[int, int], after: BlockLayout
) -> None:
    """Give blocks that are in use at the end the bytes that were read then."""
    for address in in_use.keys() & after.active.keys():
        block = in_use[address]
        blocks.sizes[block] = after.active[address]
        if blocks.begun_at[block] >= 0:
            changes[blocks.begun_at[block]] = after.active[address]


def _find_lost(trace: AllocatorTrace, blocks: Blocks, n_initial: int) -> frozenset[int]:
    """Return the blocks before the first event that were not there before the span.

    A block with the address and nearly the bytes of one from before is taken for the same block.
    """
    before = BlockLayout(trace.before).active
    return frozenset(
        block
        for block in range(n_initial)
        if not 0 <= before.get(blocks.addresses[block], -1) - blocks.sizes[block] <= SMALL_BYTES
    )


# -- Free and used ranges ------------------------------------------------------------------------


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
        #: The address of each free block, by the address behind it.
        self._starts: dict[int, int] = {}
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
        start = self._starts.get(address, -1)
        if address not in self.segment_starts and start + self.free.get(start, 0) == address:
            self._remove_free(start)
            address = start
        if end not in self.segment_starts and end in self.free:
            end += self._remove_free(end)
        self._insert_free(address, end)

    def take_free(self, address: int, n_bytes: int) -> bool:
        """Cut a range out of a free block; return ``False`` if part of the range is not free."""
        start, end = address, address + n_bytes
        if address not in self.free:
            # Only pages of a segment that grows are taken from the midst of a free block.
            around = (low for low, size in self.free.items() if low < address < low + size)
            start = next(around, -1)
        if start + self.free.get(start, 0) < end:
            return False
        stop = start + self._remove_free(start)
        self._insert_free(start, address)
        self._insert_free(end, stop)
        return True

    def _insert_free(self, start: int, end: int) -> None:
        if start < end:
            self.free[start] = end - start
            self._starts[end] = start

    def _remove_free(self, start: int) -> int:
        n_bytes = self.free.pop(start)
        self._starts.pop(start + n_bytes, None)
        return n_bytes
