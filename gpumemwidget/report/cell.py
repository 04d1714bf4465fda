"""The reports of recorded cells: one cell, whole or in one line, its budget, the ledger of all."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from gpumemwidget.model.cells import CellDevice, CellRecord, LedgerSort, Span
from gpumemwidget.model.devices import HOST, PeakIs, Reading, Sample
from gpumemwidget.model.leaks import Leak
from gpumemwidget.model.processes import DevicePeak
from gpumemwidget.report.charts.timeline import MOST_CHARTS, CounterCharts, draw_counters
from gpumemwidget.report.leaks import mark_leak
from gpumemwidget.report.render.blocks import (
    MOST_ROWS,
    MOST_ROWS_OF_ALL,
    STATUS_TONES,
    Block,
    Cell,
    Column,
    Group,
    Line,
    Note,
    Run,
    Table,
    bytes_cell,
    change_cell,
    explain_marks,
    has_moved,
    make_group,
    make_heading,
    mark_budget,
    name_columns,
    number_columns,
    peak_cell,
    sort_devices,
    warn,
)
from gpumemwidget.report.render.output import Report
from gpumemwidget.report.render.wording import (
    count,
    name_cell,
    name_record,
    name_reserved,
    say_peak,
)
from gpumemwidget.units import UNKNOWN, format_bytes, format_change, format_duration

# -- The whole report ------------------------------------------------------------------------------


def report_unfinished(record: CellRecord, samples: Sequence[Sample]) -> Report:
    """Report what is known of a running cell; a page whose kernel dies keeps it."""
    _, *blocks = list_cell_blocks(record, samples, after="last reading")
    heading = make_heading(
        name_cell(record.execution_count),
        Run("not finished", "warn"),
        Run(f"as of {format_duration(record.duration_s)}", "muted"),
    )
    return Report([heading, *blocks, *explain_marks(blocks)])


def list_cell_blocks(
    record: CellRecord, samples: Sequence[Sample], *, has_charts: bool = True, after: str = "after"
) -> list[Block]:
    """Return a cell's heading, its table, its charts, and notes on what went wrong.

    ``after`` is the title of the column of the cell's end.
    """
    devices = sort_devices(record.devices)
    status = Run(record.status, STATUS_TONES[record.status])
    blocks: list[Block] = [
        make_heading(name_record(record), status, format_duration(record.duration_s)),
        Table(
            caption="Memory of each device over the cell",
            columns=(
                *name_columns("device", "memory"),
                *number_columns("before", after, "change", "peak", "peak rise"),
            ),
            groups=list(map(_list_rows, devices)),
            n_shared=1,
            caption_is_seen=False,
            shared_above=True,
        ),
    ]
    if not devices:
        blocks[1:] = [Note("No device was read.")]
    if has_charts:
        moved = [device for device in devices if has_moved(device)] or devices[:1]
        blocks.extend(draw_cell(record, moved[:MOST_CHARTS], samples))
    for device in devices:
        if device.num_alloc_retries:
            retries = count(device.num_alloc_retries, "retry", "retries")
            words = f"{device.device} was full: the allocator emptied its cache ({retries})."
            blocks.extend(warn(words))
        if device.num_ooms:
            errors = count(device.num_ooms, "out-of-memory error")
            blocks.append(Note(f"{device.device} was full: {errors}.", tone="bad"))
    blocks.extend(_list_crossings(record))
    return blocks


def draw_cell(
    record: CellRecord, devices: Sequence[CellDevice], samples: Iterable[Sample]
) -> list[CounterCharts]:
    """Return the charts of a cell's devices: at its start, at the samples within it, at its end."""
    begin = [Reading(d.device, d.allocated.before_bytes, d.reserved.before_bytes) for d in devices]
    end = [Reading(d.device, d.allocated.after_bytes, d.reserved.after_bytes) for d in devices]
    start_s, end_s = record.start_s, record.start_s + record.duration_s
    within = [s for s in samples if 0 < s.time_s - start_s < record.duration_s]
    peaks = [
        DevicePeak(d.device, d.allocated.peak_bytes, d.reserved.peak_bytes, d.peak_is)
        for d in devices
    ]
    return draw_counters(peaks, [Sample(start_s, tuple(begin)), *within, Sample(end_s, tuple(end))])


def _list_rows(device: CellDevice) -> Group:
    rows: list[Sequence[Cell | str]] = []
    for name, span, peak_is in _name_spans(device):
        peak = peak_cell(span.peak_bytes, peak_is)
        numbers = (
            bytes_cell(span.before_bytes),
            bytes_cell(span.after_bytes),
            change_cell(span.change_bytes),
        )
        peaks: tuple[Cell | str, ...] = ("", "")
        if span is not device.outside or device.has_outside_peak:
            shown = mark_budget(peak, device) if span is device.peak_counter else peak
            peaks = (shown, change_cell(span.rise_bytes, mark=peak.mark))
        rows.append((name, *numbers, *peaks))
    return make_group(*rows, shared=(device.device,))


