"""Compare two results of this package, whichever they are, byte by byte.

Each side is taken apart into totals, and each total into rows that add up to it: what is not known
more closely is a row of its own. Rows are matched by their words alone, lines by their text, so
that a line that has moved is the same. Nothing is matched by likeness. A figure that only one side
has is no change.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePath
from typing import TypeAlias

from gpumemwidget.errors import BadInputError, name_type
from gpumemwidget.leaks.runs import make_cell_key
from gpumemwidget.model.breakdowns import Breakdown, BreakdownPart
from gpumemwidget.model.cells import CellRecord
from gpumemwidget.model.comparisons import ComparedRow, ComparedTotal
from gpumemwidget.model.devices import HOST
from gpumemwidget.model.ownership import DeviceAccount, MemoryAccount
from gpumemwidget.model.predictions import PredictionRecord
from gpumemwidget.model.processes import ProcessState
from gpumemwidget.model.traces import (
    CellTrace,
    DeviceTrace,
    HostLine,
    HostLines,
    Origin,
    SourceLine,
)
from gpumemwidget.recording.ledger import Ledger
from gpumemwidget.recording.running_cell import find_first_line
from gpumemwidget.remote.reader.recordings import Recordings
from gpumemwidget.report.comparison import report_comparison
from gpumemwidget.report.render.output import Report, ShowsReport
from gpumemwidget.report.render.wording import name_device
from gpumemwidget.session.tracer import SNAPSHOT_SUFFIXES, Trace, load_trace
from gpumemwidget.session.whole_devices import DeviceBreakdowns
from gpumemwidget.units import format_bytes


@dataclass(frozen=True, repr=False)
class Comparison(ShowsReport):
    """Two results beside each other; ``gpumemwidget.compare()`` makes it. All amounts are bytes.

    Attributes:
        a_name: what the first side is called.
        b_name: what the second side is called.
        totals: each figure of either side, with the rows that differ where both have it; the
            largest change first, the host last.
    """

    a_name: str
    b_name: str
    totals: tuple[ComparedTotal, ...]
    _sides: tuple[Side, Side] = field(compare=False)

    @property
    def rows(self) -> tuple[ComparedRow, ...]:
        """Return what differs in the figure that has changed most, of a GPU if one has."""
        return next((total.rows for total in self.totals if total.rows), ())

    @property
    def change_bytes(self) -> int:
        """Return by how much that figure has changed: the sum of ``rows``."""
        return sum(row.change_bytes for row in self.rows)

    def list_growth(self, share: float) -> list[str]:
        """Return a sentence for each reason why a peak has, or may have, grown by over a share.

        Raises:
            BadInputError: neither side has a peak.
        """
        return find_grown_peaks(*self._sides, share)

    def _report(self) -> Report:
        return report_comparison(self.a_name, self.b_name, self.totals)


def compare(a: object, b: object) -> Comparison:
    """Return two results beside each other: see ``gpumemwidget.compare``."""
    first, second = _read_side(a), _read_side(b)
    names = _name_side(a, first) or "a", _name_side(b, second) or "b"
    if names[0] == names[1] == "predicted":
        names = "a", "b"
    sides = make_alike(first, second)
    return Comparison(*names, compare_sides(*sides), sides)


def find_cells(
    ledger: Ledger, numbers: tuple[int, int] | None, sources: Mapping[int, str]
) -> tuple[CellRecord, CellRecord]:
    """Return two recorded cells by their numbers; without them the last two runs of one cell.

    ``sources`` has the code of cells by their numbers, which shows whether two without ids are one.

    Raises:
        BadInputError: there is no such cell, or none that ran twice.
    """
    records = [record for record in ledger if not record.is_only_own_magics]
    if numbers is not None:
        by_number = {record.execution_count: record for record in records}
        for number in numbers:
            if number not in by_number:
                raise BadInputError(f"In [{number}] is not recorded: %memledger lists the cells")
        return by_number[numbers[0]], by_number[numbers[1]]
    newest: dict[str, CellRecord] = {}
    pair = None
    for record in records:
        key = _find_key(record, sources)
        if key in newest:
            pair = newest[key], record
        if key is not None:
            newest[key] = record
    if pair is None:
        raise BadInputError("no cell has run twice: name two, as in %memdiff 4 9")
    return pair


def _find_key(record: CellRecord, sources: Mapping[int, str]) -> str | None:
    if record.cell_id is not None:
        return f"id {record.cell_id}"
    source = sources.get(record.execution_count or 0, "")
    # After a %reset IPython may have other code under the number.
    is_known = source and find_first_line(source) == record.first_line
    return f"code {make_cell_key(source)}" if is_known else None


def _read_side(value: object) -> Side:
    if isinstance(value, str | os.PathLike):
        path = Path(value)
        value = load_trace(path) if path.suffix in SNAPSHOT_SUFFIXES else Recordings(path)
    if isinstance(value, Trace):
        return value.trace
    if isinstance(value, Recordings):
        if value.failures:  # Without a process of one side the other's would be new.
            raise value.failures[0]
        return value.processes
    if isinstance(value, DeviceBreakdowns):
        return value.records
    # A prediction: its module is heavy to import.
    record = getattr(value, "record", None) if isinstance(value, ShowsReport) else value
    if isinstance(record, MemoryAccount | CellRecord | CellTrace | PredictionRecord):
        return record
    raise BadInputError(
        f"{name_type(value)} can't be compared: pass two of gpumemwidget.owners(), breakdown(), "
        "monitor().ledger[i], trace(), predict(), load(), or two paths"
    )


def _name_side(value: object, side: Side) -> str:
    if isinstance(value, str | os.PathLike):
        return str(os.fspath(value))
    record = side.record if isinstance(side, CellTrace) else side
    if isinstance(record, CellRecord) and record.execution_count is not None:
        return f"In [{record.execution_count}]"
    return "predicted" if isinstance(record, PredictionRecord) else ""


# -- Growth, for ``--fail-above`` ------------------------------------------------------------------


def find_grown_peaks(a: Side, b: Side, share: float) -> list[str]:
    """Return a sentence for each reason why a peak has grown, or may have, by more than a share.

    The peaks are those on GPUs; where neither side has a GPU, those on the host. One that only one
    side has may have grown, and so may all of a process in ``b`` that has not ended well.

    Raises:
        BadInputError: neither side has a peak.
    """
    firsts, seconds = list_both(a, b)
    keys = [key for key in {**firsts, **seconds} if key[1] in (PEAK, PROCESS_PEAKS)]
    keys = [key for key in keys if key[0] != HOST] or keys
    if not keys:
        raise BadInputError("neither side has a peak: nothing can be said of its growth")
    found = list(_list_doubts(_list_states(b)))
    unclear: set[str] = set()
    for side, parts in (("A", a), ("B", b)):
        for name, number in count_namesakes(_list_states(parts)).items():
            unclear.add(name)
            found.append(
                f"{number} processes are called {name} in {side}, and which is meant is not known: "
                "name one file"
            )
    for key in keys:
        where = f"on {name_device(key[0])}"
        old, new = firsts.get(key), seconds.get(key)
        for total, side in ((old, "A"), (new, "B")):
            if total is not None and total.n_bytes is None:
                found.append(f"not every peak {where} is known in {side}")
        olds, news = _list_peaks(old), _list_peaks(new)
        for what in dict.fromkeys([*olds, *news]):
            old_bytes, new_bytes = olds.get(what), news.get(what)
            if strip_number(what) in unclear:
                continue
            if old_bytes is None or new_bytes is None:
                side = "A" if old_bytes is None else "B"
                found.append(f"no peak of {what} {where} is known in {side}")
            elif new_bytes - old_bytes > share * old_bytes:
                found.append(
                    f"{what} {where} has grown from {format_bytes(old_bytes)} to "
                    f"{format_bytes(new_bytes)}, by more than {100 * share:.6g} %"
                )
    return found


def _list_states(side: Side) -> list[ProcessState]:
    parts = side if isinstance(side, tuple) else ()
    return [part for part in parts if isinstance(part, ProcessState)]


def _list_doubts(states: list[ProcessState]) -> Iterator[str]:
    # The peak so far of one that has not ended well may not be its highest.
    unfinished = {
        "failed": "has failed",
        "lost": "has no end: it was killed, or its recording is cut off",
        "running": "is still running",
    }
    for name, state in name_processes(states).items():
        if state.status in unfinished:
            yield f"{name} {unfinished[state.status]}, in B"
        if state.n_unread:
            yield f"{name} has parts that could not be read, in B"
        if not state.peaks:
            yield f"{name} has no peak, in B"


def _list_peaks(total: Total | None) -> dict[str, int]:
    if total is None:
        return {}
    if total.measure == PROCESS_PEAKS:
        return {what: n_bytes for (what, _), n_bytes in total.rows.items()}
    return {} if total.n_bytes is None else {"the memory": total.n_bytes}


# -- Totals of each side ---------------------------------------------------------------------------


#: What is compared with another of its kind. Tuples: a machine's devices, a run's processes.
Side: TypeAlias = (
    "MemoryAccount | CellTrace | CellRecord | PredictionRecord | tuple[Breakdown, ...] | "
    "tuple[ProcessState, ...]"
)
_Key: TypeAlias = "tuple[str, str]"

PEAK = "allocated at the peak"
#: The sum of the peaks of recorded processes, a row for each of them.
PROCESS_PEAKS = "at the processes' peaks"
#: The end of a label that was given a number, as others are equal to it.
_NUMBER = re.compile(r" \(no\. \d+\)\Z")


@dataclass(slots=True)
class Total:
    """A figure of one side, by what and where."""

    device: str
    measure: str
    n_bytes: int | None  #: ``None``: it is not known
    rows: Counter[_Key] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        """Add what the rows leave of the total."""
        if self.n_bytes is not None and (rest_bytes := self.n_bytes - self.rows.total()):
            self.rows[("not attributed", "")] += rest_bytes


def compare_sides(a: Side, b: Side) -> tuple[ComparedTotal, ...]:
    """Return each total of either side with the rows that differ, the largest change first.

    Raises:
        BadInputError: the sides have no figure in common.
    """
    firsts, seconds = list_both(a, b)
    is_whole = _has_every_device(a) and _has_every_device(b)
    totals = [
        _compare(*key, *(_find(side, *key, is_whole=is_whole) for side in (firsts, seconds)))
        for key in {**firsts, **seconds}
    ]
    if not firsts or not seconds:
        empty = "second" if firsts else "first"
        raise BadInputError(f"the {empty} has no figures of memory: nothing can be compared")
    if not firsts.keys() & seconds.keys() and all(t.change_bytes is None for t in totals):
        raise BadInputError(
            "the two have no figure in common: compare two of a kind, or a prediction with its run"
        )
    return tuple(
        sorted(
            totals,
            key=lambda t: (t.device == HOST, t.change_bytes is None, -abs(t.change_bytes or 0)),
        )
    )


def _find(totals: dict[_Key, Total], device: str, measure: str, *, is_whole: bool) -> Total:
    """Return a side's total; 0 bytes if it is known not to use the GPU, else unknown."""
    is_unused = is_whole and device != HOST and all(device != used for used, _ in totals)
    return totals.get((device, measure)) or Total(device, measure, 0 if is_unused else None)


