"""How a recording's file holds the allocator's events: one row an event, stacks by number."""

from __future__ import annotations

import dataclasses
from array import array
from collections.abc import Sequence
from typing import Any

from gpumemwidget.backends.snapfile import BadSnapshotError, RowReader, StackTable
from gpumemwidget.backends.stacks import StackTable as Numbering
from gpumemwidget.traces import ACTIONS, AllocatorRules, TraceEvents

__all__ = [
    "EVENT_COLUMNS",
    "cut_events",
    "format_rules",
    "join_events",
    "parse_rules",
    "parse_traced",
    "to_rows",
]

EVENT_COLUMNS = ("action", "address", "n_bytes", "time_us", "stream", "stack")
_MAX_ADDRESS = (1 << 64) - 1
_MAX_COUNT = (1 << 63) - 1

#: A device's events, by its name.
Traced = tuple[tuple[str, TraceEvents], ...]


def to_rows(traced: Traced, stacks: StackTable) -> list[list[Any]]:
    """Each device's events as rows of the file."""
    return [
        [
            device,
            [
                [code, address, n_bytes, time_us, stream, stacks.note(events.stack_table[stack])]
                for code, address, n_bytes, time_us, stream, stack in zip(
                    events.actions,
                    events.addresses,
                    events.sizes,
                    events.times_us,
                    events.streams,
                    events.stacks,
                    strict=True,
                )
            ],
        ]
        for device, events in traced
    ]


def parse_traced(rows: Any, reader: RowReader) -> Traced:
    """Each device's events out of rows of the file.

    Raises:
        BadSnapshotError: a row is not what it should be.
    """
    if not isinstance(rows, list):
        raise BadSnapshotError("the events: no list")
    found = []
    for row in rows:
        if not (isinstance(row, list) and len(row) == 2 and isinstance(row[0], str)):
            raise BadSnapshotError("the events of a device are not whole")
        found.append((row[0], _parse_events(row[1], reader)))
    return tuple(found)


def join_events(parts: Sequence[tuple[TraceEvents, int]], *, at_most: int) -> TraceEvents:
    """The newest of several stretches of events, in their order, as one.

    Args:
        parts: each with what its times are to be moved by, in microseconds.
        at_most: how many events to keep.
    """
    numbering = Numbering()
    actions = bytearray()
    addresses, sizes, times_us = array("Q"), array("q"), array("q")
    streams, stacks = array("q"), array("i")
    for events, shift_us in parts:
        places = [numbering.place_frames(stack) for stack in events.stack_table]
        actions += events.actions
        addresses.extend(events.addresses)
        sizes.extend(events.sizes)
        times_us.extend(time_us + shift_us for time_us in events.times_us)
        streams.extend(events.streams)
        stacks.extend(places[stack] for stack in events.stacks)
    first = max(0, len(actions) - at_most)
    return TraceEvents(
        actions=bytes(actions[first:]),
        addresses=addresses[first:],
        sizes=sizes[first:],
        times_us=times_us[first:],
        streams=streams[first:],
        stacks=stacks[first:],
        stack_table=tuple(numbering.stacks),
    )


def cut_events(events: TraceEvents, start: int, stop: int, shift_us: float) -> TraceEvents:
    """The events from one place up to another, with their times moved by some microseconds.

    None of them is moved to before 0.
    """
    return dataclasses.replace(
        events,
        actions=events.actions[start:stop],
        addresses=events.addresses[start:stop],
        sizes=events.sizes[start:stop],
        times_us=array(
            "q", [max(0, round(each + shift_us)) for each in events.times_us[start:stop]]
        ),
        streams=events.streams[start:stop],
        stacks=events.stacks[start:stop],
    )


def format_rules(rules: AllocatorRules) -> dict[str, Any]:
    """The allocator's rules, for the file's head."""
    return {
        "max_split_bytes": rules.max_split_bytes,
        "is_expandable": rules.is_expandable,
        "roundup_divisions": [list(each) for each in rules.roundup_divisions],
    }


def parse_rules(head: Any) -> AllocatorRules:
    """The allocator's rules, out of the file's head.

    Raises:
        BadSnapshotError: they are not what they should be.
    """
    try:
        max_split_bytes, divisions = head["max_split_bytes"], head["roundup_divisions"]
        rules = AllocatorRules(
            max_split_bytes=max_split_bytes,
            is_expandable=head["is_expandable"],
            roundup_divisions=tuple((start, n_steps) for start, n_steps in divisions),
        )
    except (KeyError, TypeError, ValueError):
        raise BadSnapshotError("the allocator's rules are not whole") from None
    counts = [each for pair in rules.roundup_divisions for each in pair]
    is_whole = type(rules.is_expandable) is bool and all(
        _is_within(each, _MAX_COUNT) for each in (*counts, max_split_bytes or 0)
    )
    if not is_whole:
        raise BadSnapshotError("the allocator's rules are not whole")
    return rules


def _parse_events(rows: Any, reader: RowReader) -> TraceEvents:
    numbering = Numbering()
    actions = bytearray()
    addresses, sizes, times_us = array("Q"), array("q"), array("q")
    streams, stacks = array("q"), array("i")
    for row in rows if isinstance(rows, list) else [None]:
        if not isinstance(row, list) or len(row) != len(EVENT_COLUMNS):
            raise BadSnapshotError("an event is not whole")
        code, address, n_bytes, time_us, stream, stack = row
        is_whole = (
            _is_within(code, len(ACTIONS) - 1)
            and _is_within(address, _MAX_ADDRESS)
            and all(_is_within(each, _MAX_COUNT) for each in (n_bytes, time_us, stream))
        )
        if not is_whole:
            raise BadSnapshotError("an event is not whole")
        actions.append(code)
        addresses.append(address)
        sizes.append(n_bytes)
        times_us.append(time_us)
        streams.append(stream)
        stacks.append(numbering.place_frames(() if stack is None else reader.get_stack(stack)))
    return TraceEvents(
        actions=bytes(actions),
        addresses=addresses,
        sizes=sizes,
        times_us=times_us,
        streams=streams,
        stacks=stacks,
        stack_table=tuple(numbering.stacks),
    )


def _is_within(value: Any, at_most: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= at_most
