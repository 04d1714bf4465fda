"""Compare two results of this package, whichever they are."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from gpumemwidget.comparing.totals import PROCESS_PEAKS, Side, compare_sides
from gpumemwidget.errors import BadInputError, name_type
from gpumemwidget.model.cells import CellRecord
from gpumemwidget.model.comparisons import ComparedRow, ComparedTotal
from gpumemwidget.model.devices import HOST
from gpumemwidget.model.ownership import MemoryAccount
from gpumemwidget.model.traces import CellTrace
from gpumemwidget.recording.ledger import Ledger
from gpumemwidget.remote.reader.recordings import Recordings
from gpumemwidget.report.render.output import Report, ShowsReport
from gpumemwidget.session.trace_block import Trace, load_trace
from gpumemwidget.session.whole_devices import DeviceBreakdowns
from gpumemwidget.units import format_bytes

#: Endings of PyTorch's memory snapshots.
_SNAPSHOTS = (".pickle", ".pkl")


@dataclass(frozen=True, repr=False)
class Comparison(ShowsReport):
    """Two results beside each other; ``gpumemwidget.compare()`` makes it. All amounts are bytes.

    Attributes:
        a_name: what the first side is called.
        b_name: what the second side is called.
        totals: each figure that both sides have, with the rows that differ; the largest change
            first, the host last.
    """

    a_name: str
    b_name: str
    totals: tuple[ComparedTotal, ...]

    @property
    def rows(self) -> tuple[ComparedRow, ...]:
        """Return what differs in the figure that has changed most, of a GPU if one has."""
        return next((total.rows for total in self.totals if total.rows), ())

    @property
    def change_bytes(self) -> int:
        """Return by how much that figure has changed: the sum of ``rows``."""
        return sum(row.change_bytes for row in self.rows)

    def _report(self) -> Report:
        from gpumemwidget.report.comparison import report_comparison  # noqa: PLC0415 - when used

        return report_comparison(self.a_name, self.b_name, self.totals)


def compare(a: object, b: object) -> Comparison:
    """Return two results beside each other: see ``gpumemwidget.compare``."""
    sides = _read_side(a), _read_side(b)
    names = _name_side(a, "a"), _name_side(b, "b")
    if _is_prediction(a) and _is_prediction(b):
        names = "a", "b"
    return Comparison(*names, compare_sides(*sides))


def list_grown(totals: Sequence[ComparedTotal], share: float) -> list[str]:
    """Return a sentence for each peak that has grown by more than a share of what it was.

    Of recordings these are the peaks of each process; what has no partner is not compared. Where
    no GPU was recorded the host's count.

    Raises:
        BadInputError: nothing has a partner, so that nothing was compared.
    """
    peaks = [total for total in totals if total.a_bytes is not None]
    peaks = [total for total in peaks if total.device != HOST] or peaks
    grown, has_partner = [], False
    for total in peaks:
        pairs = [row for row in total.rows if None not in (row.a_bytes, row.b_bytes)]
        gone_bytes = sum(row.a_bytes or 0 for row in total.rows if row.b_bytes is None)
        has_partner = has_partner or gone_bytes != total.a_bytes
        if total.measure != PROCESS_PEAKS:
            pairs = [ComparedRow(total.measure, "", total.a_bytes, total.b_bytes)]
        for row in pairs:
            if row.change_bytes > share * (row.a_bytes or 0):
                grown.append(
                    f"{row.what} on {total.device} has grown from {format_bytes(row.a_bytes)} to "
                    f"{format_bytes(row.b_bytes)}, by more than {100 * share:.3g} %"
                )
    if not has_partner:
        raise BadInputError("no peak is on both sides: nothing was compared")
    return grown


def find_cells(ledger: Ledger, numbers: tuple[int, int] | None) -> tuple[CellRecord, CellRecord]:
    """Return two recorded cells by their numbers; without them the last two runs of one cell.

    Raises:
        BadInputError: there is no such cell, or none that ran twice.
    """
    records = [record for record in ledger if not record.is_only_own_magics]
    if numbers is None:
        for place in range(len(records) - 1, 0, -1):
            last = records[place]
            for before in reversed(records[:place]):
                if _is_same_cell(before, last):
                    return before, last
        raise BadInputError("no cell has run twice: name two, as in %memdiff 4 9")
    found = []
    for number in numbers:
        record = next((r for r in reversed(records) if r.execution_count == number), None)
        if record is None:
            raise BadInputError(f"In[{number}] is not recorded: %memledger lists the cells")
        found.append(record)
    return found[0], found[1]


def _is_same_cell(a: CellRecord, b: CellRecord) -> bool:
    if a.cell_id is not None and b.cell_id is not None:
        return a.cell_id == b.cell_id
    return a.first_line == b.first_line


def _read_side(value: object) -> Side:
    if isinstance(value, str | os.PathLike):
        path = Path(value)
        value = load_trace(path) if path.suffix in _SNAPSHOTS else Recordings(path)
    if isinstance(value, Trace):
        return value.trace
    if isinstance(value, Recordings):
        return value.processes
    if isinstance(value, DeviceBreakdowns):
        return value.records
    # A prediction has its record in an attribute, and its module is heavy.
    record = getattr(value, "record", None) if _is_prediction(value) else value
    if isinstance(record, MemoryAccount | CellRecord | CellTrace) or _is_prediction(value):
        return cast("Side", record)
    raise BadInputError(
        f"{name_type(value)} can't be compared: pass two of gpumemwidget.owners(), breakdown(), "
        "monitor().ledger[i], trace(), predict(), load(), or two paths"
    )


def _is_prediction(value: object) -> bool:
    # Who has one has imported its module, which is heavy.
    module = sys.modules.get("gpumemwidget.session.step_predictions")
    return module is not None and isinstance(value, module.Prediction)


def _name_side(value: object, otherwise: str) -> str:
    if isinstance(value, str | os.PathLike):
        return str(os.fspath(value))
    if isinstance(value, Trace | CellTrace):
        value = value.record
    if isinstance(value, CellRecord) and value.execution_count is not None:
        return f"In[{value.execution_count}]"
    return "predicted" if _is_prediction(value) else otherwise
