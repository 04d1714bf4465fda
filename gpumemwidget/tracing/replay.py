"""Replay the allocator's events, so that every block has its exact bytes.

An event holds the bytes that were asked for. The bytes of the block follow from the allocator's
rules and from the free block at its address. The result is compared with the blocks at the end.

Where events are missing, the replay goes backwards from the blocks at the end, which are known to
the byte, up to the first event that contradicts them; older events are left out.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field, replace

from gpumemwidget.model.devices import Block, Frame, Segment
from gpumemwidget.model.traces import ACTIONS, AllocatorTrace, TraceEvents
from gpumemwidget.progress import Stage, follow
from gpumemwidget.tracing.layout import (
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

    def add(self, address: int, n_bytes: int, *, begun_at: int = -1, freed_at: int = -1) -> int:
        """Add a block; return its index."""
        self.addresses.append(address)
        self.sizes.append(n_bytes)
        self.begun_at.append(begun_at)
        self.freed_at.append(freed_at)
        return len(self.sizes) - 1


@dataclass(frozen=True, slots=True, eq=False)
class Replay:
    """A device's events and what each of them did.

    Attributes:
        events: the events that could be replayed.
        blocks: those that were in use when the first event came, and all that were allocated.
        event_blocks: for each event (type ``i``), the index of the block that it allocated or
            freed; -1 for other events.
        changes: for each event (type ``q``), by how many bytes it changed allocated.
        reserved_changes: for each event (type ``q``), by how many bytes it changed reserved.
        start_allocated_bytes: allocated before the first event.
        start_reserved_bytes: reserved before the first event.
        lost: the blocks that a lost event of the cell allocated, with their stacks, which are
            known of blocks that are in use at the end.
        n_dropped: number of oldest events that could not be replayed.
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
    lost: dict[int, tuple[Frame, ...]] = field(default_factory=dict)
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
    backward = _replay_backward(trace)
    if len(backward.events) or not len(trace.events) or forward is None:
        return backward
    return forward


def begins_with_events(trace: AllocatorTrace) -> bool:
    """Return whether the span begins with its first event, so that every initial block is older."""
    return len(trace.events) > 0 and trace.start_us >= trace.events.times_us[0]


def _replay_forward(trace: AllocatorTrace) -> Replay:  # noqa: PLR0912, PLR0915 - one branch for each kind of event
    events = trace.events
    layout = BlockLayout(trace.before)
    free, pending = layout.free, layout.pending
    blocks = Blocks()
    sizes = blocks.sizes
    #: The index of each block in use, by its address.
    in_use = {address: blocks.add(address, n_bytes) for address, n_bytes in layout.active.items()}
    changes = array("q", bytes(8 * len(events)))
    reserved_changes = array("q", bytes(8 * len(events)))
    event_blocks = array("i", [-1]) * len(events)
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
            if over < 0 or address in in_use:
                n_contradictions += 1
            elif over < MIN_BLOCK_BYTES or not (
                n_bytes <= always_split or (over > SMALL_BYTES and n_bytes < never_split)
            ):
                n_bytes += over
            layout.take_free(address, n_bytes)
            in_use[address] = event_blocks[place] = blocks.add(address, n_bytes, begun_at=place)
            changes[place] = n_bytes
        elif action == FREE_REQUESTED:
            block = event_blocks[place] = in_use.pop(address, -1)
            if block < 0:
                n_contradictions += 1
                continue
            blocks.freed_at[block] = place
            changes[place] = -sizes[block]
            pending[address] = sizes[block]
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

    after = BlockLayout(trace.after)
    end_reserved = start_reserved + sum(reserved_changes)
    active = {address: sizes[block] for address, block in in_use.items()}
    agrees = active == after.active and end_reserved == after.reserved_bytes
    return Replay(
        events=events,
        blocks=blocks,
        event_blocks=event_blocks,
        changes=changes,
        reserved_changes=reserved_changes,
        start_allocated_bytes=start_allocated,
        start_reserved_bytes=start_reserved,
        agrees=agrees and not n_contradictions,
    )


def _replay_backward(trace: AllocatorTrace) -> Replay:
    undone = _BackwardReplay(trace)
    n_events = len(trace.events)
    for place in follow(range(n_events - 1, -1, -1), Stage.REPLAY_EVENTS, n_events):
        if not undone.undo(place):
            # Once more without the events up to this one.
            columns = ("actions", "addresses", "sizes", "times_us", "streams", "stacks")
            known = {name: getattr(trace.events, name)[place + 1 :] for name in columns}
            found = _replay_backward(replace(trace, events=replace(trace.events, **known)))
            lost = _find_lost(trace, found.blocks)
            return replace(found, lost=lost, n_dropped=place + 1)
    return Replay(
        events=trace.events,
        blocks=undone.blocks,
        event_blocks=undone.event_blocks,
        changes=undone.changes,
        reserved_changes=undone.reserved_changes,
        start_allocated_bytes=undone.layout.allocated_bytes,
        start_reserved_bytes=undone.layout.reserved_bytes,
        lost={} if begins_with_events(trace) else _find_lost(trace, undone.blocks),
    )


