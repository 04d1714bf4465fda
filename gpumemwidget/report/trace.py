"""The report of a traced cell: which line took the memory, and what made the peak."""

from __future__ import annotations

from collections.abc import Sequence

from gpumemwidget.model.devices import HardwareNote, Sample
from gpumemwidget.model.traces import (
    CellTrace,
    DeviceTrace,
    NoteKind,
    SourceUnit,
    TraceNote,
)
from gpumemwidget.report.cell import list_cell_blocks
from gpumemwidget.report.charts.timeline import TimelineChart, describe_device, map_bands
from gpumemwidget.report.render.blocks import (
    SOME,
    Block,
    Cell,
    Column,
    Fold,
    Heading,
    Note,
    Run,
    Table,
)
from gpumemwidget.report.render.cells import bytes_cell, explain_marks, share_cell, sort_devices
from gpumemwidget.report.render.output import Report
from gpumemwidget.report.render.wording import (
    count,
    join_words,
    name_origin,
    word_hardware_note,
)
from gpumemwidget.report.source import list_host, list_unit, name_file
from gpumemwidget.units import format_bytes, format_duration

_COLUMNS_NOTE = (
    "allocated: everything the line allocated, however soon it was freed; net: still allocated "
    "after the cell; at peak: still allocated when the peak was reached; highest: its maximum at "
    "any time."
)
_HOST_NOTE = (
    "change: how the memory handed out by malloc changed while the line ran, summed over all its "
    "runs. Memory is subtracted on the line that frees it. Temporary memory within a line is not "
    "shown; the resident peak in the table includes it."
)
_UNREAD_NOTE = (
    "not read one by one: reading lines that ran often each time would have slowed the cell, so "
    "part of their changes is shown as one sum."
)

_NOTES = {
    NoteKind.HISTORY_IS_USERS: "A memory history was running already, and is used as it is, with "
    "the events and lines that it keeps: stop it with "
    "torch.cuda.memory._record_memory_history(None) for one of our own.",
    NoteKind.HISTORY_WAS_SET: "The cell started or stopped a memory history of its own, which is "
    "left as it is: the events since then are missing here.",
    NoteKind.START_WORKED_OUT: "What was allocated before the file's first event is worked out "
    "from its end. Up to 1 MiB of each large block that was freed may be missing.",
    NoteKind.CALLS_UNSEEN: "Calls of modules and of backward are not seen: other tools use "
    "sys.monitoring, or this PyTorch has other ones.",
    NoteKind.LINES_UNREAD: "The host's lines are not read, or not to the end: a debugger, a "
    "coverage tool or the cell itself traces this thread.",
    NoteKind.MALLOC_UNREAD: "This C library has no per-line memory count.",
    NoteKind.FAILED: "Part of the trace is missing, as reading it failed ({text}).",
    NoteKind.NO_SNAPSHOT: "No snapshot was written: no GPU's allocations were traced here.",
    NoteKind.COUNTERS_DIFFER: "The allocator's counters and its history differ: {n_bytes} {text} "
    "by the counters, {history_bytes} by the history.",
    NoteKind.EVENTS_MISSING: "The history has lost its oldest events: lines are complete only from "
    "{seconds} after the cell's start. Up to 1 MiB of each large block that was freed since may be "
    "missing.",
    NoteKind.PEAK_NOT_IN_EVENTS: "The peak of {n_bytes} came before that. The lines shown at the "
    "peak are those of {history_bytes}, the highest since.",
    NoteKind.REPLAY_DIFFERS: "The history does not lead to what is allocated at the end: the "
    "figures of lines are not exact, and the peak is that of the counters.",
    NoteKind.BACKWARD_INFERRED: "{n_bytes} allocated on autograd's threads, which show no line of "
    "the cell, are attributed to the line last seen before.",
    NoteKind.NO_STACKS: "The history was recorded without stacks: no line can be named.",
}

_PEAK_COLUMNS = (
    Column("allocated at", "name"),
    Column("bytes"),
    Column("share"),
    Column("blocks"),
    Column("what it is", "name", fold=24),
    Column("held by", "code", last="cut"),
)


