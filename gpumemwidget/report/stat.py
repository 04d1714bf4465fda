"""The present: this process on each device, what its memory is for, and each whole device."""

from __future__ import annotations

from collections.abc import Sequence

from gpumemwidget.records import DeviceAccount, DeviceReport, MemoryAccount
from gpumemwidget.report.document import Block, Cell, Column, Document, Note, Table
from gpumemwidget.report.html import render_html
from gpumemwidget.report.output import Report
from gpumemwidget.report.pieces import bytes_cell, explain_marks, peak_cell, share_cell
from gpumemwidget.report.text import render_text
from gpumemwidget.report.words import count_kind, name_counters, rank_device
from gpumemwidget.units import UNKNOWN

__all__ = ["report_stat"]

_PROCESS_COLUMNS = (
    Column("device", "name"),
    Column("memory", "name"),
    Column("now"),
    Column("peak"),
    Column("limit"),
)
_KIND_COLUMNS = (
    Column("device", "name"),
    Column("kind", "words"),
    Column("bytes"),
    Column("share"),
)
_DEVICE_COLUMNS = (
    Column("device", "name"),
    Column("used"),
    Column("free"),
    Column("total"),
    Column("busy"),
    Column("name", "words", last="wrap"),
)
#: Where each whole device is told in parts.
_MORE = "%memstat --device shows all of each device in parts that add up."


def report_stat(
    devices: Sequence[DeviceReport],
    notes: Sequence[str] = (),
    account: MemoryAccount | None = None,
) -> Report:
    """The counters of this process, then the whole devices with other processes in them.

    Args:
        devices: what was read; a device that the process has not used has no reading.
        notes: sentences on what could not be read.
        account: whose kinds stand between the two; ``None`` where there is none.
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
        blocks.extend(_list_kinds(account))
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
    if ordered:
        blocks.append(Note(_MORE))
    blocks.extend(Note(device.note, tone="warn") for device in ordered if device.note)
    told = {device.note for device in ordered}
    blocks.extend(Note(note, tone="warn") for note in notes if note not in told)
    document = Document(tuple(blocks))
    return Report(text=render_text(document), html=render_html(document))


def _list_kinds(account: MemoryAccount | None) -> list[Block]:
    accounts = [] if account is None else [each for each in account.devices if each.owned]
    if account is None or not accounts:
        return []
    accounts.sort(key=lambda each: rank_device(each.device))
    table = Table(
        caption="What it is for",
        columns=_KIND_COLUMNS,
        groups=tuple(_list_kind_rows(each) for each in accounts),
        n_shared=1,
        caption_is_seen=True,
    )
    if account.is_complete:
        return [table]
    return [
        table,
        Note("There was too much to look at all of it: less may be without a name.", tone="warn"),
    ]


def _list_kind_rows(account: DeviceAccount) -> tuple[tuple[Cell, ...], ...]:
    """A line for each kind, that of the unknown always, and what they are together."""
    sums = dict(account.sum_kinds())
    unknown_bytes = sums.pop("unknown", 0)
    found_bytes = sum(sums.values()) + unknown_bytes
    allocated = account.allocated_bytes
    total = max(allocated or 0, found_bytes)
    rows = [
        (Cell(count_kind(kind)), bytes_cell(n_bytes), share_cell(n_bytes, total))
        for kind, n_bytes in sums.items()
    ]
    unknown = Cell("unknown", tone="bad" if unknown_bytes else "muted")
    rows.append((unknown, bytes_cell(unknown_bytes), share_cell(unknown_bytes, total)))
    if total > found_bytes:
        missing = total - found_bytes
        words = Cell("not accounted for", tone="warn")
        rows.append((words, bytes_cell(missing), share_cell(missing, total)))
    name = "allocated" if allocated == total else "together"
    rows.append((Cell(name, tone="strong"), bytes_cell(total), share_cell(total, total)))
    return ((Cell(account.device), *rows[0]), *rows[1:])


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
