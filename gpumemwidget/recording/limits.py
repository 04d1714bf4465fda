"""Limit what PyTorch may reserve: parse, set and read limits, and reset peaks."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Sequence
from contextlib import ExitStack

from gpumemwidget.backends.cuda.releasable import divide_unallocated
from gpumemwidget.backends.hardware import Hardware
from gpumemwidget.errors import BadInputError, name_type
from gpumemwidget.model.cells import CellRecord
from gpumemwidget.model.devices import (
    HOST,
    DeviceReport,
    Limit,
    LimitRequest,
    check_device_name,
)
from gpumemwidget.recording.monitor import Monitor
from gpumemwidget.units import format_bytes, parse_bytes

NO_LIMIT = LimitRequest()
_HINT = "give a share such as 0.8 or 80%, an amount such as 12GiB, or off"
_SHARE = re.compile(r"(?P<number>\d+(?:\.\d*)?|\.\d+)\s*(?P<percent>%)?")
#: Largest limit that PyTorch can count.
_MAX_BYTES = 2**63 - 1
#: Maximum number of characters of a wrong value in an error.
_MAX_SHOWN = 40


def parse_limit(value: object) -> LimitRequest:
    """Return the limit that a user's value stands for.

    Args:
        value: ``"0.8"``, ``"80%"``, ``"12GiB"``, ``"off"``; a float is a share, an int bytes.

    Raises:
        BadInputError: the value is no limit.
    """
    # By its exact type: no code of the user's object runs.
    kind = type(value)
    if kind is str:
        return _parse_text(str(value).strip())
    if kind is int:
        return _check_bytes(int(value), value)  # type: ignore[call-overload]
    if kind is float:
        return _check_share(float(value), value)  # type: ignore[arg-type]
    raise BadInputError(
        f"a limit can't be of type {name_type(value)}: {_HINT}; in Python a float or an int"
    )


def set_limits(
    hardware: Hardware, request: LimitRequest, device: str | None = None
) -> tuple[Limit, ...]:
    """Limit what this process may reserve.

    Args:
        hardware: sets the limits.
        request: the limit; ``NO_LIMIT`` removes one.
        device: which device; ``None`` for every GPU in use, or for every GPU if none is in use.

    Returns:
        The limits of these devices as they are then.

    Raises:
        BadInputError: there is no such device, it has less memory, or it is the host.
        BackendError: PyTorch refuses.
    """
    check_device_name(device)
    reports = hardware.read_devices()
    chosen = _choose_devices(hardware, reports, device, is_off=request == NO_LIMIT)
    for report in chosen:
        total_bytes = report.info.total_bytes
        if None not in (request.limit_bytes, total_bytes) and request.limit_bytes > total_bytes:  # type: ignore[operator]
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

    Args:
        hardware: reads the limits.
        device: return this GPU's alone.

    Raises:
        BadInputError: there is no such device, or it is the host.
    """
    check_device_name(device)
    reports = hardware.read_devices()
    if device is not None:
        _check_device(reports, device)
    # A GPU that is not in use, or whose PyTorch tells no limits, has a limit without figures.
    limits = {
        report.info.device: Limit(report.info.device, None, None, _read_reserved(report))
        for report in reports
        if report.info.device != HOST
    }
    limits |= {limit.device: limit for limit in hardware.read_limits()}
    return _add_blocks(
        hardware, [limit for name, limit in limits.items() if device in (None, name)]
    )


def reset_peaks(hardware: Hardware, device: str | None = None) -> tuple[str, ...]:
    """Reset PyTorch's peaks, as the user's own call does.

    Args:
        hardware: resets the peaks.
        device: which device; ``None`` for all that are in use.

    Returns:
        The devices whose peaks were reset.

    Raises:
        BadInputError: there is no such device, it is the host, or it is not in use.
    """
    check_device_name(device)
    if device is None:
        return hardware.reset_peaks()
    reports = hardware.read_devices()
    report = next((report for report in reports if report.info.device == device), None)
    if device == HOST and report is not None:
        raise BadInputError(
            "the host's peak is the process's own, which nobody can reset: name a GPU"
        )
    _check_device(reports, device)
    if report is None or report.reading is None:
        raise BadInputError(f"{device} is not in use yet, so it has no peaks: use it first")
    return hardware.reset_peaks([device])


