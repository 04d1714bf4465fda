"""Whole devices as NVIDIA's driver tells them: names, totals, what all processes use.

NVML numbers GPUs by their place on the bus, whatever ``CUDA_VISIBLE_DEVICES`` says, and PyTorch
numbers what CUDA shows in CUDA's order. The two are matched by UUID. Where the order can't be known
without starting CUDA, nothing is guessed (see ``NvmlMonitor.match``).
"""

from __future__ import annotations

import os
import threading
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from gpumemwidget.backends.base import ProcessSource
from gpumemwidget.backends.nvmlgpu import LIBRARY_NOT_FOUND, NO_PERMISSION, Questions, explain
from gpumemwidget.backends.visible import Gpu, correct_numbers, number_gpus, strip_uuid
from gpumemwidget.records import DeviceInfo, DeviceUse

__all__ = ["NvmlMonitor"]

#: How busy a device is: instances do not tell, and nothing of its memory is missing then.
_BUSY = "utilisation"
_NO_LIBRARY = (
    "Whole-device figures are missing: the NVIDIA driver is loaded, but {what} is not found{hint}."
)


class NvmlMonitor:
    """NVML as a ``DeviceMonitor``.

    On a machine without NVIDIA's driver it knows no device and says nothing. Nothing is asked
    before the first call, and no CUDA context is ever created.

    Args:
        library: stands in for the module ``pynvml``.
        environ: where ``CUDA_VISIBLE_DEVICES`` and ``CUDA_DEVICE_ORDER`` are looked up.
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
        #: In NVML's order; ``None`` holds the place of one that can't be had.
        self._gpus: tuple[Gpu | None, ...] = ()
        self._instances: tuple[Gpu, ...] = ()
        self._uuids: dict[str, str] = {}
        self._mapped_for: object = None
        self._mapped: dict[str, Gpu] = {}
        self._notes: list[str] = []
        self._noted: set[str] = set()

    def list_infos(self) -> tuple[DeviceInfo, ...]:
        """The GPUs that CUDA shows to this process, under PyTorch's names."""
        with self._lock:
            return tuple(
                DeviceInfo(device=device, name=gpu.name, total_bytes=gpu.total_bytes, uuid=gpu.uuid)
                for device, gpu in self._map().items()
            )

    def read_use(self, device: str) -> DeviceUse | None:
        """The whole device now: two calls of the library, about 9 µs.

        What is used is what ``nvidia-smi`` shows: without what the driver has reserved, where it
        tells that apart.
        """
        with self._lock:
            gpu = self._map().get(device)
            if gpu is None:
                return None
            nvml, ask = self._library, self._questions
            memory = ask.ask(gpu, device, "memory in use", ask.read_memory)
            rates = ask.ask(gpu, device, _BUSY, nvml.nvmlDeviceGetUtilizationRates)
            if memory is None and rates is None:
                return None
            driver = getattr(memory, "reserved", None)
            return DeviceUse(
                device=device,
                used_bytes=None if memory is None else int(memory.used),
                free_bytes=None if memory is None else int(memory.free),
                total_bytes=gpu.total_bytes if memory is None else int(memory.total),
                utilization_percent=None if rates is None else int(rates.gpu),
                driver_bytes=None if driver is None else int(driver),
            )

    def read_own_use(self, device: str) -> int | None:
        """Bytes that this process takes on a device, its CUDA context included: about 60 µs.

        ``None`` where its number is not among those that the driver lists, as in a container, or
        the driver gives no bytes (Windows).
        """
        return dict(self.list_processes(device) or ()).get(os.getpid())

    def list_processes(self, device: str) -> tuple[tuple[int, int | None], ...] | None:
        """The processes that compute or draw on a device, each once: about 60 µs."""
        with self._lock:
            gpu = self._map().get(device)
            return None if gpu is None else self._questions.list_processes(gpu, device)

    def list_failures(self, device: str) -> tuple[str, ...]:
        """What of its memory could not be read when it was last asked for, a sentence each."""
        with self._lock:
            gpu = self._map().get(device)
            if gpu is None:
                return ()
            return tuple(why for what, why in gpu.failures.items() if what != _BUSY)

    @property
    def processes(self) -> ProcessSource | None:
        """``None``: the numbers are the operating system's, or a container's outside of us."""
        return None

    def match(self, uuids: Mapping[str, str]) -> None:
        """Set the numbering right by what CUDA itself says of the devices that are in use.

        Args:
            uuids: PyTorch's device names with their UUIDs, with or without ``GPU-``, as in
                ``torch.cuda.get_device_properties(0).uuid``.
        """
        with self._lock:
            self._uuids.update((device, strip_uuid(uuid)) for device, uuid in uuids.items())
            self._mapped_for = None

    def take_notes(self) -> tuple[str, ...]:
        """Sentences on what failed since the last call, each failure once in a session."""
        with self._lock:
            notes = tuple(self._notes)
            self._notes.clear()
            return notes

    def close(self) -> None:
        """Let go of the library; after that there are no devices. Twice is fine."""
        with self._lock:
            was_open = self._state == "open"
            self._state = "closed"
            self._gpus = self._instances = ()
            self._mapped = {}
            if was_open:
                try:
                    self._library.nvmlShutdown()
                except self._library.NVMLError:
                    # Somebody shut it down before us: it is as we want it.
                    return

    # -- The library --------------------------------------------------------------------------

    def _open(self) -> None:
        self._state = "failed"
        if self._library is None:
            self._library = _import_library()
        if self._library is None:
            if self._driver.exists():
                hint = ": pip install nvidia-ml-py"
                self._note(_NO_LIBRARY.format(what="the Python package nvidia-ml-py", hint=hint))
            return
        try:
            self._library.nvmlInit()
        except self._library.NVMLError as error:
            if error.value != LIBRARY_NOT_FOUND:
                self._note(f"Whole-device figures are missing: {explain(error)}.")
            elif self._driver.exists():
                hint = " (a container needs the driver capability 'utility')"
                self._note(_NO_LIBRARY.format(what="its library libnvidia-ml", hint=hint))
            return
        self._state = "open"
        self._questions = Questions(self._library, self._note)
        self._gpus = tuple(self._list_gpus())
        self._instances = tuple(self._list_instances())

    def _list_gpus(self) -> Iterator[Gpu | None]:
        nvml = self._library
        try:
            n_gpus = int(nvml.nvmlDeviceGetCount())
        except nvml.NVMLError as error:
            self._note(f"The machine's GPUs can't be counted: {explain(error)}.")
            return
        for index in range(n_gpus):
            try:
                handle = nvml.nvmlDeviceGetHandleByIndex(index)
            except nvml.NVMLError as error:
                # What this user may not open, CUDA does not count either.
                if error.value != NO_PERMISSION:
                    self._note(f"The machine's GPU {index} can't be read: {explain(error)}.")
                    yield None
                continue
            yield self._questions.describe(handle, f"The machine's GPU {index}")

    def _list_instances(self) -> Iterator[Gpu]:
        """The MIG instances of all GPUs, each a device of its own to CUDA."""
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
                instance = self._questions.describe(
                    handle, f"An instance of the machine's GPU {index}"
                )
                instance.parent = gpu
                instance.instance_id = self._questions.find_instance_id(handle)
                yield instance

    def _note(self, sentence: str) -> None:
        if sentence not in self._noted:
            self._noted.add(sentence)
            self._notes.append(sentence)

    # -- PyTorch's numbers --------------------------------------------------------------------

    def _map(self) -> dict[str, Gpu]:
        """The devices under PyTorch's names, as far as they are certain."""
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
                self._note(
                    "This machine has GPUs of different models, and CUDA numbers the fastest first:"
                    " their whole-device figures appear once CUDA is in use (CUDA_DEVICE_ORDER="
                    "PCI_BUS_ID makes the numbers certain from the start)."
                )
            known = [gpu for gpu in (*self._gpus, *self._instances) if gpu is not None]
            self._mapped = correct_numbers(numbered or {}, known, self._uuids)
        return self._mapped


def _import_library() -> Any:
    try:
        with warnings.catch_warnings():
            # The abandoned package "pynvml" beside nvidia-ml-py warns of itself; it does no harm.
            warnings.simplefilter("ignore", FutureWarning)
            import pynvml  # noqa: PLC0415 - not before it is needed
    except ImportError:
        return None
    return pynvml
