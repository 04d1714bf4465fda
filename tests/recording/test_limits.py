"""Limits and budgets: what a person means, which devices it is for, which cell exceeds it."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from gpumemwidget.backends.cuda.backend import CudaBackend
from gpumemwidget.backends.driver.nvml import NvmlMonitor
from gpumemwidget.backends.hardware import Hardware
from gpumemwidget.backends.host import HostBackend
from gpumemwidget.errors import BadInputError
from gpumemwidget.model.cells import CellRecord
from gpumemwidget.model.devices import EVERY_GPU, HOST, Budget, Limit, LimitRequest, Reading
from gpumemwidget.recording.limits import (
    Budgets,
    parse_limit,
    read_limits,
    reset_peaks,
    set_limits,
)
from gpumemwidget.recording.monitor import Monitor
from gpumemwidget.testing import SimulatedGpus, simulate_torch
from tests.backends.fake_nvml import FakeGpu, FakeNvml
from tests.clock import ManualClock
from tests.recording.scripted import ScriptedHardware, gpu, host

MIB = 1 << 20
GIB = 1 << 30
TOTAL = 80 * GIB
HINT = "is no limit: give a share such as 0.8 or 80%, an amount such as 12GiB, or off"


class _Meta(type):
    """Answers for its classes with code of its own."""

    @property
    def __name__(cls) -> str:  # type: ignore[override]
        raise SystemExit


class Hostile(str, metaclass=_Meta):
    """Does not let itself be compared or told."""

    __hash__ = None  # type: ignore[assignment]

    def __eq__(self, other: object) -> bool:
        raise SystemExit

    def __repr__(self) -> str:
        raise SystemExit


@pytest.fixture
def allocator() -> SimulatedGpus:
    """Two simulated GPUs."""
    return SimulatedGpus(2, total_bytes=TOTAL)


@pytest.fixture
def hardware(allocator: SimulatedGpus) -> Iterator[Hardware]:
    """They and the host; the driver sees a little more of each than PyTorch does."""
    torch = simulate_torch(allocator)
    gpus = [
        FakeGpu(name="GPU", uuid=f"GPU-simulated-{index}", total_bytes=TOTAL + GIB, used_bytes=GIB)
        for index in range(2)
    ]
    hardware = Hardware(
        [CudaBackend(torch), HostBackend()], NvmlMonitor(FakeNvml(*gpus), environ={})
    )
    yield hardware
    hardware.close()


@pytest.mark.parametrize(
    ("value", "wish"),
    [
        ("0.8", LimitRequest(share=0.8)),
        ("80%", LimitRequest(share=0.8)),
        (0.8, LimitRequest(share=0.8)),
        ("1", LimitRequest()),
        (1.0, LimitRequest()),
        ("off", LimitRequest()),
        (" OFF ", LimitRequest()),
        ("12GiB", LimitRequest(12 * GIB)),
        ("500 MB", LimitRequest(500_000_000)),
        (12 * GIB + 1, LimitRequest(12 * GIB + 1)),
    ],
)
def test_what_is_asked_for(value: object, wish: LimitRequest) -> None:
    """A share, an amount, or no limit."""
    assert parse_limit(value) == wish


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("12", "'12'"),
        ("0", "'0'"),
        ("120%", "'120%'"),
        ("0GiB", "'0GiB'"),
        ("nan", "'nan'"),
        ("12 bananas", "'12 bananas'"),
        (0, "this int"),
        (1.5, "this float"),
        (float("inf"), "this float"),
        (float("nan"), "this float"),
        (True, "this bool"),
        ("9" * 5000, f"'{'9' * 40}'"),
        ("9" * 5000 + "GiB", f"'{'9' * 40}'"),
        (10**5000, "this int"),
        (-(10**5000), "this int"),
        (Hostile(), "this Hostile"),
    ],
    ids=range(16),
)
def test_what_is_no_limit(value: object, message: str) -> None:
    """One line says what was given and what may be; no code of an object's runs."""
    with pytest.raises(BadInputError) as refusal:
        parse_limit(value)

    assert str(refusal.value) == f"{message} {HINT}"