def _name_spans(device: CellDevice) -> list[tuple[str, Span, PeakIs | None]]:
    """Return a device's counters with their names, and what their peaks are."""
    reserved = name_reserved(device.device)
    spans: list[tuple[str, Span, PeakIs | None]] = [
        ("allocated", device.allocated, device.peak_is),
        (reserved, device.reserved, device.peak_is),
    ]
    if device.outside is not None and device.has_moved_outside:
        spans.append(("outside PyTorch", device.outside, "sampled"))
    return spans


# -- One line --------------------------------------------------------------------------------------


def report_cell_line(record: CellRecord) -> Report:
    """Report a cell in one line, with the devices that it changed, or the first one."""
    pieces = [name_cell(record.execution_count)]
    if record.status != "ok":
        pieces.append(record.status)
    pieces.append(format_duration(record.duration_s))
    pieces.extend(map(_describe_device, _list_moved(record)))
    return Report([Line(tuple(pieces))])


def _describe_device(device: CellDevice) -> str:
    """Return ``cuda:0 allocated 1.20 GiB (0 B), peak 3.40 GiB · reserved 4.00 GiB (0 B)``."""
    parts = []
    for name, span, peak_is in _name_spans(device):
        words = f"{name} {format_bytes(span.after_bytes)} ({format_change(span.change_bytes)})"
        # A peak that the end reached again says nothing new.
        is_new = span.peak_bytes is not None and span.peak_bytes != span.after_bytes
        if device.has_outside_peak if span is device.outside else is_new:
            words += f", peak {say_peak(span.peak_bytes, peak_is)}"
        parts.append(words)
    if device.num_alloc_retries:
        parts.append(count(device.num_alloc_retries, "retry", "retries"))
    if device.num_ooms:
        parts.append(count(device.num_ooms, "OOM"))
    if device.is_over_budget:
        parts.append(f"! above its budget of {format_bytes(device.budget_bytes)}")
    return f"{device.device} {' · '.join(parts)}"


# -- The budget and the prediction of a cell -------------------------------------------------------


def report_crossings(record: CellRecord) -> Report | None:
    """Report each device on which a cell exceeded its budget; ``None`` if there is none."""
    notes = _list_crossings(record)
    words = "%%memtrace above the cell shows which line took it; %membudget off ends the budget."
    return Report([*notes, Note(words)]) if notes else None


def _list_crossings(record: CellRecord) -> list[Note]:
    return warn(
        *(
            f"{device.device} exceeded its budget of {format_bytes(device.budget_bytes)}: "
            f"{say_peak(device.peak_counter.peak_bytes, device.peak_is)} "
            f"{'resident' if device.device == HOST else 'allocated'} at the peak."
            for device in sort_devices(record.devices)
            if device.is_over_budget
        )
    )


def report_score(record: CellRecord) -> Report | None:
    """Report how a cell's peaks compare with those predicted; ``None`` if none were."""
    notes = []
    for device in sort_devices(record.devices):
        was, predicted = device.allocated.peak_bytes, device.predicted_peak_bytes
        if was and predicted is not None and record.status == "ok":
            words = (
                f"{device.device}: predicted {format_bytes(predicted)} allocated at the peak, was "
                f"{say_peak(was, device.peak_is)} ({100 * (predicted / was - 1):+.1f} %)."
            )
            notes.append(Note(words))
    return Report(notes) if notes else None


# -- The ledger ------------------------------------------------------------------------------------