def report_trace(
    trace: CellTrace,
    samples: Sequence[Sample],
    *,
    n_lines: int | None = None,
) -> Report:
    """Report a traced cell: its table, its timelines, its lines, and what made the peak.

    ``samples`` are for the devices that were not traced. Of a unit at most ``n_lines`` are shown,
    those that matter most.
    """
    moved = [device for device in sort_devices(trace.devices) if not _is_still(device)]
    blocks = list_cell_blocks(trace.record, samples, has_charts=not moved)
    duration_s = trace.record.duration_s
    for device in moved:
        peak, events = describe_device(device, duration_s)
        blocks.append(Heading((Run(device.device, "strong"), Run(peak), Run(events, "muted"))))
        blocks.append(TimelineChart(device, duration_s))
    for device in moved:
        if len(trace.devices) > 1:
            blocks.append(Heading((Run(device.device, "strong"),)))
        bands = map_bands(device.timeline)
        for place, unit in enumerate(device.units):
            listing = list_unit(device, unit, bands=bands, n_lines=n_lines)
            blocks.append(Fold(_describe_unit(unit), (listing,)) if place else listing)
        blocks.extend(_list_peak(device))
    if trace.host is not None:
        blocks.append(list_host(trace.host, n_lines=n_lines))
    still = [device.device for device in sort_devices(trace.devices) if _is_still(device)]
    if still:
        blocks.append(Note(f"{join_words(still)}: no line of the cell allocated anything."))
    blocks.extend(explain_marks(blocks))
    if moved:
        blocks.append(Note(_COLUMNS_NOTE))
    blocks.extend(_list_notes(trace))
    return Report(tuple(blocks))


# -- The parts -------------------------------------------------------------------------------------


def _is_still(device: DeviceTrace) -> bool:
    """Return whether no line allocated or freed anything on a device."""
    uses = [line.use for unit in device.units for line in unit.lines if line.use is not None]
    return not any(
        use.allocated_bytes or use.net_bytes or use.at_peak_bytes
        for use in (*uses, device.unplaced)
    )


def _describe_unit(unit: SourceUnit) -> tuple[Run, ...]:
    uses = [line.use for line in unit.lines if line.use is not None]
    n_bytes = sum(use.allocated_bytes for use in uses)
    name = unit.name if unit.kind == "earlier cell" else name_file(unit.name)
    what = "by functions defined there" if unit.kind == "earlier cell" else "by its functions"
    return (
        Run(name, "strong"),
        Run(f"{format_bytes(n_bytes)} allocated {what}, {count(len(uses), 'line')}"),
    )


def _list_notes(trace: CellTrace) -> list[Block]:
    """Return what is inferred and what is missing."""
    notes: list[Block] = []
    if trace.host is not None:
        notes.append(Note(_HOST_NOTE))
        if trace.host.unread_bytes:
            notes.append(Note(_UNREAD_NOTE))
    for device in sort_devices(trace.devices):
        for text in map(word_note, device.notes):
            notes.append(Note(text if device.device in text else f"{device.device}: {text}"))
    if trace.host is not None:
        notes.extend(Note(f"host: {word_note(note)}") for note in trace.host.notes)
    notes.extend(map(Note, dict.fromkeys(map(word_note, trace.notes))))
    return notes


def word_note(note: TraceNote | HardwareNote) -> str:
    """Return a note as a sentence."""
    if isinstance(note, HardwareNote):
        return word_hardware_note(note)
    return _NOTES[note.kind].format(
        text=note.text,
        n_bytes=format_bytes(note.n_bytes),
        history_bytes=format_bytes(note.history_bytes),
        seconds=format_duration(note.seconds or 0.0),
    )


# -- What made the peak ----------------------------------------------------------------------------


def _list_peak(device: DeviceTrace) -> list[Block]:
    if not device.peak:
        return []
    total = sum(part.n_bytes for part in device.peak)
    shown = device.peak if len(device.peak) <= SOME + 1 else device.peak[:SOME]
    rows = []
    for part in shown:
        place = name_origin(part.origin, part.line)
        kind = Cell(part.kind, tone="muted" if part.kind == "freed since" else "plain")
        amounts = _list_amounts(part.n_bytes, part.n_blocks, total)
        rows.append((Cell(place), *amounts, kind, Cell(part.owner or "")))
    rest = device.peak[len(shown) :]
    if rest:
        n_bytes, n_blocks = (sum(p.n_bytes for p in rest), sum(p.n_blocks for p in rest))
        more = Cell(f"{len(rest)} more", tone="muted")
        rows.append((more, *_list_amounts(n_bytes, n_blocks, total), Cell(""), Cell("")))
    caption = f"What made the peak of {device.device}: {format_bytes(total)}"
    return [Table(caption, _PEAK_COLUMNS, (tuple(rows),))]


def _list_amounts(n_bytes: int, n_blocks: int, total: int) -> tuple[Cell, ...]:
    return bytes_cell(n_bytes), share_cell(n_bytes, total), Cell(f"{n_blocks:,}")