def _compare(device: str, measure: str, a: Total, b: Total) -> ComparedTotal:
    rows: list[ComparedRow] = []
    if None not in (a.n_bytes, b.n_bytes):
        rows = [
            ComparedRow(*key, a.rows.get(key), b.rows.get(key))
            for key in {**a.rows, **b.rows}
            if a.rows[key] != b.rows[key]
        ]
    rows.sort(key=lambda row: (-abs(row.change_bytes), row.what, row.where))
    return ComparedTotal(device, measure, a.n_bytes, b.n_bytes, tuple(rows))


def make_alike(a: Side, b: Side) -> tuple[Side, Side]:
    """Return both sides; where one has no lines, cells instead of traces: they have counters."""
    if all(
        isinstance(side, PredictionRecord)
        or (isinstance(side, CellTrace) and (side.devices or side.host))
        for side in (a, b)
    ):
        return a, b
    first, second = (side.record if isinstance(side, CellTrace) else side for side in (a, b))
    return first, second


def list_both(a: Side, b: Side) -> tuple[dict[_Key, Total], dict[_Key, Total]]:
    """Return the totals of each side, by device and measure."""
    totals = _list_totals(a, b), _list_totals(b, a)
    firsts, seconds = ({(t.device, t.measure): t for t in side} for side in totals)
    # The only GPU of one side is compared with the other's only one: a T4, or another number.
    names = [{device for device, _ in side if device != HOST} for side in (firsts, seconds)]
    if names[0] != names[1] and all(len(devices) == 1 for devices in names):
        (old,), (new,) = names
        firsts = {(new if d == old else d, measure): t for (d, measure), t in firsts.items()}
    return firsts, seconds


