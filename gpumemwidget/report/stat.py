"""The memory in use now: by this process on each device, by kind, and on each whole device."""

from __future__ import annotations

from collections.abc import Sequence

from gpumemwidget.model.devices import DeviceState, DeviceUse, HardwareNote, rank_device
from gpumemwidget.model.ownership import DeviceAccount, MemoryAccount
from gpumemwidget.report.render.blocks import Block, Cell, Column, Note, Table
from gpumemwidget.report.render.cells import bytes_cell, explain_marks, peak_cell, share_cell
from gpumemwidget.report.render.output import Report
from gpumemwidget.report.render.wording import (
    UNATTRIBUTED,
    name_kind,
    name_reserved,
    word_driver_failure,
    word_hardware_note,
)
from gpumemwidget.units import UNKNOWN

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
_MORE = "%memstat --device: full breakdown of each device."


def report_stat(
    devices: Sequence[DeviceState],
    notes: Sequence[HardwareNote] = (),
    account: MemoryAccount | None = None,
) -> Report:
    """Report the counters of this process, then whole devices with other processes in them."""
    words = [word_hardware_note(note) for note in notes]
    ordered = sorted(devices, key=lambda device: rank_device(device.info.device))
    if not ordered:
        warnings = [Note(note, tone="warn") for note in words]
        return Report((Note("No device was found."), *warnings))
    blocks: list[Block] = [
        Table(
            caption="This process",
            columns=_PROCESS_COLUMNS,
            groups=tuple(_list_process_rows(device) for device in ordered),
            n_shared=1,
            caption_is_seen=True,
        ),
        *_list_kinds(account),
        Table(
            caption="Whole devices",
            columns=_DEVICE_COLUMNS,
            groups=tuple((_list_device_row(device),) for device in ordered),
            caption_is_seen=True,
        ),
    ]
    blocks.extend(explain_marks(blocks))
    blocks.append(Note(_MORE))
    failures = [
        word_driver_failure(device.info.device, device.use.failure)
        for device in ordered
        if device.use is not None and device.use.failure
    ]
    sentences = dict.fromkeys([*failures, *words])
    blocks.extend(Note(sentence, tone="warn") for sentence in sentences)
    return Report(tuple(blocks))


def _list_process_rows(device: DeviceState) -> tuple[tuple[Cell, ...], ...]:
    name = Cell(device.info.device)
    reading = device.reading
    if reading is None:
        return ((name, Cell("not in use", tone="muted")),)
    limit = Cell("none", tone="muted")
    if device.info.limit_bytes is not None:
        limit = bytes_cell(device.info.limit_bytes)
    return (
        (
            name,
            Cell("allocated"),
            bytes_cell(reading.allocated_bytes),
            peak_cell(reading.allocated_peak_bytes, reading.peak_is),
            Cell(""),
        ),
        (
            Cell(name_reserved(device.info.device)),
            bytes_cell(reading.reserved_bytes),
            peak_cell(reading.reserved_peak_bytes, reading.peak_is),
            # A limit is one of reserved bytes.
            limit,
        ),
    )


def _list_device_row(device: DeviceState) -> tuple[Cell, ...]:
    use = device.use or DeviceUse(device.info.device, None, None, None)
    total = device.info.total_bytes if use.total_bytes is None else use.total_bytes
    percent = use.utilization_percent
    return (
        Cell(device.info.device),
        bytes_cell(use.used_bytes),
        bytes_cell(use.free_bytes),
        bytes_cell(total),
        Cell(UNKNOWN, tone="muted") if percent is None else Cell(f"{percent} %"),
        Cell(device.info.name),
    )


def _list_kinds(account: MemoryAccount | None) -> list[Block]:
    accounts = [] if account is None else [each for each in account.devices if each.owned]
    if account is None or not accounts:
        return []
    accounts.sort(key=lambda each: rank_device(each.device))
    blocks: list[Block] = [
        Table(
            caption="Used for",
            columns=_KIND_COLUMNS,
            groups=tuple(_list_kind_rows(each) for each in accounts),
            n_shared=1,
            caption_is_seen=True,
        )
    ]
    if not account.is_complete:
        words = f"There were too many objects to look at in time: some {UNATTRIBUTED} memory has a "
        blocks.append(Note(f"{words}name.", tone="warn"))
    return blocks


def _list_kind_rows(account: DeviceAccount) -> tuple[tuple[Cell, ...], ...]:
    """Return a row for each kind, always one for what is unattributed, and their sum."""
    sums = dict(account.sum_kinds())
    unknown_bytes = sums.pop("unknown", 0)
    found_bytes = sum(sums.values()) + unknown_bytes
    total = max(account.allocated_bytes or 0, found_bytes)
    rows = [
        *((Cell(name_kind(kind, account.device)), n_bytes) for kind, n_bytes in sums.items()),
        (Cell(UNATTRIBUTED, tone="bad" if unknown_bytes else "muted"), unknown_bytes),
    ]
    if total > found_bytes:
        rows.append((Cell("not accounted for", tone="warn"), total - found_bytes))
    name = "allocated" if account.allocated_bytes == total else "total"
    rows.append((Cell(name, tone="strong"), total))
    first, *others = [(cell, bytes_cell(n), share_cell(n, total)) for cell, n in rows]
    return ((Cell(account.device), *first), *others)
