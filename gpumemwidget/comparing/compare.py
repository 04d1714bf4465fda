"""Compare two results of this package, whichever they are."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from gpumemwidget.comparing.totals import (
    PEAK,
    PROCESS_PEAKS,
    Side,
    Total,
    compare_sides,
    count_namesakes,
    list_both,
    make_alike,
    name_processes,
    strip_number,
)
from gpumemwidget.errors import BadInputError, name_type
from gpumemwidget.leaks.runs import make_cell_key
from gpumemwidget.model.cells import CellRecord
from gpumemwidget.model.comparisons import ComparedRow, ComparedTotal
from gpumemwidget.model.devices import HOST
from gpumemwidget.model.ownership import MemoryAccount
from gpumemwidget.model.predictions import PredictionRecord
from gpumemwidget.model.processes import ProcessState
from gpumemwidget.model.traces import CellTrace
from gpumemwidget.recording.ledger import Ledger
from gpumemwidget.recording.running_cell import find_first_line
from gpumemwidget.remote.reader.recordings import Recordings
from gpumemwidget.report.render.output import Report, ShowsReport
from gpumemwidget.session.tracer import SNAPSHOT_SUFFIXES, Trace, load_trace
from gpumemwidget.session.whole_devices import DeviceBreakdowns
from gpumemwidget.units import format_bytes

_PREDICTED = "predicted"


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
        return () if self._largest is None else self._largest.rows

    @property
    def change_bytes(self) -> int | None:
        """Return by how much that figure has changed: the sum of ``rows``.

        ``None``: spans alone have changed, whose peaks have no sum.
        """
        return 0 if self._largest is None else self._largest.change_bytes

    @property
    def _largest(self) -> ComparedTotal | None:
        return next((total for total in self.totals if total.rows), None)

    def list_growth(self, share: float) -> list[str]:
        """Return why a peak has grown, or may have; see ``list_growth``."""
        return list_growth(*self._sides, share)

    def _report(self) -> Report:
        from gpumemwidget.report.comparison import report_comparison  # noqa: PLC0415 - when used

        return report_comparison(self.a_name, self.b_name, self.totals)


def compare(a: object, b: object) -> Comparison:
    """Return two results beside each other: see ``gpumemwidget.compare``."""
    first, second = _read_side(a), _read_side(b)
    names = _name_side(a, first) or "a", _name_side(b, second) or "b"
    if names[0] == names[1] == _PREDICTED:
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
    return _PREDICTED if isinstance(record, PredictionRecord) else ""


# -- Growth, for ``--fail-above`` ------------------------------------------------------------------


def list_growth(a: Side, b: Side, share: float) -> list[str]:
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
        where = "on the host" if key[0] == HOST else f"on {key[0]}"
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