def _has_every_device(side: Side) -> bool:
    """Return whether PyTorch has nothing on a GPU that is not among a side's devices."""
    if isinstance(side, tuple):
        return any(isinstance(part, ProcessState) for part in side)
    return isinstance(side, MemoryAccount | CellRecord)


# -- What each kind is made of ---------------------------------------------------------------------


def _list_totals(side: Side, other: Side) -> Iterable[Total]:
    # A prediction calls some purposes otherwise than a run, which has freed them since.
    is_alike = type(side) is type(other)
    if isinstance(side, MemoryAccount):
        return map(_divide_account, side.devices)
    if isinstance(side, CellRecord):
        return _divide_cell(side)
    if isinstance(side, CellTrace):
        host = [] if side.host is None else [_divide_host(side.host)]
        return [*(_divide_peak(part, has_kinds=is_alike) for part in side.devices), *host]
    if isinstance(side, PredictionRecord):
        return [_divide_prediction(side, other)]
    breakdowns = [part for part in side if isinstance(part, Breakdown)]
    states = [part for part in side if isinstance(part, ProcessState)]
    return [*map(_divide_device, breakdowns), *_divide_processes(states)]


def _divide_account(device: DeviceAccount) -> Total:
    """Return what is allocated on a device, by purpose and variable."""
    rows: Counter[_Key] = Counter()
    for owned in device.owned:
        rows[owned.kind, owned.rows[0] if owned.rows else owned.owner] += owned.n_bytes
    if device.allocated_bytes is None:
        return Total(device.device, "found", rows.total(), rows)
    return Total(device.device, "allocated", device.allocated_bytes, rows)


