"""A unit's source as a listing: which lines are shown, what stands beside them, and the sums."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from gpumemwidget.report.calls import CallRow, list_calls, name_file
from gpumemwidget.report.document import Cell, Listing, ListingRow
from gpumemwidget.traces import DeviceTrace, LineUse, SourceLine, SourceUnit
from gpumemwidget.units import format_bytes

__all__ = ["list_unit", "sum_uses"]

_COLUMNS = ("allocated", "net", "at peak", "highest")

#: A cell of so many lines is shown whole; of longer ones, so many that allocated.
_MOST_WHOLE = 50
_MOST_LINES = 30
#: Of another unit.
_MOST_OTHER_WHOLE = 30
_MOST_OTHER = 12
#: Calls below one line, and the part of its bytes that a call must have to be among them.
_MOST_CALLS = 8
_MOST_CALLS_ASKED = 60
_LEAST_PART = 0.02


@dataclass(frozen=True, slots=True)
class _Totals:
    """What the bars are a part of."""

    allocated_bytes: int
    peak_bytes: int


def sum_uses(device: DeviceTrace) -> LineUse:
    """What the traced cell's lines and what has no line come to, with what stood before.

    The highest is that of no moment, so it is 0.
    """
    lines = device.units[0].lines if device.units else ()
    uses = [device.unplaced, *(line.use for line in lines if line.use is not None)]
    return LineUse(
        allocated_bytes=sum(use.allocated_bytes for use in uses),
        n_allocs=sum(use.n_allocs for use in uses),
        net_bytes=sum(use.net_bytes for use in uses) + device.before.net_bytes,
        at_peak_bytes=sum(use.at_peak_bytes for use in uses) + device.before.at_peak_bytes,
        highest_bytes=0,
    )


def list_unit(
    device: DeviceTrace,
    unit: SourceUnit,
    *,
    bands: Mapping[tuple[str | None, int], str],
    n_lines: int | None,
    depth: int | None,
) -> Listing:
    """A unit's lines with what they did; of the traced cell with the rows that make it add up.

    Args:
        device: what was traced.
        unit: one of its units.
        bands: the keys of the lines' colours.
        n_lines: how many lines are shown at most, those that matter most; ``None`` for a usual
            number.
        depth: how many levels of calls are shown below a line; ``None`` for a usual number, and
            for none in the other units, which show them as lines of their own.
    """
    total = sum_uses(device)
    totals = _Totals(total.allocated_bytes, total.at_peak_bytes)
    is_traced = bool(device.units) and unit is device.units[0]
    rows: list[ListingRow] = []
    shown = _choose_lines(unit, n_lines, is_traced=is_traced)
    for lines in _group(unit.lines, shown):
        if lines[0].line in shown:
            band = bands.get((unit.name, lines[0].line), "")
            levels = 0 if depth is None and not is_traced else depth
            rows.append(_row_of(device, lines[0], totals, band=band, depth=levels))
        elif is_traced:
            rows.append(_row_of_hidden(lines, totals))
        elif rows and rows[-1].kind != "words":
            rows.append(ListingRow("words", "…"))
    if not is_traced and rows and rows[-1].kind == "words":
        rows.pop()
    if is_traced:
        rows.extend(_list_sums(device, total, totals))
    name = "the cell" if is_traced else unit.name
    return Listing(f"What the lines of {name} did on {device.device}", _COLUMNS, tuple(rows))


# -- Which lines -----------------------------------------------------------------------------------


def _choose_lines(unit: SourceUnit, n_lines: int | None, *, is_traced: bool) -> frozenset[int]:
    lines = _strip_blank(unit.lines)
    if n_lines is None and len(lines) <= (_MOST_WHOLE if is_traced else _MOST_OTHER_WHOLE):
        return frozenset(line.line for line in lines)
    most = n_lines if n_lines is not None else _MOST_LINES if is_traced else _MOST_OTHER
    used = [(line.use, line.line) for line in lines if line.use is not None]
    used.sort(key=lambda each: (*_weigh(each[0]), each[1]))
    chosen = {line for _, line in used[:most]}
    if is_traced:
        # A row that stands for one line alone says less than the line.
        places = {line.line: place for place, line in enumerate(lines)}
        for number in sorted(chosen):
            following = lines[places[number] + 1 : places[number] + 3]
            if len(following) == 2 and following[0].use is None and following[1].line in chosen:
                chosen.add(following[0].line)
    return frozenset(chosen)


def _weigh(use: LineUse) -> tuple[int, int]:
    """The key to sort lines by: those that matter most first."""
    most = max(use.at_peak_bytes, use.highest_bytes, abs(use.net_bytes))
    return -most, -use.allocated_bytes


def _strip_blank(lines: Sequence[SourceLine]) -> Sequence[SourceLine]:
    """The lines without the blank ones at both ends: ``%%memtrace`` leaves one."""
    start, end = 0, len(lines)
    while start < end and not lines[start].text.strip() and lines[start].use is None:
        start += 1
    while end > start and not lines[end - 1].text.strip() and lines[end - 1].use is None:
        end -= 1
    return lines[start:end]


def _group(lines: Sequence[SourceLine], shown: frozenset[int]) -> Iterator[list[SourceLine]]:
    """Each line that is shown alone, those between together; in a unit with gaps those too."""
    hidden: list[SourceLine] = []
    before: int | None = None
    for line in _strip_blank(lines):
        is_gap = before is not None and line.line != before + 1
        before = line.line
        if is_gap and not hidden:
            # Lines that the unit does not have: a row of ours stands for them.
            hidden.append(SourceLine(line.line - 1, ""))
        if line.line not in shown:
            hidden.append(line)
            continue
        if hidden:
            yield hidden
            hidden = []
        yield [line]
    if hidden:
        yield hidden


# -- Rows ------------------------------------------------------------------------------------------


def _row_of(
    device: DeviceTrace, line: SourceLine, totals: _Totals, *, band: str, depth: int | None
) -> ListingRow:
    amounts: tuple[Cell, ...] = ()
    calls: tuple[ListingRow, ...] = ()
    if line.use is not None:
        amounts = _list_amounts(line.use, totals)
        least = 0 if depth is not None else int(_LEAST_PART * line.use.allocated_bytes)
        calls = tuple(
            _row_of_call(call, line.use)
            for call in list_calls(
                line.calls,
                depth=depth,
                most=_MOST_CALLS if depth is None else _MOST_CALLS_ASKED,
                least_bytes=least,
                files={unit.filename: name_file(unit.name) for unit in device.units},
            )
        )
    return ListingRow("line", line.text, line.line, amounts, band=band, calls=calls)


def _row_of_hidden(lines: Sequence[SourceLine], totals: _Totals) -> ListingRow:
    uses = [line.use for line in lines if line.use is not None]
    count = "1 line" if len(lines) == 1 else f"{len(lines)} lines"
    if not uses:
        return ListingRow("words", f"{count} that allocated nothing")
    return ListingRow(
        "words",
        f"{count} that matter less" if len(lines) > 1 else f"{count} that matters less",
        amounts=_list_sum(
            sum(use.allocated_bytes for use in uses),
            sum(use.net_bytes for use in uses),
            sum(use.at_peak_bytes for use in uses),
            totals,
        ),
    )


def _row_of_call(call: CallRow, above: LineUse) -> ListingRow:
    amounts: tuple[Cell, ...]
    if call.use is None:
        amounts = (*map(_amount, call.more_bytes), Cell(""))
        return ListingRow("words", call.name, amounts=amounts, level=call.level)
    amounts = _list_amounts(call.use, None)
    if not call.use.highest_bytes and call.use.allocated_bytes:
        amounts = (*amounts[:-1], Cell(""))
    if call.use == above:
        # It says where, and nothing new of how much.
        amounts = ()
    return ListingRow("call", call.name, amounts=amounts, detail=call.detail, level=call.level)


def _list_sums(device: DeviceTrace, total: LineUse, totals: _Totals) -> Iterator[ListingRow]:
    before, unplaced = device.before, device.unplaced
    amounts: tuple[Cell, ...]
    if any((before.net_bytes, before.at_peak_bytes, before.highest_bytes)):
        amounts = (
            Cell(""),
            _amount(before.net_bytes),
            _amount(before.at_peak_bytes, totals.peak_bytes),
            _amount(before.highest_bytes),
        )
        yield ListingRow("words", "before the cell", amounts=amounts)
    if any((unplaced.allocated_bytes, unplaced.net_bytes, unplaced.at_peak_bytes)):
        yield ListingRow("words", "no line", amounts=_list_amounts(unplaced, totals))
    amounts = _list_sum(total.allocated_bytes, total.net_bytes, total.at_peak_bytes, None)
    counters = (device.allocated.after_bytes, device.allocated.peak_bytes)
    # The host's peak is no counter's, but the highest of what was read.
    agrees = counters == (total.net_bytes, total.at_peak_bytes) and device.source == "history"
    yield ListingRow("sum", "all together" + ", as the counters say" * agrees, amounts=amounts)


def _list_amounts(use: LineUse, totals: _Totals | None) -> tuple[Cell, ...]:
    return (
        _amount(use.allocated_bytes, totals.allocated_bytes if totals else None),
        _amount(use.net_bytes),
        _amount(use.at_peak_bytes, totals.peak_bytes if totals else None),
        _amount(use.highest_bytes),
    )


def _list_sum(allocated: int, net: int, at_peak: int, totals: _Totals | None) -> tuple[Cell, ...]:
    """Amounts of several lines, whose highest points are of different moments."""
    return (
        _amount(allocated, totals.allocated_bytes if totals else None),
        _amount(net),
        _amount(at_peak, totals.peak_bytes if totals else None),
        Cell(""),
    )


def _amount(n_bytes: int, total_bytes: int | None = None) -> Cell:
    share = None
    if n_bytes and total_bytes and total_bytes > 0:
        share = min(max(n_bytes / total_bytes, 0.0), 1.0)
    return Cell(format_bytes(n_bytes), tone="plain" if n_bytes else "muted", share=share)
