"""``%membudget`` and ``gpumemwidget.budget()``: budgets as they are asked for, and what is said."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gpumemwidget.devices import EVERY_GPU, Budget, check_device_name, name_type
from gpumemwidget.errors import BadInputError
from gpumemwidget.measure.budget import Budgets
from gpumemwidget.records import HOST, DeviceReport
from gpumemwidget.report.budget import name_budgeted, tell_budgets
from gpumemwidget.units import format_bytes, parse_bytes

if TYPE_CHECKING:
    from gpumemwidget.measure.monitor import Monitor

__all__ = ["change_budgets", "describe_budgets"]


def change_budgets(
    monitor: Monitor,
    amount: int | str | None = None,
    *,
    device: str | None = None,
    stop: bool = False,
) -> tuple[Budget, ...]:
    """See ``gpumemwidget.budget``."""
    budgets = monitor.budgets
    check_device_name(device)
    reports: tuple[DeviceReport, ...] = ()
    if device is not None or amount is not None:
        reports = monitor.hardware.read_devices()
    known = [report.info.device for report in reports]
    if device is not None and device not in known:
        raise BadInputError(f"no device {device!r} here: choose from {', '.join(known)}")
    n_bytes = _parse_amount(amount)
    if n_bytes is not None:
        _check_room(n_bytes, device, reports)
        budgets.set(n_bytes, device=device, stops=bool(stop))
    elif stop:
        raise BadInputError("--stop (stop=True) goes with an amount: %membudget 10GiB --stop")
    elif amount is not None:
        budgets.clear(device)
    if device is None or amount is not None:
        return budgets.list()
    budget = budgets.find(device)
    return () if budget is None else (budget,)


def describe_budgets(
    monitor: Monitor, shown: tuple[Budget, ...], *, is_new: bool, device: str | None = None
) -> str:
    """What ``%membudget`` answers.

    Args:
        monitor: knows what stands.
        shown: what ``change_budgets`` gave.
        is_new: an amount was set just now.
        device: of which device, as it was asked for; ``None`` for every GPU.
    """
    lines = [f"membudget: {tell_budgets(shown)}"]
    if not is_new:
        return lines[0]
    where = EVERY_GPU if device is None else device
    budget = next(each for each in shown if each.device == where)
    outcome = "is interrupted" if budget.stops else "is marked, and a line below it tells"
    lines.append(
        f"From the next cell on: the one that has more than {format_bytes(budget.budget_bytes)} "
        f"{name_budgeted(where)} on {device or 'any GPU'} {outcome}."
    )
    reports = monitor.hardware.read_devices()
    lines += _list_warnings(monitor.budgets, reports)
    if device is None and all(report.info.device == HOST for report in reports):
        lines.append(
            "There is no GPU here yet: --device host is for the memory of this process itself."
        )
    return "\n".join(lines)


def _parse_amount(amount: int | str | None) -> int | None:
    """The bytes that were asked for; ``None`` where a budget is shown or taken away."""
    # Never asks an object of the user's what it is.
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
    """Refuse what no cell can go beyond: its unit was mistaken.

    Raises:
        BadInputError: the device has less, or each GPU that there is.
    """
    infos = [each.info for each in reports]
    if device is None:
        infos = [info for info in infos if info.device != HOST]
    else:
        infos = [info for info in infos if info.device == device]
    # One whose total is not known may have as much.
    largest = max(infos, key=lambda info: info.total_bytes or n_bytes, default=None)
    total_bytes = None if largest is None else largest.total_bytes
    if largest is not None and total_bytes is not None and n_bytes > total_bytes:
        raise BadInputError(
            f"{largest.device} has {format_bytes(total_bytes)}, and {format_bytes(n_bytes)} is "
            "more: give less, or off for no budget"
        )


def _list_warnings(budgets: Budgets, reports: tuple[DeviceReport, ...]) -> list[str]:
    """A sentence on each device that stands beyond its budget already."""
    warnings = []
    for report in reports:
        device, reading = report.info.device, report.reading
        budget = budgets.find(device)
        if budget is None or reading is None:
            continue
        n_bytes = reading.reserved_bytes if device == HOST else reading.allocated_bytes
        if n_bytes is not None and n_bytes > budget.budget_bytes:
            warnings.append(
                f"{device} has {format_bytes(n_bytes)} {name_budgeted(device)} already: a cell "
                "counts once it rises above what stood at its start."
            )
    return warnings
