"""Run the function of a test within the limits of its markers."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest

from gpumemwidget.backends.hardware import Hardware, keep_hardware
from gpumemwidget.backends.hooks import find_torch
from gpumemwidget.checks.memory_growth import (
    MAX_HOLDERS,
    check_warmups,
    following_growth,
    list_holders,
    parse_allowed,
)
from gpumemwidget.errors import BadInputError, GpuMemError, read_first_line
from gpumemwidget.model.devices import HOST
from gpumemwidget.report.leaks import describe_peak


def run_limited(
    function: Callable[..., object],
    memory: pytest.Mark | None,
    growth: pytest.Mark | None,
    /,
    **fixtures: Any,
) -> object:
    """Call a test's function as often as its markers ask, and fail the test beyond a limit."""
    limit_bytes = None if memory is None else _read_marker(_read_memory_limit, memory)
    growth_limit = None if growth is None else _read_marker(_read_growth_limit, growth)

    def call() -> object:
        if growth_limit is None:
            return function(**fixtures)
        return _run_growing(function, fixtures, *growth_limit)

    if limit_bytes is None:
        return call()
    hardware = keep_hardware("checks")
    if _has_gpu(hardware):
        return _run_measured(hardware, call, limit_bytes)
    _check_prediction(function, fixtures, limit_bytes)
    return None


def _read_marker(read: Callable[..., Any], marker: pytest.Mark) -> Any:
    try:
        return read(*marker.args, **marker.kwargs)
    except BadInputError as exc:
        why = str(exc)
    except TypeError as exc:
        # Python's words on a missing or an unknown argument name the function first.
        why = str(exc).partition("() ")[2] or str(exc)
    pytest.fail(f"{marker.name}: {why}", pytrace=False)


def _read_memory_limit(limit: object) -> int:
    return parse_allowed(limit)


def _read_growth_limit(limit: object, warmups: object = 1) -> tuple[int, int]:
    return parse_allowed(limit), check_warmups(warmups)


def _has_gpu(hardware: Hardware) -> bool:
    """Return whether a test can run on a GPU here."""
    torch: Any = find_torch()
    if any(info.device != HOST for info in hardware.list_devices()):
        return True
    if torch is not None:
        return bool(torch.cuda.is_available())
    return any(info.device != HOST for info in hardware.list_all_devices())


def _run_growing(
    function: Callable[..., object], fixtures: dict[str, Any], limit_bytes: int, warmups: int
) -> object:
    for _ in range(warmups):
        function(**fixtures)
    with following_growth(limit_bytes, counts_steps=False) as growth:
        returned = function(**fixtures)
        excess = growth.describe_excess()
    if excess is not None:
        pytest.fail(excess, pytrace=False)
    return returned


def _run_measured(hardware: Hardware, call: Callable[[], object], limit_bytes: int) -> object:
    gc.collect()
    before = {reading.device: reading.allocated_bytes or 0 for reading in hardware.start_span()}
    try:
        returned = call()
    finally:
        readings = hardware.read_exact()
    peaks = {
        reading.device: reading.allocated_peak_bytes - before.get(reading.device, 0)
        for reading in readings
        if reading.device != HOST and reading.allocated_peak_bytes is not None
    }
    device = max(peaks, key=lambda name: peaks[name], default=None)
    if device is not None and peaks[device] > limit_bytes:
        words = describe_peak(
            device, peaks[device], limit_bytes, list_holders(device), is_predicted=False
        )
        pytest.fail(words, pytrace=False)
    return returned


def _check_prediction(
    function: Callable[..., object], fixtures: dict[str, Any], limit_bytes: int
) -> None:
    from gpumemwidget.session.step_predictions import predict  # noqa: PLC0415 - when it is used

    try:
        record = predict(
            function, (), fixtures, device=None, on=None, steps=1, remedies=False
        ).record
    except GpuMemError as exc:
        pytest.skip(f"no GPU here, and the peak can't be predicted: {read_first_line(exc)}")
    # The fixtures' memory is on the device before the test begins.
    peak_bytes = record.allocated.expected - (record.trace.allocated.before_bytes or 0)
    if peak_bytes > limit_bytes:
        holders = [
            (f"{owner.kind} {owner.path}".strip(), owner.n_bytes)
            for owner in record.owners
            if owner.phase is not None
        ]
        name = record.device.name
        words = describe_peak(
            name, peak_bytes, limit_bytes, holders[:MAX_HOLDERS], is_predicted=True
        )
        pytest.fail(words, pytrace=False)
