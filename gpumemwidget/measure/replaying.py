"""The allocator's events played again, so that each block has its exact bytes.

An event says what was asked for. What the block took follows from the allocator's rules and from
the free block that it was cut from: the one that begins at its address. The result is held against
what stands at the end, and where it does not agree, it says so.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass

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
from gpumemwidget.measure.rewinding import rewind
from gpumemwidget.measure.rounding import (
    MIN_BLOCK_BYTES,
    MOST_BYTES,
    SMALL_BYTES,
    UNLIMITED_BYTES,
    choose_rounding,
)
from gpumemwidget.traces import AllocatorTrace

__all__ = ["Replay", "replay"]


@dataclass(frozen=True, slots=True, eq=False)
class Replay:
    """The events that could be played, and what each did."""

    played: Played
    #: How many of the oldest events are not among them.
    n_dropped: int
    #: Whether what stood at the end is what was found there.
    agrees: bool
    #: Events that can't have been so, as far as they were played.
    n_odd: int


def replay(trace: AllocatorTrace) -> Replay:
    """Play a trace.

    From the start where no event is missing. Else from its end backwards, as far as the events
    follow from each other: then what comes before is left out.

    Args:
        trace: one device's events and what stood at both ends.
    """
    forward = _play(trace) if trace.is_whole else None
    if forward is not None and forward.agrees and not forward.n_odd:
        return forward
    played, n_dropped = rewind(trace)
    if len(played.events) or not len(trace.events) or forward is None:
        return Replay(played, n_dropped, agrees=True, n_odd=0)
    return forward


def _play(trace: AllocatorTrace) -> Replay:  # noqa: PLR0912, PLR0915 - a million times: no calls
    events = trace.events
    layout = Layout(trace.before)
    starts, free_at, free_end, pending = (
        layout.starts,
        layout.free_at,
        layout.free_end,
        layout.pending,
    )
    standing = [Standing(address, n_bytes) for address, n_bytes in layout.active.items()]
    #: The event that allocated each block in use; of those that stood, counted from -2 down.
    born = {each.address: -2 - place for place, each in enumerate(standing)}
    changes = array("q", bytes(8 * len(events)))
    reserved = array("q", bytes(8 * len(events)))
    partners = array("i", [-1]) * len(events)
    start_allocated, start_reserved = layout.allocated_bytes, layout.reserved_bytes
    round_up = choose_rounding(trace.rules)
    most_split, always_split = UNLIMITED_BYTES, SMALL_BYTES
    if trace.rules.max_split_bytes is not None:
        most_split = trace.rules.max_split_bytes
    if trace.rules.is_expandable:
        always_split = UNLIMITED_BYTES
    n_odd = 0

    for place, (action, address, size) in enumerate(
        zip(events.actions, events.addresses, events.sizes, strict=True)
    ):
        if not 0 <= size <= MOST_BYTES:
            n_odd += action not in UNSIZED
        elif action == ALLOC:
            n_bytes = round_up(size)
            there = free_at.get(address, 0)
            if there >= n_bytes and address not in born:
                del free_at[address]
                over = there - n_bytes
                if over >= MIN_BLOCK_BYTES and (
                    n_bytes <= always_split or (over > SMALL_BYTES and n_bytes < most_split)
                ):
                    free_at[address + n_bytes] = over
                    free_end[address + there] = address + n_bytes
                else:
                    n_bytes = there
                    del free_end[address + there]
            else:
                n_odd += 1
                layout.take(address, n_bytes)
            born[address] = place
            changes[place] = n_bytes
        elif action == FREE_REQUESTED:
            parent = born.pop(address, -1)
            if parent >= 0:
                n_bytes = changes[parent]
                partners[parent] = place
            elif parent < -1:
                n_bytes = standing[-2 - parent].n_bytes
                standing[-2 - parent].end = place
            else:
                n_odd += 1
                continue
            partners[place] = parent
            changes[place] = -n_bytes
            pending[address] = n_bytes
        elif action == FREE_COMPLETED:
            n_bytes = pending.pop(address, 0)
            if not n_bytes:
                n_odd += 1
                continue
            end = address + n_bytes
            if address not in starts:
                left = free_end.pop(address, -1)
                if left >= 0:
                    del free_at[left]
                    address = left  # noqa: PLW2901 - the block begins there now
            if end not in starts:
                end += free_at.pop(end, 0)
            free_at[address] = end - address
            free_end[end] = address
        elif action in (SEGMENT_ALLOC, SEGMENT_MAP):
            reserved[place] = size
            if action == SEGMENT_MAP:
                layout.map(address, size)
            else:
                starts.add(address)
                layout.give(address, size)
        elif action in (SEGMENT_FREE, SEGMENT_UNMAP):
            reserved[place] = -size
            n_odd += not layout.take(address, size)
            if action == SEGMENT_FREE:
                starts.discard(address)

    held = {
        address: changes[parent] if parent >= 0 else standing[-2 - parent].n_bytes
        for address, parent in born.items()
    }
    after = Layout(trace.after)
    agrees = held == after.active and start_reserved + sum(reserved) == after.reserved_bytes
    played = Played(
        events=events,
        standing=tuple(standing),
        changes=changes,
        reserved_changes=reserved,
        partners=partners,
        start_allocated_bytes=start_allocated,
        start_reserved_bytes=start_reserved,
    )
    return Replay(played, 0, agrees=agrees, n_odd=n_odd)
