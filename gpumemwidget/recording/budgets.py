"""Set how much a cell may have allocated, and mark each record with its cell's budget.

A cell has the budgets of its start, unless they are raised or removed while it runs. A budget that
a cell's own line sets is for the cells after it, as the cell's peak may have come before that line.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import TYPE_CHECKING

from gpumemwidget.errors import BadInputError, name_type
from gpumemwidget.model.cells import CellDevice, CellRecord
from gpumemwidget.model.devices import EVERY_GPU, HOST, Budget, DeviceReport, check_device_name
from gpumemwidget.units import format_bytes, parse_bytes

if TYPE_CHECKING:
    from gpumemwidget.backends.hardware import Hardware

__all__ = ["BudgetTable", "Budgets", "change_budgets", "mark_budgets"]

#: Smallest budget: a lower number is one whose unit was left out.
_MIN_BYTES = 1024**2
#: Largest budget: no device has more, and the columns of an export hold no more.
_MAX_BYTES = 1024**6


@dataclass(frozen=True, slots=True)
class BudgetTable:
    """The budgets at one moment.

    Attributes:
        every_gpu: the budget of every GPU without an own one.
        own: budgets of single devices; ``None`` for a device that has none.
    """

    every_gpu: Budget | None
    own: Mapping[str, Budget | None]

    def find(self, device: str) -> Budget | None:
        """Return the budget of a device, under the device's name; ``None`` if it has none."""
        if device in self.own:
            return self.own[device]
        if self.every_gpu is None or device == HOST:
            return None
        return replace(self.every_gpu, device=device)

    def list(self) -> tuple[Budget, ...]:
        """Return the budgets that were set: every GPU's first."""
        every_gpu = () if self.every_gpu is None else (self.every_gpu,)
        return (*every_gpu, *(budget for budget in self.own.values() if budget is not None))


class Budgets:
    """The budgets that hold now.

    Attributes:
        table: all budgets; ``None`` if none is set.
    """

    def __init__(self) -> None:
        self.table: BudgetTable | None = None

    def find(self, device: str) -> Budget | None:
        """Return the budget of a device; ``None`` if it has none."""
        return None if self.table is None else self.table.find(device)

    def list(self) -> tuple[Budget, ...]:
        """Return the budgets that were set; the first may be every GPU's (``EVERY_GPU``)."""
        return () if self.table is None else self.table.list()

    def set(self, n_bytes: int, *, device: str | None = None) -> None:
        """Set how much each cell may have allocated, from the next cell on.

        Args:
            n_bytes: the budget.
            device: the device; ``None`` for every GPU, in place of the budgets of single GPUs.

        Raises:
            BadInputError: it is less than 1 MiB, or more than there can be.
        """
        if n_bytes < _MIN_BYTES:
            raise BadInputError(
                f"a budget of {n_bytes} bytes is less than any cell takes: give at least 1MiB, "
                "with its unit, as in 10GiB"
            )
        if n_bytes > _MAX_BYTES:
            raise BadInputError(
                "a budget of more than a million TiB is more than any device has: give less, as in "
                "10GiB"
            )
        budget = Budget(EVERY_GPU if device is None else device, n_bytes)
        if device is None:
            self._put(budget, {name: own for name, own in self._own.items() if name == HOST})
        else:
            self._put(self._every_gpu, {**self._own, device: budget})

    def clear(self, device: str | None = None) -> None:
        """Remove budgets, also for the cell that runs.

        Args:
            device: remove only this device's, also if every GPU has one; ``None`` for all.
        """
        if device is None:
            self.table = None
            return
        own = {name: budget for name, budget in self._own.items() if name != device}
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


def mark_budgets(record: CellRecord, start: BudgetTable, end: BudgetTable | None) -> CellRecord:
    """Return the record of a cell with its budget on each device.

    Args:
        record: the record without budgets.
        start: the budgets at the cell's start.
        end: the budgets at its end.
    """

    def mark(device: CellDevice) -> CellDevice:
        at_start = start.find(device.device)
        at_end = None if end is None else end.find(device.device)
        if at_start is None or at_end is None:
            return replace(device, budget_bytes=None)
        return replace(device, budget_bytes=max(at_start.budget_bytes, at_end.budget_bytes))

    return replace(record, devices=tuple(map(mark, record.devices)))


def change_budgets(
    budgets: Budgets,
    hardware: Hardware,
    amount: int | str | None = None,
    *,
    device: str | None = None,
) -> tuple[Budget, ...]:
    """Set, remove or just return the budgets.

    Args:
        budgets: what is changed.
        hardware: has the devices that may be named.
        amount: bytes, or text such as ``"10GiB"``; ``"off"`` removes; ``None`` changes nothing.
        device: one device; ``None`` for every GPU.

    Returns:
        The budgets that are set; of one device alone if nothing else was asked for.

    Raises:
        BadInputError: not an amount, more than the device has, or there is no such device.
    """
    check_device_name(device)
    reports: tuple[DeviceReport, ...] = ()
    if device is not None or amount is not None:
        reports = hardware.read_devices()
    known = [report.info.device for report in reports]
    if device is not None and device not in known:
        raise BadInputError(f"no device {device!r} here: choose from {', '.join(known)}")
    n_bytes = _parse_amount(amount)
    if n_bytes is not None:
        _check_room(n_bytes, device, reports)
        budgets.set(n_bytes, device=device)
    elif amount is not None:
        budgets.clear(device)
    if device is None or amount is not None:
        return budgets.list()
    budget = budgets.find(device)
    return () if budget is None else (budget,)


def _parse_amount(amount: int | str | None) -> int | None:
    """Return the bytes that were asked for; ``None`` to show or to remove a budget."""
    # An object of the user's is never asked what it is.
    if amount is None or type(amount) is int:
        return amount
    if type(amount) is not str:
        raise BadInputError(
            f"a {name_type(amount)} is no amount: give bytes as an int, or text as in '10GiB'"
        )
    text = amount.strip()
    if text.lower() == "off":
        return None
    # What %memlimit takes for a share would be some bytes here.
    if text and text.replace(".", "").isdecimal():
        raise BadInputError(f"{text!r} has no unit: give an amount, as in 10GiB or 500MB, or off")
    return parse_bytes(text)


def _check_room(n_bytes: int, device: str | None, reports: tuple[DeviceReport, ...]) -> None:
    """Refuse a budget that no cell can exceed: most likely its unit is a mistake.

    Raises:
        BadInputError: the device has less memory, or every GPU has.
    """
    infos = [report.info for report in reports]
    if device is None:
        infos = [info for info in infos if info.device != HOST]
    else:
        infos = [info for info in infos if info.device == device]
    # A device whose total is not known may have as much.
    largest = max(infos, key=lambda info: info.total_bytes or n_bytes, default=None)
    total_bytes = None if largest is None else largest.total_bytes
    if largest is not None and total_bytes is not None and n_bytes > total_bytes:
        raise BadInputError(
            f"{largest.device} has {format_bytes(total_bytes)}, and {format_bytes(n_bytes)} is "
            "more: give less, or off for no budget"
        )
