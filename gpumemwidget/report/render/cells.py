"""Cells and notes that several reports are built from: amounts, peaks, marks and their legend."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Protocol, TypeVar

from gpumemwidget.model.cells import CellDevice, Status
from gpumemwidget.model.devices import PeakIs, rank_device
from gpumemwidget.model.ownership import DeviceBytes
from gpumemwidget.report.render.blocks import Block, Cell, Note, Table, Tone
from gpumemwidget.units import format_bytes, format_change

#: Stands before a lower bound in a table; a note below explains it.
AT_LEAST_MARK = "≥"

#: Marks of peaks that are not exact.
_PEAK_MARKS: dict[PeakIs | None, str] = {"at least": "≥", "sampled": "~"}
#: Meanings of the marks before numbers, in the order of the legend.
_MARK_MEANINGS = {
    "≥": "at least: the peak counter was reset during the cell, or recording began later",
    "~": "sampled at intervals: the true peak may be higher",
    "*": "peak of resident memory (malloc has no peak counter)",
    "!": "above the cell's budget (%membudget)",
}

STATUS_TONES: dict[Status, Tone] = {"ok": "muted", "error": "bad", "interrupted": "warn"}


def bytes_cell(n_bytes: int | None, *, mark: str = "") -> Cell:
    """Return an amount; an unknown one is grey."""
    if n_bytes is None:
        return Cell(format_bytes(None), tone="muted")
    return Cell(format_bytes(n_bytes), mark=mark)


def device_bytes_cell(amounts: DeviceBytes, device: str) -> Cell:
    """Return the bytes on one device, marked if they are a lower bound."""
    return bytes_cell(amounts.on(device), mark=AT_LEAST_MARK if amounts.is_at_least else "")


def explain_lower_bounds(amounts: Iterable[DeviceBytes]) -> tuple[Note, ...]:
    """Return the legend of the mark of ``device_bytes_cell``, if any of these amounts has it."""
    if not any(amount.is_at_least for amount in amounts):
        return ()
    text = "at least: there may be more, not found in time or held by C++ code"
    return (Note(text, mark=AT_LEAST_MARK),)


def change_cell(n_bytes: int | None, *, mark: str = "") -> Cell:
    """Return a difference with its sign; none is grey."""
    if not n_bytes:
        return Cell(format_change(n_bytes), tone="muted")
    return Cell(format_change(n_bytes), mark=mark)


def peak_cell(peak_bytes: int | None, peak_is: PeakIs | None, *, is_resident: bool = False) -> Cell:
    """Return a peak, marked if it is not exact, and if it is one of resident memory."""
    mark = _PEAK_MARKS.get(peak_is, "")
    return bytes_cell(peak_bytes, mark=f"{mark} *".strip() if is_resident else mark)


def mark_budget(cell: Cell, device: CellDevice) -> Cell:
    """Return a peak's cell, marked and coloured if the peak exceeds the budget of its cell."""
    if device.is_over_budget:
        return replace(cell, mark=f"! {cell.mark}".rstrip(), tone="warn")
    return cell


def share_cell(n_bytes: int, total_bytes: int) -> Cell:
    """Return a share in percent and as a bar; blank if there is no whole."""
    if total_bytes <= 0:
        return Cell("")
    share = min(max(n_bytes / total_bytes, 0.0), 1.0)
    percent = 100 * share
    text = f"{percent:.0f}" if percent >= 9.95 or percent == 0 else f"{percent:.1f}"
    text = "<0.1" if 0 < percent < 0.05 else text
    return Cell(f"{text} %", tone="plain" if share else "muted", share=share)


class _OfDevice(Protocol):
    @property
    def device(self) -> str: ...


_D = TypeVar("_D", bound=_OfDevice)


def sort_devices(records: Iterable[_D]) -> list[_D]:
    """Return records of one device each in the order that every report has."""
    return sorted(records, key=lambda record: rank_device(record.device))


def has_moved(device: CellDevice) -> bool:
    """Return whether the cell changed the device's memory."""
    return device.outside_change_bytes != 0 or any(
        span.change_bytes != 0 or span.rise_bytes not in (0, None)
        for span in (device.allocated, device.reserved)
    )


def explain_marks(blocks: Iterable[Block]) -> tuple[Note, ...]:
    """Return the legend of the marks that occur in the tables."""
    tables = [block for block in blocks if isinstance(block, Table)]
    rows = (row for table in tables for rows in table.groups for row in rows)
    marks = {mark for row in rows for cell in row for mark in cell.mark.split()}
    return tuple(Note(text, mark=mark) for mark, text in _MARK_MEANINGS.items() if mark in marks)
