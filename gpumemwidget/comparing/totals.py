"""Compare two accounts, traces, cells, predictions, devices or recordings, byte by byte.

Each side is taken apart into totals, and each total into rows that add up to it: what is not known
more closely is a row of its own. Rows are matched by their words alone, lines by their text, so
that a line that has moved is the same. Nothing is matched by likeness.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import PurePath
from typing import TypeAlias

from gpumemwidget.errors import BadInputError, name_type
from gpumemwidget.model.breakdowns import Breakdown, BreakdownPart
from gpumemwidget.model.cells import CellRecord
from gpumemwidget.model.comparisons import ComparedRow, ComparedTotal
from gpumemwidget.model.devices import HOST
from gpumemwidget.model.ownership import MemoryAccount
from gpumemwidget.model.predictions import PredictionRecord
from gpumemwidget.model.processes import ProcessState
from gpumemwidget.model.traces import CellTrace, DeviceTrace, HostLines, Origin

#: What is compared with another of its kind. Tuples: a machine's devices, a run's processes.
Side: TypeAlias = (
    "MemoryAccount | CellTrace | CellRecord | PredictionRecord | tuple[Breakdown, ...] | "
    "tuple[ProcessState, ...]"
)
_Key: TypeAlias = "tuple[str, str]"

_ALLOCATED, _PEAK, _AFTER, _IN_USE = "allocated", "allocated at the peak", "at the end", "in use"
#: The sum of the peaks of recorded processes, a row for each of them.
PROCESS_PEAKS = "peaks of processes"
_REST: _Key = ("not attributed", "")


@dataclass(slots=True)
class _Total:
    """A figure of one side, by what and where."""

    device: str
    measure: str
    #: ``None``: the rows have no sum.
    n_bytes: int | None
    rows: Counter[_Key] = field(default_factory=Counter)

    def complete(self) -> _Total:
        """Add what the rows leave of the total."""
        if self.n_bytes is not None:
            self.rows[_REST] += self.n_bytes - sum(self.rows.values())
        return self


def compare_sides(a: Side, b: Side) -> tuple[ComparedTotal, ...]:
    """Return each total of both sides with the rows that differ, the largest change first.

    Raises:
        BadInputError: the sides have no figure in common.
    """
    totals = _list_totals(a, b), _list_totals(b, a)
    firsts, seconds = ({(t.device, t.measure): t.complete() for t in side} for side in totals)
    _rename_only_gpu(firsts, seconds)
    keys = list(dict.fromkeys([*firsts, *seconds]))
    if not firsts.keys() & seconds.keys():
        raise BadInputError(
            f"{_name(a)} and {_name(b)} have no figure in common: compare two of a kind, or a "
            "prediction with its run"
        )
    found = [_compare(*key, firsts.get(key), seconds.get(key)) for key in keys]
    return tuple(sorted(found, key=lambda t: (t.device == HOST, -abs(t.change_bytes))))


def _compare(device: str, measure: str, a: _Total | None, b: _Total | None) -> ComparedTotal:
    a_rows: Mapping[_Key, int] = {} if a is None else a.rows
    b_rows: Mapping[_Key, int] = {} if b is None else b.rows
    rows = [
        ComparedRow(*key, a_rows.get(key), b_rows.get(key))
        for key in dict.fromkeys([*a_rows, *b_rows])
        if a_rows.get(key, 0) != b_rows.get(key, 0)
    ]
    rows.sort(key=lambda row: (-abs(row.change_bytes), row.what, row.where))
    a_bytes, b_bytes = (None if side is None else side.n_bytes for side in (a, b))
    return ComparedTotal(device, measure, a_bytes, b_bytes, tuple(rows))


def _rename_only_gpu(a: dict[_Key, _Total], b: dict[_Key, _Total]) -> None:
    """Give the only GPU of one side the name of the other's only one: a T4, or another number."""
    names = [{device for device, _ in side if device != HOST} for side in (a, b)]
    if names[0] != names[1] and all(len(devices) == 1 for devices in names):
        (old,), (new,) = names
        for device, measure in list(a):
            if device == old:
                a[new, measure] = a.pop((device, measure))


# -- What each kind is made of ---------------------------------------------------------------------


def _list_totals(side: Side, other: Side) -> Iterable[_Total]:
    if isinstance(side, MemoryAccount):
        return _divide_account(side)
    if isinstance(side, tuple):
        breakdowns = [part for part in side if isinstance(part, Breakdown)]
        states = [part for part in side if isinstance(part, ProcessState)]
        return [*map(_divide_device, breakdowns), *_divide_processes(states)]
    # What has no lines on one side is compared by its counters.
    if isinstance(other, CellTrace | PredictionRecord):
        # A prediction calls some purposes otherwise than a run, which has freed them since.
        is_alike = type(side) is type(other)
        if isinstance(side, CellTrace):
            host = [] if side.host is None else [_divide_host(side.host)]
            return [*(_divide_peak(part, has_kinds=is_alike) for part in side.devices), *host]
        if isinstance(side, PredictionRecord):
            return [_divide_prediction(side) if is_alike else _divide_peak(side.trace)]
    if isinstance(side, PredictionRecord):
        peak_bytes = side.allocated.expected
        rows = _divide_rise(side.device.allocated_bytes, peak_bytes)
        return [_Total(side.device.name, _PEAK, peak_bytes, rows)]
    return _divide_cell(side.record if isinstance(side, CellTrace) else side)


def _divide_account(account: MemoryAccount) -> Iterator[_Total]:
    """Yield what is allocated on each device, by purpose and variable."""
    for device in account.devices:
        rows: Counter[_Key] = Counter()
        for owned in device.owned:
            rows[owned.kind, owned.rows[0] if owned.rows else owned.owner] += owned.n_bytes
        yield _Total(device.device, _ALLOCATED, device.allocated_bytes, rows)