def test_every_gpu_in_use_unless_one_is_named(hardware: Hardware, allocator: SimulatedGpus) -> None:
    """Where none is in use, every one there is; and all are shown, those without a limit too."""
    none_used = set_limits(hardware, LimitRequest(20 * GIB))
    set_limits(hardware, LimitRequest())
    allocator.allocate(MIB, 1)
    one_used = set_limits(hardware, LimitRequest(share=0.5))
    named = set_limits(hardware, LimitRequest(10 * GIB), "cuda:0")

    assert [(each.device, each.limit_bytes) for each in none_used] == [
        ("cuda:0", 20 * GIB),
        ("cuda:1", 20 * GIB),
    ]
    assert one_used == (Limit("cuda:1", 40 * GIB, TOTAL, 2 * MIB),)
    assert named == (Limit("cuda:0", 10 * GIB, TOTAL, None),)
    assert read_limits(hardware) == named + one_used
    assert read_limits(hardware, "cuda:1") == one_used
    assert allocator.list_touched() == (1,)


def test_more_than_one_of_them_has(allocator: SimulatedGpus) -> None:
    """Then none of them is limited."""
    torch = simulate_torch(allocator)
    allocator.allocators[1].total_bytes = allocator.allocators[1].allowed_bytes = 8 * GIB
    hardware = Hardware([CudaBackend(torch)])
    allocator.touch(0)
    allocator.touch(1)

    with pytest.raises(BadInputError, match=r"cuda:1 has 8\.00 GiB, and 12\.00 GiB is more: give"):
        set_limits(hardware, LimitRequest(12 * GIB))
    limits = read_limits(hardware)
    hardware.close()

    assert [each.limit_bytes for each in limits] == [None, None]


def test_machines_without_a_gpu() -> None:
    """Nothing can be limited there, whether PyTorch has no CUDA or has not been imported."""
    bare = Hardware([HostBackend()])
    built = Hardware([HostBackend()])
    torch = simulate_torch(SimulatedGpus(), version="2.13.0+cpu")
    del vars(vars(torch)["_C"])["_cuda_memoryStats"]
    built._join(torch)

    with pytest.raises(BadInputError, match="a limit needs a GPU with CUDA, and there is none"):
        set_limits(bare, LimitRequest(GIB))
    with pytest.raises(BadInputError, match="no device 'cuda:0' here: there is none"):
        set_limits(bare, LimitRequest(GIB), "cuda:0")
    with pytest.raises(BadInputError, match="a limit needs a GPU with CUDA, and there is none"):
        set_limits(built, LimitRequest(GIB))
    assert read_limits(bare) == ()
    for each in (bare, built):
        each.close()


def test_peaks_are_reset_where_they_are_meant_to_be(
    hardware: Hardware, allocator: SimulatedGpus
) -> None:
    """On the GPUs in use, or on the one that is named and is."""
    nowhere = reset_peaks(hardware)
    allocator.free(allocator.allocate(MIB, 0))
    allocator.free(allocator.allocate(MIB, 1))

    named = reset_peaks(hardware, "cuda:1")
    peaks = [each.allocated_peak_bytes for each in hardware.read_as_user()]

    assert (nowhere, named) == ((), ("cuda:1",))
    assert peaks[:2] == [MIB, 0]
    assert reset_peaks(hardware) == ("cuda:0", "cuda:1")


@pytest.mark.parametrize(
    ("device", "message"),
    [
        ("cuda:2", "no device 'cuda:2' here: choose from cuda:0, cuda:1"),
        ("0", "no device '0' here: choose from cuda:0, cuda:1"),
        ("host", "PyTorch limits and counts what it reserves on GPUs, not on the host: name a GPU"),
        (
            Hostile("cuda:0"),
            "a device's name can't be of type Hostile: give text such as 'cuda:0'; "
            "%memstat lists them",
        ),
        ("cuda:1", "cuda:1 is not in use yet, so it has no peaks: use it first"),
    ],
    ids=range(5),
)
def test_devices_that_can_t_be_limited_or_reset(
    hardware: Hardware, allocator: SimulatedGpus, device: str, message: str
) -> None:
    """One line says why, nothing is done, and objects of the user's are not asked what they are."""
    allocator.touch(0)
    acts: list[Callable[[], object]] = [lambda: reset_peaks(hardware, device)]
    if "not in use" not in message:
        acts.append(lambda: set_limits(hardware, LimitRequest(GIB), device))
        acts.append(lambda: read_limits(hardware, device))

    for act in acts:
        with pytest.raises(BadInputError) as refusal:
            act()
        assert str(refusal.value) == message


# -- Budgets ---------------------------------------------------------------------------------------


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


# -- The budget of a cell's record -----------------------------------------------------------------


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
