"""The table of the recorded cells."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from gpumemwidget.records import CellDevice, CellRecord
from gpumemwidget.report.document import Block, Cell, Column, Document, Heading, Note, Run, Table
from gpumemwidget.report.html import render_html
from gpumemwidget.report.output import Report
from gpumemwidget.report.pieces import (
    change_cell,
    explain_marks,
    has_moved,
    mark_budget,
    peak_cell,
    sort_devices,
    status_tone,
)
from gpumemwidget.report.text import render_text
from gpumemwidget.report.words import name_cell
from gpumemwidget.units import UNKNOWN, format_duration

__all__ = ["N_SHOWN", "report_ledger"]

#: A longer ledger is shown by its end.
N_SHOWN = 50

_COLUMNS = (
    Column("cell", "name"),
    Column("time"),
    Column("status", "words"),
    Column("device", "name"),
    Column("change"),
    Column("peak"),
    Column("first line", "code", last="cut"),
)


def report_ledger(
    records: Sequence[CellRecord], *, dropped: int = 0, last: int | None = None
) -> Report:
    """The cells, the most recent last, with what each did to each device.

    Args:
        records: in the order in which the cells ran.
        dropped: how many older records the ledger has let go.
        last: how many of them to show at most; ``N_SHOWN`` unless told otherwise.
    """
    shown = records[-(N_SHOWN if last is None else last) :]
    n_before = len(records) - len(shown) + dropped
    title = f"{len(records) + dropped} cell{'' if len(records) + dropped == 1 else 's'} recorded"
    heading = [Run(title, "strong")]
    if shown:
        heading.append(Run("change and peak of allocated", "muted"))
    blocks: list[Block] = [Heading(tuple(heading))]
    if shown:
        if n_before:
            blocks.append(Note(_tell_more(len(shown), n_before, dropped)))
        blocks.append(
            Table(
                caption="The recorded cells, with the change and the peak of allocated",
                columns=_COLUMNS,
                groups=tuple(_list_rows(record) for record in shown),
                n_shared=3,
            )
        )
    else:
        blocks.append(Note("Each cell that you run from here on is recorded."))
    blocks.extend(explain_marks(blocks))
    if any(len(_list_moved(record)) < len(record.devices) for record in shown):
        blocks.append(Note("A device that stood still over a cell has no line there."))
    document = Document(tuple(blocks))
    return Report(text=render_text(document), html=render_html(document))


def _tell_more(n_shown: int, n_before: int, dropped: int) -> str:
    text = f"The last {n_shown} are shown; {n_before} came before"
    if not dropped:
        return f"{text}."
    return f"{text}, of which the oldest {dropped} are no longer kept."


def _list_rows(record: CellRecord) -> tuple[tuple[Cell, ...], ...]:
    cell = (
        Cell(name_cell(record.execution_count)),
        Cell(format_duration(record.duration_s)),
        Cell(record.status, tone=status_tone(record.status)),
    )
    first_line = Cell(record.first_line)
    devices = _list_moved(record)
    if not devices:
        nothing = (Cell(UNKNOWN, tone="muted"),) * 3
        return ((*cell, *nothing, first_line),)
    first, *others = (_list_device(device) for device in devices)
    return ((*cell, *first, first_line), *others)


def _list_moved(record: CellRecord) -> list[CellDevice]:
    """The devices to which the cell did something, or the first one where it did nothing."""
    devices = sort_devices(record.devices)
    return [device for device in devices if has_moved(device)] or devices[:1]


def _list_device(device: CellDevice) -> tuple[Cell, ...]:
    """What the cell did to one device; where *allocated* has no peak, *reserved* lends its own."""
    peak = peak_cell(device.allocated.peak_bytes, device.peak_is)
    if device.allocated.peak_bytes is None and device.reserved.peak_bytes is not None:
        reserved = peak_cell(device.reserved.peak_bytes, device.peak_is)
        peak = replace(reserved, mark=f"{reserved.mark} *".strip())
    change = change_cell(device.allocated.change_bytes)
    return (Cell(device.device), change, mark_budget(peak, device))
