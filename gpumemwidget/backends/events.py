"""The allocator's history as records: what torch's dictionaries say, in columns.

A history of a million events is 600 MB of dictionaries. They are gone through once, a few thousand
at a time, and let go of on the way.
"""

from __future__ import annotations

import bisect
from array import array
from collections.abc import Container, Iterable, Mapping, Sequence
from typing import Any

from gpumemwidget.backends.snapshot import parse_segments
from gpumemwidget.backends.stacks import StackTable
from gpumemwidget.records import Segment
from gpumemwidget.traces import ACTIONS, AllocatorRules, AllocatorTrace, TraceEvents

__all__ = ["parse_events", "parse_rules", "parse_traces"]

_CODES = {action: code for code, action in enumerate(ACTIONS)}
_OOM = _CODES["oom"]
#: Dictionaries that are turned into columns at once.
_CHUNK = 8_192
_MIB = 1 << 20
#: Torch converts the processor's own counter to the time of day, by at most this wrong.
_CLOCKS_DIFFER_US = 50


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
    """One trace for each touched device, by index.

    Args:
        snapshot: what ``torch.cuda.memory._snapshot()`` gave. Its events are taken out of it.
        before: the segments at the start, of all devices.
        start_us: microseconds since the epoch, as all times are; earlier events are left out.
        end_us: when the snapshot was taken.
        touched: indices of the devices that are in use.
        marked_by_us: a snapshot was taken at the start, between ``start_us`` and this: it is itself
            an event, and the first one of the span comes after it. Where it is missing, the ring
            has lost it, and the trace is not whole.
        max_entries: how many events the ring of each device holds, where that is known: without a
            mark, a ring that is full may have lost some.
    """
    stood = tuple(before)
    after = parse_segments(each for each in snapshot["segments"] if each["device"] in touched)
    rules = parse_rules(snapshot.get("allocator_settings") or {})
    traces = []
    table = StackTable()
    for index, raw in enumerate(snapshot["device_traces"]):
        if index not in touched:
            continue
        device = f"cuda:{index}"
        own_before = tuple(each for each in stood if each.device == device)
        first = _find_mark(raw, start_us, marked_by_us)
        is_whole = first is not None
        if first is None:
            first = bisect.bisect_left(raw, start_us, key=_read_time)
            # A device that was first touched within the span was not there to be marked.
            needs_mark = marked_by_us is not None and (bool(own_before) or max_entries is None)
            is_whole = not needs_mark and (max_entries is None or len(raw) < max_entries)
        del raw[:first]
        traces.append(
            AllocatorTrace(
                device=device,
                before=own_before,
                events=parse_events(raw, table),
                after=tuple(each for each in after if each.device == device),
                start_us=start_us,
                end_us=end_us,
                rules=rules,
                is_whole=is_whole,
            )
        )
    return tuple(traces)


def parse_events(raw: list[dict[str, Any]], table: StackTable | None = None) -> TraceEvents:
    """The columns of one device's events, whose dictionaries are taken out of the list.

    Events of kinds that say nothing about memory are left out.

    Args:
        raw: torch's events, the oldest first; empty afterwards.
        table: where stacks that were met before are known; several devices share one.
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
        codes = [_CODES.get(each["action"], -1) for each in chunk]
        if -1 in codes:
            chunk = [each for each, code in zip(chunk, codes, strict=True) if code >= 0]
            codes = [code for code in codes if code >= 0]
        found = [each.get("addr", 0) for each in chunk]
        if _OOM in codes:
            for place, code in enumerate(codes):
                if code == _OOM:
                    found[place] = chunk[place].get("device_free", 0)
        actions += bytes(codes)
        addresses.extend(found)
        sizes.extend([each["size"] for each in chunk])
        times_us.extend([each.get("time_us", 0) for each in chunk])
        streams.extend([each.get("stream", 0) for each in chunk])
        stacks.extend(table.place([each.get("frames", ()) for each in chunk]))
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
    """How the allocator rounds and splits, from the settings that a snapshot comes with.

    The numbers' meaning: ``CUDAAllocatorConfig`` and ``round_size`` in
    https://github.com/pytorch/pytorch/blob/main/c10/cuda/CUDACachingAllocator.cpp
    """
    max_split = settings.get("max_split_size", -1)
    divisions = settings.get("roundup_power2_divisions")
    if not isinstance(divisions, Mapping):  # Releases before 1.14 had one number for all sizes.
        divisions = {"1": divisions or 0}
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
    """The place behind the snapshot that marks the start; ``None`` where it is not there."""
    if marked_by_us is None:
        return None
    first = bisect.bisect_left(raw, start_us - _CLOCKS_DIFFER_US, key=_read_time)
    for place in range(first, len(raw)):
        if raw[place]["action"] == "snapshot":
            is_ours = _read_time(raw[place]) <= marked_by_us + _CLOCKS_DIFFER_US
            return place + 1 if is_ours else None
    return None


def _read_time(raw: Mapping[str, Any]) -> int:
    time_us: int = raw.get("time_us", 0)
    return time_us
