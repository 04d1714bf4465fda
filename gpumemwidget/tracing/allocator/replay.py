"""Replay the allocator's events, so that every block has its exact bytes.

An event holds the bytes that were asked for. The bytes of the block follow from the allocator's
rules and from the free block at its address. The result is compared with the blocks at the end.

Where events are missing, the replay goes backwards from the blocks at the end, which are known to
the byte, up to the first event that contradicts them; older events are left out.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass

from gpumemwidget.model.segments import Block, Frame, Segment
from gpumemwidget.model.traces import ACTIONS, AllocatorTrace, TraceEvents
from gpumemwidget.progress import Stage, follow
from gpumemwidget.tracing.allocator.layout import (
    MAX_DEVICE_BYTES,
    MIN_BLOCK_BYTES,
    SMALL_BYTES,
    UNLIMITED_BYTES,
    BlockLayout,
    choose_rounding,
)

ALLOC = ACTIONS.index("alloc")
FREE_REQUESTED = ACTIONS.index("free_requested")
FREE_COMPLETED = ACTIONS.index("free_completed")
SEGMENT_ALLOC = ACTIONS.index("segment_alloc")
SEGMENT_FREE = ACTIONS.index("segment_free")
SEGMENT_MAP = ACTIONS.index("segment_map")
SEGMENT_UNMAP = ACTIONS.index("segment_unmap")
#: Actions that change nothing, and whose size may be anything.
_UNSIZED = frozenset((ACTIONS.index("oom"), ACTIONS.index("snapshot")))


@dataclass(slots=True, eq=False)
class InitialBlock:
    """A block that was in use when the first event came.

    Attributes:
        freed_at: the index of the event that freed it; -1 if it is in use at the end.
        is_before: whether it was allocated before the cell.
        frames: the stack of its allocation, where a lost event of the cell allocated it.
    """

    address: int
    n_bytes: int
    freed_at: int = -1
    is_before: bool = True
    frames: tuple[Frame, ...] = ()


@dataclass(frozen=True, slots=True, eq=False)
class Replay:
    """A device's events and what each of them did.

    Attributes:
        events: the events that could be replayed.
        initial_blocks: the blocks in use when the first event came.
        changes: for each event (type ``q``), by how many bytes it changed allocated.
        reserved_changes: for each event (type ``q``), by how many bytes it changed reserved.
        partners: for each event (type ``i``): of an allocation the index of the event that freed
            it, or -1; of a free the index of the allocation, or ``-2 - i`` for initial block ``i``.
        start_allocated_bytes: allocated before the first event.
        start_reserved_bytes: reserved before the first event.
        n_dropped: number of oldest events that could not be replayed.
        agrees: whether each event can follow from those before it, and the replay ends with the
            blocks that were read at the end.
    """

    events: TraceEvents
    initial_blocks: tuple[InitialBlock, ...]
    changes: array[int]
    reserved_changes: array[int]
    partners: array[int]
    start_allocated_bytes: int
    start_reserved_bytes: int
    n_dropped: int = 0
    agrees: bool = True


def replay(trace: AllocatorTrace) -> Replay:
    """Replay one device's trace.

    From the start where no event is missing; else backwards from the end, as far as the events
    follow from each other.
    """
    forward = _replay_forward(trace) if trace.is_whole else None
    if forward is not None and forward.agrees:
        return forward
    backward = _BackwardReplay(trace).run()
    if len(backward.events) or not len(trace.events) or forward is None:
        return backward
    return forward


def begins_with_events(trace: AllocatorTrace) -> bool:
    """Return whether the span begins with its first event, so that every initial block is older."""
    return len(trace.events) > 0 and trace.start_us >= trace.events.times_us[0]


def cut_events(events: TraceEvents, first: int) -> TraceEvents:
    """Return the events from index ``first`` on."""
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


def _replay_forward(trace: AllocatorTrace) -> Replay:  # noqa: PLR0912, PLR0915 - one branch for each kind of event
    events = trace.events
    layout = BlockLayout(trace.before)
    free, pending = layout.free, layout.pending
    initial = [InitialBlock(address, n_bytes) for address, n_bytes in layout.active.items()]
    # For each block in use the index of its allocation, or -2 - i for initial block i.
    allocated_at = {block.address: -2 - place for place, block in enumerate(initial)}
    changes = array("q", bytes(8 * len(events)))
    reserved_changes = array("q", bytes(8 * len(events)))
    partners = array("i", [-1]) * len(events)
    start_allocated, start_reserved = layout.allocated_bytes, layout.reserved_bytes
    round_up = choose_rounding(trace.rules)
    # Blocks up to the one size are split from any larger free block, blocks from the other never.
    always_split = UNLIMITED_BYTES if trace.rules.is_expandable else SMALL_BYTES
    max_split = trace.rules.max_split_bytes
    never_split = UNLIMITED_BYTES if max_split is None else max_split
    n_contradictions = 0

    columns = zip(events.actions, events.addresses, events.sizes, strict=True)
    for place, (action, address, size) in enumerate(
        follow(columns, Stage.REPLAY_EVENTS, len(events))
    ):
        if not 0 <= size <= MAX_DEVICE_BYTES:
            n_contradictions += action not in _UNSIZED
        elif action == ALLOC:
            n_bytes = round_up(size)
            over = free.get(address, 0) - n_bytes
            if over < 0 or address in allocated_at:
                n_contradictions += 1
            elif over < MIN_BLOCK_BYTES or not (
                n_bytes <= always_split or (over > SMALL_BYTES and n_bytes < never_split)
            ):
                n_bytes += over
            layout.take_free(address, n_bytes)
            allocated_at[address] = place
            changes[place] = n_bytes
        elif action == FREE_REQUESTED:
            parent = allocated_at.pop(address, -1)
            if parent >= 0:
                n_bytes = changes[parent]
                partners[parent] = place
            elif parent < -1:
                n_bytes = initial[-2 - parent].n_bytes
                initial[-2 - parent].freed_at = place
            else:
                n_contradictions += 1
                continue
            partners[place] = parent
            changes[place] = -n_bytes
            pending[address] = n_bytes
        elif action == FREE_COMPLETED:
            if address in pending:
                layout.add_free(address, pending.pop(address))
            else:
                n_contradictions += 1
        elif action == SEGMENT_MAP:
            reserved_changes[place] = size
            layout.map_range(address, size)
        elif action == SEGMENT_ALLOC:
            reserved_changes[place] = size
            layout.segment_starts.add(address)
            layout.add_free(address, size)
        elif action in (SEGMENT_FREE, SEGMENT_UNMAP):
            reserved_changes[place] = -size
            n_contradictions += not layout.take_free(address, size)
            if action == SEGMENT_FREE:
                layout.segment_starts.discard(address)

    in_use = {
        address: changes[parent] if parent >= 0 else initial[-2 - parent].n_bytes
        for address, parent in allocated_at.items()
    }
    after = BlockLayout(trace.after)
    end_reserved = start_reserved + sum(reserved_changes)
    agrees = in_use == after.active and end_reserved == after.reserved_bytes
    return Replay(
        events=events,
        initial_blocks=tuple(initial),
        changes=changes,
        reserved_changes=reserved_changes,
        partners=partners,
        start_allocated_bytes=start_allocated,
        start_reserved_bytes=start_reserved,
        agrees=agrees and not n_contradictions,
    )


class _BackwardReplay:
    """Undoes events, the newest first, beginning with the blocks at the end."""

    def __init__(self, trace: AllocatorTrace) -> None:
        n_events = len(trace.events)
        self._trace = trace
        self._layout = BlockLayout(trace.after)
        self._changes = array("q", bytes(8 * n_events))
        self._reserved_changes = array("q", bytes(8 * n_events))
        self._partners = array("i", [-1]) * n_events
        self._round_up = choose_rounding(trace.rules)
        #: For a block in use, by its address, the index of the event that frees it.
        self._freed_at: dict[int, int] = {}
        #: Start of each block that is freed later, by its end.
        self._starts_by_end: dict[int, int] = {}

    def run(self) -> Replay:
        """Undo as many events as possible, and return them with what each did."""
        n_events = len(self._trace.events)
        first = 0
        for place in follow(range(n_events - 1, -1, -1), Stage.REPLAY_EVENTS, n_events):
            if not self._undo(place):
                first = place + 1
                break
        initial = tuple(
            InitialBlock(address, n_bytes, max(self._freed_at.get(address, -1) - first, -1))
            for address, n_bytes in self._layout.active.items()
        )
        if first or not begins_with_events(self._trace):
            _mark_blocks_of_lost_events(self._trace, initial)
        partners = self._partners[first:]
        if first:
            # No partner lies among the dropped events: they were never undone.
            partners = array("i", [each - first if each >= 0 else -1 for each in partners])
        for place, block in enumerate(initial):
            if block.freed_at >= 0:
                partners[block.freed_at] = -2 - place
        return Replay(
            events=cut_events(self._trace.events, first),
            initial_blocks=initial,
            changes=self._changes[first:],
            reserved_changes=self._reserved_changes[first:],
            partners=partners,
            start_allocated_bytes=self._layout.allocated_bytes,
            start_reserved_bytes=self._layout.reserved_bytes,
            n_dropped=first,
        )

    def _undo(self, place: int) -> bool:  # noqa: PLR0911 - one branch for each kind of event
        """Undo one event; return ``False`` if it contradicts the layout after it."""
        events, layout = self._trace.events, self._layout
        action, address, size = events.actions[place], events.addresses[place], events.sizes[place]
        if not 0 <= size <= MAX_DEVICE_BYTES:
            return action in _UNSIZED
        if action == ALLOC:
            return self._undo_alloc(place, address)
        if action == FREE_COMPLETED:
            return self._undo_free_completed(address, self._round_up(size))
        if action == FREE_REQUESTED:
            n_bytes = layout.pending.pop(address, 0)
            if not n_bytes or address in layout.active:
                return False
            layout.active[address] = n_bytes
            self._freed_at[address] = place
            self._changes[place] = -n_bytes
        elif action in (SEGMENT_ALLOC, SEGMENT_MAP):
            if not layout.take_free(address, size):
                return False
            if action == SEGMENT_ALLOC:
                layout.segment_starts.discard(address)
            layout.reserved_bytes -= size
            self._reserved_changes[place] = size
        elif action in (SEGMENT_FREE, SEGMENT_UNMAP):
            if layout.find_free(address) is not None:
                return False
            if action == SEGMENT_FREE:
                layout.segment_starts.add(address)
                layout.add_free(address, size)
            else:
                layout.map_range(address, size)
            layout.reserved_bytes += size
            self._reserved_changes[place] = -size
        return True

    def _undo_alloc(self, place: int, address: int) -> bool:
        n_bytes = self._layout.active.pop(address, 0)
        if not n_bytes:
            return False
        self._layout.add_free(address, n_bytes)
        self._starts_by_end.pop(address + n_bytes, None)
        freed_at = self._freed_at.pop(address, -1)
        self._changes[place] = n_bytes
        self._partners[place] = freed_at
        if freed_at >= 0:
            self._partners[freed_at] = place
        return True

    def _undo_free_completed(self, address: int, n_bytes: int) -> bool:
        """Cut a block, which now waits for its free to complete, out of the free one."""
        free = self._layout.find_free(address)
        if free is None or free[1] - address < n_bytes:
            return False
        rules = self._trace.rules
        is_large = n_bytes > SMALL_BYTES and not rules.is_expandable
        never_split = UNLIMITED_BYTES if rules.max_split_bytes is None else rules.max_split_bytes
        over = free[1] - address - n_bytes
        # The allocator never splits so small a remainder off a large block.
        if is_large and (over <= SMALL_BYTES or n_bytes >= never_split):
            n_bytes += over
        self._layout.take_free(address, n_bytes)
        self._layout.pending[address] = n_bytes
        self._starts_by_end[address + n_bytes] = address
        if is_large and 0 < address - free[0] <= SMALL_BYTES:
            self._extend_block(free[0], address)
        return True

    def _extend_block(self, old_end: int, new_end: int) -> None:
        """Give the block before ``old_end`` the remainder that was never split off it.

        While the next block was free, nothing showed that the remainder was not.
        """
        start = self._starts_by_end.pop(old_end, None)
        if start is None:
            return
        n_bytes = new_end - old_end
        self._layout.take_free(old_end, n_bytes)
        self._starts_by_end[new_end] = start
        if start in self._layout.active:
            self._layout.active[start] += n_bytes
            if start in self._freed_at:
                self._changes[self._freed_at[start]] -= n_bytes
        else:
            self._layout.pending[start] += n_bytes


def _mark_blocks_of_lost_events(trace: AllocatorTrace, initial: tuple[InitialBlock, ...]) -> None:
    """Set ``is_before`` and ``frames`` of the initial blocks where events are missing.

    A block with the address and size of one that was in use before the cell is taken for the same
    block, unless the block at the end is known to have been allocated elsewhere.
    """
    before, after = _map_blocks(trace.before), _map_blocks(trace.after)
    for block in initial:
        old = before.get(block.address)
        new = after[block.address] if block.freed_at < 0 else None
        block.is_before = (
            old is not None
            and old.n_bytes == block.n_bytes
            and (new is None or new.frames == old.frames)
        )
        if new is not None and not block.is_before:
            block.frames = new.frames


def _map_blocks(segments: tuple[Segment, ...]) -> dict[int, Block]:
    return {
        block.address: block
        for segment in segments
        for block in segment.blocks
        if block.state == "active_allocated"
    }