class _BackwardReplay:
    """Undoes events, the newest first, beginning with the blocks at the end."""

    def __init__(self, trace: AllocatorTrace) -> None:
        n_events = len(trace.events)
        self._trace = trace
        self.layout = BlockLayout(trace.after)
        self.blocks = Blocks()
        self.event_blocks = array("i", [-1]) * n_events
        self.changes = array("q", bytes(8 * n_events))
        self.reserved_changes = array("q", bytes(8 * n_events))
        self._round_up = choose_rounding(trace.rules)
        #: The index of each block in use, by its address.
        self._in_use = {
            address: self.blocks.add(address, n_bytes)
            for address, n_bytes in self.layout.active.items()
        }
        #: Start of each block that is freed later, by its end.
        self._starts_by_end: dict[int, int] = {}

    def undo(self, place: int) -> bool:  # noqa: PLR0911 - one branch for each kind of event
        """Undo one event; return ``False`` if it contradicts the layout after it."""
        events, layout = self._trace.events, self.layout
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
            block = self.blocks.add(address, n_bytes, freed_at=place)
            self._in_use[address] = self.event_blocks[place] = block
            self.changes[place] = -n_bytes
        elif action in (SEGMENT_ALLOC, SEGMENT_MAP):
            if not layout.take_free(address, size):
                return False
            if action == SEGMENT_ALLOC:
                layout.segment_starts.discard(address)
            layout.reserved_bytes -= size
            self.reserved_changes[place] = size
        elif action in (SEGMENT_FREE, SEGMENT_UNMAP):
            if layout.find_free(address) is not None:
                return False
            if action == SEGMENT_FREE:
                layout.segment_starts.add(address)
                layout.add_free(address, size)
            else:
                layout.map_range(address, size)
            layout.reserved_bytes += size
            self.reserved_changes[place] = -size
        return True

    def _undo_alloc(self, place: int, address: int) -> bool:
        n_bytes = self.layout.active.pop(address, 0)
        if not n_bytes:
            return False
        self.layout.add_free(address, n_bytes)
        self._starts_by_end.pop(address + n_bytes, None)
        block = self.event_blocks[place] = self._in_use.pop(address)
        self.blocks.begun_at[block] = place
        self.changes[place] = n_bytes
        return True

    def _undo_free_completed(self, address: int, n_bytes: int) -> bool:
        """Cut a block, which now waits for its free to complete, out of the free one."""
        free = self.layout.find_free(address)
        if free is None or free[1] - address < n_bytes:
            return False
        rules = self._trace.rules
        is_large = n_bytes > SMALL_BYTES and not rules.is_expandable
        never_split = UNLIMITED_BYTES if rules.max_split_bytes is None else rules.max_split_bytes
        over = free[1] - address - n_bytes
        # The allocator never splits so small a remainder off a large block.
        if is_large and (over <= SMALL_BYTES or n_bytes >= never_split):
            n_bytes += over
        self.layout.take_free(address, n_bytes)
        self.layout.pending[address] = n_bytes
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
        self.layout.take_free(old_end, n_bytes)
        self._starts_by_end[new_end] = start
        if start not in self.layout.active:
            self.layout.pending[start] += n_bytes
            return
        self.layout.active[start] += n_bytes
        block = self._in_use[start]
        self.blocks.sizes[block] += n_bytes
        if self.blocks.freed_at[block] >= 0:
            self.changes[self.blocks.freed_at[block]] -= n_bytes


def _find_lost(trace: AllocatorTrace, blocks: Blocks) -> dict[int, tuple[Frame, ...]]:
    """Return the blocks that an event of the cell allocated that is missing; see ``Replay.lost``.

    A block with the address and size of one that was in use before the cell is taken for the same
    block, unless the block at the end is known to have been allocated elsewhere.
    """
    before, after = _map_blocks(trace.before), _map_blocks(trace.after)
    lost = {}
    for index, (address, begun_at) in enumerate(
        zip(blocks.addresses, blocks.begun_at, strict=True)
    ):
        if begun_at >= 0:
            continue
        old = before.get(address)
        new = after[address] if blocks.freed_at[index] < 0 else None
        is_before = (
            old is not None
            and old.n_bytes == blocks.sizes[index]
            and (new is None or new.frames == old.frames)
        )
        if not is_before:
            lost[index] = () if new is None else new.frames
    return lost


def _map_blocks(segments: tuple[Segment, ...]) -> dict[int, Block]:
    return {
        block.address: block
        for segment in segments
        for block in segment.blocks
        if block.state == "active_allocated"
    }
