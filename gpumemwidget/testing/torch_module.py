"""A stand-in for the module ``torch`` over simulated GPUs, with what the CUDA backend calls."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

from gpumemwidget.testing.gpus import SimulatedGpus


def simulate_torch(
    gpus: SimulatedGpus, *, version: str = "2.11.0", is_initialized: bool = True
) -> ModuleType:
    """Return a module with as much of ``torch`` as ``CudaBackend`` needs.

    Args:
        gpus: the GPUs that it tells about.
        version: the release of PyTorch that it claims to be.
        is_initialized: whether CUDA is in use from the start; else from ``torch.cuda.init()`` on.
    """
    cuda = _CudaStart(is_initialized=is_initialized)
    bindings = SimpleNamespace(
        _cuda_memoryStats=gpus.stats,
        _accelerator_getDeviceStats=gpus.stats,
        _cuda_resetPeakMemoryStats=gpus.reset_peak,
        _accelerator_resetPeakStats=gpus.reset_peak,
        _cuda_resetAccumulatedMemoryStats=gpus.reset_totals,
        _accelerator_resetAccumulatedStats=gpus.reset_totals,
        _cuda_hasPrimaryContext=lambda device: device in gpus.list_touched(),
        _cuda_isHistoryEnabled=lambda: gpus.is_history_on,
        _cuda_record_memory_history=gpus.record_history,
        _cuda_memorySnapshot=gpus.take_snapshot,
        _cuda_getMemoryFraction=gpus.get_fraction,
        _cuda_hostMemoryStats=gpus.pinned.to_stats,
    )

    # Like torch's own, these look a binding up anew at each call: somebody may have replaced it.
    def record_history(enabled: str | None = "all", **options: Any) -> None:
        vars(bindings)["_cuda_record_memory_history"](enabled, **options)

    def take_snapshot() -> dict[str, Any]:
        taken: dict[str, Any] = vars(bindings)["_cuda_memorySnapshot"]()
        return taken

    def list_segments(*, include_traces: bool = True) -> Any:  # noqa: ARG001 - PyTorch's parameter
        return take_snapshot()["segments"]

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
        device_count=lambda: gpus.n_devices,
        empty_cache=gpus.empty_cache,
        max_memory_allocated=read_peak,
        reset_peak_memory_stats=reset_peaks,
        mem_get_info=gpus.get_memory,
        set_per_process_memory_fraction=gpus.set_fraction,
        memory=SimpleNamespace(
            memory_snapshot=list_segments,
            get_allocator_backend=lambda: "native",
            _record_memory_history=record_history,
            _snapshot=take_snapshot,
        ),
        get_device_properties=lambda index: SimpleNamespace(
            name=gpus.name, total_memory=gpus.get_total(index), uuid=format_uuid(index)
        ),
    )
    stand_in: ModuleType = torch
    return stand_in


def format_uuid(index: int) -> str:
    """Return the UUID of a simulated GPU, as PyTorch writes it: without ``GPU-``."""
    return f"simulated-{index}"


class _CudaStart:
    """The initialisation of CUDA, which makes the calls that were queued before."""

    def __init__(self, *, is_initialized: bool) -> None:
        self.is_initialized = is_initialized
        self.queued: list[tuple[Callable[[], object], list[str]]] = []

    def init(self) -> None:
        """Do what ``torch.cuda.init()`` does; no GPU is in use afterwards."""
        if not self.is_initialized:
            for action, _ in tuple(self.queued):
                action()
            self.is_initialized = True

    def call(self, action: Callable[[], object]) -> None:
        """Do what ``torch.cuda._lazy_call`` does."""
        if self.is_initialized:
            action()
        else:
            self.queued.append((action, []))
