"""The report of a prediction: whether a step fits, what makes its peak, what was assumed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from gpumemwidget.model.cells import CellRecord
from gpumemwidget.model.predictions import (
    Bytes,
    PeakPlace,
    PredictedKind,
    PredictedOwner,
    PredictedRemedy,
    PredictionRecord,
    SourcePlace,
)
from gpumemwidget.report.charts.timeline import TimelineChart, map_bands
from gpumemwidget.report.render.blocks import (
    Block,
    Cell,
    Column,
    Fold,
    Heading,
    Note,
    Option,
    Options,
    Run,
    Table,
)
from gpumemwidget.report.render.cells import bytes_cell, share_cell
from gpumemwidget.report.render.html import CARD_CLASS
from gpumemwidget.report.render.output import Report
from gpumemwidget.report.render.wording import count, say_peak
from gpumemwidget.report.source import list_unit, name_file
from gpumemwidget.units import format_bytes

#: Maximum number of owners of one kind, and of sentences, that are shown.
_MAX_OWNERS, _MAX_ASSUMPTIONS = 3, 12
#: Owners with less than one part in this many of their kind are not shown.
_SMALLEST_PART = 50
_COLUMNS = (
    Column("what", "name"),
    Column("bytes"),
    Column("share"),
    Column("blocks"),
    Column("biggest", "code", fold=44),
    Column("allocated at", "words"),
)
_CODE_NOTE = (
    "Nothing was computed or allocated on the device: the step ran on tensors without memory, and "
    "PyTorch's allocator was simulated with what it did."
)


def report_prediction(record: PredictionRecord) -> Report:
    """Report what a step would take, and whether it fits."""
    blocks: list[Block] = [
        Heading((Run(_judge(record), "strong"), *_describe_room(record))),
        Heading(_describe_amounts(record)),
        Heading((Run(_describe_peak(record.peak)),)),
    ]
    if record.full_at is not None:
        words = _describe_place(record.full_at)
        blocks.append(Heading((Run(f"the device is full {words}"),)))
    if record.remedies:
        options = tuple(describe_remedy(each) for each in record.remedies)
        blocks.append(Options("What would need less, each by itself", options))
    blocks.append(_tabulate_owners(record))
    trace = record.trace
    if trace.n_events:
        blocks.append(TimelineChart(trace, trace.timeline.times_s[-1]))
        bands = map_bands(trace.timeline)
        for unit in trace.units[:1]:
            if any(line.use is not None for line in unit.lines):
                listing = list_unit(trace, unit, bands=bands, n_lines=None)
                blocks.append(Fold((Run("Lines", "strong"), Run(name_file(unit.name))), (listing,)))
    blocks.extend(_list_notes(record))
    return Report(tuple(blocks), (CARD_CLASS,) if record.fits is False else ())


def report_sizes(size: int, dim: int, records: Mapping[int, PredictionRecord]) -> Report:
    """Report the largest size of a batch that fits, and the sizes that were tried.

    Args:
        size: the answer; 0: none of them fits.
        dim: the dimension of the batch that the sizes are of.
        records: what was predicted, by size, ascending.
    """
    first = next(iter(records.values()))
    device = first.device
    name = "batch" if dim == 0 else f"size in dimension {dim}"
    words = f"The largest {name} that fits on {device.name}: {size:,}"
    if size == 0:
        words = f"Not even the smallest {name} that was tried fits on {device.name}"
    rows = []
    for each, record in records.items():
        verdict = {True: "fits", False: "does not fit", None: "too close to say"}[record.fits]
        share = share_cell(record.reserved.expected, device.available_bytes or 0)
        cells = (bytes_cell(record.reserved.expected), share, bytes_cell(record.allocated.expected))
        rows.append((Cell(f"{each:,}"), *cells, Cell(verdict)))
    table = Table(
        caption="Sizes that were predicted",
        columns=_SIZE_COLUMNS,
        groups=tuple((row,) for row in rows),
    )
    room = f"{format_bytes(device.available_bytes)} that PyTorch may reserve"
    heading = Heading((Run(words, "strong"), Run(room)))
    return Report((heading, table, Note(_CODE_NOTE)))


_SIZE_COLUMNS = (
    Column("size", "name"),
    Column("reserved peak"),
    Column("of the room"),
    Column("allocated peak"),
    Column("verdict", "words"),
)


def report_score(record: CellRecord) -> Report | None:
    """Report how a cell's peaks compare with the predicted ones; ``None``: there are none."""
    notes = []
    for device in record.devices:
        was, predicted = device.allocated.peak_bytes, device.predicted_peak_bytes
        if was and predicted is not None and record.status == "ok":
            share = f"{100 * (predicted / was - 1):+.1f} %".replace("-", "−")
            notes.append(
                Note(
                    f"{device.device}: predicted {format_bytes(predicted)} allocated at the peak, "
                    f"was {say_peak(was, device.peak_is)} ({share})."
                )
            )
    return Report(tuple(notes)) if notes else None


