"""Describe what lines did to a device, from the history of a traced cell or of a snapshot file.

The history is replayed, its events are attributed to stacks, and the stacks to lines and calls.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import PurePath
from typing import Literal, TypeAlias

from gpumemwidget.allocator.replay import BlockLayout, Replay, begins_with_events, replay
from gpumemwidget.model.cells import CellDevice, CellRecord, Span
from gpumemwidget.model.devices import PeakIs
from gpumemwidget.model.ownership import BlockNames, MemoryKind
from gpumemwidget.model.traces import (
    AllocatorTrace,
    CallMark,
    CellTrace,
    DeviceTrace,
    NoteKind,
    Origin,
    PeakPart,
    TraceNote,
)
from gpumemwidget.tracing.attribution import (
    BEFORE,
    Attribution,
    SiteTotals,
    attribute_events,
    list_blocks,
    list_sources,
)
from gpumemwidget.tracing.device_timeline import (
    Moments,
    choose_layer_lines,
    choose_moments,
    make_layers,
)
from gpumemwidget.tracing.sources import Source, Sources, is_library, read_source

_PartKind: TypeAlias = "MemoryKind | Literal['freed since']"
_PartKey: TypeAlias = "tuple[Origin, int | None, _PartKind, str | None]"


def describe_device(
    trace: AllocatorTrace,
    *,
    sources: Sources,
    start_us: int,
    cell: CellDevice | None = None,
    marks: Sequence[CallMark] = (),
    names: BlockNames | None = None,
) -> DeviceTrace:
    """Describe what the traced cell's lines did to one device.

    Args:
        trace: the allocator's events, and the segments before and after.
        sources: which frames are the cell's, earlier cells' and the user's files'.
        start_us: when the cell began, in microseconds on the clock of the events.
        cell: the counters of the cell; ``None`` if they were not read.
        marks: calls that were seen to begin and end while the cell ran.
        names: kind and owner of each block at the end; ``None``: not known.

    Returns:
        A record in which the figures of the lines agree with the segments before and after. Where
        they don't, and where events are missing, its notes say so and its peak is the counters'.
    """
    replayed = replay(trace)
    is_complete = trace.is_whole or begins_with_events(trace)
    times_us = replayed.events.times_us
    began_us = max(trace.start_us, start_us)
    if not is_complete:
        began_us = times_us[0] if times_us else trace.end_us
    moments = choose_moments(replayed, start_us, began_us, trace.end_us)
    attribution = attribute_events(replayed, sources, marks)
    totals = SiteTotals(replayed, attribution, moments.peak)
    found = list_sources(attribution, sources, totals)
    unplaced = [
        index
        for index, site in enumerate(attribution.sites)
        if index != BEFORE and site.stack.line is None
    ]
    layer_lines = choose_layer_lines(found[0], totals)
    rows = totals.follow(
        [group for source in found for group in source.list_groups()],
        [[BEFORE], *(found[0].lines[line].sites for line in layer_lines), unplaced],
        moments.stops,
    )
    is_exact = trace.is_whole and is_complete and replayed.agrees
    allocated, reserved, peak_is, notes = _choose_spans(
        trace, replayed, moments, cell, is_exact=is_exact
    )
    before = totals.describe([BEFORE])
    if not is_complete:
        # Blocks from before the cell that went before the first known event count, too.
        n_bytes = BlockLayout(trace.before).allocated_bytes
        before = replace(before, allocated_bytes=n_bytes, highest_bytes=n_bytes)
    since_s = None if is_complete else max(0, began_us - start_us) / 1e6
    notes += _describe_missing(replayed, moments, allocated, since_s)
    return DeviceTrace(
        device=trace.device,
        allocated=allocated,
        reserved=reserved,
        peak_is=peak_is,
        timeline=replace(
            moments.timeline,
            layers=make_layers(moments.timeline, rows, layer_lines, sources.traced),
        ),
        units=tuple([source.describe(totals, sources) for source in found]),
        before=before,
        unplaced=totals.describe(unplaced),
        peak=_list_peak_parts(replayed, attribution, moments.peak, names),
        n_events=len(trace.events),
        notes=(*trace.notes, *notes, *attribution.notes),
    )


def _choose_spans(
    trace: AllocatorTrace,
    replayed: Replay,
    moments: Moments,
    cell: CellDevice | None,
    *,
    is_exact: bool,
) -> tuple[Span, Span, PeakIs | None, list[TraceNote]]:
    """Return the spans of allocated and reserved, what their peaks are, and notes.

    The cell's counters are taken where they are known. Their peaks count where the replay is not
    complete (``is_exact``).
    """
    before, after = BlockLayout(trace.before), BlockLayout(trace.after)
    start_bytes = before.allocated_bytes, before.reserved_bytes
    if begins_with_events(trace) and not trace.before:
        # The segments before the cell were not read.
        start_bytes = replayed.start_allocated_bytes, replayed.start_reserved_bytes
    spans_seen = (
        Span(start_bytes[0], after.allocated_bytes, moments.peak_bytes),
        Span(start_bytes[1], after.reserved_bytes, moments.reserved_peak_bytes),
    )
    if cell is None:
        return *spans_seen, "exact" if is_exact else "at least", []
    notes: list[TraceNote] = []
    spans = []
    for what, counted, seen in zip(
        ("allocated", "reserved"), (cell.allocated, cell.reserved), spans_seen, strict=True
    ):
        if is_exact and cell.peak_is == "exact":
            notes += _compare(what, counted, seen)
        peak_bytes = seen.peak_bytes
        if not is_exact or cell.peak_is == "exact":
            peak_bytes = max(counted.peak_bytes or 0, seen.peak_bytes or 0)
        spans.append(
            Span(
                seen.before_bytes if counted.before_bytes is None else counted.before_bytes,
                seen.after_bytes if counted.after_bytes is None else counted.after_bytes,
                peak_bytes,
            )
        )
    allocated, reserved = spans
    peak_is: PeakIs | None = "exact"
    if not is_exact:
        peak_is = "at least" if cell.allocated.peak_bytes is None else cell.peak_is
    return allocated, reserved, peak_is, notes


def _compare(what: str, counted: Span, replayed: Span) -> list[TraceNote]:
    """Return a note on the first figure in which the counters and the history differ."""
    figures = (
        (counted.before_bytes, replayed.before_bytes),
        (counted.after_bytes, replayed.after_bytes),
        (counted.peak_bytes, replayed.peak_bytes),
    )
    return [
        TraceNote(NoteKind.COUNTERS_DIFFER, what, counter, history)
        for counter, history in figures
        if counter is not None and counter != history
    ][:1]


def _describe_missing(
    replayed: Replay, moments: Moments, allocated: Span, since_s: float | None
) -> list[TraceNote]:
    """Return notes on events that are missing, or that contradict the segments at the end."""
    notes = []
    if since_s is not None:
        notes.append(TraceNote(NoteKind.EVENTS_MISSING, seconds=since_s))
        peak_bytes = allocated.peak_bytes
        if peak_bytes is not None and peak_bytes > moments.peak_bytes:
            kind = NoteKind.PEAK_NOT_IN_EVENTS
            notes.append(TraceNote(kind, "", peak_bytes, moments.peak_bytes))
    if not replayed.agrees:
        notes.append(TraceNote(NoteKind.REPLAY_DIFFERS))
    return notes


# -- What made the peak ----------------------------------------------------------------------------


def _list_peak_parts(
    replayed: Replay, attribution: Attribution, peak: int, names: BlockNames | None
) -> tuple[PeakPart, ...]:
    """Return the blocks in use at the peak, added up by line, kind and owner, biggest first."""
    sizes: Counter[_PartKey] = Counter()
    n_blocks: Counter[_PartKey] = Counter()
    for site, n_bytes, address, begun_at, freed_at in list_blocks(replayed, attribution):
        if begun_at > peak or 0 <= freed_at <= peak:
            continue
        line = attribution.sites[site].stack.line
        origin = Origin.OUTSIDE_LINES if line is None else Origin.LINE
        if site == BEFORE:
            origin = Origin.BEFORE_CELL
        kind: _PartKind = "freed since"
        owner = None
        if freed_at < 0:
            kind, owner = (names or {}).get(address, ("unknown", None))
        key = (origin, line, kind, owner or None)
        sizes[key] += n_bytes
        n_blocks[key] += 1

    def rank(key: _PartKey) -> tuple[object, ...]:
        """Return the key to sort by: the biggest first, and equally big ones in one order."""
        origin, line, kind, owner = key
        return -sizes[key], origin.value, line or 0, kind, owner or ""

    return tuple(
        PeakPart(origin, line, kind, owner, sizes[key], n_blocks[key])
        for key in sorted(sizes, key=rank)
        for origin, line, kind, owner in [key]
    )


# -- Snapshots of PyTorch's memory viewer ----------------------------------------------------------


def describe_snapshot(traces: Sequence[AllocatorTrace], name: str) -> CellTrace:
    """Describe a snapshot file's history by the lines of the user's main file.

    The file does not say which cell or block it is of: the main file is the user's one that
    allocated most.

    Args:
        traces: a trace of each device in the file.
        name: the file's name, shown instead of a cell's first line.
    """
    filename = _find_main(traces)
    text = "".join(read_source(filename)) if filename else ""
    sources = Sources(Source(PurePath(filename).name or name, filename, "file", text))
    start_us = min((trace.start_us for trace in traces), default=0)
    end_us = max((trace.end_us for trace in traces), default=0)
    devices = tuple(
        [describe_device(trace, sources=sources, start_us=start_us) for trace in traces]
    )
    record = CellRecord(
        execution_count=None,
        cell_id=None,
        first_line=name,
        started_at=start_us / 1e6,
        start_s=0.0,
        duration_s=(end_us - start_us) / 1e6,
        status="ok",
        devices=tuple(
            CellDevice(device.device, device.allocated, device.reserved, device.peak_is, None, None)
            for device in devices
        ),
    )
    return CellTrace(record, devices)


def _find_main(traces: Sequence[AllocatorTrace]) -> str:
    """Return the user's file that allocated most; ``""`` if the stacks have none."""
    n_bytes: Counter[str] = Counter()
    for trace in traces:
        # The user's outermost file of each stack: a cell, or a script.
        names = ([frame.filename for frame in stack] for stack in trace.events.stack_table)
        files = [next(filter(_is_users, reversed(stack)), "") for stack in names]
        for stack, size in zip(trace.events.stacks, trace.events.sizes, strict=True):
            n_bytes[files[stack]] += size
    del n_bytes[""]
    return n_bytes.most_common(1)[0][0] if n_bytes else ""


def _is_users(filename: str) -> bool:
    return bool(filename) and not is_library(filename)
