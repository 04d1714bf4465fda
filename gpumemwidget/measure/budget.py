"""What cells may have allocated: budgets as they are set, and which cell goes beyond its own.

A cell is held to what stood at its start, unless that was raised or taken away while it ran: a
budget that a cell's own line sets is for the cells after it, for its peak may have come before.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import TYPE_CHECKING

from gpumemwidget.devices import EVERY_GPU, Budget
from gpumemwidget.errors import BadInputError
from gpumemwidget.records import HOST, CellDevice, CellRecord, Reading, Sample, crosses_budget

if TYPE_CHECKING:
    from gpumemwidget.measure.cells import RunningCell

__all__ = ["BudgetTable", "Budgets", "Crossing", "find_crossing", "mark_budgets"]

#: Less than this no cell gets by with: it is a number whose unit was left out.
_LEAST_BYTES = 1024**2
#: More than this no device has, and the columns of an export hold.
_MOST_BYTES = 1024**6


@dataclass(frozen=True, slots=True)
class Crossing:
    """A device on which a running cell was seen beyond its budget."""

    device: str
    #: What the cell had there, or had had since the sample before.
    n_bytes: int
    budget_bytes: int


@dataclass(frozen=True, slots=True)
class BudgetTable:
    """The budgets of one moment. It never changes, so that a cell can keep the one of its start."""

    every_gpu: Budget | None
    #: Of single devices, before the one of every GPU; ``None``: this device has none.
    own: Mapping[str, Budget | None]

    def find(self, device: str) -> Budget | None:
        """The budget of a device, named as it is; ``None`` where it has none."""
        if device in self.own:
            return self.own[device]
        if self.every_gpu is None or device == HOST:
            return None
        return replace(self.every_gpu, device=device)

    @property
    def stops(self) -> bool:
        """Whether any of them interrupts the cell that crosses it."""
        return any(budget.stops for budget in self.list())

    def list(self) -> tuple[Budget, ...]:
        """What was set, in order: every GPU first."""
        every_gpu = () if self.every_gpu is None else (self.every_gpu,)
        return (*every_gpu, *(budget for budget in self.own.values() if budget is not None))


class Budgets:
    """The budgets that hold now.

    Attributes:
        table: all of them; ``None`` where there is none, which is all that most cells look at.
    """

    def __init__(self) -> None:
        self.table: BudgetTable | None = None

    def find(self, device: str) -> Budget | None:
        """The budget of a device; ``None`` where it has none."""
        return None if self.table is None else self.table.find(device)

    def list(self) -> tuple[Budget, ...]:
        """What was set; the first may be the one of every GPU (``EVERY_GPU``)."""
        return () if self.table is None else self.table.list()

    def set(self, n_bytes: int, *, device: str | None = None, stops: bool = False) -> None:
        """Set what each cell may have from the next one on.

        Args:
            n_bytes: how much.
            device: on which device; ``None`` for every GPU, in place of what single ones had.
            stops: interrupt the cell that goes beyond it.

        Raises:
            BadInputError: it is less than 1 MiB, or more than there can be.
        """
        if n_bytes < _LEAST_BYTES:
            raise BadInputError(
                f"a budget of {n_bytes} bytes is less than any cell takes: give at least 1MiB, "
                "with its unit, as in 10GiB"
            )
        if n_bytes > _MOST_BYTES:
            raise BadInputError(
                "a budget of more than a million TiB is more than any device has: give less, as in "
                "10GiB"
            )
        budget = Budget(EVERY_GPU if device is None else device, n_bytes, stops)
        if device is None:
            self._put(budget, {each: own for each, own in self._own.items() if each == HOST})
        else:
            self._put(self._every_gpu, {**self._own, device: budget})

    def clear(self, device: str | None = None) -> None:
        """Take the budgets away, at once for the cell that runs too.

        Args:
            device: only this one's, also where every GPU has one; ``None`` for all.
        """
        if device is None:
            self.table = None
            return
        own = {each: budget for each, budget in self._own.items() if each != device}
        if self._every_gpu is not None and device != HOST:
            own[device] = None
        self._put(self._every_gpu, own)

    @property
    def _every_gpu(self) -> Budget | None:
        return None if self.table is None else self.table.every_gpu

    @property
    def _own(self) -> Mapping[str, Budget | None]:
        return {} if self.table is None else self.table.own

    def _put(self, every_gpu: Budget | None, own: Mapping[str, Budget | None]) -> None:
        table = BudgetTable(every_gpu, MappingProxyType(dict(own)))
        self.table = table if table.list() else None


def find_crossing(cell: RunningCell, now: BudgetTable | None, sample: Sample) -> Crossing | None:
    """Where a sample shows a cell beyond a budget that stops it; ``None`` where it does not.

    Args:
        cell: the running cell.
        now: the budgets that hold now.
        sample: one whose reading may have begun before the cell did; then it tells nothing, for its
            peaks are those of an earlier cell.
    """
    if now is None or cell.budgets is None or cell.start_failed or sample.time_s < cell.start_s:
        return None
    for reading in sample.readings:
        budget = _ease(cell.budgets.find(reading.device), now.find(reading.device))
        if budget is None or not budget.stops:
            continue
        n_bytes = _read_highest(reading)
        start_bytes = _find_start(cell, reading.device)
        if n_bytes is None or start_bytes is None:
            continue
        if crosses_budget(
            reading.device, n_bytes, budget_bytes=budget.budget_bytes, start_bytes=start_bytes
        ):
            return Crossing(reading.device, n_bytes, budget.budget_bytes)
    return None


def mark_budgets(record: CellRecord, cell: RunningCell, now: BudgetTable | None) -> CellRecord:
    """The record of a cell that had budgets, with what it was allowed on each device.

    Args:
        record: the record without them.
        cell: the cell, as it ran.
        now: the budgets that hold at its end.
    """
    return replace(record, devices=tuple(_mark(each, cell, now) for each in record.devices))


def _mark(device: CellDevice, cell: RunningCell, now: BudgetTable | None) -> CellDevice:
    stop = cell.stopped if cell.stopped and cell.stopped.device == device.device else None
    first = None if cell.budgets is None else cell.budgets.find(device.device)
    budget = _ease(first, None if now is None else now.find(device.device))
    # What has stopped it was its budget, even if the cell has taken it away since.
    budget_bytes = None if budget is None else budget.budget_bytes
    if stop is not None:
        budget_bytes = stop.budget_bytes
    return replace(
        device,
        budget_bytes=budget_bytes,
        stopped_at_bytes=None if stop is None else stop.n_bytes,
    )


def _ease(first: Budget | None, now: Budget | None) -> Budget | None:
    """The budget of a cell's start, as far as it still holds."""
    if first is None or now is None:
        return None
    return Budget(
        first.device, max(first.budget_bytes, now.budget_bytes), first.stops and now.stops
    )


def _read_highest(reading: Reading) -> int | None:
    """The most that the cell is known to have had, of what its budget is for."""
    if reading.device == HOST:
        figures = (reading.reserved_bytes, reading.reserved_peak_bytes)
    else:
        figures = (reading.allocated_bytes, reading.allocated_peak_bytes)
    return max((figure for figure in figures if figure is not None), default=None)


def _find_start(cell: RunningCell, device: str) -> int | None:
    for reading in cell.before:
        if reading.device == device:
            return reading.reserved_bytes if device == HOST else reading.allocated_bytes
    # A GPU that is first used in this cell.
    return None if device == HOST else 0
