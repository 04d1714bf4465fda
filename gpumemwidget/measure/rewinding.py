"""The allocator's events taken back from the end, where the oldest ones are missing.

What stands at the end is known to the byte. Each event undone gives what stood before it, up to the
oldest one that is there, or up to one that can't have been so: events before that are incomplete.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field

from gpumemwidget.measure.layout import Layout
from gpumemwidget.measure.played import (
    ALLOC,
    FREE_COMPLETED,
    FREE_REQUESTED,
    SEGMENT_ALLOC,
    SEGMENT_FREE,
    SEGMENT_MAP,
    SEGMENT_UNMAP,
    UNSIZED,
    Played,
    Standing,
)
from gpumemwidget.measure.rounding import (
    MOST_BYTES,
    SMALL_BYTES,
    UNLIMITED_BYTES,
    choose_rounding,
)
from gpumemwidget.records import Block, Segment
from gpumemwidget.traces import AllocatorTrace, TraceEvents

__all__ = ["begins_with_events", "cut_events", "rewind"]


def begins_with_events(trace: AllocatorTrace) -> bool:
    """Whether the span begins with its first event: then whatever stood there is of before."""
    return len(trace.events) > 0 and trace.start_us >= trace.events.times_us[0]


def rewind(trace: AllocatorTrace) -> tuple[Played, int]:
    """The newest events that follow from each other, played, and how many older ones there are.

    Args:
        trace: one device's events and what stood at the end.
    """
    rewinder = _Rewinder(trace)
    first = rewinder.run()
    layout = rewinder.layout
    ends = rewinder.ends
    standing = tuple(
        Standing(address, n_bytes, max(ends.get(address, -1) - first, -1))
        for address, n_bytes in layout.active.items()
    )
    if first or not begins_with_events(trace):
        _tell_apart(trace, standing)
    partners = rewinder.partners[first:]
    if first:
        # What is left out was never undone, so that no partner lies there.
        partners = array("i", [each - first if each >= 0 else -1 for each in partners])
    for place, each in enumerate(standing):
        if each.end >= 0:
            partners[each.end] = -2 - place
    return (
        Played(
            events=cut_events(trace.events, first),
            standing=standing,
            changes=rewinder.changes[first:],
            reserved_changes=rewinder.reserved_changes[first:],
            partners=partners,
            start_allocated_bytes=layout.allocated_bytes,
            start_reserved_bytes=layout.reserved_bytes,
        ),
        first,
    )


@dataclass(slots=True, eq=False)
class _Rewinder:
    """Goes back from what stood at the end."""

    trace: AllocatorTrace
    layout: Layout = field(init=False)
    changes: array[int] = field(init=False)
    reserved_changes: array[int] = field(init=False)
    partners: array[int] = field(init=False)
    #: Where a block that is in use will be freed.
    ends: dict[int, int] = field(init=False, default_factory=dict)
    #: Where a block begins that was freed later, by where it ends.
    _by_end: dict[int, int] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        self.layout = Layout(self.trace.after, is_sorted=True)
        n_events = len(self.trace.events)
        self.changes = array("q", bytes(8 * n_events))
        self.reserved_changes = array("q", bytes(8 * n_events))
        self.partners = array("i", [-1]) * n_events

    def run(self) -> int:  # noqa: PLR0911, PLR0912 - one branch for each kind of event
        """Undo all that can be undone; the place of the oldest event that was."""
        events = self.trace.events
        layout, ends = self.layout, self.ends
        active, pending = layout.active, layout.pending
        round_up = choose_rounding(self.trace.rules)
        for place in range(len(events) - 1, -1, -1):
            action, address, size = (
                events.actions[place],
                events.addresses[place],
                events.sizes[place],
            )
            if not 0 <= size <= MOST_BYTES:
                if action not in UNSIZED:
                    return place + 1
            elif action == ALLOC:
                n_bytes = active.pop(address, 0)
                if not n_bytes:
                    return place + 1
                layout.give(address, n_bytes)
                self._by_end.pop(address + n_bytes, None)
                end = ends.pop(address, -1)
                self.changes[place] = n_bytes
                self.partners[place] = end
                if end >= 0:
                    self.partners[end] = place
            elif action == FREE_COMPLETED:
                if not self._take_back(address, round_up(size)):
                    return place + 1
            elif action == FREE_REQUESTED:
                n_bytes = pending.pop(address, 0)
                if not n_bytes or address in active:
                    return place + 1
                active[address] = n_bytes
                ends[address] = place
                self.changes[place] = -n_bytes
            elif action in (SEGMENT_ALLOC, SEGMENT_MAP):
                if not layout.take(address, size):
                    return place + 1
                if action == SEGMENT_ALLOC:
                    layout.starts.discard(address)
                layout.reserved_bytes -= size
                self.reserved_changes[place] = size
            elif action in (SEGMENT_FREE, SEGMENT_UNMAP):
                if layout.find_free(address) is not None:
                    return place + 1
                if action == SEGMENT_FREE:
                    layout.starts.add(address)
                    layout.give(address, size)
                else:
                    layout.map(address, size)
                layout.reserved_bytes += size
                self.reserved_changes[place] = -size
        return 0

    def _take_back(self, address: int, n_bytes: int) -> bool:
        """Let what was freed be a block again; it is the free block's, or a part of it."""
        found = self.layout.find_free(address)
        if found is None or found[1] - address < n_bytes:
            return False
        rules = self.trace.rules
        is_large = n_bytes > SMALL_BYTES and not rules.is_expandable
        most_split = UNLIMITED_BYTES if rules.max_split_bytes is None else rules.max_split_bytes
        over = found[1] - address - n_bytes
        # Of large blocks no such rest is ever split off, so that it is the block's.
        if is_large and (over <= SMALL_BYTES or n_bytes >= most_split):
            n_bytes += over
        self.layout.take(address, n_bytes)
        self.layout.pending[address] = n_bytes
        self._by_end[address + n_bytes] = address
        if is_large and 0 < address - found[0] <= SMALL_BYTES:
            self._extend(found[0], address)
        return True

    def _extend(self, end: int, address: int) -> None:
        """Let a block have what was left between it and the next one, too little to be split off.

        While that one was free, nothing showed that this was not.
        """
        owner = self._by_end.pop(end, None)
        if owner is None:
            return
        rest = address - end
        self.layout.take(end, rest)
        self._by_end[address] = owner
        blocks = self.layout.active if owner in self.layout.active else self.layout.pending
        blocks[owner] += rest
        if blocks is self.layout.active and owner in self.ends:
            self.changes[self.ends[owner]] -= rest


