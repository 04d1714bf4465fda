"""XPU, MPS and others as their releases of PyTorch tell them: exact, unknown, never brought up."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest

from gpumemwidget.backends.counters import AcceleratorBackend
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
from tests.backends.fake_accelerators import GIB, make_mps, make_old_mps, make_other, make_xpu
from tests.backends.fake_nvml import FakeNvml

MIB = 1 << 20
METHODS = (
    *("list_devices", "read", "start_span", "read_exact", "read_as_user", "read_segments"),
    *("empty_cache", "take_notes", "reset_peaks"),
)
MAKERS: dict[str, Callable[..., Any]] = {"xpu": make_xpu, "mps": make_mps, "other": make_other}


@pytest.mark.parametrize("name", MAKERS)
def test_a_device_that_is_not_used_is_not_brought_into_use(name: str) -> None:
    """No method asks what would do so; there are no devices, and nothing to say."""
    backend = AcceleratorBackend(MAKERS[name](SimulatedGpus(2)))

    answers = {getattr(backend, name)() for name in METHODS}

    assert answers <= {(), None}
    backend.close()
    backend.close()


@pytest.mark.parametrize("name", ["cuda", "cpu", "mps 2.5", "mps 2.9"])
def test_builds_without_counters_are_refused(name: str) -> None:
    """Of old MPS nothing says whether it is in use, and to ask would make it so."""
    if name.startswith("mps"):
        torch = make_old_mps(SimulatedGpus(), has_bindings=name == "mps 2.9")
    else:
        torch = simulate_torch(SimulatedGpus())
        if name == "cpu":
            del torch._C._cuda_memoryStats

    with pytest.raises(BackendError, match="was built without a GPU's support"):
        AcceleratorBackend(torch)


def test_xpu_is_exact_where_there_are_no_general_functions() -> None:
    """As in PyTorch 2.6: spans have their own peaks, and the user's are those since their reset."""
    allocator = SimulatedGpus()
    backend = AcceleratorBackend(make_xpu(allocator, version="2.6.0"))
    allocator.free(allocator.allocate(60 * MIB))

    backend.start_span()
    allocator.allocate(10 * MIB)
    span, user = backend.read_exact(), backend.read_as_user()
    info = DeviceInfo("xpu:0", "Intel(R) Data Center GPU Max 1100", 48 * GIB, uuid="u0")

    reserved = {"reserved_bytes": 60 * MIB, "reserved_peak_bytes": 60 * MIB, "peak_is": "exact"}
    assert span == (Reading("xpu:0", 10 * MIB, allocated_peak_bytes=10 * MIB, **reserved),)
    assert user == (Reading("xpu:0", 10 * MIB, allocated_peak_bytes=60 * MIB, **reserved),)
    assert backend.list_devices() == (info,)
    backend.close()


def test_xpu_in_a_forked_child_is_not_asked() -> None:
    """There the parent's can't be used."""
    allocator = SimulatedGpus()
    allocator.allocate(MIB)
    backend = AcceleratorBackend(make_xpu(allocator, is_bad_fork=True))

    assert backend.read() == ()
    assert backend.list_devices() == ()
    backend.empty_cache()
    backend.close()


def test_mps_has_metals_name_and_maximum() -> None:
    """The memory is the machine's own: Metal recommends how much of it to take at most."""
    allocator = SimulatedGpus()
    backend = AcceleratorBackend(make_mps(allocator))
    kept = allocator.allocate(MIB)

    assert backend.list_devices() == (DeviceInfo("mps:0", "Apple M3 Max", 21 * GIB),)
    allocator.free(kept)
    backend.empty_cache()
    assert allocator.stats(0)["reserved_bytes"]["all"]["current"] == 0
    backend.close()


