"""Build a cell's record from the readings at its start and end."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from gpumemwidget.model.cells import CellDevice, CellRecord, Span, Status
from gpumemwidget.model.devices import (
    HOST,
    BytesByDevice,
    PeakIs,
    Reading,
    find_outside_bytes,
    rank_device,
)
from gpumemwidget.recording.limits import Budgets

#: A line with one of our magics that neither releases nor restores memory, or shows only the plan.
_OWN_MAGIC = re.compile(
    r"%(?:mem(?:budget|dash|diff|fit|help|leak|ledger|limit|reset|save|stat|trace|vars|why"
    r"|re(?:lease|store)\b(?=.*\s--dry-run\b))"
    r"|(?:un|re)?load_ext\s+gpumemwidget)\b"
)
#: A line that is not blank, without the blanks before it. A ``\r`` alone ends one, too.
_TEXT_LINE = re.compile(r"\S[^\r\n]*")
_NO_BUDGETS = Budgets()


@dataclass(slots=True)
class RunningCell:
    """A cell that has begun and not yet ended. Not to be changed, but by ``note_outside``.

    It is not frozen because making it would take three times as long, in every cell.

    Attributes:
        started_at: seconds since the epoch, UTC.
        start_s: seconds on the monitor's clock.
        before: the readings at the start.
        partial: whether the cell began before we did, as the one that loads the extension.
        start_failed: whether nothing could be read at the start, so that ``before`` is empty.
        budgets: the budgets that were set when it began.
        expected: the peak of each device that was predicted, in bytes.
        is_only_own_magics: whether it has only our magics; see ``CellRecord``.
        source: the cell as it was typed.
        own_before: what this process had of each GPU that it was on, as the driver has it.
        outside_peaks: the most that was outside PyTorch on a GPU, of the samples since.
    """

    execution_count: int | None
    cell_id: str | None
    first_line: str
    started_at: float
    start_s: float
    before: tuple[Reading, ...]
    partial: bool = False
    start_failed: bool = False
    budgets: Budgets = _NO_BUDGETS
    expected: BytesByDevice = ()
    is_only_own_magics: bool = False
    source: str = ""
    own_before: BytesByDevice = ()
    outside_peaks: dict[str, int] = field(default_factory=dict)

    def note_outside(self, own: BytesByDevice, readings: Sequence[Reading]) -> None:
        """Note what was outside PyTorch in a sample, if that is the most yet.

        Args:
            own: what this process had of each GPU, as the driver has it.
            readings: those just before and after it. PyTorch may have freed or taken memory
                meanwhile: by the higher one, so much at least was outside.
        """
        for device, own_bytes in own:
            reserved = [found.reserved_bytes for found in readings if found.device == device]
            outside = [find_outside_bytes(own_bytes, n_bytes) for n_bytes in reserved or [0]]
            known = [n_bytes for n_bytes in outside if n_bytes is not None]
            if len(known) == len(outside):
                self.outside_peaks[device] = max(self.outside_peaks.get(device, 0), min(known))


def find_first_line(source: str) -> str:
    """Return the first line of a cell that describes it.

    Args:
        source: the cell as it was typed; it is read no further than needed.

    Returns:
        The first line that is not blank, stripped, at most 120 characters; a longer one ends in
        ``…``. ``%%memtrace`` counts only if there is nothing else.
    """
    found = _TEXT_LINE.search(source)
    if found is None:
        return ""
    if found[0].split(maxsplit=1)[0] == "%%memtrace":
        found = _TEXT_LINE.search(source, found.end()) or found
    line = found[0].rstrip()
    if len(line) > 120:
        line = f"{line[:119].rstrip()}…"
    # Half of a surrogate pair can't be written to a file or sent to a page.
    return line.encode(errors="replace").decode()


def name_cell(first_line: str, execution_count: int | None) -> str:
    """Return a cell's name beside those of other work: ``In [2] x = 1``."""
    return first_line if execution_count is None else f"In [{execution_count}] {first_line}"


def has_only_own_magics(source: str) -> bool:
    """Return whether a cell has only our magics, and none that releases or restores memory."""
    if "%" not in source:
        return False
    has_magic = False
    for found in _TEXT_LINE.finditer(source):
        if _OWN_MAGIC.match(found[0]):
            has_magic = True
        elif not found[0].startswith("#"):
            return False
    return has_magic


