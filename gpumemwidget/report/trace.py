"""The report of a traced cell: which line took the memory, and what made the peak."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import PurePath

from gpumemwidget.model.devices import HardwareNote, Sample
from gpumemwidget.model.traces import (
    Call,
    CellTrace,
    DeviceTrace,
    HostLines,
    LineUse,
    NoteKind,
    Origin,
    PeakPart,
    SourceUnit,
    TraceNote,
)
from gpumemwidget.report.cell import list_cell_blocks
from gpumemwidget.report.charts.timeline import TimelineChart, describe_device, map_bands
from gpumemwidget.report.render.blocks import (
    FEW,
    SOME,
    Cell,
    Column,
    Fold,
    Group,
    Note,
    Row,
    Run,
    Table,
    Tone,
    bytes_cell,
    change_cell,
    explain_marks,
    make_group,
    make_heading,
    name_columns,
    number_columns,
    share_cell,
    sort_devices,
    split_rest,
)
from gpumemwidget.report.render.output import Report
from gpumemwidget.report.render.text import LONG_WIDTH, cut
from gpumemwidget.report.render.wording import (
    count,
    join_words,
    name_origin,
    name_range,
    name_traced,
    word_hardware_note,
)
from gpumemwidget.units import format_bytes, format_duration

_NOTES = {
    NoteKind.HISTORY_IS_USERS: "A memory history was running already, and is used as it is, with "
    "the events and lines that it keeps: stop it with "
    "torch.cuda.memory._record_memory_history(None) for one of our own.",
    NoteKind.HISTORY_WAS_SET: "The cell started or stopped a memory history of its own, which is "
    "left as it is: events are missing here.",
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
    devices = sort_devices(trace.devices)
    moved = [device for device in devices if not _is_still(device)]
    blocks = list_cell_blocks(trace.record, samples, has_charts=not moved)
    duration_s = trace.record.duration_s
    for device in moved:
        peak, events = describe_device(device, duration_s)
        blocks.append(make_heading(device.device, peak, Run(events, "muted")))
        blocks.append(TimelineChart(device, duration_s))
        bands = map_bands(device.timeline)
        for place, unit in enumerate(device.units):
            listing = list_unit(device, unit, bands=bands, n_lines=n_lines)
            blocks.append(Fold(_describe_unit(unit), [listing]) if place else listing)
        blocks.extend(_list_peak(device))
    if trace.host is not None:
        blocks.append(list_host(trace.host, n_lines=n_lines))
    if still := [device.device for device in devices if _is_still(device)]:
        blocks.append(Note(f"{join_words(still)}: no line of the cell allocated anything."))
    blocks.extend(explain_marks(blocks))
    if moved:
        words = "net: kept after the cell; at peak: held when the peak was reached; highest: the "
        blocks.append(Note(f"{words}line's own maximum."))
    blocks.extend(map(Note, _list_notes(trace)))
    return Report(blocks)


# -- The parts -------------------------------------------------------------------------------------


def _is_still(device: DeviceTrace) -> bool:
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


def _list_notes(trace: CellTrace) -> Iterator[str]:
    if trace.host is not None:
        yield (
            "change: what was allocated while the line ran, less what was freed. Temporary memory "
            "within a line is not shown; the peak above includes it."
        )
        if trace.host.unread_bytes:
            yield "not read one by one: lines that ran too often to be read each time."
    for device in sort_devices(trace.devices):
        for text in map(word_note, device.notes):
            yield text if device.device in text else f"{device.device}: {text}"
    if trace.host is not None:
        yield from (f"host: {word_note(note)}" for note in trace.host.notes)
    yield from dict.fromkeys(map(word_note, trace.notes))


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


# -- The listing of lines --------------------------------------------------------------------------

_LINE_COLUMNS = (Column("", "index"), Column("line", "source"))


def list_unit(
    device: DeviceTrace,
    unit: SourceUnit,
    *,
    bands: Mapping[int, str],
    n_lines: int | None,
) -> Table:
    """Return a unit's lines with what they did, and for the traced cell the rows of a sum.

    ``bands`` are the keys of the lines' colours. At most ``n_lines`` are shown, those that matter
    most; ``None`` for a usual number.
    """
    # The sum of the traced cell's lines, of what has no line, and of what stood before.
    before, unplaced = replace(device.before, allocated_bytes=0), device.unplaced
    cell_lines = device.units[0].lines if device.units else ()
    total = _add_up([before, unplaced, *(line.use for line in cell_lines if line.use is not None)])
    is_cell = bool(device.units) and unit is device.units[0]
    files = {other.filename: name_file(other.name) for other in device.units}
    weights = {line.line: _weigh_line(line.use) for line in unit.lines if line.use is not None}
    texts = {line.line: line.text for line in unit.lines}
    shown = _choose_lines(texts, weights, n_lines, is_cell=is_cell)
    groups: list[Group] = []
    for line in unit.lines:
        if line.line in shown:
            amounts = () if line.use is None else _list_amounts(line.use, total)
            row = _make_line(line.text, line.line, amounts, band=bands.get(line.line, "") * is_cell)
            calls = () if line.use is None else _list_calls(line.calls, line.use, files)
            groups.append((row, *calls))
    traced = name_traced(device.timeline)
    if is_cell:
        hidden = [line.use for line in unit.lines if line.use and line.line not in shown]
        if hidden:
            words = count(len(hidden), "other line")
            groups.append((_make_row(words, _list_amounts(_add_up(hidden), total)),))
        if any((before.net_bytes, before.at_peak_bytes, before.highest_bytes)):
            words = name_origin(Origin.BEFORE_CELL, None, traced=traced)
            groups.append((_make_row(words, (Cell(""), *_list_amounts(before, total)[1:])),))
        if any((unplaced.allocated_bytes, unplaced.net_bytes, unplaced.at_peak_bytes)):
            words = name_origin(Origin.OUTSIDE_LINES, None, traced=traced)
            groups.append((_make_row(words, _list_amounts(unplaced, total)),))
        groups.append((_make_row("total", _list_amounts(total), tone="strong"),))
    name = f"the {traced}" if is_cell else unit.name
    caption = f"What the lines of {name} did on {device.device}"
    columns = (*_LINE_COLUMNS, *number_columns("allocated", "net", "at peak", "highest"))
    return Table(caption, columns, groups, caption_is_seen=False, opens=True)


def list_host(host: HostLines, *, n_lines: int | None) -> Table:
    """Return the traced cell's lines with what changed while each ran, and the rows of a sum.

    At most ``n_lines``, those that matter most, are shown one by one; ``None`` for a usual number.
    """
    changes = {line.line: line.net_bytes for line in host.lines if line.net_bytes}
    weights = {line: (-abs(n_bytes), 0) for line, n_bytes in changes.items()}
    texts = {line.line: line.text for line in host.lines}
    shown = _choose_lines(texts, weights, n_lines, is_cell=True)
    rows = []
    for number in shown:
        amounts = (change_cell(changes[number]),) if number in changes else ()
        rows.append(_make_line(texts[number], number, amounts))
    hidden = [n_bytes for number, n_bytes in changes.items() if number not in shown]
    sums = {
        count(len(hidden), "other line"): sum(hidden) if hidden else None,
        "not read one by one": host.unread_bytes or None,
        name_origin(Origin.OUTSIDE_LINES, None): host.outside_bytes or None,
    }
    rows += [_make_row(words, (change_cell(n),)) for words, n in sums.items() if n is not None]
    total = change_cell(host.after_bytes - host.before_bytes)
    rows.append(_make_row("total", (total,), tone="strong"))
    caption = "What the lines of the cell changed on host"
    columns = (*_LINE_COLUMNS, Column("change"))
    return Table(caption, columns, [(row,) for row in rows], caption_is_seen=False, opens=True)


# -- Which lines -----------------------------------------------------------------------------------


def _choose_lines(
    texts: Mapping[int, str],
    weights: Mapping[int, tuple[int, int]],
    n_lines: int | None,
    *,
    is_cell: bool,
) -> list[int]:
    """Return the numbers of the lines to show.

    All lines of a short unit are shown, else those whose sort keys in ``weights`` come first.
    """
    # ``%%memtrace`` leaves a blank line at the start.
    used = [number for number, text in texts.items() if text.strip() or number in weights]
    numbers = [number for number in texts if used and used[0] <= number <= used[-1]]
    # Up to how many lines a unit is shown whole, and how many of a longer one.
    max_whole, max_lines = (50, 30) if is_cell else (30, 12)
    if n_lines is None and len(numbers) <= max_whole:
        return numbers
    most = max_lines if n_lines is None else n_lines
    return sorted(sorted(weights, key=lambda number: (*weights[number], number))[:most])


def _weigh_line(use: LineUse) -> tuple[int, int]:
    most = max(use.at_peak_bytes, use.highest_bytes, abs(use.net_bytes))
    return -most, -use.allocated_bytes


# -- Rows ------------------------------------------------------------------------------------------


def _make_line(text: str, number: int, amounts: tuple[Cell, ...] = (), *, band: str = "") -> Row:
    shown = cut(text.rstrip().expandtabs(4), LONG_WIDTH)
    swatch = f"gmw-k{band}" if band else ""
    return (Cell(str(number), swatch=swatch), Cell(shown, tone="code"), *amounts)


def _make_row(
    text: str,
    amounts: tuple[Cell, ...] = (),
    *,
    tone: Tone = "muted",
    detail: str = "",
    level: int = 0,
) -> Row:
    """Return a call, or a row for other lines or calls."""
    return (Cell(""), Cell(text, tone=tone, detail=detail, level=level), *amounts)


def _add_up(uses: Sequence[LineUse]) -> LineUse:
    """Return the sum; ``highest_bytes`` is 0, as the highest points are of different moments."""
    return LineUse(
        allocated_bytes=sum(use.allocated_bytes for use in uses),
        net_bytes=sum(use.net_bytes for use in uses),
        at_peak_bytes=sum(use.at_peak_bytes for use in uses),
        highest_bytes=0,
    )


def _list_amounts(use: LineUse, total: LineUse | None = None) -> tuple[Cell, ...]:
    """Return the cells of the columns, with bars of their shares of a total."""
    # The highest of several together is not known.
    has_highest = bool(use.highest_bytes or not use.allocated_bytes)
    return (
        _show_amount(use.allocated_bytes, total.allocated_bytes if total else 0),
        _show_amount(use.net_bytes),
        _show_amount(use.at_peak_bytes, total.at_peak_bytes if total else 0),
        _show_amount(use.highest_bytes) if has_highest else Cell(""),
    )


def _show_amount(n_bytes: int, total_bytes: int = 0) -> Cell:
    share = share_cell(n_bytes, total_bytes).share if n_bytes else None
    return Cell(format_bytes(n_bytes), tone="plain" if n_bytes else "muted", share=share)


# -- Calls below a line ----------------------------------------------------------------------------


def _list_calls(
    calls: Iterable[Call], line_use: LineUse, files: Mapping[str, str], level: int = 1
) -> Iterator[Row]:
    """Yield the rows below a line, each followed by those below it."""
    for call in calls:
        name, detail = _describe_call(call, files)
        # The only call of a line adds where it allocated, and nothing new of how much.
        amounts = () if call.use == line_use else _list_amounts(call.use)
        tone: Tone = "code" if call.functions else "muted"
        yield _make_row(name, amounts, tone=tone, detail=detail, level=level)
        yield from _list_calls(call.calls, line_use, files, level + 1)


def _describe_call(call: Call, files: Mapping[str, str]) -> tuple[str, str]:
    """Return a call's name, and what is said of it more quietly."""
    if not call.functions:
        return count(call.n_calls, "more call"), ""
    names = call.functions
    if len(names) > FEW:
        names = (names[0], "…", names[-1])
    functions = " › ".join(names)
    place = ""
    if call.filename:
        place = f"{files.get(call.filename) or name_file(call.filename)}, line {call.line}"
    if not call.modules:
        return functions, place
    return name_range(call.modules), f"{functions}, {place}" if place else functions


