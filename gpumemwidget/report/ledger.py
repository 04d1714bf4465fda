"""The table of the recorded cells."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from gpumemwidget.model.cells import CellDevice, CellRecord
from gpumemwidget.report.render.blocks import Block, Cell, Column, Heading, Note, Run, Table
from gpumemwidget.report.render.cells import (
    STATUS_TONES,
    change_cell,
    explain_marks,
    has_moved,
    mark_budget,
    peak_cell,
    sort_devices,
)
from gpumemwidget.report.render.output import Report
from gpumemwidget.report.wording.words import count, name_cell
from gpumemwidget.units import UNKNOWN, format_duration

#: Number of cells that are shown: a longer ledger is shown by its end.
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
    records: Sequence[CellRecord],
    *,
    dropped: int = 0,
    last: int | None = None,
    shows_own_magics: bool = True,
) -> Report:
    """Report the cells with what each did to each device, the most recent last.

    Args:
        records: in the order in which the cells ran.
        dropped: how many older records the ledger has let go.
        last: maximum number of cells; ``N_SHOWN`` if it is not given.
        shows_own_magics: show cells that have nothing but gpumemwidget's own magics as well.
    """
    listed = [each for each in records if shows_own_magics or not each.is_only_own_magics]
    n_hidden = len(records) - len(listed)
    shown = listed[-(N_SHOWN if last is None else last) :]
    n_before = len(listed) - len(shown) + dropped
    title = Run(f"{count(len(records) + dropped, 'cell')} recorded", "strong")
    what = Run("change and peak of allocated memory, per cell", "muted")
    blocks: list[Block] = [Heading((title, what) if shown else (title,))]
    if shown and n_before:
        words = f"The last {len(shown)} are shown; {n_before} came before"
        gone = f", of which the oldest {dropped} are no longer kept" if dropped else ""
        blocks.append(Note(f"{words}{gone}."))
    if shown:
        blocks.append(
            Table(
                caption="The recorded cells, with change and peak of allocated memory",
                columns=_COLUMNS,
                groups=tuple(_list_rows(record) for record in shown),
                n_shared=3,
            )
        )
    else:
        blocks.append(Note("Every cell that you run from now on is recorded."))
    if n_hidden:
        cells = count(n_hidden, "gpumemwidget cell")
        blocks.append(Note(f"{cells} hidden: %memledger --all shows everything."))
    blocks.extend(explain_marks(blocks))
    if any(len(_list_moved(record)) < len(record.devices) for record in shown):
        blocks.append(Note("Devices that a cell did not change are left out."))
    return Report(tuple(blocks))


def _list_rows(record: CellRecord) -> tuple[tuple[Cell, ...], ...]:
    cell = (
        Cell(name_cell(record.execution_count)),
        Cell(format_duration(record.duration_s)),
        Cell(record.status, tone=STATUS_TONES[record.status]),
    )
    unknown = (Cell(UNKNOWN, tone="muted"),) * 3
    first, *others = [_list_device(device) for device in _list_moved(record)] or [unknown]
    return ((*cell, *first, Cell(record.first_line)), *others)


def _list_moved(record: CellRecord) -> list[CellDevice]:
    """Return the devices that the cell changed, or the first one if it changed none."""
    devices = sort_devices(record.devices)
    return [device for device in devices if has_moved(device)] or devices[:1]


def _list_device(device: CellDevice) -> tuple[Cell, ...]:
    """Return a device's change and peak; the peak of *reserved* stands in for an unknown one."""
    peak = peak_cell(device.allocated.peak_bytes, device.peak_is)
    if device.allocated.peak_bytes is None and device.reserved.peak_bytes is not None:
        reserved = peak_cell(device.reserved.peak_bytes, device.peak_is)
        peak = replace(reserved, mark=f"{reserved.mark} *".strip())
    change = change_cell(device.allocated.change_bytes)
    return (Cell(device.device), change, mark_budget(peak, device))
