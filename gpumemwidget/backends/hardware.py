"""All of the machine's memory behind one object: what the rest of the package asks.

It puts the backends side by side (GPUs first, the host last), lets those of torch join when the
user imports it, and adds what the driver knows of whole devices.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from types import ModuleType

from gpumemwidget.backends.accelerator import AcceleratorBackend
from gpumemwidget.backends.arrival import TorchArrival, find_torch
from gpumemwidget.backends.base import DeviceMonitor, MemoryBackend, ProcessSource
from gpumemwidget.backends.cuda import CudaBackend
from gpumemwidget.backends.cudalimits import Wish
from gpumemwidget.backends.host import HostBackend
from gpumemwidget.backends.nvml import NvmlMonitor
from gpumemwidget.backends.whole import WholeDevices, by_kind_and_index
from gpumemwidget.devices import ChildProcess, DeviceState, Limit, PinnedUse
from gpumemwidget.errors import BackendError
from gpumemwidget.records import DeviceInfo, DeviceReport, Reading, Segment
from gpumemwidget.traces import AllocatorTrace

__all__ = ["Hardware", "detect_hardware"]


class Hardware:
    """The memory of this process on every device, and of the devices themselves.

    Args:
        backends: sources of counters, in the order in which their devices are shown.
        monitor: the source for whole devices; ``None`` where there is none.
        processes: the source for processes; the monitor's, or the operating system, if not given.
    """

    def __init__(
        self,
        backends: Sequence[MemoryBackend],
        monitor: DeviceMonitor | None = None,
        *,
        processes: ProcessSource | None = None,
    ) -> None:
        self._backends = tuple(backends)
        self._whole = WholeDevices(self, monitor, processes)
        self._arrival: TorchArrival | None = None
        self._lock = threading.Lock()
        self._closed = False
        self._notes: list[str] = []
        #: Of the running trace.
        self._n_events: int | None = None
        self._has_sites = False
        #: Limits that wait for torch.
        self._limits: dict[str, Wish] = {}
        #: Why there is no CUDA backend, where torch has come without.
        self._no_cuda = ""

    def list_devices(self) -> tuple[DeviceInfo, ...]:
        """The devices that have counters now: the touched GPUs, and the host last."""
        return tuple(info for backend in self._backends for info in backend.list_devices())

    def read(self) -> tuple[Reading, ...]:
        """One reading for each of these devices, with the peaks of the running span."""
        return tuple(reading for backend in self._backends for reading in backend.read())

    def start_span(self) -> tuple[Reading, ...]:
        """Begin a span of high-water marks on all of them; what stands at its start."""
        readings: list[Reading] = []  # A loop takes half the time of a generator, in every cell.
        for backend in self._backends:
            readings += backend.start_span()
        return tuple(readings)

    def end_span(self) -> tuple[Reading, ...]:
        """What stands at the span's end, with its peaks."""
        readings: list[Reading] = []
        for backend in self._backends:
            readings += backend.end_span()
        return tuple(readings)

    def read_as_user(self) -> tuple[Reading, ...]:
        """Readings whose peaks are those that the user's own calls tell."""
        return tuple(reading for backend in self._backends for reading in backend.read_as_user())

    def read_segments(self) -> tuple[Segment, ...]:
        """The allocator's segments and blocks, of the devices whose allocator tells."""
        return tuple(segment for backend in self._backends for segment in backend.read_segments())

    @property
    def is_tracing(self) -> bool:
        """Whether a trace was started and not ended."""
        return self._n_events is not None

    def start_trace(self, *, n_events: int = 1_000_000) -> tuple[str, ...]:
        """Begin to note each allocation; where a device can't be traced, a sentence why.

        PyTorch need not be there yet: it is traced from when the user imports it. A million events
        take some 300 MB while the trace runs.

        Args:
            n_events: how many events to keep, of all devices together: the newest.
        """
        with self._lock:
            self._n_events = n_events
            backends = self._backends
        try:
            return tuple(note for each in backends for note in each.start_trace(n_events=n_events))
        except BaseException:  # A Ctrl-C in one of them: none is to run on.
            self.end_trace()
            raise

    def end_trace(self, *, snapshot_to: Path | None = None) -> tuple[AllocatorTrace, ...]:
        """What was noted since, on each device that has an allocator of PyTorch's and was touched.

        Args:
            snapshot_to: a file for PyTorch's own memory viewer; one of that name is replaced.
        """
        with self._lock:
            self._n_events = None
            backends = self._backends
        return tuple(
            trace for each in backends for trace in each.end_trace(snapshot_to=snapshot_to)
        )

    def set_sites(self, *, is_on: bool) -> str:
        """Keep the line of each live block from now on, or no longer; what was done, in one line.

        PyTorch need not be there yet.
        """
        with self._lock:
            self._has_sites = is_on
            backends = self._backends
        done = [each.set_sites(is_on=is_on) for each in backends]
        if any(done):
            return "; ".join(each for each in done if each)
        if self._arrival is not None and is_on:
            return "the line of each block is kept from when PyTorch is imported"
        return "there is no memory of a GPU whose lines could be kept"

    def empty_cache(self) -> None:
        """Give back what is cached and unused, everywhere.

        Raises:
            BackendError: a device refused.
        """
        for backend in self._backends:
            backend.empty_cache()

    def release_workspaces(self) -> str:
        """Free what cuBLAS keeps to work in; what was done, in a few words.

        Raises:
            BackendError: a device refused, or a CUDA graph is alive that may use it.
        """
        done = [backend.release_workspaces() for backend in self._backends]
        return "; ".join(each for each in done if each) or "there are no cuBLAS workspaces here"

    def read_devices(self) -> tuple[DeviceReport, ...]:
        """Every device that can be seen, touched or not: its counters and its whole use.

        The peaks are those that the user's own calls tell.
        """
        readings = {reading.device: reading for reading in self.read_as_user()}
        return tuple(
            DeviceReport(
                info=info,
                reading=readings.get(device),
                use=self._whole.read_use(info),
                note=self._whole.find_failure(device),
            )
            for device, info in self._whole.list_infos().items()
        )

    def take_device_states(self, *, with_segments: bool = True) -> tuple[DeviceState, ...]:
        """All that can be told of every device at one moment: the GPUs, touched or not, the host.

        Some 0.2 ms a GPU, and what ``read_segments`` takes. The peaks are those that the user's own
        calls tell.

        Args:
            with_segments: read the blocks too.
        """
        return self._whole.take_states(with_segments=with_segments)

    def list_children(self) -> tuple[ChildProcess, ...]:
        """The processes below this one, with what they take of each device and of the host.

        Cheap enough for once a second: a millisecond on a machine of some hundred processes.
        """
        return self._whole.list_children()

    # -- What may be taken -------------------------------------------------------------------------

    def read_pinned(self) -> PinnedUse | None:
        """Pinned host memory, of the first backend that tells; ``None`` where none does."""
        found = (backend.read_pinned() for backend in self._backends)
        return next((pinned for pinned in found if pinned is not None), None)

    def set_limit(
        self, device: str, limit_bytes: int | None, *, share: float | None = None
    ) -> None:
        """Let this process reserve no more than this on a device; ``None``: all of it.

        It waits for a device that is not in use yet, and for torch, without touching either.

        Args:
            device: which one.
            limit_bytes: may be less than what is reserved, which then stays.
            share: of the whole, in its place; above 0, up to 1.

        Raises:
            BackendError: there is no such device, it has no limits, or it refuses.
        """
        with self._lock:
            backend = self._find_backend(device)
            is_coming = self._arrival is not None and self._arrival.is_waiting
            if backend is None and is_coming and device.startswith("cuda:"):
                self._limits.pop(device, None)
                if limit_bytes is not None or share is not None:
                    self._limits[device] = Wish(limit_bytes, share)
                return
        if backend is None:
            reason = self._no_cuda or f"there is no {device} here: name a device of %memstat's"
            raise BackendError(reason)
        backend.set_limit(device, limit_bytes, share=share)

    @property
    def why_no_cuda(self) -> str:
        """Why there are no GPUs though torch is there, in one line; ``""``: that is not known."""
        return self._no_cuda

    def read_limits(self) -> tuple[Limit, ...]:
        """The limits of the devices in use, whoever set them, and those that wait."""
        limits = [limit for backend in self._backends for limit in backend.read_limits()]
        with self._lock:
            waiting = dict(self._limits)
        limits += [
            Limit(device, wish.limit_bytes, None, None, is_waiting=True, share=wish.share)
            for device, wish in waiting.items()
        ]
        return tuple(sorted(limits, key=lambda limit: by_kind_and_index(limit.device)))

    def reset_peaks(self, devices: Collection[str] | None = None) -> tuple[str, ...]:
        """Set the peaks back as the user's own calls would; on which devices that was done.

        Args:
            devices: only on these.
        """
        done = (backend.reset_peaks(devices) for backend in self._backends)
        return tuple(device for each in done for device in each)

    def _find_backend(self, device: str) -> MemoryBackend | None:
        """Whose a device is, by what it has in use or else by its kind."""
        kind = device.partition(":")[0]
        for backend in self._backends:
            if any(info.device == device for info in backend.list_devices()):
                return backend
        return next((each for each in self._backends if each.kind == kind), None)

    # -- More of the host and the driver -----------------------------------------------------------

    def read_memory(self, device: str) -> tuple[int, int] | None:
        """What is free of a GPU in use, and its total, as PyTorch has them from the driver."""
        for backend in self._backends:
            if isinstance(backend, CudaBackend) and device.startswith(f"{backend.kind}:"):
                return backend.read_memory(device)
        return None

    def available_host_bytes(self) -> int | None:
        """Host memory that can still be taken; ``None`` where that is unknown."""
        for backend in self._backends:
            if isinstance(backend, HostBackend):
                return backend.available_bytes()
        return None

    def find_host_counter(self) -> Callable[[], int] | None:
        """A call that gives the host's bytes in use, for who asks often; ``None``: unknown."""
        for backend in self._backends:
            if isinstance(backend, HostBackend):
                return backend.find_counter()
        return None

    def read_own_use(self, device: str) -> int | None:
        """Bytes that this process takes on a device, its CUDA context included.

        ``None`` where the driver does not tell: there is none, or it knows this process by another
        number, as in a container.
        """
        return self._whole.read_own_use(device)

    def list_lost_peaks(self) -> tuple[tuple[str, int], ...]:
        """Devices and the peaks, in bytes, that ``close`` takes from the user's view."""
        return tuple(
            lost
            for backend in self._backends
            if isinstance(backend, CudaBackend | AcceleratorBackend | HostBackend)
            for lost in backend.list_lost_peaks()
        )

    def take_notes(self) -> tuple[str, ...]:
        """What could not be read and why, a plain sentence each, each once."""
        notes = [note for backend in self._backends for note in backend.take_notes()]
        with self._lock:
            notes.extend(self._notes)
            self._notes.clear()
        return (*notes, *self._whole.take_notes())

    def close(self) -> None:
        """Take away whatever was added to the process. May be called twice."""
        with self._lock:
            self._closed = True
        if self._arrival is not None:
            self._arrival.cancel()
        for backend in self._backends:
            backend.close()
        self._whole.close()

    # -- torch joins -------------------------------------------------------------------------------

    def await_torch(self) -> None:
        """Let its backends join: now if torch is imported, else when the user imports it."""
        torch = find_torch()
        if torch is not None:
            self._join(torch)
        else:
            self._arrival = TorchArrival(self._join)
            self._arrival.expect()

    def _join(self, torch: ModuleType) -> None:
        # Who joins later stands first. A build for CUDA may have an extension's devices beside it.
        for make in (AcceleratorBackend, CudaBackend):
            self._add(make, torch)

    def _add(self, make: Callable[[ModuleType], MemoryBackend], torch: ModuleType) -> None:
        try:
            backend = make(torch)
        except BackendError as error:
            # A build without it: that is no failure of ours.
            if make is CudaBackend:
                with self._lock:
                    self._no_cuda = str(error)
                    limits, self._limits = self._limits, {}
                    lost = (f"The limit of {each} is not set: {error}." for each in limits)
                    self._notes.extend(lost)
            return
        except Exception as exc:  # noqa: BLE001 - this runs within the user's `import torch`
            note = f"GPU memory is not recorded: {type(exc).__name__}: {exc}"
            with self._lock:
                # The same may be missing for both.
                self._notes.extend([] if note in self._notes else [note])
            return
        with self._lock:
            is_closed = self._closed
            if not is_closed:
                self._backends = (backend, *self._backends)
                n_events, has_sites = self._n_events, self._has_sites
                limits = {}
                if make is CudaBackend:
                    limits, self._limits = self._limits, {}
        if is_closed:
            backend.close()
            return
        if isinstance(backend, AcceleratorBackend):
            self._whole.add_accelerator(backend)
        self._pass_limits(backend, limits)
        if has_sites:
            backend.set_sites(is_on=True)
        if n_events is not None:
            notes = backend.start_trace(n_events=n_events)
            with self._lock:
                self._notes.extend(notes)

    def _pass_limits(self, backend: MemoryBackend, limits: dict[str, Wish]) -> None:
        """Give a backend that joins the limits that have waited for it."""
        for device, wish in limits.items():
            try:
                backend.set_limit(device, wish.limit_bytes, share=wish.share)
            except BackendError as error:
                with self._lock:
                    self._notes.append(f"The limit of {device} is not set: {error}.")


def detect_hardware() -> Hardware:
    """What this machine has: the host, the driver, and GPUs in use as soon as torch is there."""
    hardware = Hardware([HostBackend()], NvmlMonitor())
    hardware.await_torch()
    return hardware
