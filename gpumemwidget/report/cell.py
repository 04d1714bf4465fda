"""The reports of recorded cells: one cell, whole or in one line, its budget, the ledger of all."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from gpumemwidget.model.cells import CellDevice, CellRecord, LedgerSort, Span
from gpumemwidget.model.devices import HOST, Sample
from gpumemwidget.model.leaks import Leak
from gpumemwidget.report.charts.timeline import MOST_CHARTS, draw_counters
from gpumemwidget.report.leaks import mark_leak
from gpumemwidget.report.render.blocks import (
    MOST_ROWS,
    MOST_ROWS_OF_ALL,
    Block,
    Cell,
    Column,
    Heading,
    Line,
    Note,
    Run,
    Table,
)
from gpumemwidget.report.render.cells import (
    STATUS_TONES,
    bytes_cell,
    change_cell,
    explain_marks,
    has_moved,
    mark_budget,
    peak_cell,
    sort_devices,
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

#: The name of what this process has of a GPU beside what PyTorch has reserved.
_OUTSIDE = "outside PyTorch"
_COLUMNS = (
    Column("device", "name"),
    Column("memory", "name"),
    Column("before"),
    Column("after"),
    # The change is what stands at the end, less what stood before.
    Column("change"),
    Column("peak"),
    Column("peak rise"),
)


# -- The whole report ------------------------------------------------------------------------------


def list_cell_blocks(
    record: CellRecord,
    samples: Sequence[Sample],
    *,
    without: Collection[str] = (),
) -> list[Block]:
    """Return a cell's heading, its table, its charts, and notes on what went wrong.

    The devices ``without`` get no chart.
    """
    devices = sort_devices(record.devices)
    heading = (
        Run(name_record(record), "strong"),
        Run(record.status, STATUS_TONES[record.status]),
        Run(format_duration(record.duration_s)),
    )
    blocks: list[Block] = [Heading(heading)]
    if devices:
        blocks.append(
            Table(
                caption="Memory of each device over the cell",
                columns=_COLUMNS,
                groups=tuple(_list_rows(device) for device in devices),
                n_shared=1,
                caption_is_seen=False,
                shared_above=True,
            )
        )
    else:
        blocks.append(Note("No device was read."))
    plotted = [
        device
        for index, device in enumerate(devices[:MOST_CHARTS])
        if (index == 0 or has_moved(device)) and device.device not in without
    ]
    blocks.extend(draw_counters(record, plotted, samples))
    for device in devices:
        blocks.extend(_list_troubles(device))
    blocks.extend(list_crossings(record, names_lines=True))
    return blocks


def _list_rows(device: CellDevice) -> tuple[tuple[Cell, ...], ...]:

    def list_numbers(span: Span) -> tuple[Cell, ...]:
        peak = peak_cell(span.peak_bytes, device.peak_is)
        return (
            bytes_cell(span.before_bytes),
            bytes_cell(span.after_bytes),
            change_cell(span.change_bytes),
            mark_budget(peak, device) if span is device.peak_counter else peak,
            change_cell(span.rise_bytes, mark=peak.mark),
        )

    rows = [
        (Cell(device.device), Cell("allocated"), *list_numbers(device.allocated)),
        (Cell(name_reserved(device.device)), *list_numbers(device.reserved)),
    ]
    if device.outside is not None and device.outside_change_bytes:
        span = device.outside
        numbers = bytes_cell(span.before_bytes), bytes_cell(span.after_bytes)
        change = change_cell(span.change_bytes)
        rows.append((Cell(_OUTSIDE), *numbers, change, Cell(""), Cell("")))
    return tuple(rows)


def _list_troubles(device: CellDevice) -> list[Note]:
    notes = []
    if device.num_alloc_retries:
        retries = count(device.num_alloc_retries, "retry", "retries")
        words = f"{device.device} was full: the allocator emptied its cache ({retries})."
        notes.append(Note(words, tone="warn"))
    if device.num_ooms:
        errors = count(device.num_ooms, "out-of-memory error")
        notes.append(Note(f"{device.device} was full: {errors}.", tone="bad"))
    return notes


def explain_host(devices: Sequence[CellDevice]) -> list[Note]:
    """Return a note on the gaps in the host's first row, if it has any."""
    host = next((device for device in devices if device.device == HOST), None)
    if host is None or host.allocated.peak_bytes is not None:
        return []
    if host.allocated.before_bytes is None and host.allocated.after_bytes is None:
        return [Note("host allocated: this system's malloc gives no figure.")]
    return [Note("host allocated: memory handed out by malloc (no peak available).")]


