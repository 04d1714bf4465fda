"""The report of a traced cell: which line took the memory, and what made the peak.

It is one report (``report_trace``), or the pieces that stand under a cell (``list_displays``): the
cell's own table, in which its live chart has just told the numbers; the timeline, which a front end
with plotly draws so that the pointer can ask it; and the lines.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from gpumemwidget.records import HOST, Sample
from gpumemwidget.report.bands import describe_device, map_bands
from gpumemwidget.report.calls import name_file
from gpumemwidget.report.cell import explain_host, list_cell_blocks
from gpumemwidget.report.document import (
    Block,
    Document,
    Fold,
    Heading,
    Note,
    Run,
    Timelines,
)
from gpumemwidget.report.html import render_html
from gpumemwidget.report.output import Report
from gpumemwidget.report.peak import list_peak
from gpumemwidget.report.pieces import explain_marks
from gpumemwidget.report.source import list_unit, sum_uses
from gpumemwidget.report.text import render_text
from gpumemwidget.report.timeline import plot_timeline
from gpumemwidget.report.traceplot import CONFIG, PLOTLY_TYPE, plot_trace
from gpumemwidget.report.words import join_words, rank_device, say_peak
from gpumemwidget.traces import CellTrace, DeviceTrace, LineUse, SourceUnit
from gpumemwidget.units import format_bytes

__all__ = ["TimelineReport", "list_displays", "report_trace"]

#: Units beside the traced cell that are shown.
_MOST_UNITS = 6
#: On the host, what no line did may be Python's own and is not worth a table.
_NOISE_BYTES = 65_536

#: What is said where there is nothing to tell.
_STILL = {
    "history": "no line of the cell allocated anything.",
    # What a line takes and gives back itself is not seen: ``x = load()`` in a cell run twice.
    "lines": "no line of the cell changed what is in use by 4 KiB or more.",
}
_COLUMNS_NOTE = (
    "allocated: all of it, however soon it went; net: what of it is still held; at peak: what of "
    "it was held when the peak was reached; highest: the most of it that was held at any moment."
)
_COLUMNS_NOTE_HOST = (
    "host: bytes in use, read as each line of the cell begins. allocated: what the line added; "
    "net: what of it is still held; highest: the most of it that was held at any moment."
)


@dataclass(frozen=True, slots=True, repr=False)
class TimelineReport(Report):
    """The timeline of a traced cell: plotly's where it can be drawn, else the static chart.

    Attributes:
        figure: plotly's JSON, data and layout.
    """

    figure: Mapping[str, Any]

    def _repr_mimebundle_(
        self,
        include: object = None,  # noqa: ARG002 - IPython's protocol
        exclude: object = None,  # noqa: ARG002
    ) -> dict[str, Any]:
        return {
            PLOTLY_TYPE: {**self.figure, "config": CONFIG},
            "text/html": self.html,
            "text/plain": self.text,
        }


def report_trace(
    trace: CellTrace,
    samples: Sequence[Sample],
    *,
    n_lines: int | None = None,
    depth: int | None = None,
) -> Report:
    """What a traced cell did: the cell's table, its timelines, its lines and what made the peak.

    Args:
        trace: the traced cell.
        samples: readings taken while it ran, for the devices that were not traced.
        n_lines: how many lines of a unit are shown, those that matter most; the rest is folded.
        depth: how many levels of calls are shown below a line; 0 for none.
    """
    blocks = _list_head(trace, samples)
    for device in _list_moved(trace):
        blocks.extend(_list_timeline(trace, device))
        blocks.extend(_list_lines(device, n_lines=n_lines, depth=depth))
    blocks.extend(_list_still(trace))
    blocks.extend(_list_notes(trace, blocks))
    return _render(blocks)


def list_displays(
    trace: CellTrace,
    samples: Sequence[Sample],
    *,
    n_lines: int | None = None,
    depth: int | None = None,
) -> tuple[Report | TimelineReport, ...]:
    """The same in pieces, one display each: the head, the timelines, the lines.

    The head begins as the report of a cell does, so it can take the place of the cell's live chart.
    Where there is no timeline, all is one piece.

    Args:
        trace: the traced cell.
        samples: readings taken while it ran.
        n_lines: how many lines of a unit are shown.
        depth: how many levels of calls are shown below a line.
    """
    moved = _list_moved(trace)
    figure = plot_trace(replace(trace, devices=tuple(moved)), has_title=False)
    if figure is None:
        return (report_trace(trace, samples, n_lines=n_lines, depth=depth),)
    head = _list_head(trace, samples)
    timelines = [block for device in moved for block in _list_timeline(trace, device)]
    lines: list[Block] = []
    for device in moved:
        if len(trace.devices) > 1:
            lines.append(Heading((Run(device.device, "strong"),)))
        lines.extend(_list_lines(device, n_lines=n_lines, depth=depth))
    lines.extend(_list_still(trace))
    lines.extend(_list_notes(trace, [*head, *lines]))
    drawn = _render(timelines)
    return _render(head), TimelineReport(drawn.text, drawn.html, figure), _render(lines)


def _render(blocks: Sequence[Block]) -> Report:
    document = Document(tuple(blocks))
    return Report(text=render_text(document), html=render_html(document))


def _sort(devices: Sequence[DeviceTrace]) -> list[DeviceTrace]:
    return sorted(devices, key=lambda device: rank_device(device.device))


# -- The parts -------------------------------------------------------------------------------------


def _list_head(trace: CellTrace, samples: Sequence[Sample]) -> list[Block]:
    drawn = [
        device.device
        for device in trace.devices
        if device.timeline is not None and not _is_still(device)
    ]
    return list_cell_blocks(trace.record, samples, without=drawn)


def _list_timeline(trace: CellTrace, device: DeviceTrace) -> list[Block]:
    chart = plot_timeline(device, trace.record.duration_s)
    if chart is None:
        return []
    peak, *rest, events = describe_device(device, trace.record.duration_s)
    runs = [Run(device.device, "strong"), *map(Run, (peak, *rest)), Run(events, "muted")]
    return [Heading(tuple(runs)), Timelines((chart,))]


def _list_lines(device: DeviceTrace, *, n_lines: int | None, depth: int | None) -> list[Block]:
    bands = map_bands(device.timeline)
    blocks: list[Block] = []
    for place, unit in enumerate(device.units[: _MOST_UNITS + 1]):
        listing = list_unit(device, unit, bands=bands, n_lines=n_lines, depth=depth)
        if place == 0:
            blocks.append(listing)
            blocks.extend(_compare(device))
        else:
            blocks.append(Fold(_describe_unit(unit), (listing,)))
    n_more = len(device.units) - 1 - _MOST_UNITS
    if n_more > 0:
        blocks.append(Note(f"{n_more} more {'file' if n_more == 1 else 'files'} allocated less."))
    blocks.extend(list_peak(device))
    return blocks


def _list_moved(trace: CellTrace) -> list[DeviceTrace]:
    return [device for device in _sort(trace.devices) if not _is_still(device)]


def _list_still(trace: CellTrace) -> list[Block]:
    """A line for all devices that there is nothing to tell of."""
    names: dict[str, list[str]] = {}
    for device in _sort(trace.devices):
        if _is_still(device):
            names.setdefault(_STILL[device.source], []).append(device.device)
    return [Note(f"{join_words(each)}: {text}") for text, each in names.items()]


def _is_still(device: DeviceTrace) -> bool:
    """Whether there is nothing to tell of it."""
    uses = [line.use for unit in device.units for line in unit.lines if line.use is not None]
    unplaced = device.unplaced
    if device.source == "lines" and abs(unplaced.net_bytes) < _NOISE_BYTES:
        unplaced = LineUse(0, 0, 0, 0, 0)
    return not any(
        use.allocated_bytes or use.net_bytes or use.at_peak_bytes for use in (*uses, unplaced)
    )


def _describe_unit(unit: SourceUnit) -> tuple[Run, ...]:
    uses = [line.use for line in unit.lines if line.use is not None]
    n_bytes = sum(use.allocated_bytes for use in uses)
    name = unit.name if unit.kind == "earlier cell" else name_file(unit.name)
    count = "1 line" if len(uses) == 1 else f"{len(uses)} lines"
    what = "by functions defined there" if unit.kind == "earlier cell" else "by its functions"
    return (Run(name, "strong"), Run(f"{format_bytes(n_bytes)} allocated {what}, {count}"))


def _compare(device: DeviceTrace) -> list[Note]:
    """Where what the lines come to is not what the counters say, which nobody else would see."""
    total = sum_uses(device)
    wrong = []
    after_bytes, peak_bytes = device.allocated.after_bytes, device.allocated.peak_bytes
    if after_bytes is not None and after_bytes != total.net_bytes:
        wrong.append(f"{format_bytes(after_bytes)} allocated after the cell")
    # Where the oldest events are lost, a note says of which peak the lines tell.
    is_whole = device.complete_since_s is None
    if is_whole and peak_bytes is not None and peak_bytes != total.at_peak_bytes:
        wrong.append(f"a peak of {say_peak(peak_bytes, device.peak_is)}")
    if not wrong:
        return []
    words = f"{device.device}: the lines do not add up to what the counters say: "
    return [Note(words + " and ".join(wrong), tone="warn")]


def _list_notes(trace: CellTrace, blocks: Sequence[Block]) -> list[Block]:
    """What the marks and the columns mean, what is inferred and what is missing."""
    notes: list[Block] = list(explain_marks(blocks))
    moved = _list_moved(trace)
    if any(device.source == "history" for device in moved):
        notes.append(Note(_COLUMNS_NOTE))
    if any(device.source == "lines" for device in moved):
        notes.append(Note(_COLUMNS_NOTE_HOST))
    for device in _sort(trace.devices):
        for text in device.notes:
            named = text if device.device in text else f"{device.device}: {text}"
            notes.append(Note(named))
    notes.extend(Note(text) for text in trace.notes)
    if any(device.device == HOST for device in trace.record.devices):
        notes.extend(explain_host(trace.record.devices))
    return notes
