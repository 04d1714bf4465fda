"""Read whole devices from NVIDIA's driver: names, totals, the memory of all processes.

NVML numbers GPUs by their place on the bus, whatever ``CUDA_VISIBLE_DEVICES`` says, and PyTorch
numbers what CUDA shows in CUDA's order. The two are matched by UUID. Where the order can't be known
without starting CUDA, nothing is guessed (see ``NvmlMonitor.match``).

MIG instances lack figures that whole GPUs have, and a GPU may be lost at any moment: a note says
what is missing. A driver before 510 is too old.
"""

from __future__ import annotations

import contextlib
import os
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

from gpumemwidget.backends.driver.visible_devices import (
    Gpu,
    correct_numbers,
    number_gpus,
    strip_uuid,
)
from gpumemwidget.backends.protocol import ProcessesByBytes
from gpumemwidget.errors import Notes
from gpumemwidget.model.devices import DeviceInfo, DeviceUse

_T = TypeVar("_T")

# nvmlReturn_t: https://docs.nvidia.com/deploy/nvml-api/group__nvmlDeviceEnumvs.html
_UNINITIALIZED = 1
_NO_PERMISSION = 4
_LIBRARY_NOT_FOUND = 12
_NOT_FOUND = 13
_CAUSES = {
    _UNINITIALIZED: "something else in this process has shut the driver's library down",
    3: "the device does not support it",
    _NO_PERMISSION: "this user has no permission for it",
    9: "the NVIDIA driver is not loaded",
    10: "the driver did not answer in time",
    _NOT_FOUND: "the driver is too old for it",
    15: "the GPU is lost and does not answer any more (nvidia-smi tells more)",
    16: "the GPU has to be reset first",
    18: "the driver and its library are of different versions (a reboot mends that)",
    999: "the driver gives no reason",
}
#: NVML's value for bytes that are not told.
_NO_BYTES = 0xFFFFFFFFFFFFFFFF
#: Functions that list the processes which draw, or compute by NVIDIA's multi-process service.
_OTHER_LISTS = (
    "nvmlDeviceGetGraphicsRunningProcesses_v3",
    "nvmlDeviceGetMPSComputeRunningProcesses_v3",
)

#: The question of how busy a device is, which MIG instances don't answer; its memory is known then.
_BUSY = "utilisation"
_NO_LIBRARY = (
    "Whole-device figures are missing: the NVIDIA driver is loaded, but its library libnvidia-ml"
    " is not found (a container needs the driver capability 'utility')."
)


