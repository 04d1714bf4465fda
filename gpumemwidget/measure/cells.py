"""From the readings at a cell's two ends to its record: pure, so that each rule can be tested."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from gpumemwidget.records import HOST, CellDevice, CellRecord, PeakIs, Reading, Span, Status

if TYPE_CHECKING:
    from gpumemwidget.measure.budget import BudgetTable, Crossing

__all__ = ["RunningCell", "build_record", "find_first_line", "lift_peaks"]

#: How much of a cell's first line a record keeps, in characters.
FIRST_LINE_LIMIT = 120
#: The next line that is not blank, from its first sign on, and no further than it takes to see
#: that it is too long.
_LINE = re.compile(rf"\S[^\r\n]{{0,{FIRST_LINE_LIMIT}}}")
#: The magic that asks for a report says nothing of what the cell does.
_TRACE_MAGIC = "%%memtrace"


@dataclass(slots=True)
class RunningCell:
    """A cell that has begun and not yet ended.

    Not to be changed, but for what becomes of it (``stopped``); it is not frozen because that takes
    three times as long, in every cell.
    """

    execution_count: int | None
    cell_id: str | None
    first_line: str
    #: Seconds since the epoch, UTC.
    started_at: float
    #: Seconds on the monitor's clock.
    start_s: float
    #: What stood at the start.
    before: tuple[Reading, ...]
    #: The cell began before we did: it is the one that loads the extension.
    partial: bool = False
    #: Nothing could be read at the start, so ``before`` is empty.
    start_failed: bool = False
    #: What it may have, as was set before it began; ``None`` where nothing was.
    budgets: BudgetTable | None = None
    #: Where it was interrupted for going beyond that.
    stopped: Crossing | None = None


def find_first_line(source: str) -> str:
    """The first line of a cell that says what it does.

    Only as much of the source is looked at as it takes to find it.

    Args:
        source: the cell as it was typed.

    Returns:
        The first line that is not blank, without the blanks around it, at most 120 characters; a
        longer one ends in ``…``. ``%%memtrace`` counts only if there is nothing else.
    """
    line, end = _cut_line(source, 0)
    if line.split(maxsplit=1)[:1] == [_TRACE_MAGIC]:
        end_of_magic = source.find("\n", end)
        return (end_of_magic >= 0 and _cut_line(source, end_of_magic)[0]) or line
    return line


def _cut_line(source: str, position: int) -> tuple[str, int]:
    """The next line that is not blank, and where what was looked at ends."""
    match = _LINE.search(source, position)
    if match is None:
        return "", len(source)
    line = match[0].rstrip()
    if len(line) > FIRST_LINE_LIMIT:
        line = f"{line[: FIRST_LINE_LIMIT - 1]}…"
    return line, match.end()


def build_record(
    cell: RunningCell,
    after: Iterable[Reading] | None,
    *,
    end_s: float,
    status: Status,
    execution_count: int | None = None,
    known_devices: Sequence[str] = (),
) -> CellRecord:
    """The record of a cell that has ended.

    Args:
        cell: the cell.
        after: the readings of the span's end; ``None`` where they could not be read.
        end_s: when it ended, in seconds on the monitor's clock.
        status: how it ended.
        execution_count: the count that IPython gave at the end, where the start had none.
        known_devices: the devices that were seen before the cell began.

    Returns:
        A record with every device of the start or the end, the host last. A device that was not
        there at the start began at 0 if it was first touched in this cell. What could not be read
        is ``None``; if nothing could be read, the known devices stand there so.
    """
    starts = {reading.device: reading for reading in cell.before}
    ends = {reading.device: reading for reading in after or ()}
    names: Iterable[str] = ends
    if not ends.keys() >= starts.keys():
        names = sorted({**starts, **ends}, key=_is_host)
    elif cell.start_failed and after is None:
        names = known_devices
    return CellRecord(
        execution_count=cell.execution_count if execution_count is None else execution_count,
        cell_id=cell.cell_id,
        first_line=cell.first_line,
        started_at=cell.started_at,
        start_s=cell.start_s,
        duration_s=max(0.0, end_s - cell.start_s),
        status=status,
        devices=tuple(
            [
                _build_device(
                    name,
                    starts.get(name),
                    ends.get(name),
                    began_here=not cell.start_failed and name not in known_devices and name != HOST,
                    partial=cell.partial,
                )
                for name in names
            ]
        ),
    )


def lift_peaks(ends: Iterable[Reading], earlier: Iterable[Reading]) -> tuple[Reading, ...]:
    """Readings with the peaks of spans that ran before theirs, within the same cell.

    Args:
        ends: the readings; of several of one device the last is what stands.
        earlier: those of the other spans' ends.
    """
    lifted: dict[str, Reading] = {}
    for reading in (*earlier, *ends):
        known = lifted.get(reading.device)
        lifted[reading.device] = reading if known is None else _lift(known, reading)
    return tuple(lifted.values())


#: From the surest kind of peak to the least sure.
_KINDS: tuple[PeakIs | None, ...] = ("exact", "at least", "sampled", None)


def _lift(earlier: Reading, reading: Reading) -> Reading:
    return replace(
        reading,
        allocated_peak_bytes=_find_higher(
            earlier.allocated_peak_bytes, reading.allocated_peak_bytes
        ),
        reserved_peak_bytes=_find_higher(earlier.reserved_peak_bytes, reading.reserved_peak_bytes),
        peak_is=max(earlier.peak_is, reading.peak_is, key=_KINDS.index),
    )


def _find_higher(first: int | None, second: int | None) -> int | None:
    return None if first is None or second is None else max(first, second)


def _is_host(device: str) -> bool:
    return device == HOST


def _build_device(
    device: str, start: Reading | None, end: Reading | None, *, began_here: bool, partial: bool
) -> CellDevice:
    was_there = start is not None
    if start is None:
        zero = 0 if began_here else None
        start = Reading(device, zero, zero, num_alloc_retries=zero, num_ooms=zero)
    if end is None:
        end = Reading(device, None, None)
    allocated = _build_span(start.allocated_bytes, end.allocated_bytes, end.allocated_peak_bytes)
    reserved = _build_span(start.reserved_bytes, end.reserved_bytes, end.reserved_peak_bytes)
    peak_is: PeakIs | None = None
    if allocated.peak_bytes is not None or reserved.peak_bytes is not None:
        peak_is = "at least" if partial and was_there else end.peak_is
    return CellDevice(
        device=device,
        allocated=allocated,
        reserved=reserved,
        peak_is=peak_is,
        num_alloc_retries=_count(start.num_alloc_retries, end.num_alloc_retries),
        num_ooms=_count(start.num_ooms, end.num_ooms),
    )


def _build_span(before: int | None, after: int | None, peak: int | None) -> Span:
    # Without its start the span is an older one, and so is its mark.
    if before is None or peak is None:
        return Span(before, after, None)
    # The mark is the highest of all, but not every source reads its mark and its present value at
    # one instant.
    return Span(before, after, max(before, peak if after is None else max(peak, after)))


def _count(start: int | None, end: int | None) -> int | None:
    # A total that fell was reset by the user (torch.cuda.reset_accumulated_memory_stats).
    if start is None or end is None or end < start:
        return None
    return end - start
