"""Read whole devices from NVIDIA's driver: names, totals, the memory of all processes.

NVML numbers GPUs by their place on the bus, whatever ``CUDA_VISIBLE_DEVICES`` says, and PyTorch
numbers what CUDA shows in CUDA's order. The two are matched by UUID. Where the order can't be known
without starting CUDA, nothing is guessed (see ``NvmlMonitor.match``).

A GPU that shares the host's memory has no figure of its own for NVML.

A call into a driver's library can hang for ever, as when a GPU has fallen off its bus, and nothing
in Python can end it. So ``TimeLimitedMonitor`` asks on a thread of its own, and waits a moment for
each answer, where a Ctrl-C is heard. While a question is unanswered no other is asked.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import queue
import threading
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

from gpumemwidget.backends.protocol import DeviceMonitor, ProcessesByBytes
from gpumemwidget.errors import Notes
from gpumemwidget.model.devices import (
    MEMORY_IN_USE,
    BytesByDevice,
    DeviceInfo,
    DeviceUse,
    HardwareNote,
    HardwareNoteKind,
)

_T = TypeVar("_T")
_Answers: TypeAlias = "queue.SimpleQueue[tuple[Any, BaseException | None]]"
#: A question, and where its answer or its error is awaited.
_Question: TypeAlias = tuple[Callable[[], Any], _Answers]

#: Seconds to wait for an answer, which takes milliseconds; and for the first one, as NVML's start
#: takes a second or more for each GPU that no other program uses.
_LIMIT_S = 2.0
_FIRST_LIMIT_S = 10.0


@dataclass(slots=True, eq=False)
class _Gpu:
    """One GPU or MIG instance as the driver's library knows it, compared by identity."""

    handle: Any
    name: str = ""
    uuid: str | None = None
    total_bytes: int | None = None
    #: The GPU of an instance.
    parent: _Gpu | None = None
    #: NVML's words for the last question that failed.
    failure: str = ""
    #: True if NVML knows no memory of its own: it shares the host's.
    has_no_memory: bool = False


class _RunningProcess(ctypes.Structure):
    """NVML's record of a process on a GPU (``nvmlProcessInfo_t``)."""

    _fields_ = (
        ("pid", ctypes.c_uint),
        ("used_bytes", ctypes.c_ulonglong),
        ("gpu_instance", ctypes.c_uint),
        ("compute_instance", ctypes.c_uint),
    )


