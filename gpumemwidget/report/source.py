"""The listing of a traced cell: its lines, and the calls below them, with what they allocated."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import PurePath

from gpumemwidget.model.traces import (
    Call,
    DeviceTrace,
    HostLines,
    LineUse,
    Origin,
    SourceLine,
    SourceUnit,
)
from gpumemwidget.report.render.blocks import FEW, Cell, Column, Table, Tone
from gpumemwidget.report.render.text import LONG_WIDTH, cut
from gpumemwidget.report.render.wording import count, name_origin, name_range, name_traced
from gpumemwidget.units import format_bytes, format_change

#: Changes on the host below this are shown in grey: malloc keeps small pieces that were freed for
#: their next use and counts them as in use, and Python's own tables come and go.
_RESOLUTION_BYTES = 4096

_LINE_COLUMNS = (Column("", "index"), Column("line", "source"))
_COLUMNS = (*_LINE_COLUMNS, *map(Column, ("allocated", "net", "at peak", "highest")))
_HOST_COLUMNS = (*_LINE_COLUMNS, Column("change"))
#: A line's number, the line, and its amounts, if it has any.
_Row = tuple[Cell, ...]

#: Maximum number of lines up to which a unit is shown whole, and number of lines that allocated
#: which are shown of a longer one: of the traced cell, and of another unit.
_CELL_LINES = (50, 30)
_OTHER_LINES = (30, 12)
_TAB_SIZE = 4


def _add_up(uses: Iterable[LineUse]) -> LineUse:
    """Return the sum; ``highest_bytes`` is 0, as the highest points are of different moments."""
    listed = list(uses)
    return LineUse(
        allocated_bytes=sum(use.allocated_bytes for use in listed),
        net_bytes=sum(use.net_bytes for use in listed),
        at_peak_bytes=sum(use.at_peak_bytes for use in listed),
        highest_bytes=0,
    )


def _sum_uses(device: DeviceTrace) -> LineUse:
    """Return the sum of the traced cell's lines, of what has no line, and of what stood before."""
    lines = device.units[0].lines if device.units else ()
    before = replace(device.before, allocated_bytes=0)
    return _add_up([before, device.unplaced, *(line.use for line in lines if line.use is not None)])


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
    total = _sum_uses(device)
    is_cell = bool(device.units) and unit is device.units[0]
    files = {other.filename: name_file(other.name) for other in device.units}
    weights = {line.line: _weigh_line(line.use) for line in unit.lines if line.use is not None}
    texts = {line.line: line.text for line in unit.lines}
    shown = _choose_lines(texts, weights, n_lines, is_cell=is_cell)
    groups: list[tuple[_Row, ...]] = []
    for line in unit.lines:
        if line.line in shown:
            band = bands.get(line.line, "") if is_cell else ""
            groups.append(_list_line(line, total, files, band=band))
    if is_cell:
        hidden = [line.use for line in unit.lines if line.use and line.line not in shown]
        if hidden:
            words = count(len(hidden), "other line")
            groups.append((_make_row(words, _list_amounts(_add_up(hidden), total)),))
        groups.extend((row,) for row in _list_sums(device, total))
    name = f"the {name_traced(device.timeline)}" if is_cell else unit.name
    caption = f"What the lines of {name} did on {device.device}"
    return Table(caption, _COLUMNS, tuple(groups), caption_is_seen=False, opens=True)


def _make_line(text: str, number: int, amounts: tuple[Cell, ...] = (), *, band: str = "") -> _Row:
    shown = cut(text.rstrip().expandtabs(_TAB_SIZE), LONG_WIDTH)
    swatch = f"gmw-k{band}" if band else ""
    return (Cell(str(number), swatch=swatch), Cell(shown, tone="code"), *amounts)


def _make_row(
    text: str,
    amounts: tuple[Cell, ...] = (),
    *,
    tone: Tone = "muted",
    detail: str = "",
    level: int = 0,
) -> _Row:
    """Return a call, or a row for other lines or calls."""
    return (Cell(""), Cell(text, tone=tone, detail=detail, level=level), *amounts)


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
        amounts = (_show_change(changes[number]),) if number in changes else ()
        rows.append(_make_line(texts[number], number, amounts))
    hidden = [n_bytes for number, n_bytes in changes.items() if number not in shown]
    if hidden:
        rows.append(_make_row(count(len(hidden), "other line"), (_show_change(sum(hidden)),)))
    if host.unread_bytes:
        rows.append(_make_row("not read one by one", (_show_change(host.unread_bytes),)))
    if host.outside_bytes:
        words = name_origin(Origin.OUTSIDE_LINES, None)
        rows.append(_make_row(words, (_show_change(host.outside_bytes),)))
    total = _show_change(host.after_bytes - host.before_bytes)
    rows.append(_make_row("total", (total,), tone="strong"))
    groups = tuple((row,) for row in rows)
    caption = "What the lines of the cell changed on host"
    return Table(caption, _HOST_COLUMNS, groups, caption_is_seen=False, opens=True)


def _show_change(n_bytes: int) -> Cell:
    is_small = abs(n_bytes) < _RESOLUTION_BYTES
    return Cell(format_change(n_bytes), tone="muted" if is_small else "plain")


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
    max_whole, max_lines = _CELL_LINES if is_cell else _OTHER_LINES
    if n_lines is None and len(numbers) <= max_whole:
        return numbers
    most = max_lines if n_lines is None else n_lines
    return sorted(sorted(weights, key=lambda number: (*weights[number], number))[:most])


def _weigh_line(use: LineUse) -> tuple[int, int]:
    """Return the sort key of a line: those that matter most come first."""
    most = max(use.at_peak_bytes, use.highest_bytes, abs(use.net_bytes))
    return -most, -use.allocated_bytes


# -- Rows ------------------------------------------------------------------------------------------


def _list_line(
    line: SourceLine,
    total: LineUse,
    files: Mapping[str, str],
    *,
    band: str,
) -> tuple[_Row, ...]:
    """Return a line with the calls below it, all levels in one."""
    if line.use is None:
        return (_make_line(line.text, line.line, band=band),)
    row = _make_line(line.text, line.line, _list_amounts(line.use, total), band=band)
    return (row, *_list_calls(line.calls, line.use, files))


def _list_sums(device: DeviceTrace, total: LineUse) -> Iterator[_Row]:
    before, unplaced, traced = device.before, device.unplaced, name_traced(device.timeline)
    if any((before.net_bytes, before.at_peak_bytes, before.highest_bytes)):
        words = name_origin(Origin.BEFORE_CELL, None, traced=traced)
        yield _make_row(words, (Cell(""), *_list_amounts(before, total)[1:]))
    if any((unplaced.allocated_bytes, unplaced.net_bytes, unplaced.at_peak_bytes)):
        words = name_origin(Origin.OUTSIDE_LINES, None, traced=traced)
        yield _make_row(words, _list_amounts(unplaced, total))
    yield _make_row("total", _list_amounts(total), tone="strong")


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
    share = None
    if n_bytes and total_bytes > 0:
        share = min(max(n_bytes / total_bytes, 0.0), 1.0)
    return Cell(format_bytes(n_bytes), tone="plain" if n_bytes else "muted", share=share)


# -- Calls below a line ----------------------------------------------------------------------------


def _list_calls(
    calls: Iterable[Call], line_use: LineUse, files: Mapping[str, str], level: int = 1
) -> Iterator[_Row]:
    """Return the rows below a line, each followed by those below it."""
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