def _divide_prediction(record: PredictionRecord, other: Side) -> Total:
    """Return what would be allocated at the peak, as the other side has it.

    By purpose and path beside another prediction, by line beside a traced run, else by what was
    there before.
    """
    device, peak_bytes = record.device, record.allocated.expected
    if isinstance(other, CellTrace):
        return _divide_peak(record.trace)
    if not isinstance(other, PredictionRecord):
        return _divide_rise(device.name, PEAK, device.allocated_bytes, peak_bytes)
    rows: Counter[_Key] = Counter()
    for owner in record.owners:
        rows[owner.kind, owner.path] += owner.n_bytes
    return Total(device.name, PEAK, peak_bytes, rows)


def _divide_peak(trace: DeviceTrace, *, has_kinds: bool = False) -> Total:
    """Return what was allocated at the peak, by line, and by purpose too."""
    rows: Counter[_Key] = Counter()
    texts = _number_lines(trace.units[0].lines if trace.units else ())
    for part in trace.peak:
        is_line, place = part.origin is Origin.LINE, part.origin.value
        what = (part.kind if is_line else f"{part.kind}, {place}") if has_kinds else place
        where = texts.get(part.line, f"line {part.line}") if is_line else ""
        rows[what, where] += part.n_bytes
    return Total(trace.device, PEAK, trace.allocated.peak_bytes, rows)


def _divide_host(host: HostLines) -> Total:
    """Return how the host's memory has changed, by line."""
    texts = _number_lines(host.lines)
    rows = Counter({("line", texts[line.line]): line.net_bytes for line in host.lines})
    rows["outside the lines", ""] = host.outside_bytes
    rows["lines that were not read", ""] = host.unread_bytes
    return Total(HOST, "kept by the cell", host.after_bytes - host.before_bytes, rows)


