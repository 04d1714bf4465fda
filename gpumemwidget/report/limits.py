"""Limits and budgets, and peaks that were reset."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from gpumemwidget.model.cells import CellRecord
from gpumemwidget.model.devices import (
    HOST,
    Budget,
    HardwareNote,
    Limit,
    Reading,
    rank_device,
)
from gpumemwidget.report.render.blocks import Block, Cell, Column, Note, Table
from gpumemwidget.report.render.cells import bytes_cell, explain_marks, peak_cell, sort_devices
from gpumemwidget.report.render.output import Report
from gpumemwidget.report.render.wording import (
    say_peak,
    word_hardware_note,
)
from gpumemwidget.units import format_bytes

_COLUMNS = (
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
    ordered = sorted(limits, key=lambda limit: rank_device(limit.device))
    blocks: list[Block] = [Note("There is no GPU that PyTorch could limit.")]
    if ordered:
        caption = "What PyTorch may reserve in this process"
        blocks = [Table(caption, _COLUMNS, tuple((_list_cells(limit),) for limit in ordered))]
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
    table = Table("PyTorch's peaks, now reset", _RESET_COLUMNS, groups, caption_is_seen=True)
    note = Note("The recorded cells keep their peaks.")
    return Report((table, *explain_marks([table]), note))


# -- Budgets ---------------------------------------------------------------------------------------


def report_crossings(record: CellRecord) -> Report | None:
    """Report each device on which a cell exceeded its budget; ``None`` if there is none."""
    notes = list_crossings(record)
    return Report(tuple(notes)) if notes else None


def list_crossings(record: CellRecord, *, names_lines: bool = False) -> list[Note]:
    """Return a sentence on each device on which a cell exceeded its budget, with what can be done.

    Args:
        record: the cell.
        names_lines: whether the report tells which lines took the memory.
    """
    advice = "" if names_lines else "%%memtrace above the cell shows which line took it; "
    return [
        Note(
            f"{device.device} exceeded its budget: "
            f"{say_peak(device.budgeted.peak_bytes, device.peak_is)} "
            f"{'resident' if device.device == HOST else 'allocated'} at the peak, "
            f"{format_bytes(device.budget_bytes)} allowed. {advice}%membudget off ends the budget.",
            tone="warn",
        )
        for device in sort_devices(record.devices)
        if device.is_over_budget
    ]


def describe_budgets(budgets: Sequence[Budget], *, has_new: bool = False) -> str:
    """Return what ``%membudget`` answers: the budgets, and what follows where one is new."""
    told = [f"{each.device} {format_bytes(each.budget_bytes)}" for each in budgets]
    words = f"membudget: {'; '.join(told) or 'no budget is set'}"
    return f"{words}\nFrom the next cell on, cells that exceed it are marked." if has_new else words
