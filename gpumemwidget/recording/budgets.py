"""Set how much a cell may have allocated.

A cell has the budgets of its start, unless they are raised or removed while it runs. A budget that
a cell's own line sets is for the cells after it, as the cell's peak may have come before that line.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from gpumemwidget.errors import BadInputError, name_type
from gpumemwidget.model.devices import EVERY_GPU, HOST, Budget, check_device
from gpumemwidget.units import format_bytes, parse_bytes

if TYPE_CHECKING:
    from gpumemwidget.backends.hardware import Hardware


@dataclass(frozen=True, slots=True)
class Budgets:
    """The budgets at one moment.

    Attributes:
        bytes_by_device: the budget of each device, and of each GPU without an own one under
            ``EVERY_GPU``.
    """

    bytes_by_device: Mapping[str, int] = field(default_factory=dict)

    def find(self, device: str) -> int | None:
        """Return the budget of a device in bytes; ``None`` if it has none."""
        of_every_gpu = None if device == HOST else self.bytes_by_device.get(EVERY_GPU)
        return self.bytes_by_device.get(device, of_every_gpu)

    def list(self) -> tuple[Budget, ...]:
        """Return the budgets that were set; the first may be every GPU's (``EVERY_GPU``)."""
        found = (Budget(device, n_bytes) for device, n_bytes in self.bytes_by_device.items())
        return tuple(sorted(found, key=lambda budget: budget.device != EVERY_GPU))

    def add(self, n_bytes: int, *, device: str | None = None) -> Budgets:
        """Return the budgets with one more, for each cell from the next one on.

        Without a device it is every GPU's, instead of the budgets of single GPUs.

        Raises:
            BadInputError: it is less than 1 MiB, or more than there can be.
        """
        # Of a lower number the unit was left out, and no device has more.
        if not 1024**2 <= n_bytes <= 1024**6:
            raise BadInputError(
                "a budget is from 1MiB to a million TiB: give an amount with its unit, as in 10GiB"
            )
        kept = self.bytes_by_device
        if device is None:
            kept = {name: own for name, own in kept.items() if name == HOST}
        return Budgets({**kept, device or EVERY_GPU: n_bytes})

    def remove(self, device: str | None = None) -> Budgets:
        """Return the budgets without some, also for the cell that runs."""
        if device is None:
            return Budgets()
        kept = {name: own for name, own in self.bytes_by_device.items() if name != device}
        return Budgets(kept)


def change_budgets(
    budgets: Budgets,
    hardware: Hardware,
    amount: int | str | None = None,
    *,
    device: str | None = None,
) -> Budgets:
    """Return the budgets with one more or with some fewer.

    Args:
        budgets: those that are set.
        hardware: has the devices that may be named.
        amount: bytes, or text such as ``"10GiB"``; ``"off"`` removes; ``None`` changes nothing.
        device: one device; ``None`` for every GPU.

    Raises:
        BadInputError: not an amount, more than the device has, or there is no such device.
    """
    infos = hardware.list_all_devices()
    check_device(device, [info.device for info in infos])
    n_bytes = _parse_amount(amount)
    if n_bytes is not None:
        totals = [
            info.total_bytes or n_bytes
            for info in infos
            if (info.device != HOST if device is None else info.device == device)
        ]
        if totals and n_bytes > max(totals):
            raise BadInputError(
                f"{device or 'the largest GPU'} has {format_bytes(max(totals))}, and "
                f"{format_bytes(n_bytes)} is more: give less, or off for no budget"
            )
        return budgets.add(n_bytes, device=device)
    return budgets if amount is None else budgets.remove(device)


def _parse_amount(amount: int | str | None) -> int | None:
    """Return the bytes that were asked for; ``None`` to show or to remove a budget."""
    # An object of the user's is never asked what it is.
    if amount is None or type(amount) is int:
        return amount
    if type(amount) is not str:
        raise BadInputError(
            f"an amount can't be of type {name_type(amount)}: give bytes as an int, or text as in "
            "'10GiB'"
        )
    text = amount.strip()
    if text.lower() == "off":
        return None
    # %memlimit takes a number without a unit for a share of the device; a budget has no shares.
    if text and text.replace(".", "").isdecimal():
        raise BadInputError(f"{text!r} has no unit: give an amount, as in 10GiB or 500MB, or off")
    return parse_bytes(text)