# -- One line --------------------------------------------------------------------------------------


def report_cell_line(record: CellRecord) -> Report:
    """Report a cell in one line, with the devices that it changed, or the first one."""
    pieces = [name_cell(record.execution_count)]
    if record.status != "ok":
        pieces.append(record.status)
    pieces.append(format_duration(record.duration_s))
    pieces.extend(map(_describe_device, _list_moved(record)))
    return Report((Line(tuple(pieces)),))


def _describe_device(device: CellDevice) -> str:
    """Return ``cuda:0 allocated 1.20 GiB (0 B), peak 3.40 GiB · reserved 4.00 GiB (0 B)``."""
    spans = (("allocated", device.allocated), (name_reserved(device.device), device.reserved))
    parts = [_describe_span(name, span, device) for name, span in spans]
    if device.outside is not None and device.outside_change_bytes:
        parts.append(_describe_span(_OUTSIDE, device.outside, device))
    if device.num_alloc_retries:
        parts.append(count(device.num_alloc_retries, "retry", "retries"))
    if device.num_ooms:
        parts.append(count(device.num_ooms, "OOM"))
    if device.is_over_budget:
        parts.append(f"! above its budget of {format_bytes(device.budget_bytes)}")
    return f"{device.device} {' · '.join(parts)}"


def _describe_span(name: str, span: Span, device: CellDevice) -> str:
    words = f"{name} {format_bytes(span.after_bytes)} ({format_change(span.change_bytes)})"
    # A peak that the end reached again says nothing new.
    if span.peak_bytes is None or span.peak_bytes == span.after_bytes:
        return words
    return f"{words}, peak {say_peak(span.peak_bytes, device.peak_is)}"


# -- The budget and the prediction of a cell -------------------------------------------------------


def report_crossings(record: CellRecord) -> Report | None:
    """Report each device on which a cell exceeded its budget; ``None`` if there is none."""
    notes = list_crossings(record)
    return Report(tuple(notes)) if notes else None


def list_crossings(record: CellRecord, *, names_lines: bool = False) -> list[Note]:
    """Return a sentence on each device on which a cell exceeded its budget, with what can be done.

    ``names_lines``: the report shows itself which lines took the memory.
    """
    advice = "" if names_lines else "%%memtrace above the cell shows which line took it; "
    return [
        Note(
            f"{device.device} exceeded its budget: "
            f"{say_peak(device.peak_counter.peak_bytes, device.peak_is)} "
            f"{'resident' if device.device == HOST else 'allocated'} at the peak, "
            f"{format_bytes(device.budget_bytes)} allowed. {advice}%membudget off ends the budget.",
            tone="warn",
        )
        for device in sort_devices(record.devices)
        if device.is_over_budget
    ]


def report_score(record: CellRecord) -> Report | None:
    """Report how a cell's peaks compare with those predicted; ``None`` if none were."""
    notes = []
    for device in sort_devices(record.devices):
        was, predicted = device.allocated.peak_bytes, device.predicted_peak_bytes
        if was and predicted is not None and record.status == "ok":
            share = f"{100 * (predicted / was - 1):+.1f} %"
            notes.append(
                Note(
                    f"{device.device}: predicted {format_bytes(predicted)} allocated at the peak, "
                    f"was {say_peak(was, device.peak_is)} ({share})."
                )
            )
    return Report(tuple(notes)) if notes else None


# -- The ledger ------------------------------------------------------------------------------------


