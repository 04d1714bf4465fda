"""Describe what a traced cell's lines did to one device, from the allocator's history.

The history is replayed, its events are attributed to stacks, and the stacks to lines and calls. A
snapshot file of PyTorch's has such a history of each device, without a cell.
"""

from __future__ import annotations

import bisect
from array import array
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
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
    Layer,
    NoteKind,
    Origin,
    PeakPart,
    Timeline,
    TraceNote,
)
from gpumemwidget.recording.history import find_extremes
from gpumemwidget.tracing.attribution import (
    BEFORE,
    AllocatingSource,
    Attribution,
    SiteTotals,
    attribute_events,
    list_blocks,
    list_sources,
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


# -- The moments of the timeline -------------------------------------------------------------------

#: Maximum number of moments; of a shorter history all are kept.
MAX_MOMENTS = 800


@dataclass(frozen=True, slots=True, eq=False)
class Moments:
    """The moments of a timeline.

    Attributes:
        timeline: the moments, without layers.
        stops: for each moment the index of the last event up to it; -1 before all events.
        peak: index of the event with the most allocated, the first of equals; -1 before all events.
        peak_bytes: the most that was allocated.
        reserved_peak_bytes: the most that was reserved.
    """

    timeline: Timeline
    stops: list[int]
    peak: int
    peak_bytes: int
    reserved_peak_bytes: int


def choose_moments(replayed: Replay, cell_us: int, first_us: int, last_us: int) -> Moments:
    """Choose moments such that the eye sees no difference and no extreme is lost.

    Args:
        replayed: the device's trace.
        cell_us: when the cell began; this and the others in microseconds on the events' clock.
        first_us: the first moment, before all events.
        last_us: the last moment.
    """
    changes, reserved_changes = replayed.changes, replayed.reserved_changes
    # Before the first event, and after each.
    allocated = array("q", accumulate(changes, initial=replayed.start_allocated_bytes))
    reserved = array("q", accumulate(reserved_changes, initial=replayed.start_reserved_bytes))
    n_unchanged = changes.count(0) + reserved_changes.count(0)
    n_moments = 1 + 2 * len(changes) - n_unchanged
    peak_bytes = max(allocated)
    peak = allocated.index(peak_bytes)
    kept = {0, peak}
    if n_moments < MAX_MOMENTS:
        pairs = zip(changes, reserved_changes, strict=True)
        kept.update(place for place, pair in enumerate(pairs, 1) if any(pair))
    else:
        columns = allocated, reserved
        for stretch in _cut(replayed.events.times_us):
            kept.add(stretch[-1])
            kept.update(find_extremes(stretch, highest=columns, lowest=columns))
    places = sorted(kept)
    times_us = [first_us, *(replayed.events.times_us[place - 1] for place in places if place)]
    # Threads may note their events a moment late.
    times_us = list(accumulate(times_us, max))
    peak_moment = places.index(peak)
    if last_us > times_us[-1]:
        places.append(len(changes))
        times_us.append(last_us)
    timeline = Timeline(
        times_s=tuple([max(0, time_us - cell_us) / 1e6 for time_us in times_us]),
        allocated_bytes=tuple([allocated[place] for place in places]),
        reserved_bytes=tuple([reserved[place] for place in places]),
        layers=(),
        peak=peak_moment,
    )
    stops = [place - 1 for place in places]
    return Moments(timeline, stops, peak - 1, peak_bytes, max(reserved))


def choose_layer_lines(source: AllocatingSource, totals: SiteTotals) -> list[int]:
    """Return the eight lines to give a layer: those that hold most at the peak, then at the end."""

    def rank(line: int) -> tuple[int, int, int]:
        sites = source.lines[line].sites
        at_peak = sum([totals.at_peak_bytes[site] for site in sites])
        return -at_peak, -sum([totals.net_bytes[site] for site in sites]), line

    return sorted(source.lines, key=rank)[:8]


def make_layers(
    timeline: Timeline, rows: Sequence[Sequence[int]], lines: Sequence[int], cell: Source
) -> tuple[Layer, ...]:
    """Return the layers from the bottom up, without those that never hold anything.

    Args:
        timeline: the moments.
        rows: for each moment the bytes from before the cell, of each line, and outside its lines.
        lines: the lines that have a layer.
        cell: the traced cell.
    """
    texts = cell.lines
    before, *held, outside = (tuple(column) for column in zip(*rows, strict=True))
    others = tuple(
        allocated - sum(row) for allocated, row in zip(timeline.allocated_bytes, rows, strict=True)
    )
    layers = [Layer(Origin.BEFORE_CELL, "", None, before)]
    for line, held_bytes in zip(lines, held, strict=True):
        text = texts[line - 1].strip() if line <= len(texts) else ""
        layers.append(Layer(Origin.LINE, text, line, held_bytes))
    layers.append(Layer(Origin.OTHER_LINES, "", None, others))
    layers.append(Layer(Origin.OUTSIDE_LINES, "", None, outside))
    return tuple([layer for layer in layers if any(layer.held_bytes)])


def _cut(times_us: array[int]) -> Iterator[range]:
    """Cut the moments into stretches that are equal in number or in time, whichever is shorter.

    Equal in number for where events crowd, equal in time for where they are few.
    """
    n_moments = len(times_us) + 1
    first_us, last_us = times_us[0], times_us[-1]
    # Half of the cuts are by number. A stretch keeps five moments at most; the first, the last and
    # the peak's come on top.
    n_cuts = (MAX_MOMENTS - 3) // 10
    cuts = {n_moments * part // n_cuts for part in range(n_cuts)}
    cuts.update(
        1 + bisect.bisect_left(times_us, first_us + (last_us - first_us) * part // n_cuts)
        for part in range(1, n_cuts)
    )
    cuts.add(n_moments)
    return (range(start, stop) for start, stop in pairwise(sorted(cuts)))
