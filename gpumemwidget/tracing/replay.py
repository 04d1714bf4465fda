"""Replay the allocator's events, so that every block has its exact bytes.

An event holds the bytes that were asked for. The bytes of the block follow from the allocator's
rules and from the free block at its address. The result is compared with the blocks at the end.

Where events are missing, blocks that are gone at the end have the bytes of their requests: at least
as many as they had.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field

from gpumemwidget.model.devices import Block, Frame, Segment
from gpumemwidget.model.traces import ACTIONS, AllocatorTrace, TraceEvents
from gpumemwidget.progress import Stage, follow
from gpumemwidget.tracing.layout import (
    MAX_DEVICE_BYTES,
    SMALL_BYTES,
    BlockLayout,
    choose_fitting,
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
        events: the events.
        blocks: those that were in use when the first event came, and all that were allocated.
        event_blocks: for each event (type ``i``), the index of the block that it allocated or
            freed; -1 for other events.
        changes: for each event (type ``q``), by how many bytes it changed allocated.
        reserved_changes: for each event (type ``q``), by how many bytes it changed reserved.
        start_allocated_bytes: allocated before the first event.
        start_reserved_bytes: reserved before the first event.
        lost: the blocks that a lost event of the cell allocated, with their stacks, which are
            known of blocks that are in use at the end.
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
    agrees: bool = True


def replay(trace: AllocatorTrace) -> Replay:
    """Replay one device's trace.

    From the start where that is known; a history without segments before it may have begun with
    the process. Else the blocks at the end say what stood at the start.
    """
    if trace.is_whole or not trace.before:
        forward = _replay_from_start(trace)
        if forward.agrees or trace.is_whole:
            return forward
    return _replay_from_end(trace)


def begins_with_events(trace: AllocatorTrace) -> bool:
    """Return whether the span begins with its first event, so that every initial block is older."""
    return len(trace.events) > 0 and trace.start_us >= trace.events.times_us[0]


def _replay_from_start(trace: AllocatorTrace) -> Replay:  # noqa: PLR0915 - one branch for each kind of event
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
    fit = choose_fitting(trace.rules)
    n_contradictions = 0

    columns = zip(events.actions, events.addresses, events.sizes, strict=True)
    for place, (action, address, size) in enumerate(
        follow(columns, Stage.REPLAY_EVENTS, len(events))
    ):
        if not 0 <= size <= MAX_DEVICE_BYTES:
            n_contradictions += action not in _UNSIZED
        elif action == ALLOC:
            free_bytes = free.get(address, 0)
            n_bytes = fit(size, free_bytes)
            n_contradictions += n_bytes > free_bytes or address in in_use
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


def _replay_from_end(trace: AllocatorTrace) -> Replay:
    """Replay events whose beginning is unknown: what stood before follows from the end.

    A block that is in use at the end has its exact bytes. Any other has those of its request,
    rounded up: what the allocator did not split off is unknown, up to ``SMALL_BYTES`` of a large
    block.
    """
    events = trace.events
    after = BlockLayout(trace.after)
    blocks = Blocks()
    event_blocks = array("i", [-1]) * len(events)
    reserved_changes = array("q", bytes(8 * len(events)))
    round_up = choose_rounding(trace.rules)
    #: The index of each block that the events have left in use, by its address.
    in_use: dict[int, int] = {}
    n_contradictions = 0

    columns = zip(events.actions, events.addresses, events.sizes, strict=True)
    for place, (action, address, size) in enumerate(
        follow(columns, Stage.REPLAY_EVENTS, len(events))
    ):
        if not 0 <= size <= MAX_DEVICE_BYTES:
            n_contradictions += action not in _UNSIZED
        elif action == ALLOC:
            n_contradictions += address in in_use
            block = blocks.add(address, round_up(size), begun_at=place)
            in_use[address] = event_blocks[place] = block
        elif action == FREE_REQUESTED:
            known = in_use.pop(address, None)
            block = blocks.add(address, round_up(size)) if known is None else known
            event_blocks[place] = block
            blocks.freed_at[block] = place
        elif action in (SEGMENT_ALLOC, SEGMENT_MAP):
            reserved_changes[place] = size
        elif action in (SEGMENT_FREE, SEGMENT_UNMAP):
            reserved_changes[place] = -size

    for address, n_bytes in after.active.items():
        known = in_use.pop(address, None)
        if known is None:
            blocks.add(address, n_bytes)
        else:
            blocks.sizes[known] = n_bytes
    changes = array("q", bytes(8 * len(events)))
    for place, block in enumerate(event_blocks):
        if block >= 0:
            is_begin = blocks.begun_at[block] == place
            changes[place] = blocks.sizes[block] if is_begin else -blocks.sizes[block]
    ages = zip(blocks.sizes, blocks.begun_at, strict=True)
    return Replay(
        events=events,
        blocks=blocks,
        event_blocks=event_blocks,
        changes=changes,
        reserved_changes=reserved_changes,
        start_allocated_bytes=sum(n_bytes for n_bytes, begun_at in ages if begun_at < 0),
        start_reserved_bytes=after.reserved_bytes - sum(reserved_changes),
        lost={} if begins_with_events(trace) else _find_lost(trace, blocks),
        agrees=not (in_use or n_contradictions),
    )


def _find_lost(trace: AllocatorTrace, blocks: Blocks) -> dict[int, tuple[Frame, ...]]:
    """Return the blocks that an event of the cell allocated that is missing; see ``Replay.lost``.

    A block with the address and request of one that was in use before the cell is taken for the
    same block, unless the block at the end is known to have been allocated elsewhere.
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
            and 0 <= old.n_bytes - blocks.sizes[index] <= SMALL_BYTES
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
