"""Pieces that several reports are built from: cells of numbers, peaks with their marks, legends."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from gpumemwidget.records import CellDevice, CellRecord, PeakIs, Status
from gpumemwidget.report.document import Block, Cell, Note, Run, Table, Tone
from gpumemwidget.report.words import MARK_MEANINGS, mark_peak, name_record, rank_device
from gpumemwidget.units import format_bytes, format_change, format_duration

__all__ = [
    "bytes_cell",
    "change_cell",
    "explain_marks",
    "has_moved",
    "list_cell_runs",
    "mark_budget",
    "peak_cell",
    "rise_cell",
    "share_cell",
    "sort_devices",
    "status_tone",
]

_STATUS_TONES: dict[Status, Tone] = {"ok": "muted", "error": "bad", "interrupted": "warn"}


def bytes_cell(n_bytes: int | None, *, mark: str = "") -> Cell:
    """An amount; quiet where it is unknown."""
    if n_bytes is None:
        return Cell(format_bytes(None), tone="muted")
    return Cell(format_bytes(n_bytes), mark=mark)


def change_cell(n_bytes: int | None, *, mark: str = "") -> Cell:
    """A difference with its sign; quiet where there is none."""
    if not n_bytes:
        return Cell(format_change(n_bytes), tone="muted")
    return Cell(format_change(n_bytes), mark=mark)


def peak_cell(peak_bytes: int | None, peak_is: PeakIs | None) -> Cell:
    """A peak, marked where it is not the exact one."""
    return bytes_cell(peak_bytes, mark=mark_peak(peak_is))


def mark_budget(cell: Cell, device: CellDevice) -> Cell:
    """A peak, marked and loud where it stood beyond the budget of its cell."""
    if device.stopped_at_bytes is not None:
        return replace(cell, mark=f"!! {cell.mark}".rstrip(), tone="bad")
    if device.is_over_budget:
        return replace(cell, mark=f"! {cell.mark}".rstrip(), tone="warn")
    return cell


def rise_cell(rise_bytes: int | None, peak_is: PeakIs | None) -> Cell:
    """How far a peak stood above the start, as sure as the peak is."""
    return change_cell(rise_bytes, mark=mark_peak(peak_is))


def share_cell(n_bytes: int, total_bytes: int) -> Cell:
    """Which part of the whole it is, in percent and as a bar; blank where there is no whole."""
    if total_bytes <= 0:
        return Cell("")
    share = min(max(n_bytes / total_bytes, 0.0), 1.0)
    percent = 100 * share
    if percent >= 9.95 or percent == 0:
        text = f"{percent:.0f}"
    elif percent >= 0.05:
        text = f"{percent:.1f}"
    else:
        text = "<0.1"
    return Cell(f"{text} %", tone="plain" if share else "muted", share=share)


def sort_devices(devices: Iterable[CellDevice]) -> list[CellDevice]:
    """A cell's devices in the order in which every report has them."""
    return sorted(devices, key=lambda device: rank_device(device.device))


def has_moved(device: CellDevice) -> bool:
    """Whether the cell did anything to the device that the counters show."""
    return any(
        span.change_bytes != 0 or span.rise_bytes not in (0, None)
        for span in (device.allocated, device.reserved)
    )


def status_tone(status: Status) -> Tone:
    """How loudly a status is said."""
    return _STATUS_TONES[status]


def list_cell_runs(record: CellRecord) -> tuple[Run, ...]:
    """What names a cell: its number or first line, how it ended, how long it took."""
    return (
        Run(name_record(record), "strong"),
        Run(record.status, status_tone(record.status)),
        Run(format_duration(record.duration_s)),
    )


def explain_marks(blocks: Iterable[Block]) -> tuple[Note, ...]:
    """A legend for just the marks that occur in the tables."""
    marks = {
        mark
        for block in blocks
        if isinstance(block, Table)
        for group in block.groups
        for row in group
        for cell in row
        for mark in cell.mark.split()
    }
    return tuple(Note(text, mark=mark) for mark, text in MARK_MEANINGS.items() if mark in marks)
