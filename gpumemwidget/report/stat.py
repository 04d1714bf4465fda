"""The present: this process on each device, and each device as a whole."""

from __future__ import annotations

from collections.abc import Sequence

from gpumemwidget.records import DeviceReport
from gpumemwidget.report.document import Block, Cell, Column, Document, Note, Table
from gpumemwidget.report.html import render_html
from gpumemwidget.report.output import Report
from gpumemwidget.report.pieces import bytes_cell, explain_marks, peak_cell
from gpumemwidget.report.text import render_text
from gpumemwidget.report.words import name_counters, rank_device
from gpumemwidget.units import UNKNOWN

__all__ = ["report_stat"]

_PROCESS_COLUMNS = (
    Column("device", "name"),
    Column("memory", "name"),
    Column("now"),
    Column("peak"),
    Column("limit"),
)
_DEVICE_COLUMNS = (
    Column("device", "name"),
    Column("used"),
    Column("free"),
    Column("total"),
    Column("busy"),
    Column("name", "words", last="wrap"),
)


def report_stat(devices: Sequence[DeviceReport], notes: Sequence[str] = ()) -> Report:
    """The counters of this process, then the whole devices with other processes in them.

    Args:
        devices: what was read; a device that the process has not used has no reading.
        notes: sentences on what could not be read.
    """
    ordered = sorted(devices, key=lambda device: rank_device(device.info.device))
    blocks: list[Block] = []
    if ordered:
        blocks.append(
            Table(
                caption="This process",
                columns=_PROCESS_COLUMNS,
                groups=tuple(_list_process_rows(device) for device in ordered),
                n_shared=1,
                caption_is_seen=True,
            )
        )
        blocks.append(
            Table(
                caption="Whole devices",
                columns=_DEVICE_COLUMNS,
                groups=tuple((_list_device_row(device),) for device in ordered),
                caption_is_seen=True,
            )
        )
    else:
        blocks.append(Note("No device was found."))
    blocks.extend(explain_marks(blocks))
    blocks.extend(Note(device.note, tone="warn") for device in ordered if device.note)
    blocks.extend(Note(note, tone="warn") for note in notes)
    document = Document(tuple(blocks))
    return Report(text=render_text(document), html=render_html(document))


def _list_process_rows(device: DeviceReport) -> tuple[tuple[Cell, ...], ...]:
    name = Cell(device.info.device)
    reading = device.reading
    if reading is None:
        return ((name, Cell("not used by this process yet", tone="muted", spans_rest=True)),)
    names = name_counters(device.info.device)
    return (
        (
            name,
            Cell(names.allocated, detail=names.allocated_detail),
            bytes_cell(reading.allocated_bytes),
            peak_cell(reading.allocated_peak_bytes, reading.peak_is),
            Cell(""),
        ),
        (
            Cell(names.reserved),
            bytes_cell(reading.reserved_bytes),
            peak_cell(reading.reserved_peak_bytes, reading.peak_is),
            # It is the reserved bytes that a limit holds back.
            bytes_cell(device.info.limit_bytes)
            if device.info.limit_bytes is not None
            else Cell("none", tone="muted"),
        ),
    )


def _list_device_row(device: DeviceReport) -> tuple[Cell, ...]:
    use = device.use
    total = device.info.total_bytes
    if use is not None and use.total_bytes is not None:
        total = use.total_bytes
    percent = use.utilization_percent if use else None
    return (
        Cell(device.info.device),
        bytes_cell(use.used_bytes if use else None),
        bytes_cell(use.free_bytes if use else None),
        bytes_cell(total),
        Cell(UNKNOWN, tone="muted") if percent is None else Cell(f"{percent} %"),
        Cell(device.info.name),
    )
