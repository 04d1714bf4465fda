"""As much of torch as an accelerator's backend uses, over simulated allocators.

What each release of PyTorch has of XPU and MPS, and what its answers look like, is as its sources
say: https://github.com/pytorch/pytorch/tree/main/torch/csrc (``DeviceAccelerator.cpp``,
``xpu/Module.cpp``) and ``aten/src/ATen/mps/MPSAllocator.mm``.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

from gpumemwidget.testing import SimulatedGpus

GIB = 1 << 30
_XPU_KEYS = ("allocated_bytes", "reserved_bytes")


class BroughtIntoUse(BaseException):
    """Nobody catches it: the test that meets it fails."""


class _Forbidden:
    """Fails the test that asks it: this would bring the device into use."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __call__(self, *_: object, **__: object) -> object:
        raise BroughtIntoUse(self._name)


def _guard(allocator: SimulatedGpus, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
    """A call that is forbidden as long as the device is not in use."""

    def ask(*arguments: Any, **options: Any) -> Any:
        if not allocator.list_touched():
            _Forbidden(name)()
        return call(*arguments, **options)

    return ask


def _make_torch(version: str, bindings: SimpleNamespace) -> Any:
    torch: Any = ModuleType("torch")
    torch.__version__ = version
    vars(torch)["_C"] = bindings
    torch.accelerator = SimpleNamespace()
    return torch


def _add_general(bindings: SimpleNamespace, allocator: SimulatedGpus, keys: tuple[str, ...] = ()):
    """The bindings behind ``torch.accelerator``'s memory functions, since 2.9."""

    def read(index: int) -> dict[str, Any]:
        stats = allocator.stats(index)
        return {key: stats[key] for key in keys} if keys else stats

    bindings._accelerator_isAllocatorInitialized = lambda: bool(allocator.list_touched())
    bindings._accelerator_getDeviceStats = _guard(allocator, "getDeviceStats", read)
    bindings._accelerator_resetPeakStats = _guard(allocator, "resetPeakStats", allocator.reset_peak)


def make_xpu(allocator: SimulatedGpus, *, version: str = "2.13.0", is_bad_fork: bool = False):
    """Intel GPUs: all of them are initialised together, as a first tensor lands on one."""

    def read(index: int) -> dict[str, Any]:
        return {key: allocator.stats(index)[key] for key in _XPU_KEYS}

    bindings = SimpleNamespace(
        _xpu_init=_Forbidden("_xpu_init"),
        _xpu_memoryStats=_guard(allocator, "_xpu_memoryStats", read),
        _xpu_resetPeakMemoryStats=_guard(allocator, "reset", allocator.reset_peak),
    )
    torch = _make_torch(version, bindings)
    release = tuple(int(part) for part in version.split(".")[:2])
    if release >= (2, 9):
        _add_general(bindings, allocator)
    torch.xpu = SimpleNamespace(
        is_initialized=lambda: bool(allocator.list_touched()) and not is_bad_fork,
        _is_in_bad_fork=lambda: is_bad_fork,
        device_count=_guard(allocator, "device_count", lambda: len(allocator.allocators)),
        get_device_properties=_guard(
            allocator,
            "get_device_properties",
            lambda index: SimpleNamespace(
                name="Intel(R) Data Center GPU Max 1100", total_memory=48 * GIB, uuid=f"u{index}"
            ),
        ),
        mem_get_info=_guard(allocator, "mem_get_info", lambda _: (40 * GIB, 48 * GIB)),
        empty_cache=_guard(allocator, "empty_cache", allocator.empty_cache),
        memory=SimpleNamespace(),
    )
    if release >= (2, 12):
        torch.xpu.memory.memory_snapshot = lambda: allocator.take_snapshot()["segments"]
    return torch


def make_mps(allocator: SimulatedGpus, *, version: str = "2.13.0"):
    """Apple's GPU, where ``torch.accelerator`` reaches it: two statistics, one pool."""
    bindings = SimpleNamespace(
        _has_mps=True,
        _mps_currentAllocatedMemory=_guard(
            allocator,
            "_mps_currentAllocatedMemory",
            lambda: allocator.stats(0)["allocated_bytes"]["all"]["current"],
        ),
    )
    torch = _make_torch(version, bindings)
    _add_general(bindings, allocator, ("allocated_bytes", "reserved_bytes"))
    torch.mps = SimpleNamespace(
        _is_in_bad_fork=lambda: False,
        is_available=_Forbidden("is_available"),
        device_count=_Forbidden("device_count"),
        recommended_max_memory=_guard(allocator, "recommended_max_memory", lambda: 21 * GIB),
        empty_cache=_guard(allocator, "empty_cache", allocator.empty_cache),
    )
    torch.backends = SimpleNamespace(mps=SimpleNamespace(get_name=lambda: "Apple M3 Max"))
    return torch


def make_old_mps(allocator: SimulatedGpus, *, has_bindings: bool):
    """Apple's GPU before 2.13: without the bindings (before 2.9), or with ones that refuse."""
    torch = make_mps(allocator, version="2.9.0")
    for name in [name for name in vars(torch._C) if name.startswith("_accelerator_")]:
        delattr(torch._C, name)

    def refuse() -> bool:
        raise RuntimeError("Allocator for mps is not a DeviceAllocator.")

    if has_bindings:
        torch._C._accelerator_isAllocatorInitialized = refuse
        torch._C._accelerator_getDeviceStats = _Forbidden("getDeviceStats")
    return torch


def make_other(allocator: SimulatedGpus, *, version: str = "2.13.0"):
    """An extension's own device, with functions of its own that no overlay of ours covers."""
    bindings = SimpleNamespace()
    torch = _make_torch(version, bindings)
    bindings._get_privateuse1_backend_name = lambda: "npu"
    _add_general(bindings, allocator)
    torch.accelerator.device_count = lambda: len(allocator.allocators)
    torch.accelerator.empty_cache = _guard(allocator, "empty_cache", allocator.empty_cache)
    torch.npu = SimpleNamespace(
        is_initialized=lambda: bool(allocator.list_touched()),
        device_count=lambda: len(allocator.allocators),
    )
    return torch
