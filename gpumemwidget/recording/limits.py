"""Limit what PyTorch may reserve: parse, set and read limits, and reset peaks."""

from __future__ import annotations

import re
from contextlib import suppress

from gpumemwidget.backends.hardware import Hardware
from gpumemwidget.errors import BadInputError, name_type
from gpumemwidget.model.devices import HOST, DeviceState, Limit, LimitRequest, check_device
from gpumemwidget.units import format_bytes, parse_bytes

_SHARE = re.compile(r"(?P<number>\d+(?:\.\d*)?|\.\d+)\s*(?P<percent>%)?")


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
        match = _SHARE.fullmatch(text)
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
