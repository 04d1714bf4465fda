"""The memory in use now, by this process and on whole devices; its limits, and peaks reset."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import compress

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
from gpumemwidget.report.render.blocks import (
    Block,
    Cell,
    Column,
    Group,
    Note,
    Table,
    bytes_cell,
    explain_marks,
    make_group,
    name_columns,
    number_columns,
    peak_cell,
    share_cell,
    sort_devices,
    warn,
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


def report_stat(
    devices: Sequence[DeviceState],
    notes: Sequence[HardwareNote] = (),
    account: MemoryAccount | None = None,
) -> Report:
    """Report the counters of this process, then whole devices with other processes in them."""
    words = [word_hardware_note(note) for note in notes]
    ordered = sorted(devices, key=lambda device: rank_device(device.info.device))
    if not ordered:
        return Report([Note("No device was found."), *warn(*words)])
    # One reading for both tables: the walk itself changes what malloc has in use.
    owners = [] if account is None else account.devices
    owned = {device.device: device.allocated_bytes for device in owners if device.owned}
    has_limit = any(device.info.limit_bytes is not None for device in ordered)
    own_columns = (*name_columns("device", "memory"), *number_columns("now", "peak"))
    own_rows = [
        _list_process_rows(device, owned.get(device.info.device), has_limit=has_limit)
        for device in ordered
    ]
    uses = [device.use or DeviceUse(device.info.device, None, None, None) for device in ordered]
    has = (*[True] * 4, any(use.utilization_percent is not None for use in uses), True)
    columns = (
        *name_columns("device"),
        *number_columns("used", "free", "total", "busy"),
        Column("name", "words", last="wrap"),
    )
    rows = [
        make_group(compress(_list_use(device, use), has))
        for device, use in zip(ordered, uses, strict=True)
    ]
    blocks: list[Block] = [
        Table("This process", own_columns + number_columns("limit") * has_limit, own_rows, 1),
        *_list_kinds(account),
        Table("Whole devices", tuple(compress(columns, has)), rows),
    ]
    blocks.extend(explain_marks(blocks))
    failures = [word_driver_failure(use.device, use.failure) for use in uses if use.failure]
    blocks.extend(warn(*dict.fromkeys([*failures, *words])))
    return Report(blocks)


def _list_process_rows(device: DeviceState, owned_bytes: int | None, *, has_limit: bool) -> Group:
    name, reading = device.info.device, device.reading
    if reading is None:
        return make_group((name, Cell("not in use", tone="muted")))
    allocated = bytes_cell(reading.allocated_bytes if owned_bytes is None else owned_bytes)
    limit = "" if device.info.limit_bytes is None else bytes_cell(device.info.limit_bytes)
    peaks = [
        peak_cell(peak_bytes, reading.peak_is)
        for peak_bytes in (reading.allocated_peak_bytes, reading.reserved_peak_bytes)
    ]
    # A limit is one of reserved bytes.
    return make_group(
        (name, "allocated", allocated, peaks[0], *[""] * has_limit),
        (name_reserved(name), bytes_cell(reading.reserved_bytes), peaks[1], *[limit] * has_limit),
    )


def _list_use(device: DeviceState, use: DeviceUse) -> Sequence[Cell | str]:
    total = device.info.total_bytes if use.total_bytes is None else use.total_bytes
    percent = use.utilization_percent
    return (
        device.info.device,
        *map(bytes_cell, (use.used_bytes, use.free_bytes, total)),
        Cell(UNKNOWN, tone="muted") if percent is None else f"{percent} %",
        device.info.name,
    )


def _list_kinds(account: MemoryAccount | None) -> list[Block]:
    accounts = [] if account is None else [part for part in account.devices if part.owned]
    if account is None or not accounts:
        return []
    columns = (
        *name_columns("device"),
        Column("kind", "words"),
        *number_columns("bytes", "share"),
    )
    table = Table("Used for", columns, [*map(_list_kind_rows, sort_devices(accounts))], n_shared=1)
    words = (
        f"There were too many objects to look at in time: some {UNATTRIBUTED} memory has a name."
    )
    return [table, *warn(*[words] * (not account.is_complete))]


def _list_kind_rows(account: DeviceAccount) -> Group:
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
    return make_group((account.device, *first), *others)


# -- What the user sets: limits, budgets, peaks ----------------------------------------------------


def report_limits(limits: Sequence[Limit], notes: Sequence[HardwareNote] = ()) -> Report:
    """Report the limits, with a warning for each that is below what is reserved already."""
    ordered = sort_devices(limits)
    blocks: list[Block] = [Note("There is no GPU that PyTorch could limit.")]
    if ordered:
        columns = (*name_columns("device"), *number_columns("limit", "of", "reserved", "left"))
        groups = [make_group(_list_limit(limit)) for limit in ordered]
        caption = "Limit of what PyTorch may reserve"
        blocks = [Table(caption, columns, groups, caption_is_seen=False)]
    if any(limit.is_waiting for limit in ordered):
        blocks.append(Note("PyTorch sets these limits when CUDA is first used."))
    for limit in ordered:
        if excess := _find_excess(limit):
            words = (
                f"{limit.device} has {format_bytes(excess)} more reserved than its limit. What is "
                "allocated stays allocated; new requests must fit into the cache. "
                "torch.cuda.empty_cache() gives back what is cached, and %memvars "
                f"--device {limit.device} shows who holds the rest."
            )
            blocks.extend(warn(words))
    blocks.extend(warn(*map(word_hardware_note, notes)))
    return Report(blocks)


def _list_limit(limit: Limit) -> Sequence[Cell | str]:
    total, reserved = limit.total_bytes, limit.reserved_bytes
    amount = bytes_cell(limit.limit_bytes)
    if limit.share is not None:
        amount = Cell(f"{100 * limit.share:.10g} %")
    elif limit.limit_bytes is None and (total is not None or reserved is None):
        amount = Cell("none", tone="muted")
    start = (limit.device, amount, "" if total is None else bytes_cell(total))
    if reserved is None:
        return (*start, Cell("not in use yet", tone="muted"), "")
    top = total if limit.limit_bytes is None else limit.limit_bytes
    left = bytes_cell(None if top is None else max(top - reserved, 0))
    left = replace(left, tone="bad") if _find_excess(limit) else left
    return (*start, bytes_cell(reserved), left)


def _find_excess(limit: Limit) -> int:
    if limit.is_waiting or limit.limit_bytes is None or limit.reserved_bytes is None:
        return 0
    return max(limit.reserved_bytes - limit.limit_bytes, 0)


def report_reset(devices: Sequence[str], before: Sequence[Reading]) -> Report:
    """Report on which devices the peaks were reset, and what they were."""
    if not devices:
        return Report([Note("No GPU in use yet: nothing to reset.")])
    peaks = [
        (reading.device, reading.allocated_peak_bytes, reading.reserved_peak_bytes, reading.peak_is)
        for reading in before
        if reading.device in devices
    ]
    groups = [
        make_group((device, peak_cell(allocated, kind), peak_cell(reserved, kind)))
        for device, allocated, reserved, kind in peaks
    ]
    columns = number_columns("allocated, peak was", "reserved, peak was")
    table = Table("PyTorch's peaks, now reset", (*name_columns("device"), *columns), groups)
    return Report([table, *explain_marks([table]), Note("The recorded cells keep their peaks.")])


def describe_budgets(budgets: Sequence[Budget], *, has_new: bool = False) -> str:
    """Return what ``%membudget`` answers: the budgets, and what follows where one is new."""
    listed = [f"{budget.device} {format_bytes(budget.budget_bytes)}" for budget in budgets]
    words = f"membudget: {'; '.join(listed) or 'no budget is set'}"
    return f"{words}\nFrom the next cell on, cells that exceed it are marked." if has_new else words
