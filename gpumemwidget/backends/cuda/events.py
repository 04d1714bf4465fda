"""Parse the allocator's history: torch's dictionaries become columns of numbers.

A history of a million events is 600 MB of dictionaries, so a few thousand at a time are parsed and
then dropped.
"""

from __future__ import annotations

import bisect
from array import array
from collections.abc import Container, Iterable, Mapping, Sequence
from typing import Any

from gpumemwidget.backends.cuda.history_control import CLOCKS_DIFFER_US, read_time
from gpumemwidget.backends.cuda.snapshot import StackTable, parse_segments
from gpumemwidget.model.segments import Segment
from gpumemwidget.model.traces import ACTIONS, AllocatorRules, AllocatorTrace, TraceEvents

_CODES = {action: code for code, action in enumerate(ACTIONS)}
_OOM = _CODES["oom"]
#: Number of dictionaries that are parsed at once.
_CHUNK = 8_192
_MIB = 1 << 20


def parse_traces(
    snapshot: Mapping[str, Any],
    *,
    before: Iterable[Segment],
    start_us: int,
    end_us: int,
    touched: Container[int],
    marked_by_us: int | None = None,
    max_entries: int | None = None,
) -> tuple[AllocatorTrace, ...]:
    """Return a trace of each touched device, by index.

    Args:
        snapshot: from ``torch.cuda.memory._snapshot()``. Its events are taken out of it.
        before: the segments at the start, of all devices.
        start_us: microseconds since the epoch, as all times are; earlier events are left out.
        end_us: when the snapshot was taken.
        touched: indices of the devices that are in use.
        marked_by_us: when the snapshot at the start was done, in microseconds. A snapshot is itself
            an event, behind which the trace begins. Where that event is missing, the history has
            dropped it, and the trace is not whole.
        max_entries: the number of events that the history keeps for each device, where that is
            known: without a mark, a full history may have dropped some.
    """
    stood = tuple(before)
    after = parse_segments(
        segment for segment in snapshot["segments"] if segment["device"] in touched
    )
    rules = parse_rules(snapshot.get("allocator_settings") or {})
    traces = []
    table = StackTable()
    for index, raw in enumerate(snapshot["device_traces"]):
        if index not in touched:
            continue
        device = f"cuda:{index}"
        own_before = tuple(segment for segment in stood if segment.device == device)
        first = _find_mark(raw, start_us, marked_by_us)
        is_whole = first is not None
        if first is None:
            first = bisect.bisect_left(raw, start_us, key=read_time)
            # A device that was first touched within the span was not there to be marked.
            needs_mark = marked_by_us is not None and (bool(own_before) or max_entries is None)
            is_whole = not needs_mark and (max_entries is None or len(raw) < max_entries)
        del raw[:first]
        traces.append(
            AllocatorTrace(
                device=device,
                before=own_before,
                events=parse_events(raw, table),
                after=tuple(segment for segment in after if segment.device == device),
                start_us=start_us,
                end_us=end_us,
                rules=rules,
                is_whole=is_whole,
            )
        )
    return tuple(traces)


def parse_events(raw: list[dict[str, Any]], table: StackTable | None = None) -> TraceEvents:
    """Return one device's events as columns, and empty the list of their dictionaries.

    Events of kinds that say nothing about memory are left out.

    Args:
        raw: torch's events, the oldest first; empty afterwards.
        table: numbers the stacks; several devices may share a table.
    """
    table = StackTable() if table is None else table
    actions = bytearray()
    addresses, sizes, times_us = array("Q"), array("q"), array("q")
    streams, stacks = array("q"), array("i")
    raw.reverse()
    while raw:
        chunk = raw[-_CHUNK:]
        del raw[-_CHUNK:]
        chunk.reverse()
        codes = [_CODES.get(event["action"], -1) for event in chunk]
        if -1 in codes:
            chunk = [each for each, code in zip(chunk, codes, strict=True) if code >= 0]
            codes = [code for code in codes if code >= 0]
        found = [event.get("addr", 0) for event in chunk]
        if _OOM in codes:
            for place, code in enumerate(codes):
                if code == _OOM:
                    found[place] = chunk[place].get("device_free", 0)
        actions += bytes(codes)
        addresses.extend(found)
        sizes.extend([event["size"] for event in chunk])
        times_us.extend([event.get("time_us", 0) for event in chunk])
        streams.extend([event.get("stream", 0) for event in chunk])
        stacks.extend(table.place([event.get("frames", ()) for event in chunk]))
    return TraceEvents(
        actions=bytes(actions),
        addresses=addresses,
        sizes=sizes,
        times_us=times_us,
        streams=streams,
        stacks=stacks,
        stack_table=tuple(table.stacks),
    )


def parse_rules(settings: Mapping[str, Any]) -> AllocatorRules:
    """Return the allocator's rules of rounding and splitting, from the settings of a snapshot.

    The numbers' meaning: ``CUDAAllocatorConfig`` and ``round_size`` in
    https://github.com/pytorch/pytorch/blob/main/c10/cuda/CUDACachingAllocator.cpp
    """
    max_split = settings.get("max_split_size", -1)
    divisions = settings.get("roundup_power2_divisions") or {}
    steps: list[tuple[int, int]] = []
    for n_mib, n_steps in sorted((int(key), value) for key, value in divisions.items()):
        # The first interval holds for all that is smaller, too.
        start = n_mib * _MIB if steps or n_mib > 1 else 0
        if n_steps != (steps[-1][1] if steps else 0):
            steps.append((start, n_steps))
    return AllocatorRules(
        max_split_bytes=max_split if max_split >= 0 else None,
        is_expandable=bool(settings.get("expandable_segments", False)),
        roundup_divisions=tuple(steps),
    )


def _find_mark(
    raw: Sequence[Mapping[str, Any]], start_us: int, marked_by_us: int | None
) -> int | None:
    """Return the index behind the snapshot that marks the start; ``None`` without such a mark."""
    if marked_by_us is None:
        return None
    first = bisect.bisect_left(raw, start_us - CLOCKS_DIFFER_US, key=read_time)
    for place in range(first, len(raw)):
        if raw[place]["action"] == "snapshot":
            is_ours = read_time(raw[place]) <= marked_by_us + CLOCKS_DIFFER_US
            return place + 1 if is_ours else None
    return None