def name_file(filename: str) -> str:
    """Return a file's name with its folder's."""
    return "/".join(PurePath(filename.replace("\\", "/")).parts[-2:]).lstrip("/")


# -- What made the peak ----------------------------------------------------------------------------


def _list_peak(device: DeviceTrace) -> Iterator[Table]:
    if not device.peak:
        return
    total = sum(part.n_bytes for part in device.peak)

    def list_cells(place: Cell | str, parts: Sequence[PeakPart]) -> list[Cell | str]:
        n_bytes, n_blocks = (sum(p.n_bytes for p in parts), sum(p.n_blocks for p in parts))
        return [place, bytes_cell(n_bytes), share_cell(n_bytes, total), f"{n_blocks:,}"]

    rows = []
    listed, rest = split_rest(device.peak, SOME)
    for part in listed:
        kind = Cell(part.kind, tone="muted" if part.kind == "freed since" else "plain")
        place = name_origin(part.origin, part.line)
        rows.append([*list_cells(place, [part]), kind, part.owner or ""])
    if rest:
        rows.append(list_cells(Cell(f"{len(rest)} more", tone="muted"), rest))
    columns = (
        *name_columns("allocated at"),
        *number_columns("bytes", "share", "blocks"),
        Column("what it is", "name", fold=24),
        Column("held by", "code", last="cut"),
    )
    caption = f"What made the peak of {device.device}: {format_bytes(total)}"
    yield Table(caption, columns, [make_group(*rows)])
