"""The report of a prediction: whether a step fits, what makes its peak, what was assumed."""

from __future__ import annotations

from collections.abc import Mapping

from gpumemwidget.model.predictions import (
    Bytes,
    PeakPlace,
    PredictedKind,
    PredictedOwner,
    PredictedRemedy,
    PredictionDevice,
    PredictionRecord,
    SourcePlace,
)
from gpumemwidget.report.charts.timeline import TimelineChart, map_bands
from gpumemwidget.report.render.blocks import (
    FEW,
    SOME,
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
    bound_items,
    bytes_cell,
    make_group,
    make_heading,
    name_columns,
    number_columns,
    say,
    share_cell,
)
from gpumemwidget.report.render.html import CARD_CLASS
from gpumemwidget.report.render.output import Report
from gpumemwidget.report.render.text import SHORT_WIDTH, cut
from gpumemwidget.report.render.wording import count, name_kind
from gpumemwidget.report.trace import list_unit, name_file
from gpumemwidget.units import format_bytes, format_change

_VERDICTS = {True: "fits", False: "does not fit", None: "too close to say"}
_CODE_NOTE = (
    "Nothing was computed on the device: the step ran on tensors without memory, and PyTorch's "
    "allocator was simulated."
)


# -- One step --------------------------------------------------------------------------------------


def report_prediction(record: PredictionRecord) -> Report:
    """Report what a step would take, and whether it fits."""
    blocks: list[Block] = [
        make_heading(_judge(record), _describe_need(record)),
        Heading(_describe_amounts(record)),
    ]
    # Where it runs out of memory, and where its peak is if that is elsewhere.
    if record.full_at is not None:
        blocks.append(_describe_place(record, record.full_at, "runs out of memory"))
    if record.full_at != record.peak:
        blocks.append(_describe_place(record, record.peak, "the peak is"))
    if record.remedies:
        options = list(map(describe_remedy, record.remedies))
        blocks.append(Options("Ways to need less, each alone", options))
    blocks.append(_tabulate_owners(record))
    trace = record.trace
    if trace.n_events:
        blocks.append(TimelineChart(trace, trace.timeline.times_s[-1]))
        bands = map_bands(trace.timeline)
        for unit in trace.units[:1]:
            if any(line.use is not None for line in unit.lines):
                listing = list_unit(trace, unit, bands=bands, n_lines=None)
                blocks.append(Fold((Run("Lines", "strong"), Run(name_file(unit.name))), [listing]))
    blocks.append(Note(_CODE_NOTE))
    if record.assumptions:
        words = "; ".join(record.assumptions[:SOME])
        n_more = len(record.assumptions) - SOME
        more = f"; and {count(n_more, 'more assumption')}: see .assumptions" if n_more > 0 else ""
        blocks.append(Note(f"Assumptions: {words}{more}."))
    if record.untried:
        blocks.append(Note("Not tried: " + "; ".join(bound_items(record.untried, str))))
    return Report(blocks, (CARD_CLASS,) if record.fits is False else ())


def _judge(record: PredictionRecord) -> str:
    if record.device.available_bytes is None:
        return f"Needs {format_bytes(record.reserved.expected)}"
    place = _name_place(record.device)
    if record.fits is None:
        return f"Too close to say whether it fits {place}"
    return f"Fits {place}" if record.fits else f"Does not fit {place}"


def _name_place(device: PredictionDevice) -> str:
    """Return ``on T4``, or ``in 15.00 GiB`` of a device that is known by its memory alone."""
    return f"{'in' if device.name == format_bytes(device.total_bytes) else 'on'} {device.name}"


def _describe_need(record: PredictionRecord) -> str:
    room, needs = record.device.available_bytes, record.reserved
    if room is None:
        return 'there is no GPU here to compare with: name one, --on T4 (in code: on="T4")'
    if record.fits is None:
        return f"needs {_word_bounds(needs)}, PyTorch may reserve {format_bytes(room)}"
    words = f"needs {format_bytes(needs.expected)}"
    if needs.expected > room:
        more = format_bytes(needs.expected - room)
        return f"{words}, {more} more than the {format_bytes(room)} that PyTorch may reserve"
    return f"{words} of the {format_bytes(room)} that PyTorch may reserve"


def _describe_amounts(record: PredictionRecord) -> tuple[Run, ...]:
    pieces = [
        Run(f"reserved peak {_word_bytes(record.reserved)}"),
        Run(f"allocated peak {_word_bytes(record.allocated)}"),
    ]
    if record.device.reserved_bytes:
        before = format_bytes(record.device.allocated_bytes)
        pieces.append(Run(f"{before} allocated before", "muted"))
    return tuple(pieces)


def _word_bytes(amount: Bytes) -> str:
    expected = format_bytes(amount.expected)
    bounds = _word_bounds(amount)
    return expected if bounds == expected else f"{expected} ({bounds})"


def _word_bounds(amount: Bytes) -> str:
    """Return ``1.66 to 1.70 GiB``, or the one amount where both are the same."""
    low, high = format_bytes(amount.at_least), format_bytes(amount.at_most)
    if low == high:
        return high
    (number, unit), high_unit = low.split(), high.split()[1]
    return f"{number if unit == high_unit else low} to {high}"