class NvmlMonitor:
    """NVML as a ``DeviceMonitor``.

    On a machine without NVIDIA's driver it knows no device and says nothing. Nothing is asked
    before the first call, and no CUDA context is ever created.

    Args:
        library: stands in for the module ``pynvml``.
        environ: has ``CUDA_VISIBLE_DEVICES`` and ``CUDA_DEVICE_ORDER``.
        driver: the file that is there when the driver is loaded.
    """

    def __init__(
        self,
        library: Any = None,
        *,
        environ: Mapping[str, str] = os.environ,
        driver: Path = Path("/proc/driver/nvidia/version"),
    ) -> None:
        self._library = library
        self._environ = environ
        self._driver = driver
        self._lock = threading.RLock()
        self._state = "new"  # then "open" or "failed", and "closed"
        #: GPUs in NVML's order; ``None`` holds the place of a GPU that can't be read.
        self._gpus: tuple[Gpu | None, ...] = ()
        self._instances: tuple[Gpu, ...] = ()
        self._uuids: dict[str, str] = {}
        self._mapped_for: object = None
        self._mapped: dict[str, Gpu] = {}
        self._notes = Notes()

    def list_infos(self) -> tuple[DeviceInfo, ...]:
        """Return the GPUs that CUDA shows to this process, under PyTorch's names."""
        with self._lock:
            return tuple(
                DeviceInfo(device=device, name=gpu.name, total_bytes=gpu.total_bytes, uuid=gpu.uuid)
                for device, gpu in self._map().items()
            )

    def read_use(self, device: str) -> DeviceUse | None:
        """Return the use of a whole device, as ``nvidia-smi`` shows it: about 9 µs."""
        with self._lock:
            gpu = self._map().get(device)
            if gpu is None:
                return None
            memory = self._ask(gpu, device, "memory in use", self._read_memory)
            rates = self._ask(gpu, device, _BUSY, self._library.nvmlDeviceGetUtilizationRates)
            percent = None if rates is None else int(rates.gpu)
            if memory is None:
                use = DeviceUse(device, None, None, gpu.total_bytes, percent)
                return None if rates is None else use
            return DeviceUse(
                device=device,
                used_bytes=int(memory.used),
                free_bytes=int(memory.free),
                total_bytes=int(memory.total),
                utilization_percent=percent,
                driver_bytes=int(memory.reserved),
            )

    def list_processes(self, device: str) -> ProcessesByBytes | None:
        """Return the processes that compute or draw on a device, each once: about 60 µs."""
        with self._lock:
            gpu = self._map().get(device)
            return None if gpu is None else self._read_processes(gpu, device)

    def list_failures(self, device: str) -> tuple[str, ...]:
        """Return a sentence for each figure of memory that could not be read the last time."""
        with self._lock:
            gpu = self._map().get(device)
            if gpu is None:
                return ()
            return tuple(why for what, why in gpu.failures.items() if what != _BUSY)

    def match(self, uuids: Mapping[str, str]) -> None:
        """Correct the numbering by what CUDA itself says of the devices that are in use."""
        with self._lock:
            self._uuids.update(
                (device, strip_uuid(uuid))
                for device, uuid in uuids.items()
                if device.startswith("cuda:")
            )
            self._mapped_for = None

    def take_notes(self) -> tuple[str, ...]:
        """Return sentences on what failed since the last call, each failure once in a session."""
        return self._notes.take()

    def close(self) -> None:
        """Let go of the library, after which there are no devices. May be called twice."""
        with self._lock:
            was_open = self._state == "open"
            self._state = "closed"
            self._gpus = self._instances = ()
            self._mapped = {}
            if was_open:
                # Somebody else may have shut the library down already.
                with contextlib.suppress(self._library.NVMLError):
                    self._library.nvmlShutdown()

    # -- The library --------------------------------------------------------------------------

    def _open(self) -> None:
        self._state = "failed"
        if self._library is None:
            self._library = _import_library()
        try:
            self._library.nvmlInit()
            self._state = "open"
            n_gpus = int(self._library.nvmlDeviceGetCount())
        except self._library.NVMLError as error:
            if error.value != _LIBRARY_NOT_FOUND:
                self._notes.add(f"Whole-device figures are missing: {_explain(error)}.")
            elif self._driver.exists():
                self._notes.add(_NO_LIBRARY)
            return
        self._gpus = tuple(self._list_gpus(n_gpus))
        self._instances = tuple(self._list_instances())

    def _list_gpus(self, n_gpus: int) -> Iterator[Gpu | None]:
        nvml = self._library
        for index in range(n_gpus):
            try:
                handle = nvml.nvmlDeviceGetHandleByIndex(index)
            except nvml.NVMLError as error:
                # CUDA does not count GPUs that this user may not open either.
                if error.value != _NO_PERMISSION:
                    self._notes.add(f"The machine's GPU {index} can't be read: {_explain(error)}.")
                    yield None
                continue
            yield self._describe(handle, f"The machine's GPU {index}")

    def _list_instances(self) -> Iterator[Gpu]:
        """Yield the MIG instances of all GPUs; to CUDA an instance is a device of its own."""
        nvml = self._library
        for index, gpu in enumerate(self._gpus):
            if gpu is None:
                continue
            try:
                if not nvml.nvmlDeviceGetMigMode(gpu.handle)[0]:
                    continue
                n_places = int(nvml.nvmlDeviceGetMaxMigDeviceCount(gpu.handle))
            except nvml.NVMLError:
                continue  # a GPU without MIG: most are
            for place in range(n_places):
                try:
                    handle = nvml.nvmlDeviceGetMigDeviceHandleByIndex(gpu.handle, place)
                except nvml.NVMLError:
                    continue  # an empty place
                instance = self._describe(handle, f"An instance of the machine's GPU {index}")
                instance.parent = gpu
                yield instance

    # -- PyTorch's numbers --------------------------------------------------------------------

    def _map(self) -> dict[str, Gpu]:
        """Return the devices under PyTorch's names, as far as these are certain."""
        if self._state == "new":
            self._open()
        if self._state != "open":
            return {}
        visible = self._environ.get("CUDA_VISIBLE_DEVICES")
        by_bus = self._environ.get("CUDA_DEVICE_ORDER") == "PCI_BUS_ID"
        if self._mapped_for != (visible, by_bus):
            self._mapped_for = (visible, by_bus)
            numbered = number_gpus(self._gpus, self._instances, visible, by_bus=by_bus)
            if numbered is None and not self._uuids:
                self._notes.add(
                    "This machine has GPUs of different models, and CUDA numbers the fastest first:"
                    " their whole-device figures appear once CUDA is in use (CUDA_DEVICE_ORDER="
                    "PCI_BUS_ID makes the numbers certain from the start)."
                )
            known = [gpu for gpu in (*self._gpus, *self._instances) if gpu is not None]
            self._mapped = correct_numbers(numbered or {}, known, self._uuids)
        return self._mapped

    # -- Questions about one GPU or instance ------------------------------------------------------

    def _describe(self, handle: Any, where: str) -> Gpu:
        """Return a GPU or instance with its name, UUID and total, as far as NVML tells them."""
        nvml = self._library
        gpu = Gpu(handle, "", None, None)
        gpu.name = self._ask(gpu, where, "name", nvml.nvmlDeviceGetName) or "NVIDIA GPU"
        gpu.uuid = self._ask(gpu, where, "UUID", nvml.nvmlDeviceGetUUID)
        memory = self._ask(gpu, where, "total memory", self._read_memory)
        gpu.total_bytes = None if memory is None else int(memory.total)
        # Only later answers count as failures.
        gpu.failures.clear()
        return gpu

    def _read_memory(self, handle: Any) -> Any:
        # The second version tells the driver's own part apart.
        nvml = self._library
        return nvml.nvmlDeviceGetMemoryInfo(handle, version=nvml.nvmlMemory_v2)

    def _read_processes(self, gpu: Gpu, where: str) -> ProcessesByBytes | None:
        """Return the processes on a GPU, each once, by pid; ``None`` where they are not told."""
        nvml = self._library
        question = nvml.nvmlDeviceGetComputeRunningProcesses_v3
        computing = self._ask(gpu, where, "processes", question)
        if computing is None:
            return None
        listed = list(computing)
        for name in _OTHER_LISTS:
            # Not every device has them. Memory of processes that are not told is no process's.
            with contextlib.suppress(nvml.NVMLError):
                listed += getattr(nvml, name)(gpu.handle)
        found: dict[int, int | None] = {}
        for process in listed:
            # A process that computes and draws is in two lists, each time with all its bytes.
            each = (process.usedGpuMemory, found.get(process.pid))
            told = [int(n_bytes) for n_bytes in each if n_bytes not in (None, _NO_BYTES)]
            found[int(process.pid)] = max(told, default=None)
        return tuple(sorted(found.items()))

    def _ask(self, gpu: Gpu, where: str, what: str, question: Callable[[Any], _T]) -> _T | None:
        """Return the answer to a question; ``None`` where there is none, with a note why."""
        error_type = self._library.NVMLError
        try:
            try:
                answer = question(gpu.handle)
            except error_type as error:
                if error.value != _UNINITIALIZED or gpu.uuid is None:
                    raise
                # The user's own code has called nvmlShutdown once too often: open it again.
                self._library.nvmlInit()
                gpu.handle = self._library.nvmlDeviceGetHandleByUUID(gpu.uuid)
                answer = question(gpu.handle)
        except error_type as error:
            gpu.failures[what] = f"{where}: {what} can't be read: {_explain(error)}."
            self._notes.add(gpu.failures[what])
            return None
        gpu.failures.pop(what, None)
        return answer


def _import_library() -> Any:
    with warnings.catch_warnings():
        # The abandoned package "pynvml" beside nvidia-ml-py warns of itself; it does no harm.
        warnings.simplefilter("ignore", FutureWarning)
        import pynvml  # noqa: PLC0415 - not before it is needed
    return pynvml


def _explain(error: Any) -> str:
    return _CAUSES.get(error.value, f"NVML says {str(error)!r}")
