"""The memory in use now, by this process and on whole devices; its limits, and peaks reset."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from gpumemwidget.model.devices import (
    Budget,
    DeviceState,
    DeviceUse,
    HardwareNote,
    Limit,
    Reading,
    rank_device,
)
from gpumemwidget.model.ownership import DeviceAccount, MemoryAccount
from gpumemwidget.report.render.blocks import Block, Cell, Column, Note, Table
from gpumemwidget.report.render.cells import (
    bytes_cell,
    explain_marks,
    peak_cell,
    share_cell,
    sort_devices,
)
from gpumemwidget.report.render.output import Report
from gpumemwidget.report.render.wording import (
    UNATTRIBUTED,
    name_kind,
    name_reserved,
    word_driver_failure,
    word_hardware_note,
)
from gpumemwidget.units import UNKNOWN, format_bytes

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
    # One reading for both tables: the walk itself changes what malloc has in use.
    owners = [] if account is None else account.devices
    owned = {device.device: device.allocated_bytes for device in owners if device.owned}
    own_rows = tuple(
        _list_process_rows(device, owned.get(device.info.device)) for device in ordered
    )
    device_rows = tuple((_list_device_row(device),) for device in ordered)
    blocks: list[Block] = [
        Table("This process", _PROCESS_COLUMNS, own_rows, n_shared=1),
        *_list_kinds(account),
        Table("Whole devices", _DEVICE_COLUMNS, device_rows),
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


def _list_process_rows(
    device: DeviceState, owned_bytes: int | None
) -> tuple[tuple[Cell, ...], ...]:
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
            bytes_cell(reading.allocated_bytes if owned_bytes is None else owned_bytes),
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
    accounts = [] if account is None else [part for part in account.devices if part.owned]
    if account is None or not accounts:
        return []
    groups = tuple(map(_list_kind_rows, sort_devices(accounts)))
    blocks: list[Block] = [Table("Used for", _KIND_COLUMNS, groups, n_shared=1)]
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


# -- What the user sets: limits, budgets, peaks ----------------------------------------------------

_LIMIT_COLUMNS = (
    Column("device", "name"),
    Column("limit"),
    Column("of"),
    Column("reserved"),
    Column("left"),
)
_RESET_COLUMNS = (
    Column("device", "name"),
    Column("allocated, peak was"),
    Column("reserved, peak was"),
)


def report_limits(limits: Sequence[Limit], notes: Sequence[HardwareNote] = ()) -> Report:
    """Report the limits, with a warning for each that is below what is reserved already."""
    ordered = sort_devices(limits)
    blocks: list[Block] = [Note("There is no GPU that PyTorch could limit.")]
    if ordered:
        caption = "Limit of what PyTorch may reserve"
        groups = tuple((_list_cells(limit),) for limit in ordered)
        blocks = [Table(caption, _LIMIT_COLUMNS, groups, caption_is_seen=False)]
    if any(limit.is_waiting for limit in ordered):
        blocks.append(Note("PyTorch sets these limits when CUDA is first used."))
    for limit in ordered:
        excess = _find_excess(limit)
        if excess:
            words = (
                f"{limit.device} has {format_bytes(excess)} more reserved than its limit. What is "
                "allocated stays allocated; of new requests, only those that fit into the cache "
                "succeed. torch.cuda.empty_cache() gives back what is cached, and %memvars "
                f"--device {limit.device} shows who holds the rest."
            )
            blocks.append(Note(words, tone="warn"))
    blocks.extend(Note(word_hardware_note(note), tone="warn") for note in notes)
    return Report(tuple(blocks))


def _list_cells(limit: Limit) -> tuple[Cell, ...]:
    total, reserved = limit.total_bytes, limit.reserved_bytes
    amount = bytes_cell(limit.limit_bytes)
    if limit.share is not None:
        amount = Cell(f"{100 * limit.share:.10g} %")
    elif limit.limit_bytes is None and (total is not None or reserved is None):
        amount = Cell("none", tone="muted")
    start = (Cell(limit.device), amount, Cell("") if total is None else bytes_cell(total))
    if reserved is None:
        return (*start, Cell("not in use yet", tone="muted"), Cell(""))
    top = total if limit.limit_bytes is None else limit.limit_bytes
    left = bytes_cell(None if top is None else max(top - reserved, 0))
    return (
        *start,
        bytes_cell(reserved),
        replace(left, tone="bad") if _find_excess(limit) else left,
    )


def _find_excess(limit: Limit) -> int:
    """Return the bytes that are reserved beyond the limit."""
    if limit.is_waiting or limit.limit_bytes is None or limit.reserved_bytes is None:
        return 0
    return max(limit.reserved_bytes - limit.limit_bytes, 0)


def report_reset(devices: Sequence[str], before: Sequence[Reading]) -> Report:
    """Report on which devices the peaks were reset, and what they were."""
    if not devices:
        return Report((Note("No GPU in use yet: nothing to reset."),))
    groups = tuple(
        (
            (
                Cell(reading.device),
                peak_cell(reading.allocated_peak_bytes, reading.peak_is),
                peak_cell(reading.reserved_peak_bytes, reading.peak_is),
            ),
        )
        for reading in before
        if reading.device in devices
    )
    table = Table("PyTorch's peaks, now reset", _RESET_COLUMNS, groups)
    note = Note("The recorded cells keep their peaks.")
    return Report((table, *explain_marks([table]), note))


def describe_budgets(budgets: Sequence[Budget], *, has_new: bool = False) -> str:
    """Return what ``%membudget`` answers: the budgets, and what follows where one is new."""
    listed = [f"{budget.device} {format_bytes(budget.budget_bytes)}" for budget in budgets]
    words = f"membudget: {'; '.join(listed) or 'no budget is set'}"
    return f"{words}\nFrom the next cell on, cells that exceed it are marked." if has_new else words
