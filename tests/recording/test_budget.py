"""Budgets: what is set, what holds for a cell, and which cell goes beyond it."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from gpumemwidget.errors import BadInputError
from gpumemwidget.model.cells import CellRecord
from gpumemwidget.model.devices import EVERY_GPU, HOST, Budget, Reading
from gpumemwidget.recording.limits import Budgets
from gpumemwidget.recording.monitor import Monitor
from tests.clock import ManualClock
from tests.recording.scripted import ScriptedHardware, gpu, host

MIB = 1 << 20


# -- What is set -----------------------------------------------------------------------------------


def test_every_gpu_has_its_own_and_the_host_has_none() -> None:
    """Those that come into use later too."""
    budgets = Budgets().add(10 * MIB)

    assert budgets.find("cuda:0") == 10 * MIB
    assert budgets.find("xpu:7") == 10 * MIB
    assert budgets.find(HOST) is None
    assert budgets.list() == (Budget(EVERY_GPU, 10 * MIB),)


def test_one_for_every_gpu_takes_the_place_of_single_ones() -> None:
    """But not of the host's; a single device's that is set after it goes before it."""
    budgets = Budgets().add(5 * MIB, device="cuda:1").add(7 * MIB, device=HOST).add(10 * MIB)
    again = budgets.add(5 * MIB, device="cuda:1")

    assert budgets.list() == (Budget(EVERY_GPU, 10 * MIB), Budget(HOST, 7 * MIB))
    assert budgets.find("cuda:1") == 10 * MIB
    assert again.find("cuda:0") == 10 * MIB
    assert again.find("cuda:1") == 5 * MIB


def test_budgets_are_removed_one_by_one_or_together() -> None:
    """What every GPU has is left to a GPU whose own is removed."""
    budgets = Budgets().add(10 * MIB).add(5 * MIB, device="cuda:1").add(7 * MIB, device=HOST)

    assert budgets.remove("cuda:1").find("cuda:1") == 10 * MIB
    budgets = budgets.remove("cuda:1")
    assert budgets.remove(HOST).list() == (Budget(EVERY_GPU, 10 * MIB),)
    assert budgets.remove() == Budgets()


@pytest.mark.parametrize("n_bytes", [-1, 10, MIB - 1, 10**99])
def test_a_number_without_its_unit_is_refused(n_bytes: int) -> None:
    with pytest.raises(BadInputError, match="give an amount with its unit, as in 10GiB"):
        Budgets().add(n_bytes)


# -- The record ------------------------------------------------------------------------------------


def _make_monitor(*readings: Reading) -> Monitor:
    return Monitor(
        ScriptedHardware(*readings),  # type: ignore[arg-type]
        on_failure=pytest.fail,
        clock=ManualClock(),
    )


def _run_cell(
    monitor: Monitor, *end: Reading, change: Callable[[Budgets], Budgets] = lambda kept: kept
) -> CellRecord:
    monitor.start_cell(execution_count=1, cell_id=None, source="")
    monitor.budgets = change(monitor.budgets)
    monitor.hardware.readings = end  # type: ignore[attr-defined]
    record = monitor.end_cell(status="ok")
    assert record is not None
    return record


@pytest.mark.parametrize(
    ("start", "peak", "is_over"),
    [
        (0, 10 * MIB, False),
        (0, 10 * MIB + 1, True),
        (9 * MIB, 11 * MIB, True),
        (12 * MIB, 12 * MIB, False),
        (12 * MIB, 12 * MIB + 1, True),
    ],
    ids=["just", "beyond", "from below", "already", "already and more"],
)
def test_a_cell_is_over_by_its_peak(*, start: int, peak: int, is_over: bool) -> None:
    """To the byte; one that begins beyond it only if it rises above what stood at its start."""
    monitor = _make_monitor(gpu(start))
    monitor.budgets = Budgets().add(10 * MIB)

    (device,) = _run_cell(monitor, gpu(start, peak=peak)).devices

    assert (device.budget_bytes, device.is_over_budget) == (10 * MIB, is_over)


@pytest.mark.parametrize(("peak", "is_over"), [(40 * MIB + 1, False), (42 * MIB, True)])
def test_the_hosts_is_its_resident_size(*, peak: int, is_over: bool) -> None:
    """Which moves by kilobytes in every cell, also in one that begins beyond its budget."""
    monitor = _make_monitor(host(1 * MIB, reserved=40 * MIB))
    monitor.budgets = Budgets().add(10 * MIB, device=HOST)

    (device,) = _run_cell(monitor, host(1 * MIB, reserved=40 * MIB, peak=peak)).devices

    assert device.peak_counter is device.reserved
    assert device.is_over_budget is is_over


def test_a_device_that_comes_into_use_within_the_cell_has_its_budget() -> None:
    monitor = _make_monitor(gpu(0))
    monitor.budgets = Budgets().add(10 * MIB)

    _, second = _run_cell(monitor, gpu(0), gpu(11 * MIB, device="cuda:1")).devices

    assert second.is_over_budget


@pytest.mark.parametrize(
    ("before", "change", "held_to"),
    [
        (None, lambda budgets: budgets.add(10 * MIB), None),
        (10, lambda budgets: budgets.remove(), None),
        (10, lambda budgets: budgets.remove("cuda:0"), 10),
        (10, lambda budgets: budgets.add(20 * MIB), 20),
        (10, lambda budgets: budgets.add(5 * MIB), 10),
    ],
    ids=["set", "taken away", "taken away there", "raised", "lowered"],
)
def test_what_a_cell_eases_counts_for_itself(
    before: int | None, change: Callable[[Budgets], Budgets], held_to: int | None
) -> None:
    """What it tightens is for the cells after it: its own peak may have come before."""
    monitor = _make_monitor(gpu(0))
    if before is not None:
        monitor.budgets = Budgets().add(before * MIB)

    (device,) = _run_cell(monitor, gpu(11 * MIB), change=change).devices

    assert device.budget_bytes == (None if held_to is None else held_to * MIB)
