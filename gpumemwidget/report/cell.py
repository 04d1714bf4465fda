"""The report under one cell: the whole of it, or one line."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from gpumemwidget.records import HOST, CellDevice, CellRecord, Sample, Span
from gpumemwidget.report.budget import list_crossings
from gpumemwidget.report.document import (
    Block,
    Cell,
    Column,
    Document,
    Heading,
    Note,
    Sparklines,
    Table,
)
from gpumemwidget.report.html import render_html, render_html_line
from gpumemwidget.report.output import Report
from gpumemwidget.report.pieces import (
    bytes_cell,
    change_cell,
    explain_marks,
    has_moved,
    list_cell_runs,
    mark_budget,
    peak_cell,
    rise_cell,
    sort_devices,
)
from gpumemwidget.report.sparkline import plot_device
from gpumemwidget.report.text import render_text, render_text_line
from gpumemwidget.report.words import name_cell, name_counters
from gpumemwidget.units import format_bytes, format_change, format_duration

__all__ = ["explain_host", "list_cell_blocks", "report_cell", "report_cell_line"]

_COLUMNS = (
    Column("device", "name"),
    Column("memory", "name"),
    Column("before"),
    Column("after"),
    Column("change"),
    Column("peak"),
    Column("peak rise"),
)


def report_cell(record: CellRecord, samples: Sequence[Sample]) -> Report:
    """What one cell did: each device's counters before, after and at their peak, and its chart.

    Args:
        record: the cell.
        samples: readings taken while it ran, in order of time; others are left out. May be empty.
    """
    devices = sort_devices(record.devices)
    blocks = list_cell_blocks(record, samples)
    blocks.extend(explain_marks(blocks))
    blocks.extend(explain_host(devices))
    document = Document(tuple(blocks))
    return Report(text=render_text(document), html=render_html(document))


def list_cell_blocks(
    record: CellRecord, samples: Sequence[Sample], *, without: Collection[str] = ()
) -> list[Block]:
    """The report's heading, its table, its charts and what went wrong.

    Args:
        record: the cell.
        samples: readings taken while it ran.
        without: the devices that get no chart here.
    """
    devices = sort_devices(record.devices)
    blocks: list[Block] = [Heading(list_cell_runs(record))]
    if devices:
        blocks.append(
            Table(
                caption="Memory of each device over the cell",
                columns=_COLUMNS,
                groups=tuple(_list_rows(device) for device in devices),
                n_shared=1,
                shared_above=True,
            )
        )
    else:
        blocks.append(Note("No device was read."))
    charts = [
        plot_device(record, device, samples)
        for index, device in enumerate(devices)
        if (index == 0 or has_moved(device)) and device.device not in without
    ]
    drawn = tuple(chart for chart in charts if chart is not None)
    if drawn:
        blocks.append(Sparklines(drawn))
    blocks.extend(_list_troubles(devices))
    blocks.extend(list_crossings(record, names_lines=True))
    return blocks


def _list_rows(device: CellDevice) -> tuple[tuple[Cell, ...], ...]:
    names = name_counters(device.device)

    def list_numbers(span: Span) -> tuple[Cell, ...]:
        peak = peak_cell(span.peak_bytes, device.peak_is)
        return (
            bytes_cell(span.before_bytes),
            bytes_cell(span.after_bytes),
            change_cell(span.change_bytes),
            mark_budget(peak, device) if span is device.budgeted else peak,
            rise_cell(span.rise_bytes, device.peak_is),
        )

    return (
        (
            Cell(device.device),
            Cell(names.allocated, detail=names.allocated_detail),
            *list_numbers(device.allocated),
        ),
        (Cell(names.reserved), *list_numbers(device.reserved)),
    )


def _list_troubles(devices: Sequence[CellDevice]) -> list[Note]:
    notes = []
    for device in devices:
        if device.num_alloc_retries:
            times = _count_times(device.num_alloc_retries)
            notes.append(
                Note(
                    f"{device.device} was full: the allocator emptied its cache and tried again "
                    f"{times}.",
                    tone="warn",
                )
            )
        if device.num_ooms:
            times = _count_times(device.num_ooms)
            notes.append(Note(f"{device.device} ran out of memory {times}.", tone="bad"))
    return notes


def explain_host(devices: Sequence[CellDevice]) -> list[Note]:
    """Why the host's first row has gaps, where it has."""
    host = next((device for device in devices if device.device == HOST), None)
    if host is None or host.allocated.peak_bytes is not None:
        return []
    if host.allocated.before_bytes is None and host.allocated.after_bytes is None:
        return [Note("host allocated: this system's malloc tells no figure.")]
    return [Note("host allocated: what malloc has handed out; of this it keeps no peak.")]


def report_cell_line(record: CellRecord) -> Report:
    """What one cell did, in one line: GPUs that stood still are only counted."""
    devices = sort_devices(record.devices)
    gpus = [device for device in devices if device.device != HOST]
    shown = [device for device in gpus if has_moved(device)] or gpus[:1]
    pieces = [name_cell(record.execution_count)]
    if record.status != "ok":
        pieces.append(record.status)
    pieces.append(format_duration(record.duration_s))
    pieces.extend(_describe_device(device, is_alone=len(shown) == 1) for device in shown)
    n_still = len(gpus) - len(shown)
    if n_still:
        pieces.append(f"{n_still} more GPU{'s' if n_still > 1 else ''} unchanged")
    pieces.extend(
        _describe_host_change(device) if gpus else _describe_device(device, is_alone=True)
        for device in devices
        if device.device == HOST
    )
    return Report(text=render_text_line(pieces), html=render_html_line(pieces))


def _describe_device(device: CellDevice, *, is_alone: bool) -> str:
    """``cuda:0 allocated 1.20 GiB (+512.00 MiB), peak 3.40 GiB · reserved 4.00 GiB (0 B)``."""
    names = name_counters(device.device)
    parts = [_describe_span(names.allocated, device.allocated, device)]
    if is_alone:
        parts.append(_describe_span(names.reserved, device.reserved, device))
    if device.num_alloc_retries:
        parts.append(_count(device.num_alloc_retries, "retry", "retries"))
    if device.num_ooms:
        parts.append(_count(device.num_ooms, "OOM", "OOMs"))
    return f"{device.device} {' · '.join([*parts, *_describe_budget(device)])}"


def _describe_budget(device: CellDevice) -> list[str]:
    budget = format_bytes(device.budget_bytes)
    if device.stopped_at_bytes is not None:
        return [f"! stopped by its budget of {budget}"]
    return [f"! beyond its budget of {budget}"] if device.is_over_budget else []


def _describe_span(name: str, span: Span, device: CellDevice) -> str:
    words = f"{name} {format_bytes(span.after_bytes)} ({format_change(span.change_bytes)})"
    # A peak that the end reached again says nothing new.
    if span.peak_bytes is None or span.peak_bytes == span.after_bytes:
        return words
    kind = "" if device.peak_is in ("exact", None) else f"{device.peak_is} "
    return f"{words}, peak {kind}{format_bytes(span.peak_bytes)}"


def _count_times(number: int) -> str:
    return "once" if number == 1 else f"{number} times"


def _count(number: int, one: str, many: str) -> str:
    return f"{number} {one if number == 1 else many}"


def _describe_host_change(device: CellDevice) -> str:
    names = name_counters(device.device)
    words = f"host {names.reserved} {format_change(device.reserved.change_bytes)}"
    if device.allocated.change_bytes is not None:
        words = f"host {names.allocated} {format_change(device.allocated.change_bytes)}"
    return " · ".join([words, *_describe_budget(device)])