def _tell_apart(trace: AllocatorTrace, standing: tuple[Standing, ...]) -> None:
    """Tell what stood before the cell from what the missing events allocated.

    A block of the place and size of one that stood before the cell is taken for the same one,
    unless it is known to have been allocated elsewhere since.
    """
    before, after = _map_blocks(trace.before), _map_blocks(trace.after)
    for each in standing:
        old = before.get(each.address)
        new = after[each.address] if each.end < 0 else None
        each.is_before = (
            old is not None
            and old.n_bytes == each.n_bytes
            and (new is None or new.frames == old.frames)
        )
        if new is not None and not each.is_before:
            each.frames = new.frames


def _map_blocks(segments: tuple[Segment, ...]) -> dict[int, Block]:
    """The blocks in use by their addresses."""
    return {
        block.address: block
        for segment in segments
        for block in segment.blocks
        if block.state == "active_allocated"
    }


def cut_events(events: TraceEvents, first: int) -> TraceEvents:
    """The events from a place on."""
    if not first:
        return events
    return TraceEvents(
        actions=events.actions[first:],
        addresses=events.addresses[first:],
        sizes=events.sizes[first:],
        times_us=events.times_us[first:],
        streams=events.streams[first:],
        stacks=events.stacks[first:],
        stack_table=events.stack_table,
    )
