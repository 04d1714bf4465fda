"""From the allocator's history of one device to what the traced cell's lines did to it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from gpumemwidget.measure.layout import Layout
from gpumemwidget.measure.moments import Moments, choose_moments
from gpumemwidget.measure.peakparts import BEFORE_CELL, NO_LINE, describe_peak
from gpumemwidget.measure.placing import BEFORE, place_blocks
from gpumemwidget.measure.replaying import Replay, replay
from gpumemwidget.measure.rewinding import begins_with_events
from gpumemwidget.measure.sources import Sources
from gpumemwidget.measure.tallies import Tallies
from gpumemwidget.measure.unitlines import Unit, list_units
from gpumemwidget.records import CellDevice, PeakIs, Span
from gpumemwidget.traces import (
    AllocatorTrace,
    BlockNames,
    CallMark,
    DeviceTrace,
    Layer,
    Timeline,
)
from gpumemwidget.units import format_bytes, format_duration

__all__ = ["describe_device"]

#: The lines that have a layer of their own in the timeline.
_MOST_LAYERS = 8
_OTHER_LINES = "other lines"


def describe_device(
    trace: AllocatorTrace,
    *,
    sources: Sources,
    start_us: int,
    cell: CellDevice | None = None,
    marks: Sequence[CallMark] = (),
    names: BlockNames | None = None,
    depth: int | None = None,
) -> DeviceTrace:
    """What the traced cell's lines did to one device.

    Args:
        trace: the allocator's events, and what stood before and after.
        sources: which frames are the cell's, earlier cells' and the user's files'.
        start_us: when the cell began, in microseconds on the clock of the events.
        cell: what the counters say of the cell; ``None`` where they were not read.
        marks: calls that were seen to begin and end while the cell ran.
        names: what the blocks at the end are for, and the paths to them; ``None``: not known.
        depth: how many calls deep a line opens at most; 0 for lines alone.

    Returns:
        The figures of the lines agree with what stood before and after. Where they don't, and
        where events are missing, ``notes`` say so and the peak is that of the counters.
    """
    found = replay(trace)
    played = found.played
    is_whole = not found.n_dropped and (trace.is_whole or begins_with_events(trace))
    times_us = played.events.times_us
    began_us = max(trace.start_us, start_us)
    if not is_whole:
        began_us = times_us[0] if times_us else trace.end_us
    moments = choose_moments(played, began_us, trace.end_us)
    placed = place_blocks(played, sources, marks)
    tallies = Tallies(played, placed, moments.peak)
    units = list_units(placed, sources, tallies, depth)
    unplaced = [
        index
        for index, site in enumerate(placed.table)
        if index != BEFORE and site.stack.line is None
    ]
    top = _choose_lines(units[0], tallies)
    rows = tallies.follow(
        [group for unit in units for group in unit.list_groups()],
        [[BEFORE], *(units[0].nodes[line].sites for line in top), unplaced],
        moments.stops,
    )
    allocated, reserved, peak_is, notes = _settle(
        trace, moments, cell, is_sure=trace.is_whole and is_whole and found.agrees
    )
    before = tallies.describe([BEFORE])
    if not is_whole:
        # What of it went before the first event that is there is part of it, too.
        stood = Layout(trace.before).active.values()
        before = replace(
            before, allocated_bytes=sum(stood), n_allocs=len(stood), highest_bytes=sum(stood)
        )
    since_s = None if is_whole else max(0, began_us - start_us) / 1e6
    notes += _tell_missing(trace, found, moments, allocated, since_s)
    return DeviceTrace(
        device=trace.device,
        source="history",
        allocated=allocated,
        reserved=reserved,
        peak_is=peak_is,
        timeline=Timeline(
            times_s=tuple([max(0, each - start_us) / 1e6 for each in moments.times_us]),
            allocated_bytes=tuple(moments.allocated_bytes),
            reserved_bytes=tuple(moments.reserved_bytes),
            layers=_make_layers(moments, rows, top, sources),
            peak=moments.peak_moment,
            n_moments=moments.n_moments,
        ),
        units=tuple([unit.describe(tallies, sources) for unit in units]),
        before=before,
        unplaced=tallies.describe(unplaced),
        peak=describe_peak(played, placed, moments.peak, sources.traced.name, names),
        n_events=len(trace.events),
        complete_since_s=since_s,
        notes=(*trace.notes, *notes, *placed.notes),
    )


def _choose_lines(unit: Unit, tallies: Tallies) -> list[int]:
    """The lines that hold most at the peak, biggest first; then those that hold most at the end."""
    held = {
        line: (
            sum([tallies.at_peak_bytes[site] for site in node.sites]),
            sum([tallies.net_bytes[site] for site in node.sites]),
        )
        for line, node in unit.nodes.items()
    }
    ordered = sorted(held, key=lambda line: (-held[line][0], -held[line][1], line))
    return ordered[:_MOST_LAYERS]


def _make_layers(
    moments: Moments, rows: Sequence[Sequence[int]], top: Sequence[int], sources: Sources
) -> tuple[Layer, ...]:
    """The layers from the bottom up; those that never hold anything are left out."""
    texts = sources.traced.lines
    before, *lines, unplaced = (tuple(column) for column in zip(*rows, strict=True))
    others = tuple(
        allocated - sum(row) for allocated, row in zip(moments.allocated_bytes, rows, strict=True)
    )
    layers = [
        Layer(BEFORE_CELL, "", None, None, before),
        *(
            Layer(
                label=f"line {line}",
                text=texts[line - 1].strip() if line <= len(texts) else "",
                unit=sources.traced.name,
                line=line,
                held_bytes=held,
            )
            for line, held in zip(top, lines, strict=True)
        ),
        Layer(_OTHER_LINES, "", None, None, others),
        Layer(NO_LINE, "", None, None, unplaced),
    ]
    return tuple([layer for layer in layers if any(layer.held_bytes)])


def _settle(
    trace: AllocatorTrace, moments: Moments, cell: CellDevice | None, *, is_sure: bool
) -> tuple[Span, Span, PeakIs | None, list[str]]:
    """Both spans, what kind of figure their peaks are, and where counters and events differ."""
    before, after = Layout(trace.before), Layout(trace.after)
    start = before.allocated_bytes, before.reserved_bytes
    if begins_with_events(trace) and not trace.before:
        # What stood before was not read, if it was anything.
        start = moments.allocated_bytes[0], moments.reserved_bytes[0]
    counted = (None, None) if cell is None else (cell.allocated, cell.reserved)
    ends = (
        (start[0], after.allocated_bytes),
        (start[1], after.reserved_bytes),
    )
    peaks = moments.peak_bytes, max(moments.reserved_bytes)
    counted_is = None if cell is None else cell.peak_is
    notes: list[str] = []
    spans = []
    for what, span, (begin, end), peak in zip(
        ("allocated", "reserved"), counted, ends, peaks, strict=True
    ):
        seen = Span(begin, end, peak)
        if span is None:
            spans.append(seen)
            continue
        known = span.peak_bytes
        if is_sure and known is not None and counted_is == "exact":
            notes += _compare(what, span, seen)
        elif is_sure or known is None:
            known = peak
        spans.append(
            Span(
                begin if span.before_bytes is None else span.before_bytes,
                end if span.after_bytes is None else span.after_bytes,
                known if is_sure else max(known, peak),
            )
        )
    allocated, reserved = spans
    if is_sure:
        return allocated, reserved, "exact", notes
    if cell is None or cell.allocated.peak_bytes is None:
        counted_is = "at least"
    return allocated, reserved, counted_is, notes


def _compare(what: str, span: Span, seen: Span) -> list[str]:
    pairs = (
        ("before the cell", span.before_bytes, seen.before_bytes),
        ("after it", span.after_bytes, seen.after_bytes),
        ("at its peak", span.peak_bytes, seen.peak_bytes),
    )
    return [
        f"The counters say that {format_bytes(counted)} were {what} {when}, the history "
        f"{format_bytes(played)}."
        for when, counted, played in pairs
        if counted is not None and counted != played
    ]


def _tell_missing(
    trace: AllocatorTrace, found: Replay, moments: Moments, allocated: Span, since_s: float | None
) -> list[str]:
    """Sentences on events that are missing, or that can't have been so."""
    notes = []
    if since_s is not None:
        why = (
            "The history has lost its oldest events"
            if not trace.is_whole
            else "Events are missing in the history"
        )
        notes.append(
            f"{why}: lines are complete from {format_duration(since_s)} after the cell's start on."
        )
        if allocated.peak_bytes is not None and allocated.peak_bytes > moments.peak_bytes:
            notes.append(
                f"The peak of {format_bytes(allocated.peak_bytes)} came before that. What is said "
                f"of the peak's lines is of {format_bytes(moments.peak_bytes)}, the most since."
            )
    if not found.agrees:
        notes.append(
            "The history does not lead to what stands at the end: what is said of lines is not "
            "exact, and the peak is that of the counters."
        )
    return notes
