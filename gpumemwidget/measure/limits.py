"""What PyTorch may reserve: a person's words for it, the devices it is for, and what stands."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Sequence

from gpumemwidget.backends.cudalimits import Wish
from gpumemwidget.backends.hardware import Hardware
from gpumemwidget.backends.unallocated import divide_unallocated
from gpumemwidget.devices import Limit, check_device_name, name_type
from gpumemwidget.errors import BadInputError
from gpumemwidget.records import HOST, DeviceReport, Reading
from gpumemwidget.units import format_bytes, parse_bytes

__all__ = ["NO_LIMIT", "parse_limit", "read_limits", "reset_peaks", "set_limits"]

NO_LIMIT = Wish()
_HINT = "give a share such as 0.8 or 80%, an amount such as 12GiB, or off"
_SHARE = re.compile(r"(?P<number>\d+(?:\.\d*)?|\.\d+)\s*(?P<percent>%)?")
#: A number without a unit is an amount from here on: nobody means so many GiB.
_LEAST_PLAIN_BYTES = 1024**2
#: No device has so much, and PyTorch counts no further.
_MOST_BYTES = 2**63 - 1
#: So much of what was given is told.
_MOST_SHOWN = 40


def parse_limit(value: object) -> Wish:
    """What somebody asks for.

    Args:
        value: ``"0.8"``, ``"80%"``, ``"12GiB"``, ``"off"``; a float is a share, an int bytes.

    Raises:
        BadInputError: it is no limit.
    """
    # Never asks an object of the user's what it is.
    kind = type(value)
    if kind is str:
        return _parse_text(str(value).strip())
    if kind is int:
        return _check_bytes(int(value), value)  # type: ignore[call-overload]
    if kind is float:
        return _check_share(float(value), value)  # type: ignore[arg-type]
    raise BadInputError(f"a {name_type(value)} is no limit: {_HINT}; in Python a float or an int")


def set_limits(hardware: Hardware, wish: Wish, device: str | None = None) -> tuple[Limit, ...]:
    """Let this process reserve no more than that; what stands then.

    Args:
        hardware: sets it.
        wish: what is asked for; ``NO_LIMIT`` takes it away.
        device: which one; ``None`` for every GPU in use, or every GPU where none is.

    Returns:
        The limits of these devices.

    Raises:
        BadInputError: there is no such device, it has less, or it is the host.
        BackendError: PyTorch refuses.
    """
    check_device_name(device)
    reports = hardware.read_devices()
    chosen = _choose(hardware, reports, device, is_off=wish == NO_LIMIT)
    for report in chosen:
        total_bytes = report.info.total_bytes
        if None not in (wish.limit_bytes, total_bytes) and wish.limit_bytes > total_bytes:  # type: ignore[operator]
            raise BadInputError(
                f"{report.info.device} has {format_bytes(total_bytes)}, and "
                f"{format_bytes(wish.limit_bytes)} is more: give less, or off for no limit"
            )
        if None not in (wish.share, total_bytes) and wish.share * total_bytes < 1:  # type: ignore[operator]
            raise BadInputError(
                f"{wish.share} of {report.info.device}, which has {format_bytes(total_bytes)}, "
                f"would leave nothing: {_HINT}"
            )
    for report in chosen:
        hardware.set_limit(report.info.device, wish.limit_bytes, share=wish.share)
    names = {report.info.device for report in chosen}
    return tuple(limit for limit in read_limits(hardware) if limit.device in names)


def _tell_nothing(device: str, reading: Reading | None) -> Limit:
    """A device of which no limit is told: it is not in use, or its PyTorch has no word for it."""
    return Limit(device, None, None, None if reading is None else reading.reserved_bytes)


def read_limits(hardware: Hardware, device: str | None = None) -> tuple[Limit, ...]:
    """The limits of all GPUs, whoever has set them, those without one too.

    Raises:
        BadInputError: there is no such device, or it is the host.
    """
    check_device_name(device)
    reports = hardware.read_devices()
    if device is not None:
        _check_device(reports, device)
    known = {limit.device: limit for limit in hardware.read_limits()}
    names = [report.info.device for report in reports if report.info.device != HOST]
    names += [each for each in known if each not in names]
    readings = {report.info.device: report.reading for report in reports}
    limits = [
        known.get(each) or _tell_nothing(each, readings.get(each))
        for each in names
        if device in (None, each)
    ]
    return _add_blocks(hardware, limits)


def reset_peaks(hardware: Hardware, device: str | None = None) -> tuple[str, ...]:
    """Begin PyTorch's peaks anew, as the user's own call does; on which devices.

    Raises:
        BadInputError: there is no such device, it is the host, or it is not in use.
    """
    check_device_name(device)
    if device is None:
        return hardware.reset_peaks()
    reports = hardware.read_devices()
    report = next((each for each in reports if each.info.device == device), None)
    if device == HOST and report is not None:
        raise BadInputError(
            "the host's peak is the process's own, which nobody can reset: name a GPU"
        )
    _check_device(reports, device)
    if report is None or report.reading is None:
        raise BadInputError(f"{device} is not in use yet, so it has no peaks: use it first")
    return hardware.reset_peaks([device])


def _choose(
    hardware: Hardware, reports: Sequence[DeviceReport], device: str | None, *, is_off: bool
) -> list[DeviceReport]:
    """The devices that are meant."""
    if device is not None:
        _check_device(reports, device)
        return [each for each in reports if each.info.device == device]
    gpus = [each for each in reports if each.info.device != HOST]
    if not gpus:
        raise BadInputError(
            hardware.why_no_cuda or "there is no GPU here, and PyTorch limits nothing else"
        )
    if is_off:
        # One that is not in use may have a limit from before the extension was loaded.
        return gpus
    return [each for each in gpus if each.reading is not None] or gpus


def _check_device(reports: Sequence[DeviceReport], device: str) -> None:
    if device == HOST:
        raise BadInputError(
            "PyTorch limits what it reserves on GPUs alone, not the host: name a GPU"
        )
    known = [each.info.device for each in reports if each.info.device != HOST]
    if device not in known:
        choice = f"choose from {', '.join(known)}" if known else "there is no GPU"
        raise BadInputError(f"no device {device!r} here: {choice}")


def _add_blocks(hardware: Hardware, limits: Sequence[Limit]) -> tuple[Limit, ...]:
    """Tell what is free within what is reserved, where that is more than the limit."""
    tight = {each.device for each in limits if _is_tight(each)}
    segments = hardware.read_segments() if tight else ()
    found = []
    for limit in limits:
        own = [each for each in segments if each.device == limit.device]
        if limit.device in tight and own:
            parts = divide_unallocated(own)
            limit = dataclasses.replace(  # noqa: PLW2901 - the same with more
                limit,
                releasable_bytes=parts.releasable_bytes,
                largest_free_block_bytes=parts.largest_free_block_bytes,
            )
        found.append(limit)
    return tuple(found)


def _is_tight(limit: Limit) -> bool:
    reserved = limit.reserved_bytes
    return limit.limit_bytes is not None and reserved is not None and reserved > limit.limit_bytes


def _parse_text(text: str) -> Wish:
    if text.lower() == "off":
        return NO_LIMIT
    match = _SHARE.fullmatch(text)
    if match is None:
        try:
            n_bytes = parse_bytes(text)
        except BadInputError:
            raise BadInputError(f"{_show(text)} is no limit: {_HINT}") from None
        return _check_bytes(n_bytes, text)
    number = float(match["number"])
    if not math.isfinite(number):
        raise BadInputError(f"{_show(text)} is more than any GPU has: {_HINT}")
    if match["percent"]:
        return _check_share(number / 100, text)
    if number > 1 and number == int(number) and number >= _LEAST_PLAIN_BYTES:
        return _check_bytes(int(match["number"].partition(".")[0]), text)
    if number > 1:
        raise BadInputError(f"{_show(text)} has no unit and is no share: {_HINT}")
    return _check_share(number, text)


def _check_share(share: float, given: object) -> Wish:
    if not (math.isfinite(share) and 0 < share <= 1):
        raise BadInputError(f"{_show(given)} is no share above 0 and up to 1 (100%): {_HINT}")
    return NO_LIMIT if share == 1 else Wish(share=share)


def _check_bytes(n_bytes: int, given: object) -> Wish:
    if n_bytes > _MOST_BYTES:
        raise BadInputError(f"{_show(given)} is more than any GPU has: {_HINT}")
    if n_bytes <= 0:
        raise BadInputError(f"{_show(given)} would leave nothing: {_HINT}")
    return Wish(limit_bytes=n_bytes)


def _show(given: object) -> str:
    """What was given, as long as it is short: a number or a text."""
    if type(given) is int and abs(given) > _MOST_BYTES:
        return "an int of that size"  # Python refuses to write those of thousands of digits.
    if type(given) is str and len(given) > _MOST_SHOWN:
        given = f"{given[:_MOST_SHOWN]}…"
    return repr(given)
