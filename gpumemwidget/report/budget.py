"""What is said of budgets: what is set, and which cell went beyond its own."""

from __future__ import annotations

from collections.abc import Sequence

from gpumemwidget.devices import Budget
from gpumemwidget.records import HOST, CellDevice, CellRecord
from gpumemwidget.report.document import Document, Note
from gpumemwidget.report.html import render_html
from gpumemwidget.report.output import Report
from gpumemwidget.report.pieces import sort_devices
from gpumemwidget.report.text import render_text
from gpumemwidget.report.words import name_counters, say_peak
from gpumemwidget.units import format_bytes

__all__ = ["list_crossings", "name_budgeted", "report_crossings", "tell_budgets"]


def report_crossings(record: CellRecord) -> Report | None:
    """One line for each device on which a cell went beyond its budget; ``None`` for no such."""
    notes = list_crossings(record)
    if not notes:
        return None
    document = Document(tuple(notes))
    return Report(text=render_text(document), html=render_html(document))


def list_crossings(record: CellRecord, *, names_lines: bool = False) -> list[Note]:
    """A sentence on each device on which a cell went beyond its budget, and what can be done.

    Args:
        record: the cell.
        names_lines: it stands in a report that tells which lines took the memory.
    """
    notes = []
    for device in sort_devices(record.devices):
        if device.stopped_at_bytes is not None:
            notes.append(Note(_tell_stop(device, record), tone="bad"))
        elif device.is_over_budget:
            notes.append(Note(_tell_crossing(device, names_lines=names_lines), tone="warn"))
    return notes


def _tell_crossing(device: CellDevice, *, names_lines: bool) -> str:
    advice = "" if names_lines else "%%memtrace above the cell tells which line took it; "
    return (
        f"{device.device} went beyond its budget: {_say_peak(device)} "
        f"{name_budgeted(device.device)} at the peak, {format_bytes(device.budget_bytes)} allowed. "
        f"{advice}%membudget off ends the budget."
    )


def _tell_stop(device: CellDevice, record: CellRecord) -> str:
    words = (
        f"%membudget interrupted this cell: {device.device} had "
        f"{format_bytes(device.stopped_at_bytes)} {name_budgeted(device.device)}, "
        f"{format_bytes(device.budget_bytes)} are allowed"
    )
    # What came after the sample that showed it: until the signal was met, or later.
    peak_bytes = device.budgeted.peak_bytes
    is_higher = peak_bytes is not None and peak_bytes > (device.stopped_at_bytes or 0)
    # By less than is shown it need not be told.
    is_higher &= format_bytes(peak_bytes) != format_bytes(device.stopped_at_bytes)
    peak = f"{_say_peak(device)} at the peak" if is_higher else ""
    if record.status == "error":
        return f"{words}{f'; {peak}' if peak else ''}. The cell ended in another error upon that."
    if record.status != "interrupted":
        return f"{words}. The cell caught that and went on{f' to {peak}' if peak else ''}."
    return (
        f"{words}{f'; {peak}' if peak else ''}. Allow more (%membudget AMOUNT --stop), or end the "
        "budget (%membudget off), and run it again."
    )


def _say_peak(device: CellDevice) -> str:
    peak_bytes = device.budgeted.peak_bytes
    return format_bytes(None) if peak_bytes is None else say_peak(peak_bytes, device.peak_is)


def name_budgeted(device: str) -> str:
    """What a device's budget is for, in a word: ``allocated``, or the host's ``resident``."""
    names = name_counters(device)
    return names.reserved if device == HOST else names.allocated


def tell_budgets(budgets: Sequence[Budget]) -> str:
    """What is set, in one line: ``every GPU 10.00 GiB; host 20.00 GiB, which stops the cell``."""
    if not budgets:
        return "no budget is set"
    return "; ".join(
        f"{each.device} {format_bytes(each.budget_bytes)}"
        + (", which stops the cell" if each.stops else "")
        for each in budgets
    )