_LEDGER_COLUMNS = (
    Column("cell", "name"),
    Column("time"),
    Column("status", "words"),
    Column("device", "name"),
    Column("change"),
    Column("peak"),
)
_FIRST_LINE = Column("first line", "code", last="cut")


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
    if sort is not None:
        has_gpu = any(device.device != HOST for record in records for device in record.devices)
        listed.sort(key=lambda record: _weigh(record, sort, has_gpu=has_gpu), reverse=True)
    shown = listed[-n_shown:] if sort is None else listed[:n_shown]
    n_before = len(listed) - len(shown) + dropped
    title = Run(f"{count(len(records) + dropped, 'cell')} recorded", "strong")
    what = Run("change of allocated memory, and its peak, per cell", "muted")
    blocks: list[Block] = [Heading((title, what) if shown else (title,))]
    if sort is not None and shown:
        where = " on GPUs" if sort != "time" and has_gpu else ""
        rest = f"; {n_before:,} others are not shown" if n_before else ""
        blocks.append(Note(f"The largest {sort}{where} first{rest}."))
    elif shown and n_before:
        words = f"The last {len(shown):,} are shown; {n_before:,} came before"
        gone = f", of which the oldest {dropped} are no longer kept" if dropped else ""
        blocks.append(Note(f"{words}{gone}."))
    if shown:
        is_predicted = any(
            device.predicted_peak_bytes is not None
            for record in shown
            for device in _list_moved(record)
        )
        leaks = {record.start_s: (leaks or {}).get(record.start_s, ()) for record in shown}
        grows = any(leaks.values())
        more = [Column("predicted")] * is_predicted + [Column("grows")] * grows
        blocks.append(
            Table(
                caption="The recorded cells, with the change of allocated memory and its peak",
                columns=(*_LEDGER_COLUMNS, *more, _FIRST_LINE),
                groups=tuple(
                    _list_ledger_rows(
                        record, leaks[record.start_s] if grows else None, is_predicted=is_predicted
                    )
                    for record in shown
                ),
                n_shared=3,
                caption_is_seen=False,
                most=n_shown,
            )
        )
    else:
        grows = False
        blocks.append(Note("Every cell that you run from now on is recorded."))
    if n_hidden:
        cells = count(n_hidden, "gpumemwidget cell")
        blocks.append(Note(f"{cells} hidden: %memledger --all shows everything."))
    blocks.extend(explain_marks(blocks))
    if grows:
        blocks.append(Note("%memleak says what holds the memory that grows."))
    if any(len(_list_moved(record)) < len(record.devices) for record in shown):
        blocks.append(Note("Devices that a cell did not change are left out."))
    return Report(tuple(blocks))


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


def _list_ledger_rows(
    record: CellRecord, leaks: Sequence[Leak] | None, *, is_predicted: bool
) -> tuple[tuple[Cell, ...], ...]:
    cell = (
        Cell(name_cell(record.execution_count)),
        Cell(format_duration(record.duration_s)),
        Cell(record.status, tone=STATUS_TONES[record.status]),
    )
    unknown = (Cell(UNKNOWN, tone="muted"),) * (3 + is_predicted + (leaks is not None))
    listed: list[tuple[Cell, ...]] = []
    for device in _list_moved(record):
        is_noted = device.is_over_budget or device.predicted_peak_bytes is not None or leaks
        if not device.outside_change_bytes or is_noted or has_moved(replace(device, outside=None)):
            listed.append(_list_device(device, leaks, is_predicted=is_predicted))
        if device.outside_change_bytes:
            blanks = [Cell("")] * (len(unknown) - 2)
            name = Cell(f"{device.device} {_OUTSIDE}")
            listed.append((name, change_cell(device.outside_change_bytes), *blanks))
    first, *others = listed or [unknown]
    return ((*cell, *first, Cell(record.first_line)), *others)


def _list_moved(record: CellRecord) -> list[CellDevice]:
    """Return the devices that the cell changed, or the first one if it changed none."""
    devices = sort_devices(record.devices)
    return [device for device in devices if has_moved(device)] or devices[:1]


def _list_device(
    device: CellDevice, leaks: Sequence[Leak] | None, *, is_predicted: bool
) -> tuple[Cell, ...]:
    """Return a device's change and peak; the peak of *reserved* stands in for an unknown one.

    With ``is_predicted`` the predicted peak follows, or a blank where there is none; with ``leaks``
    what the cell or its loop adds each time.
    """
    is_resident = device.allocated.peak_bytes is None and device.reserved.peak_bytes is not None
    counter = device.reserved if is_resident else device.allocated
    peak = peak_cell(counter.peak_bytes, device.peak_is, is_resident=is_resident)
    change = change_cell(device.allocated.change_bytes)
    cells = [Cell(device.device), change, mark_budget(peak, device)]
    if is_predicted:
        predicted = device.predicted_peak_bytes
        cells.append(Cell("") if predicted is None else bytes_cell(predicted))
    if leaks is not None:
        marks = dict.fromkeys(mark_leak(leak) for leak in leaks if leak.device == device.device)
        cells.append(Cell(", ".join(marks), tone="warn"))
    return tuple(cells)