def _divide_prediction(record: PredictionRecord) -> _Total:
    """Return what would be allocated at the peak, by purpose and path."""
    rows: Counter[_Key] = Counter()
    for owner in record.owners:
        rows[owner.kind, owner.path] += owner.n_bytes
    return _Total(record.device.name, _PEAK, record.allocated.expected, rows)


def _divide_peak(trace: DeviceTrace, *, has_kinds: bool = False) -> _Total:
    """Return what was allocated at the peak, by line, and by purpose too."""
    texts = _list_texts(trace)
    rows: Counter[_Key] = Counter()
    for part in trace.peak:
        place = part.origin.value if part.origin is not Origin.LINE else texts.get(part.line, "")
        what = part.kind if has_kinds else "allocated there"
        rows[what, place or f"line {part.line}"] += part.n_bytes
    return _Total(trace.device, _PEAK, trace.allocated.peak_bytes, rows)


def _list_texts(trace: DeviceTrace) -> dict[int | None, str]:
    """Return the text of each line of the traced cell; of equal ones the later have numbers."""
    lines = trace.units[0].lines if trace.units else ()
    return dict(_number_alike((line.line, line.text.strip()) for line in lines))


def _number_alike(lines: Iterable[tuple[int, str]]) -> Iterator[tuple[int, str]]:
    seen: Counter[str] = Counter()
    for number, text in lines:
        seen[text] += 1
        yield number, text if seen[text] == 1 else f"{text} (no. {seen[text]})"


def _divide_host(host: HostLines) -> _Total:
    """Return how the host's memory has changed, by line."""
    rows: Counter[_Key] = Counter()
    numbered = _number_alike((line.line, line.text.strip()) for line in host.lines)
    for line, (_, text) in zip(host.lines, numbered, strict=True):
        rows["malloc", text] += line.net_bytes
    rows["malloc", "outside the lines"] = host.outside_bytes
    rows["malloc", "lines that were not read"] = host.unread_bytes
    total = _Total(HOST, "kept by the cell", host.after_bytes - host.before_bytes)
    total.rows = Counter({key: n_bytes for key, n_bytes in rows.items() if n_bytes})
    return total


def _divide_cell(record: CellRecord) -> Iterator[_Total]:
    """Yield each device's peak and what was there at the end, from before the cell and by it."""
    for device in record.devices:
        counter = device.peak_counter
        peak = "resident at the peak" if device.device == HOST else _PEAK
        measures = [(peak, counter.before_bytes, counter.peak_bytes)]
        measures.append((_AFTER, device.allocated.before_bytes, device.allocated.after_bytes))
        if (outside := device.outside) is not None:
            measures.append(("outside PyTorch", outside.before_bytes, outside.after_bytes))
        for measure, before_bytes, n_bytes in measures:
            if n_bytes is not None:
                rows = _divide_rise(before_bytes or 0, n_bytes)
                yield _Total(device.device, measure, n_bytes, rows)


def _divide_rise(before_bytes: int, n_bytes: int) -> Counter[_Key]:
    return Counter({("from before", ""): before_bytes, ("added", ""): n_bytes - before_bytes})


def _divide_device(breakdown: Breakdown) -> _Total:
    """Return what is in use on a device, by part."""
    rows: Counter[_Key] = Counter()
    free_bytes = 0
    for part in breakdown.parts:
        if part.key == "free":
            free_bytes += part.n_bytes
            continue
        for inner in part.parts or (part,):
            rows[_name_part(inner, part)] += inner.n_bytes
    return _Total(breakdown.device, _IN_USE, breakdown.total_bytes - free_bytes, rows)


def _name_part(part: BreakdownPart, whole: BreakdownPart) -> _Key:
    if part.process is not None:
        return whole.key, part.process.name or f"pid {part.process.pid}"
    if part.library is not None:
        return part.key, part.library.name
    if part.key == "outside":
        return "context", ""
    return part.kind or (", ".join(part.merged) if part.merged else part.key), ""


def _divide_processes(states: Sequence[ProcessState]) -> Iterator[_Total]:
    """Yield the peaks of all processes, and those of their spans, which have no sum."""
    peaks: dict[str, Counter[_Key]] = {}
    spans: Counter[_Key] = Counter()
    names = _number_alike((number, name_compared(state)) for number, state in enumerate(states))
    for state, (_, name) in zip(states, names, strict=True):
        for peak in state.peaks:
            n_bytes = peak.reserved_bytes if peak.device == HOST else peak.allocated_bytes
            peaks.setdefault(peak.device, Counter())[name, ""] = n_bytes or 0
        for span in state.spans:
            for part in span.devices:
                n_bytes = part.peak_counter.peak_bytes
                if part.device != HOST and n_bytes is not None:
                    key = f"{name} on {part.device}", span.name
                    spans[key] = max(spans[key], n_bytes)
    for device, rows in peaks.items():
        yield _Total(device, PROCESS_PEAKS, sum(rows.values()), rows)
    if spans:
        yield _Total("all devices", "peaks of spans", None, spans)


def name_compared(state: ProcessState) -> str:
    """Return the name by which another recording has a process: ``rank 0``, ``train.py``."""
    info = state.info
    if info.number is not None:
        return f"{info.role} {info.number}"
    if info.label:
        return info.label
    words = [word for word in info.name.split() if not word.startswith("-")]
    return PurePath(words[1 if len(words) > 1 else 0]).name if words else info.role


def _name(side: object) -> str:
    if isinstance(side, tuple):
        return f"a tuple of {name_type(side[0])}" if side else "a recording without processes"
    return name_type(side)