def _number_lines(lines: Sequence[SourceLine | HostLine]) -> dict[int | None, str]:
    """Return the text of each line, by its number in the cell."""
    texts = _number_alike(line.text.strip() for line in lines)
    return {line.line: text for line, text in zip(lines, texts, strict=True)}


def _number_alike(labels: Iterable[str]) -> Iterator[str]:
    """Yield labels, each once: of equal ones the second is "step (no. 2)", and so on.

    A label that looks like a numbered one has a number, too: nothing else becomes equal to it.
    """
    seen: Counter[str] = Counter()
    for label in labels:
        seen[label] += 1
        is_plain = seen[label] == 1 and _NUMBER.search(label) is None
        yield label if is_plain else f"{label} (no. {seen[label]})"


def _divide_cell(record: CellRecord) -> Iterator[Total]:
    """Yield each device's peak and what was there at the end, from before the cell and by it."""
    for device in record.devices:
        counter, kept, outside = device.peak_counter, device.allocated, device.outside
        peak = "resident at the peak" if device.device == HOST else PEAK
        figures = [(peak, counter.before_bytes, counter.peak_bytes)]
        figures.append(("allocated at the end", kept.before_bytes, kept.after_bytes))
        if outside is not None:
            figures.append(("outside PyTorch", outside.before_bytes, outside.after_bytes))
        yield from (_divide_rise(device.device, *figure) for figure in figures)


def _divide_rise(device: str, measure: str, before_bytes: int | None, n_bytes: int | None) -> Total:
    rows: Counter[_Key] = Counter()
    if before_bytes is not None and n_bytes is not None:
        rows[("before the cell", "")] = before_bytes
        rows[("added by the cell", "")] = n_bytes - before_bytes
    return Total(device, measure, n_bytes, rows)


def _divide_device(breakdown: Breakdown) -> Total:
    """Return what is in use on a device, by part."""
    rows: Counter[_Key] = Counter()
    free_bytes = 0
    for part in breakdown.parts:
        if part.key == "free":
            free_bytes += part.n_bytes
            continue
        for inner in part.parts or (part,):
            rows[_name_part(inner, part)] += inner.n_bytes
    return Total(breakdown.device, "in use", breakdown.total_bytes - free_bytes, rows)


def _name_part(part: BreakdownPart, whole: BreakdownPart) -> _Key:
    if part.process is not None:
        return whole.key, part.process.name or f"pid {part.process.pid}"
    if part.library is not None:
        return part.key, part.library.name
    if part.key == "outside":
        return "context", ""
    return part.kind or (", ".join(part.merged) if part.merged else part.key), ""


def _divide_processes(states: Sequence[ProcessState]) -> Iterator[Total]:
    """Yield the peaks of all processes on each device."""
    peaks: dict[str, dict[_Key, int | None]] = {}
    for name, state in name_processes(states).items():
        for peak in state.peaks:
            n_bytes = peak.reserved_bytes if peak.device == HOST else peak.allocated_bytes
            peaks.setdefault(peak.device, {})[name, ""] = n_bytes
    for device, figures in peaks.items():
        known = Counter({key: n_bytes for key, n_bytes in figures.items() if n_bytes is not None})
        n_bytes = known.total() if len(known) == len(figures) else None
        yield Total(device, PROCESS_PEAKS, n_bytes, known)


def name_processes(states: Sequence[ProcessState]) -> dict[str, ProcessState]:
    """Return processes by the names that they have in another recording, too."""
    return dict(zip(_number_alike(map(_name_process, states)), states, strict=True))


def count_namesakes(states: Sequence[ProcessState]) -> dict[str, int]:
    """Return the names that several processes have, with the number of these."""
    counts = Counter(map(_name_process, states))
    return {name: number for name, number in counts.items() if number > 1}


def strip_number(name: str) -> str:
    """Return the name that a process shares with others, of one that ``name_processes`` gave."""
    return _NUMBER.sub("", name)


def _name_process(state: ProcessState) -> str:
    """Return the name by which another recording has a process: ``rank 0``, ``train.py``."""
    info = state.info
    if info.number is not None:
        return f"{info.role} {info.number}"
    if info.label:
        return info.label
    words = [word for word in info.name.split() if not word.startswith("-")]
    return PurePath(words[1 if len(words) > 1 else 0]).name if words else info.role
