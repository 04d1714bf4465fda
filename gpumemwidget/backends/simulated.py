"""Stands in for torch over simulated allocators: the CUDA backend runs on it without a GPU.

    gpu = ReplayAllocator()
    hardware = Hardware([CudaBackend(simulate_torch(gpu)), HostBackend()])

Whatever calls ``gpu.allocate`` is then traced as a cell on a real GPU is, line by line.
"""

from __future__ import annotations

import contextlib
from types import ModuleType, SimpleNamespace
from typing import Any

from gpumemwidget.backends.allocator import ReplayAllocator

__all__ = ["simulate_torch"]


def simulate_torch(
    allocator: ReplayAllocator, *, version: str = "2.11.0", is_initialized: bool = True
) -> ModuleType:
    """As much of the module torch as the CUDA backend uses.

    Args:
        allocator: what it tells about.
        version: which release it says it is.
        is_initialized: whether CUDA is in use from the start; else from ``torch.cuda.init()`` on.
    """
    cuda = _SimulatedCuda(allocator, is_initialized=is_initialized)
    bindings = SimpleNamespace(
        _cuda_memoryStats=allocator.stats,
        _accelerator_getDeviceStats=allocator.stats,
        _cuda_resetPeakMemoryStats=allocator.reset_peak,
        _accelerator_resetPeakStats=allocator.reset_peak,
        _cuda_resetAccumulatedMemoryStats=allocator.reset_totals,
        _accelerator_resetAccumulatedStats=allocator.reset_totals,
        _cuda_hasPrimaryContext=lambda device: device in allocator.list_touched(),
        _cuda_isHistoryEnabled=lambda: allocator.is_history_on,
        _cuda_record_memory_history=allocator.record_history,
        _cuda_getMemoryFraction=allocator.get_fraction,
        _cuda_hostMemoryStats=allocator.pinned.to_dict,
    )

    def record(enabled: str | None = "all", **options: Any) -> None:
        # Looked up anew each time, as torch does: somebody may have wrapped it.
        vars(bindings)["_cuda_record_memory_history"](enabled, **options)

    def reset_peaks(device: int = 0) -> None:
        vars(bindings)["_cuda_resetPeakMemoryStats"](device)

    def read_peak(device: int = 0) -> int:
        peak: int = vars(bindings)["_cuda_memoryStats"](device)["allocated_bytes"]["all"]["peak"]
        return peak

    torch: Any = ModuleType("torch")
    torch.__version__ = version
    vars(torch)["_C"] = bindings
    torch.cuda = SimpleNamespace(
        init=cuda.init,
        is_initialized=lambda: cuda.is_initialized,
        _queued_calls=cuda.queued,
        _lazy_call=cuda.call,
        device=lambda _: contextlib.nullcontext(),
        device_count=lambda: allocator.n_devices,
        empty_cache=allocator.empty_cache,
        max_memory_allocated=read_peak,
        reset_peak_memory_stats=reset_peaks,
        mem_get_info=cuda.get_memory,
        set_per_process_memory_fraction=allocator.set_fraction,
        memory=SimpleNamespace(
            memory_snapshot=allocator.snapshot,
            get_allocator_backend=lambda: "native",
            _record_memory_history=record,
            _snapshot=allocator.take_snapshot,
        ),
        get_device_properties=lambda index: SimpleNamespace(
            name=f"Simulated {index}",
            total_memory=allocator.total_bytes(index),
            uuid=f"simulated-{index}",
        ),
    )
    simulated: ModuleType = torch
    return simulated


class _SimulatedCuda:
    """CUDA's initialisation: what is queued before is called by it."""

    def __init__(self, allocator: ReplayAllocator, *, is_initialized: bool) -> None:
        self.is_initialized = is_initialized
        self.queued: list[tuple[Any, list[str]]] = []
        self._allocator = allocator

    def init(self) -> None:
        """As ``torch.cuda.init()``, which touches no device."""
        if not self.is_initialized:
            for action, _ in tuple(self.queued):
                action()
            self.is_initialized = True

    def call(self, action: Any) -> None:
        """As ``torch.cuda._lazy_call``."""
        if self.is_initialized:
            action()
        else:
            self.queued.append((action, []))

    def get_memory(self, device: int = 0) -> tuple[int, int]:
        """What of a device is free, and what it is; it is in use from then on, as CUDA has it."""
        self._allocator.touch(device)
        total_bytes = self._allocator.total_bytes(device)
        reserved = self._allocator.stats(device)["reserved_bytes"]["all"]["current"]
        return total_bytes - reserved, total_bytes
