"""NVML's Python binding over GPUs that a test makes up.

A driver can't be had in a test, so this stands in at the binding's own functions, and fails with
the binding's real exception classes.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pynvml

GIB = 1024**3


@dataclass
class FakeGpu:
    """One GPU or MIG instance, and what fails on it: a function's name with NVML's error."""

    name: str = "NVIDIA H200"
    uuid: str = "GPU-aaaa"
    total_bytes: int = 140 * GIB
    used_bytes: int = 3 * GIB
    busy_percent: int = 17
    #: Bytes of the processes that compute on it, by their numbers, and of those that draw.
    processes: dict[int, int | None] = field(default_factory=dict)
    drawing: dict[int, int | None] = field(default_factory=dict)
    #: What the driver has reserved.
    reserved_bytes: int = 0
    instances: list[FakeGpu] | None = None
    failures: dict[str, int] = field(default_factory=dict)


class FakeNvml:
    """Stands in for the module ``pynvml``."""

    NVMLError = pynvml.NVMLError
    NVML_ERROR_UNINITIALIZED = pynvml.NVML_ERROR_UNINITIALIZED
    NVML_ERROR_NOT_SUPPORTED = pynvml.NVML_ERROR_NOT_SUPPORTED
    NVML_ERROR_NO_PERMISSION = pynvml.NVML_ERROR_NO_PERMISSION
    NVML_ERROR_INSUFFICIENT_SIZE = pynvml.NVML_ERROR_INSUFFICIENT_SIZE
    NVML_ERROR_LIBRARY_NOT_FOUND = pynvml.NVML_ERROR_LIBRARY_NOT_FOUND
    nvmlMemory_v2 = 0x2000028  # noqa: N815 - NVML's own names, here and below

    def __init__(self, *gpus: FakeGpu, init_error: int | None = None) -> None:
        self.gpus = list(gpus)
        self.init_error = init_error
        self.n_inits = 0

    def nvmlInit(self) -> None:  # noqa: N802
        if self.init_error is not None:
            raise self.NVMLError(self.init_error)
        self.n_inits += 1

    def nvmlShutdown(self) -> None:  # noqa: N802
        self._check()
        self.n_inits -= 1

    def nvmlDeviceGetCount(self) -> int:  # noqa: N802
        self._check()
        return len(self.gpus)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> FakeGpu:  # noqa: N802
        return self._check(self.gpus[index], "nvmlDeviceGetHandleByIndex")

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> FakeGpu:  # noqa: N802
        self._check()
        return next(gpu for gpu in self.gpus if gpu.uuid == uuid)

    def nvmlDeviceGetName(self, gpu: FakeGpu) -> str:  # noqa: N802
        return self._check(gpu, "nvmlDeviceGetName").name

    def nvmlDeviceGetUUID(self, gpu: FakeGpu) -> str:  # noqa: N802
        return self._check(gpu, "nvmlDeviceGetUUID").uuid

    def nvmlDeviceGetMemoryInfo(self, gpu: FakeGpu, version: int) -> SimpleNamespace:  # noqa: N802
        self._check(gpu, "nvmlDeviceGetMemoryInfo")
        assert version == self.nvmlMemory_v2
        return SimpleNamespace(
            total=gpu.total_bytes,
            used=gpu.used_bytes,
            free=gpu.total_bytes - gpu.used_bytes - gpu.reserved_bytes,
            reserved=gpu.reserved_bytes,
        )

    def nvmlDeviceGetUtilizationRates(self, gpu: FakeGpu) -> SimpleNamespace:  # noqa: N802
        self._check(gpu, "nvmlDeviceGetUtilizationRates")
        return SimpleNamespace(gpu=gpu.busy_percent, memory=1)

    def _nvmlGetFunctionPointer(self, name: str) -> Callable[..., int]:  # noqa: N802
        """A function of the driver's library itself, which writes a list of processes."""
        kind = name.removeprefix("nvmlDeviceGet").removesuffix("RunningProcesses_v3")

        def list_running(gpu: FakeGpu, count: Any, entries: Any) -> int:
            if kind == "MPSCompute":
                return int(pynvml.NVML_ERROR_NOT_SUPPORTED)
            try:
                self._check(gpu, name.removesuffix("_v3"))
            except self.NVMLError as error:
                return int(error.value)
            running = gpu.processes if kind == "Compute" else gpu.drawing
            room, count._obj.value = count._obj.value, len(running)
            if room < len(running):
                return int(pynvml.NVML_ERROR_INSUFFICIENT_SIZE)
            written = ctypes.cast(entries, ctypes.POINTER(pynvml.c_nvmlProcessInfo_v2_t))
            for index, (pid, n_bytes) in enumerate(running.items()):
                # Unknown bytes are -1.
                written[index].pid = pid
                written[index].usedGpuMemory = (1 << 64) - 1 if n_bytes is None else n_bytes
            return int(pynvml.NVML_SUCCESS)

        return list_running

    def nvmlDeviceGetMigMode(self, gpu: FakeGpu) -> list[int]:  # noqa: N802
        self._check(gpu, "nvmlDeviceGetMigMode")
        if gpu.instances is None:
            raise self.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
        return [1, 1]

    def nvmlDeviceGetMaxMigDeviceCount(self, gpu: FakeGpu) -> int:  # noqa: N802
        self._check(gpu, "nvmlDeviceGetMaxMigDeviceCount")
        return 7

    def nvmlDeviceGetMigDeviceHandleByIndex(self, gpu: FakeGpu, index: int) -> FakeGpu:  # noqa: N802
        # Every other place is empty, as on a GPU that was cut into large instances.
        if gpu.instances is None or index % 2 or index // 2 >= len(gpu.instances):
            raise self.NVMLError(pynvml.NVML_ERROR_NOT_FOUND)
        return gpu.instances[index // 2]

    def _check(self, gpu: FakeGpu | None = None, function: str = "") -> FakeGpu | None:
        if self.n_inits <= 0:
            raise self.NVMLError(pynvml.NVML_ERROR_UNINITIALIZED)
        if gpu is not None and function in gpu.failures:
            raise self.NVMLError(gpu.failures[function])
        return gpu
