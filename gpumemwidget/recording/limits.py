"""Set what may be allocated: PyTorch's limits, cells' budgets; keep what is predicted of cells.

A cell has the budgets of its start, unless they are raised or removed while it runs. A budget that
a cell's own line sets is for the cells after it, as the cell's peak may have come before that line.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field

from gpumemwidget.backends.hardware import Hardware
from gpumemwidget.errors import BadInputError, name_type
from gpumemwidget.model.devices import (
    EVERY_GPU,
    HOST,
    Budget,
    BytesByDevice,
    DeviceState,
    Limit,
    LimitRequest,
    check_device,
)
from gpumemwidget.model.predictions import PredictedRemedy
from gpumemwidget.units import format_bytes, parse_bytes


def parse_limit(value: object) -> LimitRequest:
    """Return the limit that a user's value means.

    Args:
        value: ``"0.8"``, ``"80%"``, ``"12GiB"``, ``"off"``; a float is a share, an int bytes.

    Raises:
        BadInputError: the value is no limit.
    """
    share: float | None = None
    n_bytes: int | None = None
    # By its exact type: no code of the user's object runs.
    if type(value) is float:
        share = value
    elif type(value) is int:
        n_bytes = value
    elif type(value) is str:
        text = value.strip()
        if text.lower() == "off":
            return LimitRequest()
        match = re.fullmatch(r"(?P<number>\d+(?:\.\d*)?|\.\d+)\s*(?P<percent>%)?", text)
        if match is not None:
            share = float(match["number"]) / (100 if match["percent"] else 1)
        else:
            with suppress(BadInputError):
                n_bytes = parse_bytes(text)
    if share is not None and 0 < share <= 1:
        return LimitRequest(share=None if share == 1 else share)
    # PyTorch counts in 64 bits.
    if n_bytes is not None and 0 < n_bytes < 1 << 63:
        return LimitRequest(limit_bytes=n_bytes)
    shown = repr(value[:40]) if type(value) is str else f"this {name_type(value)}"
    raise BadInputError(
        f"{shown} is no limit: give a share such as 0.8 or 80%, an amount such as 12GiB, or off"
    )


def set_limits(
    hardware: Hardware, request: LimitRequest, device: str | None = None
) -> tuple[Limit, ...]:
    """Limit what this process may reserve.

    Without a device: of every GPU in use, or of every GPU if none is.

    Returns:
        The limits of these devices as they are then.

    Raises:
        BadInputError: there is no such device, it has less memory, or it is the host.
        BackendError: PyTorch refuses.
    """
    chosen = _read_gpus(hardware, device)
    if not chosen:
        raise BadInputError(
            "a limit needs a GPU with CUDA, and there is none: for a budget of the host's memory "
            "use %membudget AMOUNT --device host"
        )
    # A GPU that is not in use may have a limit from before the extension was loaded.
    if device is None and not request.is_off:
        chosen = [report for report in chosen if report.reading is not None] or chosen
    for report in chosen:
        total_bytes = report.info.total_bytes
        if total_bytes is not None and (request.limit_bytes or 0) > total_bytes:
            raise BadInputError(
                f"{report.info.device} has {format_bytes(total_bytes)}, and "
                f"{format_bytes(request.limit_bytes)} is more: give less, or off for no limit"
            )
    for report in chosen:
        hardware.set_limit(report.info.device, request)
    names = {report.info.device for report in chosen}
    return tuple(limit for limit in read_limits(hardware) if limit.device in names)


def read_limits(hardware: Hardware, device: str | None = None) -> tuple[Limit, ...]:
    """Return the limits of all GPUs, whoever set them, also of GPUs without one.

    Raises:
        BadInputError: there is no such device, or it is the host.
    """
    gpus = _read_gpus(hardware, device)
    known = {limit.device: limit for limit in hardware.read_limits()}
    for gpu in gpus:
        # A GPU that is not in use, or whose PyTorch knows no limits, has one without figures.
        reserved = None if gpu.reading is None else gpu.reading.reserved_bytes
        known.setdefault(gpu.info.device, Limit(gpu.info.device, None, None, reserved))
    return tuple(known[gpu.info.device] for gpu in gpus)


def reset_peaks(hardware: Hardware, device: str | None = None) -> tuple[str, ...]:
    """Reset PyTorch's peaks, as the user's own call does.

    Returns:
        The devices whose peaks were reset.

    Raises:
        BadInputError: there is no such device, it is the host, or it is not in use.
    """
    gpus = _read_gpus(hardware, device)
    if device is None:
        return hardware.reset_peaks()
    if gpus[0].reading is None:
        raise BadInputError(f"{device} is not in use yet, so it has no peaks: use it first")
    return hardware.reset_peaks([device])


def _read_gpus(hardware: Hardware, device: str | None) -> list[DeviceState]:
    """Return the report of every GPU, or of one; refuse the host, and what is no device here."""
    reports = [report for report in hardware.read_devices() if report.info.device != HOST]
    if type(device) is str and device == HOST:
        raise BadInputError(
            "PyTorch limits and counts what it reserves on GPUs, not on the host: name a GPU"
        )
    check_device(device, [report.info.device for report in reports])
    return [report for report in reports if device in (None, report.info.device)]


# -- Budgets ---------------------------------------------------------------------------------------


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


# -- What is predicted -----------------------------------------------------------------------------


class Expectations:
    """The predicted peaks of cells, and what would need less, by the cells' text."""

    def __init__(self) -> None:
        self._peaks: dict[str, dict[str, int]] = {}
        self._remedies: dict[str, tuple[PredictedRemedy, ...]] = {}

    def add(
        self,
        source: str,
        device: str,
        peak_bytes: int,
        remedies: tuple[PredictedRemedy, ...] = (),
    ) -> None:
        """Keep the most that a cell is expected to have allocated on a device."""
        key = strip_magics(source)
        peaks = {**self._peaks.pop(key, {}), device: peak_bytes}
        self._peaks[key] = peaks
        self._remedies[key] = remedies or self._remedies.get(key, ())
        if len(self._peaks) > 64:
            oldest = next(iter(self._peaks))
            del self._peaks[oldest], self._remedies[oldest]

    def find(self, source: str) -> BytesByDevice:
        """Return the expected peak of a cell on each device, in bytes."""
        return tuple(self._peaks.get(strip_magics(source), {}).items()) if self._peaks else ()

    def find_remedies(self, source: str) -> tuple[PredictedRemedy, ...]:
        """Return what was predicted to need less than a cell does, the best first."""
        return self._remedies.get(strip_magics(source), ()) if self._remedies else ()


def strip_magics(source: str) -> str:
    """Return a cell without ``%%memfit``, ``%%memtrace`` and blank lines around it."""
    lines = source.strip().splitlines()
    while lines and lines[0].split(maxsplit=1)[:1] in (["%%memfit"], ["%%memtrace"]):
        lines = "\n".join(lines[1:]).strip().splitlines()
    return "\n".join(line.rstrip() for line in lines)