def report_ledger(
    records: Sequence[CellRecord],
    *,
    dropped: int = 0,
    n_shown: int | None = MOST_ROWS,
    leaks: Mapping[float, Sequence[Leak]] | None = None,
    sort: LedgerSort | None = None,
) -> Report:
    """Report the cells with what each did to each device, the most recent last.

    Args:
        records: in the order in which the cells ran.
        dropped: how many older records the ledger has let go.
        n_shown: maximum number of cells, the last of those that have more than gpumemwidget's own
            magics; ``None`` for theirs too, and ten times as many.
        leaks: those that were found in each cell, by its ``start_s``.
        sort: the figure by which the cells are sorted, the largest first.
    """
    listed = list(records)
    if n_shown is not None:
        listed = [record for record in records if not record.is_only_own_magics]
    n_hidden = len(records) - len(listed)
    n_shown = MOST_ROWS_OF_ALL if n_shown is None else n_shown
    has_gpu = any(device.device != HOST for record in records for device in record.devices)
    if sort is not None:
        listed.sort(key=lambda record: _weigh(record, sort, has_gpu=has_gpu), reverse=True)
    shown = listed[-n_shown:] if sort is None else listed[:n_shown]
    n_before = len(listed) - len(shown) + dropped
    title = f"{count(len(records) + dropped, 'cell')} recorded"
    if not shown:
        words = "Every cell that you run from now on is recorded."
        return Report([make_heading(title), Note(words), *_note_hidden(n_hidden)])
    what = Run("change of allocated memory, and its peak, per cell", "muted")
    blocks: list[Block] = [make_heading(title, what)]
    if sort is not None:
        where = " on GPUs" if sort != "time" and has_gpu else ""
        rest = f"; {n_before:,} others are not shown" * bool(n_before)
        blocks.append(Note(f"The largest {sort}{where} first{rest}."))
    elif n_before:
        gone = f", of which the oldest {dropped} are no longer kept" * bool(dropped)
        blocks.append(Note(f"The last {len(shown):,} are shown; {n_before:,} came before{gone}."))
    found = {record.start_s: (leaks or {}).get(record.start_s, ()) for record in shown}
    columns = (
        *name_columns("cell"),
        *number_columns("time"),
        Column("status", "words"),
        *name_columns("device"),
        *number_columns("change", "peak"),
        Column("predicted", is_optional=True),
        Column("grows", is_optional=True),
        Column("first line", "code", last="cut"),
    )
    groups = [_list_ledger_rows(record, found[record.start_s]) for record in shown]
    caption = "The recorded cells, with the change of allocated memory and its peak"
    table = Table(caption, columns, groups, n_shared=3, caption_is_seen=False, most=n_shown)
    blocks += [table, *_note_hidden(n_hidden), *explain_marks([table])]
    if any(found.values()):
        blocks.append(Note("%memleak says what holds the memory that grows."))
    return Report(blocks)


def _note_hidden(n_hidden: int) -> list[Note]:
    cells = count(n_hidden, "gpumemwidget cell")
    return [Note(f"{cells} hidden: %memledger --all shows everything.")] if n_hidden else []


def _weigh(record: CellRecord, sort: LedgerSort, *, has_gpu: bool) -> float:
    """Return what a cell took, over all GPUs, or on the host where there is none."""
    if sort == "time":
        return record.duration_s
    weights: list[int | None] = []
    for device in record.devices:
        if (device.device != HOST) == has_gpu:
            weights.append(device.outside_change_bytes if sort == "change" else 0)
            span = device.allocated if sort == "change" else device.peak_counter
            weights.append(getattr(span, f"{sort}_bytes"))
    return sum(weight or 0 for weight in weights)


def _list_moved(record: CellRecord) -> list[CellDevice]:
    """Return the devices that the cell changed, or the first one if it changed none."""
    devices = sort_devices(record.devices)
    return [device for device in devices if has_moved(device)] or devices[:1]


def _list_ledger_rows(record: CellRecord, leaks: Sequence[Leak]) -> Group:
    rows: list[Sequence[Cell | str]] = []
    for device in _list_moved(record):
        is_noted = device.is_over_budget or device.predicted_peak_bytes is not None or leaks
        outside = device.outside
        if not device.has_moved_outside or is_noted or has_moved(replace(device, outside=None)):
            rows.append(_list_device(device, leaks))
        if outside is not None and device.has_moved_outside:
            name = f"{device.device} outside PyTorch"
            peak = peak_cell(outside.peak_bytes, "sampled") if device.has_outside_peak else ""
            rows.append((name, change_cell(device.outside_change_bytes), peak, "", ""))
    status = Cell(record.status, tone=STATUS_TONES[record.status])
    cell = (name_cell(record.execution_count), format_duration(record.duration_s), status)
    first, *others = rows or [[Cell(UNKNOWN, tone="muted")] * 5]
    return make_group((*first, record.first_line), *others, shared=cell)


def _list_device(device: CellDevice, leaks: Sequence[Leak]) -> Sequence[Cell | str]:
    """Return a device's change and peak, the predicted peak, and what is added each time.

    The peak of *reserved* replaces an unknown one.
    """
    is_resident = device.allocated.peak_bytes is None and device.reserved.peak_bytes is not None
    counter = device.reserved if is_resident else device.allocated
    peak = peak_cell(counter.peak_bytes, device.peak_is, is_resident=is_resident)
    predicted = device.predicted_peak_bytes
    marks = dict.fromkeys(mark_leak(leak) for leak in leaks if leak.device == device.device)
    return (
        device.device,
        change_cell(device.allocated.change_bytes),
        mark_budget(peak, device),
        "" if predicted is None else bytes_cell(predicted),
        Cell(", ".join(marks), tone="warn"),
    )
