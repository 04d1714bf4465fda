"""XPU and MPS as their releases of PyTorch describe them: exact, unknown, never brought up."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest

from gpumemwidget.backends.accelerators import AcceleratorBackend
from gpumemwidget.backends.driver.nvml import NvmlMonitor
from gpumemwidget.backends.hardware import Hardware
from gpumemwidget.backends.host import HostBackend
from gpumemwidget.device_parts import build_breakdown
from gpumemwidget.errors import BackendError
from gpumemwidget.model.devices import (
    DeviceInfo,
    DeviceUse,
    HardwareNote,
    HardwareNoteKind,
    Reading,
)
from gpumemwidget.testing import SimulatedGpus, simulate_torch
from tests.backends.fake_accelerators import GIB, make_mps, make_old_mps, make_xpu
from tests.backends.fake_nvml import FakeNvml

MIB = 1 << 20
METHODS = (
    *("list_devices", "read", "start_span", "end_span", "read_as_user", "read_segments"),
    *("empty_cache", "take_notes", "reset_peaks"),
)
MAKERS: dict[str, Callable[..., Any]] = {
    "xpu": make_xpu,
    "mps": make_mps,
}


@pytest.mark.parametrize("name", MAKERS)
def test_a_device_that_is_not_used_is_not_brought_into_use(name: str) -> None:
    """No method asks what would do so; there are no devices, and nothing to say."""
    backend = AcceleratorBackend(MAKERS[name](SimulatedGpus(2)))

    answers = {getattr(backend, name)() for name in METHODS}

    assert answers <= {(), None}
    backend.close()
    backend.close()


@pytest.mark.parametrize("kind", ["cpu", "cuda", "mps 2.5.0", "mps 2.9.0"])
def test_builds_without_statistics_are_refused(kind: str) -> None:
    """CUDA's own backend reads it; of an old MPS nobody knows whether it is in use."""
    torch = simulate_torch(SimulatedGpus())
    if kind == "cpu":
        del torch._C._cuda_memoryStats
    elif kind != "cuda":
        torch = make_old_mps(SimulatedGpus(), version=kind.split()[1])

    with pytest.raises(BackendError, match="has no statistics of a GPU"):
        AcceleratorBackend(torch)


@pytest.mark.parametrize(
    ("make", "reader", "info"),
    [
        (
            make_xpu,
            "_xpu_memoryStats",
            DeviceInfo("xpu:0", "Intel(R) Data Center GPU Max 1100", 48 * GIB, uuid="u0"),
        ),
        (make_mps, "_accelerator_getDeviceStats", DeviceInfo("mps:0", "Apple M3 Max", 21 * GIB)),
    ],
    ids=["xpu", "mps"],
)
def test_the_user_sees_nothing_of_our_spans(
    make: Callable[[SimulatedGpus], Any], reader: str, info: DeviceInfo
) -> None:
    """PyTorch's functions return the peaks since the user's reset; closing puts them back."""
    allocator = SimulatedGpus()
    torch = make(allocator)
    bindings = dict(vars(torch._C))
    backend = AcceleratorBackend(torch)
    allocator.free(allocator.allocate(60 * MIB))

    backend.start_span()
    allocator.free(allocator.allocate(20 * MIB))
    (end,) = backend.end_span()

    seen = getattr(torch._C, reader)(0)["allocated_bytes"]["all"]["peak"]
    assert (end.allocated_peak_bytes, seen) == (20 * MIB, 60 * MIB)
    assert backend.list_devices() == (info,)
    backend.empty_cache()
    assert allocator.stats(0)["reserved_bytes"]["all"]["current"] == 0
    backend.close()
    assert vars(torch._C) == bindings


def test_xpu_in_a_forked_child_is_not_asked() -> None:
    """There the parent's can't be used."""
    allocator = SimulatedGpus()
    allocator.allocate(MIB)
    backend = AcceleratorBackend(make_xpu(allocator, is_bad_fork=True))

    assert backend.read() == ()
    assert backend.list_devices() == ()
    backend.empty_cache()
    backend.close()