def build_record(
    cell: RunningCell,
    after: Iterable[Reading] | None,
    *,
    end_s: float,
    status: Status,
    execution_count: int | None = None,
    known_devices: Sequence[str] = (),
    budgets: Budgets = _NO_BUDGETS,
    own_after: BytesByDevice = (),
) -> CellRecord:
    """Return the record of a cell that has ended.

    Args:
        cell: the cell.
        after: the readings at the span's end; ``None`` if they could not be read.
        end_s: when it ended, in seconds on the monitor's clock.
        status: how it ended.
        execution_count: the count that IPython gave at the end, if the start had none.
        known_devices: the devices that were seen before the cell began.
        budgets: the budgets at its end. A cell has those of its start, as far as they still hold;
            one that was raised meanwhile holds as it is then.
        own_after: what this process has of each GPU at the end, as the driver has it.

    Returns:
        A record with every device of the start or the end, the host last. A device that was first
        used in this cell began at 0. What could not be read is ``None``; if nothing could be read,
        the record has the known devices with ``None`` for all figures.
    """
    starts = {reading.device: reading for reading in cell.before}
    ends = {reading.device: reading for reading in after or ()}
    own_before, own_after_by_device = dict(cell.own_before), dict(own_after)
    # On a GPU of other libraries alone PyTorch has nothing.
    for device in own_after_by_device:
        if starts and ends and device not in starts and device not in ends:
            starts[device] = ends[device] = Reading(device, 0, 0, 0, 0, "exact")
    names = sorted({**starts, **ends}, key=rank_device) or known_devices
    expected = dict(cell.expected)
    has_budgets = bool(budgets.bytes_by_device)
    devices = []
    for name in names:
        start, end = starts.get(name), ends.get(name)
        budget_bytes = outside = None
        if has_budgets:
            budget_bytes = _find_higher(cell.budgets.find(name), budgets.find(name))
        if name in own_after_by_device:
            sampled_bytes = cell.outside_peaks.get(name, 0)
            own_bytes = own_before.get(name, 0), own_after_by_device[name]
            outside = _build_outside(*own_bytes, start, end, sampled_bytes)
        devices.append(
            _build_device(
                name,
                start,
                end,
                began_here=not cell.start_failed and name not in known_devices and name != HOST,
                partial=cell.partial,
                budget_bytes=budget_bytes,
                predicted_peak_bytes=expected.get(name),
                outside=outside,
            )
        )
    return CellRecord(
        execution_count=cell.execution_count if execution_count is None else execution_count,
        cell_id=cell.cell_id,
        first_line=cell.first_line,
        started_at=cell.started_at,
        start_s=cell.start_s,
        duration_s=max(0.0, end_s - cell.start_s),
        status=status,
        is_only_own_magics=cell.is_only_own_magics,
        devices=tuple(devices),
    )


def lift_peaks(ends: Iterable[Reading], earlier: Iterable[Reading]) -> tuple[Reading, ...]:
    """Return readings with the highest peaks of all spans within the same cell."""
    lifted: dict[str, Reading] = {}
    for reading in (*earlier, *ends):
        known = lifted.get(reading.device)
        lifted[reading.device] = reading if known is None else _lift(known, reading)
    return tuple(lifted.values())


#: From the surest kind of peak to the least sure.
PEAK_KINDS: tuple[PeakIs | None, ...] = ("exact", "at least", "sampled", None)


def _lift(earlier: Reading, reading: Reading) -> Reading:
    return replace(
        reading,
        allocated_peak_bytes=_find_higher(
            earlier.allocated_peak_bytes, reading.allocated_peak_bytes
        ),
        reserved_peak_bytes=_find_higher(earlier.reserved_peak_bytes, reading.reserved_peak_bytes),
        peak_is=max(earlier.peak_is, reading.peak_is, key=PEAK_KINDS.index),
    )


def _find_higher(first: int | None, second: int | None) -> int | None:
    return None if first is None or second is None else max(first, second)


def _build_device(
    device: str,
    start: Reading | None,
    end: Reading | None,
    *,
    began_here: bool,
    partial: bool,
    budget_bytes: int | None,
    predicted_peak_bytes: int | None,
    outside: Span | None,
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
        budget_bytes=budget_bytes,
        predicted_peak_bytes=predicted_peak_bytes,
        outside=outside,
    )


def _build_outside(
    own_before: int,
    own_after: int,
    start: Reading | None,
    end: Reading | None,
    sampled_bytes: int,
) -> Span | None:
    """Return what is outside PyTorch; ``None`` where that is unknown before or after the cell."""
    before = find_outside_bytes(own_before, 0 if start is None else start.reserved_bytes)
    after = find_outside_bytes(own_after, 0 if end is None else end.reserved_bytes)
    if before is None or after is None:
        return None
    return Span(before, after, max(before, after, sampled_bytes))


def _build_span(before: int | None, after: int | None, peak: int | None) -> Span:
    # Without a reading at its start the span is an older one, and so is its peak.
    if before is None or peak is None:
        return Span(before, after, None)
    # The peak is the highest of all, but not every source reads its peak and its present value at
    # one instant.
    return Span(before, after, max(before, peak if after is None else max(peak, after)))


def _count(start: int | None, end: int | None) -> int | None:
    # A total that fell was reset by the user (torch.cuda.reset_accumulated_memory_stats).
    if start is None or end is None or end < start:
        return None
    return end - start