def test_others_are_never_reset() -> None:
    """What their own functions tell the user stays, and a span has no peak."""
    allocator = SimulatedGpus(2)
    torch = make_other(allocator)
    backend = AcceleratorBackend(torch)
    before = dict(vars(torch._C))
    allocator.free(allocator.allocate(60 * MIB, 1))
    start = backend.start_span()
    handle = allocator.allocate(20 * MIB, 1)
    backend.read()
    allocator.free(handle)

    _, end = backend.read_exact()
    _, user = backend.read_as_user()

    counts = {"num_alloc_retries": 0, "num_ooms": 0}
    assert start == (Reading("npu:0", 0, 0, **counts), Reading("npu:1", 0, 60 * MIB, **counts))
    assert end == Reading("npu:1", 0, 60 * MIB, **counts)
    assert (user.allocated_peak_bytes, user.peak_is) == (60 * MIB, "exact")
    assert vars(torch._C) == before
    backend.reset_peaks(["npu:1"])
    assert backend.read_as_user()[1].allocated_peak_bytes == 0
    backend.empty_cache()
    assert allocator.stats(1)["reserved_bytes"]["all"]["current"] == 0
    backend.close()


@pytest.mark.parametrize(
    "name",
    [
        *("is_initialized", "_is_in_bad_fork", "device_count", "get_device_properties"),
        *("mem_get_info", "memory_snapshot", "_xpu_memoryStats", "_xpu_resetPeakMemoryStats"),
    ],
)
@pytest.mark.parametrize("kind", [RuntimeError, AttributeError, None])
def test_whatever_fails_the_rest_is_recorded(
    name: str, kind: type[Exception] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An extension's code may raise what it likes, or lack it: the host's record goes on."""
    allocator = SimulatedGpus(2)
    torch = make_xpu(allocator)
    torch.__spec__ = None
    owner = next(
        (each for each in (torch.xpu, torch.xpu.memory, torch._C) if hasattr(each, name)), torch._C
    )
    if kind is not None:
        setattr(owner, name, _Failing(kind))
    elif hasattr(owner, name):
        delattr(owner, name)
    monkeypatch.setitem(sys.modules, "torch", torch)
    hardware = Hardware([HostBackend()], NvmlMonitor(FakeNvml(), environ={}))
    hardware.await_torch()
    allocator.allocate(MIB)
    methods = ("start_span", "read", "read_exact", "read_as_user", "read_segments", "list_devices")

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


def test_hardware_is_joined_by_it_where_there_is_no_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the host behind it; what unloading takes from the user's view is told."""
    allocator = SimulatedGpus()
    torch = make_xpu(allocator)
    torch.__spec__ = None
    monkeypatch.setitem(sys.modules, "torch", torch)
    hardware = Hardware([HostBackend()], NvmlMonitor(FakeNvml(), environ={}))
    hardware.await_torch()
    allocator.free(allocator.allocate(8 * MIB))

    hardware.start_span()
    readings = hardware.read_exact()

    assert [reading.device for reading in readings] == ["xpu:0", "host"]
    assert [info.device for info in hardware.list_devices()] == ["xpu:0", "host"]
    reports = {report.info.device: report for report in hardware.read_devices()}
    assert reports["xpu:0"].reading.allocated_peak_bytes == 8 * MIB
    assert reports["xpu:0"].use == DeviceUse("xpu:0", 8 * GIB, 40 * GIB, 48 * GIB)
    states = {state.info.device: state for state in hardware.take_device_states()}
    assert sum(each.n_bytes for each in states["xpu:0"].segments) == 20 * MIB
    assert states["xpu:0"].processes is None
    breakdown = build_breakdown(states["xpu:0"])
    assert breakdown is not None
    assert [(part.key, part.n_bytes, part.merged) for part in breakdown.parts] == [
        ("releasable", 20 * MIB, ()),
        ("rest", 8 * GIB - 20 * MIB, ("outside", "children", "others", "unlisted", "driver")),
        ("free", 40 * GIB, ()),
    ]
    assert hardware.start_trace(n_events=10) == (
        HardwareNote(HardwareNoteKind.NOT_TRACED, device="xpu:0"),
    )
    assert hardware.end_trace() == ()
    assert hardware.take_notes() == ()
    hardware.close()
