"""Stands in for torch over simulated allocators: the CUDA backend runs on it without a GPU.

    gpu = ReplayAllocator()
    hardware = Hardware([CudaBackend(simulate_torch(gpu)), HostBackend()])

Whatever calls ``gpu.allocate`` is then traced as a cell on a real GPU is, line by line.
"""

from __future__ import annotations

from types import ModuleType, SimpleNamespace
from typing import Any

from gpumemwidget.backends.allocator import ReplayAllocator

__all__ = ["simulate_torch"]


def simulate_torch(allocator: ReplayAllocator, *, version: str = "2.11.0") -> ModuleType:
    """As much of the module torch as the CUDA backend uses.

    Args:
        allocator: what it tells about.
        version: which release it says it is.
    """
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
    )

    def record(enabled: str | None = "all", **options: Any) -> None:
        # Looked up anew each time, as torch does: somebody may have wrapped it.
        vars(bindings)["_cuda_record_memory_history"](enabled, **options)

    torch: Any = ModuleType("torch")
    torch.__version__ = version
    vars(torch)["_C"] = bindings
    torch.cuda = SimpleNamespace(
        is_initialized=lambda: True,
        device_count=lambda: allocator.n_devices,
        empty_cache=allocator.empty_cache,
        memory=SimpleNamespace(
            memory_snapshot=allocator.snapshot,
            get_allocator_backend=lambda: "native",
            _record_memory_history=record,
            _snapshot=allocator.take_snapshot,
        ),
        get_device_properties=lambda index: SimpleNamespace(
            name=f"Simulated {index}", total_memory=allocator.total_bytes(index), uuid="abc"
        ),
    )
    simulated: ModuleType = torch
    return simulated