def test_what_fails_is_unknown_and_said_once() -> None:
    """A device in error has no figures; the others do."""
    allocator = SimulatedGpus(2)
    torch = make_xpu(allocator)
    read = torch._C._xpu_memoryStats
    is_lost = False

    def fail(index: int) -> Any:
        if is_lost and index == 0:
            raise RuntimeError("UR_RESULT_ERROR_DEVICE_LOST\nand more")
        return read(index)

    torch._C._xpu_memoryStats = fail
    backend = AcceleratorBackend(torch)
    allocator.allocate(MIB, 0)
    allocator.allocate(MIB, 1)
    backend.read()
    is_lost = True

    for _ in range(2):
        first, second = backend.read()

    assert first == Reading("xpu:0", None, None)
    assert second.allocated_bytes == MIB
    assert backend.take_notes() == (
        HardwareNote(HardwareNoteKind.UNREAD, "UR_RESULT_ERROR_DEVICE_LOST", "xpu:0", "counters"),
    )
    assert backend.take_notes() == ()
    torch.xpu.empty_cache = _Failing(RuntimeError)
    with pytest.raises(BackendError, match="XPU could not empty its cache"):
        backend.empty_cache()
    backend.close()


@pytest.mark.parametrize(
    "name",
    [
        *("is_initialized", "_is_in_bad_fork", "device_count", "get_device_properties"),
        *("mem_get_info", "_xpu_memoryStats", "_xpu_resetPeakMemoryStats"),
    ],
)
@pytest.mark.parametrize("kind", [RuntimeError, AttributeError, None])
def test_whatever_fails_the_rest_is_recorded(
    name: str, kind: type[Exception] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A binding may raise what it likes, or be missing: the host's record goes on."""
    allocator = SimulatedGpus(2)
    torch = make_xpu(allocator)
    torch.__spec__ = None
    owner = torch.xpu if hasattr(torch.xpu, name) else torch._C
    if kind is not None:
        setattr(owner, name, _Failing(kind))
    elif hasattr(owner, name):
        delattr(owner, name)
    monkeypatch.setitem(sys.modules, "torch", torch)
    hardware = Hardware([HostBackend()], NvmlMonitor(FakeNvml(), environ={}))
    hardware.await_torch()
    allocator.allocate(MIB)
    methods = ("start_span", "read", "end_span", "read_as_user", "read_segments", "list_devices")

    answers = {method: getattr(hardware, method)() for method in methods * 2}
    devices = [report.info.device for report in hardware.read_devices()]
    states = [state.info.device for state in hardware.take_device_states()]
    notes = hardware.take_notes()

    for method in set(methods) - {"read_segments"}:
        assert answers[method][-1].device == "host"
    assert devices[-1] == states[-1] == "host"
    assert len(notes) == len(set(notes)) <= 4
    if kind is not None:
        assert any("oh" in note.text for note in notes)
    hardware.close()


class _Failing:
    """A function of torch's, or what should be one."""

    def __init__(self, kind: type[Exception]) -> None:
        self._kind = kind

    def __call__(self, *_: object) -> object:
        raise self._kind("oh\nand more")


def test_hardware_is_joined_by_it_where_there_is_no_cuda(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With the host behind it."""
    allocator = SimulatedGpus()
    torch = make_xpu(allocator)
    torch.__spec__ = None
    monkeypatch.setitem(sys.modules, "torch", torch)
    hardware = Hardware([HostBackend()], NvmlMonitor(FakeNvml(), environ={}))
    hardware.await_torch()
    allocator.free(allocator.allocate(8 * MIB))

    hardware.start_span()
    readings = hardware.end_span()

    assert [reading.device for reading in readings] == ["xpu:0", "host"]
    assert [info.device for info in hardware.list_devices()] == ["xpu:0", "host"]
    reports = {report.info.device: report for report in hardware.read_devices()}
    assert reports["xpu:0"].reading.allocated_peak_bytes == 8 * MIB
    assert reports["xpu:0"].use == DeviceUse("xpu:0", 8 * GIB, 40 * GIB, 48 * GIB)
    states = {state.info.device: state for state in hardware.take_device_states()}
    assert states["xpu:0"].processes is None
    breakdown = build_breakdown(states["xpu:0"])
    assert breakdown is not None
    assert [(part.key, part.n_bytes, part.merged) for part in breakdown.parts] == [
        ("rest", 20 * MIB, ("pending", "releasable", "fragmented", "pools")),
        ("rest", 8 * GIB - 20 * MIB, ("outside", "children", "others", "unlisted", "driver")),
        ("free", 40 * GIB, ()),
    ]
    assert hardware.start_trace(n_events=10) == (
        HardwareNote(HardwareNoteKind.NOT_TRACED, device="xpu:0"),
    )
    assert hardware.end_trace() == ()
    assert hardware.take_notes() == ()
    hardware.close()