def _judge(record: PredictionRecord) -> str:
    name = record.device.name
    if record.device.available_bytes is None:
        return "Predicted without a device to compare with"
    if record.fits is None:
        return f"Too close to say whether it fits on {name}"
    return f"Fits on {name}" if record.fits else f"Does not fit on {name}"


def _describe_room(record: PredictionRecord) -> tuple[Run, ...]:
    device = record.device
    if device.available_bytes is None:
        return (Run("name one: on='15GiB', on='T4'", "muted"),)
    needs = format_bytes(record.reserved.expected)
    words = f"{needs} of {format_bytes(device.available_bytes)} that PyTorch may reserve"
    return (Run(words),)


def _describe_amounts(record: PredictionRecord) -> tuple[Run, ...]:
    pieces = [
        Run(f"reserved peak {_word_bytes(record.reserved)}"),
        Run(f"allocated peak {_word_bytes(record.allocated)}"),
    ]
    if record.device.reserved_bytes:
        before = format_bytes(record.device.allocated_bytes)
        pieces.append(Run(f"{before} allocated before", "muted"))
    return tuple(pieces)


def describe_remedy(remedy: PredictedRemedy) -> Option:
    """Return what a change would save of the reserved peak, and whether the step fits with it."""
    verdict = {True: "fits", False: "does not fit", None: "may fit"}[remedy.fits]
    text = f"{remedy.name}: {format_bytes(remedy.reserved_peak_bytes)} reserved, {verdict}"
    return Option(f"−{format_bytes(remedy.saved_bytes)}", text, remedy.command)


def _word_bytes(amount: Bytes) -> str:
    expected = format_bytes(amount.expected)
    low, high = format_bytes(amount.at_least), format_bytes(amount.at_most)
    if low == expected == high:
        return expected
    return f"{expected} ({low} to {high})"


def _describe_peak(peak: PeakPlace) -> str:
    return f"the peak is {_describe_place(peak)}"


def _describe_place(place: PeakPlace) -> str:
    words = f"in {_PHASES[place.phase]} of run {place.run}"
    if place.module:
        words += f", in {place.module}"
    if place.line is not None:
        words += f", at {_name_line(place.line)}"
    return f"{words} ({place.operator.removeprefix('aten::')})"


_PHASES = {"forward": "forward", "backward": "backward", "optimizer": "the optimizer's step"}


def _name_line(place: SourcePlace) -> str:
    return f"{place.name}, line {place.line}" if place.name else f"line {place.line}"


# -- What makes the peak ---------------------------------------------------------------------------

_KIND_NAMES: dict[PredictedKind, str] = {
    "parameter": "parameters",
    "gradient": "gradients",
    "buffer": "buffers",
    "tensor": "tensors passed in",
    "temporary": "temporaries",
    "workspace": "workspaces of operators",
}


def _tabulate_owners(record: PredictionRecord) -> Table:
    by_kind: dict[PredictedKind, list[PredictedOwner]] = {}
    for owner in record.owners:
        by_kind.setdefault(owner.kind, []).append(owner)
    total = record.allocated.expected
    groups = []
    ranked = sorted(by_kind.items(), key=lambda pair: -sum(each.n_bytes for each in pair[1]))
    for kind, owners in ranked:
        n_bytes = sum(each.n_bytes for each in owners)
        n_blocks = sum(each.n_blocks for each in owners)
        rows: list[tuple[Cell, ...]] = []
        shown = [each for each in owners[:_MAX_OWNERS] if _SMALLEST_PART * each.n_bytes >= n_bytes]
        for place, owner in enumerate(shown):
            first = (
                Cell(_KIND_NAMES.get(kind, kind)),
                bytes_cell(n_bytes),
                share_cell(n_bytes, total),
                Cell(f"{n_blocks:,}"),
            )
            name = f"{owner.path or '—'}  {format_bytes(owner.n_bytes)}"
            cells = (Cell(name), Cell(_word_origin(owner)))
            rows.append((*first, *cells) if place == 0 else cells)
        groups.append(tuple(rows))
    return Table(
        caption=f"What makes the peak: {format_bytes(total)} allocated",
        columns=_COLUMNS,
        groups=tuple(groups),
        n_shared=4,
        caption_is_seen=True,
    )


def _word_origin(owner: PredictedOwner) -> str:
    if owner.phase is None:
        return "before the step"
    words = _PHASES[owner.phase]
    return words if owner.line is None else f"{words}, {_name_line(owner.line)}"


def _list_notes(record: PredictionRecord) -> list[Block]:
    notes: list[Block] = [Note(_CODE_NOTE)]
    if record.n_measured:
        operators = count(record.n_measured, "operator")
        words = f"The memory inside {operators} was taken from your own %%memtrace recordings."
        notes.append(Note(words))
    shown: Sequence[str] = record.assumptions[:_MAX_ASSUMPTIONS]
    if shown:
        notes.append(Note("Taken for granted: " + "; ".join(shown) + "."))
    if record.untried:
        notes.append(Note("Not tried: " + "; ".join(record.untried)))
    n_more = len(record.assumptions) - len(shown)
    if n_more:
        notes.append(Note(f"and {count(n_more, 'more assumption')}: see .assumptions"))
    return notes