class NvmlMonitor:
    """NVML as a ``DeviceMonitor``.

    Nothing is asked before the first call, and no CUDA context is ever created.

    Args:
        library: replaces the module ``pynvml``.
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
        self._gpus: tuple[_Gpu | None, ...] = ()
        self._instances: tuple[_Gpu, ...] = ()
        self._uuids: dict[str, str] = {}
        self._mapped_for: object = None
        self._mapped: dict[str, _Gpu] = {}
        self._notes: Notes[HardwareNote] = Notes()
        #: Where the library writes the processes of a GPU, made once.
        self._running = (_RunningProcess * 64)()

    def list_infos(self, uuids: Mapping[str, str] | None = None) -> tuple[DeviceInfo, ...]:
        """Return the GPUs that CUDA shows to this process, under PyTorch's names."""
        with self._lock:
            if uuids is not None:
                cuda = ((name, uuid) for name, uuid in uuids.items() if name.startswith("cuda:"))
                self._uuids.update((name, _strip_uuid(uuid)) for name, uuid in cuda)
                self._mapped_for = None
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
            # How busy MIG instances are is unknown.
            nvml = self._library
            rates = self._ask(gpu, device, "utilisation", nvml.nvmlDeviceGetUtilizationRates)
            percent = None if rates is None else int(rates.gpu)
            memory = self._ask(gpu, device, MEMORY_IN_USE, self._read_memory)
            if memory is None:
                unknown = DeviceUse(device, None, None, None, percent, failure=gpu.failure)
                is_shared = gpu.has_no_memory
                return replace(unknown, failure="", is_shared=True) if is_shared else unknown
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
            if gpu is None:
                return None
            listed = self._ask(gpu, device, "processes", self._list_running)
            if listed is None:
                return None
            # Those that draw, and those that compute by NVIDIA's multi-process service.
            for kind in ("Graphics", "MPSCompute"):
                # Not every device has them. Memory of unlisted processes is no process's.
                with contextlib.suppress(self._library.NVMLError):
                    listed += self._list_running(gpu.handle, kind)
        # A process that computes and draws is in two lists, each time with all its bytes.
        found = dict(sorted(listed, key=lambda process: -1 if process[1] is None else process[1]))
        return tuple(sorted(found.items()))

    def read_process(self, device: str, pid: int) -> int | None:
        """Return the bytes of a process that computes on a device, by one call of NVML's."""
        with self._lock:
            gpu = self._map().get(device)
            listed = gpu and self._ask(gpu, device, "processes", self._list_running)
        return dict(listed or ()).get(pid)

    def take_notes(self) -> tuple[HardwareNote, ...]:
        """Return notes on what failed since the last call, each failure once in a session."""
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
            with warnings.catch_warnings():
                # The abandoned package "pynvml" beside nvidia-ml-py warns of itself, harmlessly.
                warnings.simplefilter("ignore", FutureWarning)
                import pynvml  # noqa: PLC0415 - not before it is needed
            self._library = pynvml
        try:
            self._library.nvmlInit()
            self._state = "open"
            n_gpus = int(self._library.nvmlDeviceGetCount())
        except self._library.NVMLError as error:
            if error.value != self._library.NVML_ERROR_LIBRARY_NOT_FOUND or self._driver.exists():
                self._notes.add(HardwareNote(HardwareNoteKind.NO_DRIVER, str(error)))
            return
        self._gpus = tuple(self._list_gpus(n_gpus))
        self._instances = tuple(self._list_instances())

    def _list_gpus(self, n_gpus: int) -> Iterator[_Gpu | None]:
        nvml = self._library
        for index in range(n_gpus):
            try:
                handle = nvml.nvmlDeviceGetHandleByIndex(index)
            except nvml.NVMLError as error:
                # CUDA does not count GPUs that this user may not open either.
                if error.value != nvml.NVML_ERROR_NO_PERMISSION:
                    self._note_unread(f"the machine's GPU {index}", "whole-device figures", error)
                    yield None
                continue
            yield self._describe(handle, f"the machine's GPU {index}")

    def _list_instances(self) -> Iterator[_Gpu]:
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
                yield self._describe(handle, f"an instance of the machine's GPU {index}", gpu)

    # -- PyTorch's numbers --------------------------------------------------------------------

    def _map(self) -> dict[str, _Gpu]:
        """Return the devices under PyTorch's names, as far as these are certain."""
        if self._state == "new":
            self._open()
        if self._state != "open":
            return {}
        visible = self._environ.get("CUDA_VISIBLE_DEVICES")
        by_bus = self._environ.get("CUDA_DEVICE_ORDER") == "PCI_BUS_ID"
        if self._mapped_for != (visible, by_bus):
            self._mapped_for = (visible, by_bus)
            numbered = _number_gpus(self._gpus, self._instances, visible, by_bus=by_bus)
            if numbered is None and not self._uuids:
                self._notes.add(HardwareNote(HardwareNoteKind.GPUS_UNNUMBERED))
            known = [gpu for gpu in (*self._gpus, *self._instances) if gpu is not None]
            self._mapped = _correct_numbers(numbered or {}, known, self._uuids)
        return self._mapped

    # -- Questions about one GPU or instance ------------------------------------------------------

    def _describe(self, handle: Any, where: str, parent: _Gpu | None = None) -> _Gpu:
        """Return a GPU or instance with its name, UUID and total, as far as NVML knows them."""
        nvml = self._library
        gpu = _Gpu(handle, parent=parent)
        gpu.name = self._ask(gpu, where, "name", nvml.nvmlDeviceGetName) or "NVIDIA GPU"
        gpu.uuid = self._ask(gpu, where, "UUID", nvml.nvmlDeviceGetUUID)
        memory = self._ask(gpu, where, "total memory", self._read_memory)
        gpu.total_bytes = None if memory is None else int(memory.total)
        return gpu

    def _read_memory(self, handle: Any) -> Any:
        # The second version has the driver's own part apart.
        nvml = self._library
        return nvml.nvmlDeviceGetMemoryInfo(handle, version=nvml.nvmlMemory_v2)

    def _list_running(self, handle: Any, kind: str = "Compute") -> list[tuple[int, int | None]]:
        """Return the processes of one kind on a GPU, by one call of NVML's; pynvml makes two."""
        nvml = self._library
        name = f"nvmlDeviceGet{kind}RunningProcesses_v3"
        ask = nvml._nvmlGetFunctionPointer(name)  # noqa: SLF001 - the library's own function
        for _ in range(2):
            # Half of the room is spare: some drivers of the series 535 write longer records.
            count = ctypes.c_uint(len(self._running) // 2)
            code = ask(handle, ctypes.byref(count), self._running)
            if code != nvml.NVML_ERROR_INSUFFICIENT_SIZE:
                break
            self._running = (_RunningProcess * (4 * count.value + 64))()
        if code:
            raise nvml.NVMLError(code)
        found = [(process.pid, process.used_bytes) for process in self._running[: count.value]]
        # NVML's value for unknown bytes is -1, unsigned.
        return [(pid, None if n_bytes == (1 << 64) - 1 else n_bytes) for pid, n_bytes in found]

    def _ask(self, gpu: _Gpu, where: str, what: str, question: Callable[[Any], _T]) -> _T | None:
        """Return the answer to a question; ``None`` where there is none, with a note why."""
        error_type = self._library.NVMLError
        try:
            try:
                answer = question(gpu.handle)
            except error_type as error:
                if error.value != self._library.NVML_ERROR_UNINITIALIZED or gpu.uuid is None:
                    raise
                # The user's own code has called nvmlShutdown once too often: open it again.
                self._library.nvmlInit()
                gpu.handle = self._library.nvmlDeviceGetHandleByUUID(gpu.uuid)
                answer = question(gpu.handle)
        except error_type as error:
            gpu.failure = str(error)
            is_unsupported = error.value == self._library.NVML_ERROR_NOT_SUPPORTED
            if question == self._read_memory and is_unsupported and gpu.parent is None:
                gpu.has_no_memory = True
            else:
                self._note_unread(where, what, error)
            return None
        return answer

    def _note_unread(self, where: str, what: str, error: Any) -> None:
        self._notes.add(HardwareNote(HardwareNoteKind.UNREAD, str(error), where, what))


# -- What CUDA shows, and in which order -----------------------------------------------------------


def _number_gpus(
    gpus: Sequence[_Gpu | None], instances: Sequence[_Gpu], visible: str | None, *, by_bus: bool
) -> dict[str, _Gpu] | None:
    """Return the GPUs under PyTorch's names, from those in the order of the bus.

    ``None`` where the order can't be known: by default CUDA puts the fastest first, so GPUs of
    different models may be in any order.
    """
    entries = None if visible is None else [entry.strip() for entry in visible.split(",")]
    is_in_order = by_bus or len({gpu.name for gpu in gpus if gpu is not None}) < 2
    if not is_in_order and (entries is None or any(map(str.isdecimal, entries))):
        return None
    chosen = gpus if entries is None else _list_visible(entries, gpus, instances)
    # If there are MIG instances, CUDA shows one of them and no other GPU:
    # https://docs.nvidia.com/datacenter/tesla/mig-user-guide/ (CUDA device enumeration)
    shown = [instance for instance in instances if instance in chosen or instance.parent in chosen]
    if shown:
        chosen = [next((gpu for gpu in chosen if gpu in shown), shown[0])]
    return {f"cuda:{index}": gpu for index, gpu in enumerate(chosen) if gpu is not None}


def _list_visible(
    entries: Sequence[str], gpus: Sequence[_Gpu | None], instances: Sequence[_Gpu]
) -> list[_Gpu | None]:
    """Return the GPUs that the entries of ``CUDA_VISIBLE_DEVICES`` name, up to an invalid entry.

    There are none if a GPU is named twice. An entry is a number, or the beginning of a UUID:
    https://docs.nvidia.com/cuda/cuda-c-programming-guide/#cuda-environment-variables
    """
    chosen: list[_Gpu | None] = []
    for entry in entries:
        known = instances if entry.startswith("MIG-") else gpus
        found: list[_Gpu | None]
        found = [gpu for gpu in known if gpu and entry and (gpu.uuid or "").startswith(entry)]
        if entry.isdecimal():
            found = list(gpus[int(entry) : int(entry) + 1])
        if len(found) != 1:
            break
        if found[0] is not None and found[0] in chosen:
            return []
        chosen += found
    return chosen


def _correct_numbers(
    numbered: dict[str, _Gpu], known: Sequence[_Gpu], in_use: Mapping[str, str]
) -> dict[str, _Gpu]:
    """Return the GPUs that were numbered, if CUDA has the same UUIDs; else those of CUDA alone."""
    by_uuid = {_strip_uuid(gpu.uuid): gpu for gpu in known if gpu.uuid is not None}
    if all(numbered.get(device) is by_uuid.get(uuid) for device, uuid in in_use.items()):
        return numbered
    in_order = sorted(in_use, key=lambda device: int(device.rpartition(":")[2]))
    return {device: by_uuid[in_use[device]] for device in in_order if in_use[device] in by_uuid}


def _strip_uuid(uuid: str) -> str:
    """Return a UUID without ``GPU-`` or ``MIG-``, which torch leaves out, in small letters."""
    return uuid.lower().removeprefix("gpu-").removeprefix("mig-")


# -- With a time limit -----------------------------------------------------------------------------


class TimeLimitedMonitor:
    """Asks a ``DeviceMonitor``, and goes on without an answer that takes too long."""

    def __init__(self, monitor: DeviceMonitor) -> None:
        self._monitor = monitor
        self._worker = _Worker()
        #: The thread whose question took too long.
        self._late: threading.Thread | None = None
        self._limit_s = _FIRST_LIMIT_S
        #: The devices that were listed last, and the UUIDs by which they were numbered last.
        self._infos: tuple[DeviceInfo, ...] = ()
        self._uuids: Mapping[str, str] = {}

    def list_infos(self, uuids: Mapping[str, str] | None = None) -> tuple[DeviceInfo, ...]:
        """Return all devices that this process can see; those known before, if none answers."""
        self._infos = self._ask(lambda: self._monitor.list_infos(uuids), self._infos)
        return self._infos

    def read_use(self, device: str) -> DeviceUse | None:
        """Return the use of a whole device, or that the driver does not answer."""
        is_known = any(info.device == device for info in self._infos)
        silent = DeviceUse(device, None, None, None, failure="the driver does not answer")
        return self._ask(lambda: self._monitor.read_use(device), silent if is_known else None)

    def list_processes(self, device: str) -> ProcessesByBytes | None:
        """Return the processes on a device; ``None`` where the driver does not list them."""
        return self._ask(lambda: self._monitor.list_processes(device), None)

    def list_own(
        self, pid: int, devices: Collection[str] | None, uuids: Mapping[str, str], *, hurries: bool
    ) -> BytesByDevice | None:
        """Return the bytes of a process on the devices where the driver lists it, at one go.

        ``None`` without an answer in time.

        Args:
            pid: of the process.
            devices: ask of these alone; ``None`` for all.
            uuids: of the devices that are in use.
            hurries: do not wait for a slow driver: each cell asks twice, and a Ctrl-C waits.
        """

        def ask() -> BytesByDevice:
            infos = self._infos
            if not infos or uuids != self._uuids:
                infos = self._infos = self._monitor.list_infos(uuids)
                self._uuids = uuids
            names = [info.device for info in infos] if devices is None else devices
            listed = ((name, self._monitor.read_process(name, pid)) for name in names)
            return tuple((name, n_bytes) for name, n_bytes in listed if n_bytes is not None)

        return self._ask(ask, None, limit_s=0.2 if hurries else None)

    def take_notes(self) -> tuple[HardwareNote, ...]:
        """Return notes on what failed since the last call, each failure once."""
        return self._monitor.take_notes()

    def close(self) -> None:
        """Let go of the driver's library, unless it hangs."""
        self._ask(self._monitor.close, None)
        self._infos = ()
        thread = self._worker.thread
        self._worker.end()
        if thread is not None:
            thread.join(_LIMIT_S)

    def _ask(self, question: Callable[[], _T], unknown: _T, *, limit_s: float | None = None) -> _T:
        """Return the answer to a question; ``unknown`` if there is none within the limit.

        The thread ends after it, unless a limit says that another question may follow at once.
        """
        if self._late is not None and self._late.is_alive():
            return unknown
        self._late = None
        if self._worker.pid != os.getpid():
            self._worker = _Worker()  # A forked child has the thread's object alone.
        answers: _Answers = queue.SimpleQueue()
        worker = self._worker
        try:
            thread = worker.put((question, answers))
            if limit_s is None:
                worker.end()
        except RuntimeError:
            return question()  # A process that ends starts no thread any more.
        try:
            found, exc = answers.get(timeout=self._limit_s if limit_s is None else limit_s)
        except queue.Empty:
            self._late, self._worker = thread, _Worker()
            worker.end()
            return unknown
        finally:
            if limit_s is None:
                self._limit_s = _LIMIT_S
        if exc is not None:
            raise exc
        answer: _T = found
        return answer


class _Worker:
    """A thread that answers questions, and ends where there are none for a moment."""

    def __init__(self) -> None:
        self.pid = os.getpid()
        self._questions: queue.SimpleQueue[_Question | None] = queue.SimpleQueue()
        #: Held while a thread is started, or finds that it is no longer needed.
        self._lock = threading.Lock()
        self.thread: threading.Thread | None = None

    def put(self, question: _Question) -> threading.Thread:
        """Ask on the thread that runs or on a new one, which is returned.

        Raises:
            RuntimeError: no thread can be started.
        """
        with self._lock:
            thread = self.thread
            if thread is None:
                thread = threading.Thread(target=self._run, name="gpumemwidget-driver", daemon=True)
                thread.start()
                self.thread = thread
            self._questions.put(question)
            return thread

    def end(self) -> None:
        """Let the thread end after its question."""
        self._questions.put(None)

    def _run(self) -> None:
        while True:
            try:
                # A new thread starts in some 60 µs.
                asked = self._questions.get(timeout=0.5)
            except queue.Empty:
                asked = None
            if asked is None:
                with self._lock:
                    if not self._questions.empty():
                        continue
                    self.thread = None
                    return
            question, answers = asked
            try:
                answers.put((question(), None))
            except BaseException as exc:  # noqa: BLE001 - raised where the question was asked
                answers.put((None, exc))
            # Nothing of the asker's is held until the next question comes.
            del asked, question, answers