class LimitWatch:
    """Samples cells while a limit waits for its device: the device's first reading sets the limit.

    PyTorch 2.11 and later need none of this: CUDA itself asks for the limit before the device is in
    use. With an older PyTorch the limit would wait for the end of the cell that first uses it.

    Args:
        monitor: the session's.
    """

    def __init__(self, monitor: Monitor) -> None:
        self._monitor = monitor
        self._listening: ExitStack | None = None

    def check(self) -> None:
        """Begin or end to sample cells, by whether a limit waits for its device."""
        is_waiting = any(limit.is_waiting for limit in self._monitor.hardware.read_limits())
        if is_waiting and self._listening is None:
            self._listening = ExitStack()
            self._listening.callback(self._monitor.unwant_samples, self)
            self._listening.callback(
                self._monitor.cell_started.add(lambda _: self._monitor.want_samples(self))
            )
            self._listening.callback(self._monitor.cell_ended.add(self._end_cell))
        elif self._listening is not None and not is_waiting:
            self._listening.close()
            self._listening = None

    def _end_cell(self, _record: CellRecord) -> None:
        # Between cells nothing uses a device.
        self._monitor.unwant_samples(self)
        self.check()


def _read_reserved(report: DeviceReport) -> int | None:
    return None if report.reading is None else report.reading.reserved_bytes


def _choose_devices(
    hardware: Hardware, reports: Sequence[DeviceReport], device: str | None, *, is_off: bool
) -> list[DeviceReport]:
    if device is not None:
        _check_device(reports, device)
        return [report for report in reports if report.info.device == device]
    gpus = [report for report in reports if report.info.device != HOST]
    if not gpus:
        cause = "this PyTorch was built without CUDA" if hardware.why_no_cuda else "there is none"
        raise BadInputError(
            f"a limit needs a GPU with CUDA, and {cause}: for a budget of the host's memory use "
            "%membudget AMOUNT --device host"
        )
    if is_off:
        # A GPU that is not in use may have a limit from before the extension was loaded.
        return gpus
    return [report for report in gpus if report.reading is not None] or gpus


def _check_device(reports: Sequence[DeviceReport], device: str) -> None:
    if device == HOST:
        raise BadInputError(
            "PyTorch limits what it reserves on GPUs alone, not the host: name a GPU"
        )
    known = [report.info.device for report in reports if report.info.device != HOST]
    if device not in known:
        choice = f"choose from {', '.join(known)}" if known else "there is no GPU"
        raise BadInputError(f"no device {device!r} here: {choice}")


def _add_blocks(hardware: Hardware, limits: Sequence[Limit]) -> tuple[Limit, ...]:
    """Add what is free within reserved to limits that reserved exceeds."""
    exceeded = {limit.device for limit in limits if _is_exceeded(limit)}
    segments = hardware.read_segments() if exceeded else ()

    def add_to(limit: Limit) -> Limit:
        own = [segment for segment in segments if segment.device == limit.device]
        if limit.device not in exceeded or not own:
            return limit
        parts = divide_unallocated(own)
        return dataclasses.replace(
            limit,
            releasable_bytes=parts.releasable_bytes,
            largest_free_block_bytes=parts.largest_free_block_bytes,
        )

    return tuple(map(add_to, limits))


def _is_exceeded(limit: Limit) -> bool:
    reserved = limit.reserved_bytes
    return limit.limit_bytes is not None and reserved is not None and reserved > limit.limit_bytes


def _parse_text(text: str) -> LimitRequest:
    if text.lower() == "off":
        return NO_LIMIT
    match = _SHARE.fullmatch(text)
    if match is None:
        try:
            n_bytes = parse_bytes(text)
        except BadInputError:
            raise BadInputError(f"{_show(text)} is not a limit: {_HINT}") from None
        return _check_bytes(n_bytes, text)
    number = float(match["number"])
    if match["percent"]:
        return _check_share(number / 100, text)
    if number > 1:
        raise BadInputError(f"{_show(text)} has no unit and is no share: {_HINT}")
    return _check_share(number, text)


def _check_share(share: float, given: object) -> LimitRequest:
    if not (math.isfinite(share) and 0 < share <= 1):
        raise BadInputError(f"{_show(given)} is no share above 0 and up to 1 (100%): {_HINT}")
    return NO_LIMIT if share == 1 else LimitRequest(share=share)


def _check_bytes(n_bytes: int, given: object) -> LimitRequest:
    if n_bytes > _MAX_BYTES:
        raise BadInputError(f"{_show(given)} is more than any GPU has: {_HINT}")
    if n_bytes <= 0:
        raise BadInputError(f"{_show(given)} would leave nothing: {_HINT}")
    return LimitRequest(limit_bytes=n_bytes)


def _show(given: object) -> str:
    """Return a wrong number or text for an error, cut to its first characters."""
    if type(given) is int and abs(given) > _MAX_BYTES:
        return "an int of that size"  # Python refuses to format thousands of digits.
    if type(given) is str and len(given) > _MAX_SHOWN:
        given = f"{given[:_MAX_SHOWN]}…"
    return repr(given)