def describe_remedy(remedy: PredictedRemedy) -> Option:
    """Return what a change would save of the reserved peak, and whether the step fits with it."""
    needs = format_bytes(remedy.reserved_peak_bytes)
    text = f"{remedy.name}: {needs} reserved, {_VERDICTS[remedy.fits]}"
    return Option(format_change(-remedy.saved_bytes), text, remedy.command)


# -- Where the peak is -----------------------------------------------------------------------------

_PHASES = {"forward": "forward", "backward": "backward", "optimizer": "the optimizer's step"}


def _describe_place(record: PredictionRecord, place: PeakPlace, words: str) -> Heading:
    phase = f"in {_PHASES[place.phase]}"
    if place.module:
        phase += f" of {place.module}"
    if len(record.runs) > 1:
        phase += f", run {place.run} of {len(record.runs)}"
    operator = Run(place.operator.removeprefix("aten::"), "muted")
    if place.line is None:
        return make_heading(f"{words} {phase}", operator, tone="plain")
    code = cut(_find_code(record, place.line), SHORT_WIDTH)
    line = f"{words} at {_name_line(place.line)}"
    return make_heading(line, *[Run(code, "code")] * bool(code), phase, operator, tone="plain")


def _find_code(record: PredictionRecord, place: SourcePlace) -> str:
    units = record.trace.units
    unit = next((unit for unit in units if unit.name == place.name), None)
    if not place.name and units:
        unit = units[0]
    lines = () if unit is None else unit.lines
    return next((line.text.strip() for line in lines if line.line == place.line), "")


def _name_line(place: SourcePlace) -> str:
    return f"{name_file(place.name)}, line {place.line}" if place.name else f"line {place.line}"


# -- What makes the peak ---------------------------------------------------------------------------


def _tabulate_owners(record: PredictionRecord) -> Table:
    by_kind: dict[PredictedKind, list[PredictedOwner]] = {}
    for owner in record.owners:
        by_kind.setdefault(owner.kind, []).append(owner)
    total = record.allocated.expected
    groups = []
    ranked = sorted(by_kind.items(), key=lambda pair: -sum(owner.n_bytes for owner in pair[1]))
    for kind, owners in ranked:
        n_bytes = sum(owner.n_bytes for owner in owners)
        # Owners with less than a fiftieth of their kind are not shown.
        shown = [owner for owner in owners[:FEW] if 50 * owner.n_bytes >= n_bytes]
        rows = [
            (owner.path or "—", bytes_cell(owner.n_bytes), _word_origin(owner))
            for owner in shown or owners[:1]
        ]
        name = "temporaries" if kind == "temporary" else name_kind(kind)  # type: ignore[arg-type]
        sums = name, bytes_cell(n_bytes), share_cell(n_bytes, total)
        groups.append(make_group(*rows, shared=sums))
    columns = (
        *name_columns("what"),
        *number_columns("bytes", "share"),
        Column("biggest", "code", fold=26),
        *number_columns("bytes"),
        Column("allocated at", "words", fold=24),
    )
    caption = f"What makes the peak: {format_bytes(total)} allocated"
    return Table(caption, columns, groups, n_shared=3)


def _word_origin(owner: PredictedOwner) -> str:
    if owner.phase is None:
        return "before the step"
    return f"in {_PHASES[owner.phase]}" if owner.line is None else _name_line(owner.line)


# -- The largest batch -----------------------------------------------------------------------------


def report_sizes(
    size: int, dim: int, records: Mapping[int, PredictionRecord], *, asked: int | None = None
) -> Report:
    """Report the largest size of a batch that fits, and the sizes that were tried.

    ``size`` is the answer, 0 where none fits; ``records`` are by size, ascending. Whether the
    ``asked`` size fits is said first.
    """
    smallest = next(iter(records))
    answer = records[size or smallest]
    place = _name_place(answer.device)
    name, where = ("batch", "") if dim == 0 else ("size", f" in dimension {dim}")
    words = f"The largest {name}{where} that fits {place}: {size:,}"
    if size == 0:
        words = f"Not even a {name} of {smallest:,}{where} fits {place}"
    if asked is not None:
        answer = records[asked]
        verdict = {True: "fits", False: "does not fit", None: "may not fit"}[answer.fits]
        words = f"A {name} of {asked:,}{where} {verdict} {place}"
    blocks: list[Block] = [make_heading(words, _describe_need(answer))]
    if asked is not None and size:
        largest = f"The largest that fits is {size:,}, which {_describe_need(records[size])}."
        blocks.append(say(largest))
    elif asked is not None and smallest < asked:
        blocks.append(say(f"Not even {smallest:,} fits."))
    groups = [
        make_group(
            (
                f"{tried:,}",
                bytes_cell(record.reserved.expected),
                bytes_cell(record.reserved.at_most),
                bytes_cell(record.allocated.expected),
                Cell(_VERDICTS[record.fits], tone="strong" if tried == size else "plain"),
            )
        )
        for tried, record in records.items()
    ]
    columns = (
        *name_columns("size"),
        *number_columns("reserved peak", "reserved at most", "allocated peak"),
        Column("verdict", "words"),
    )
    table = Table("Sizes that were predicted", columns, groups, caption_is_seen=False)
    return Report([*blocks, table, Note(_CODE_NOTE)])
