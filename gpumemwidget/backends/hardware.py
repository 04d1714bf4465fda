"""All of the machine's memory behind one object: what the rest of the package asks.

``Hardware`` puts the backends side by side (GPUs first, the host last), lets those of torch join
when the user imports it, and adds what the driver and the operating system know of whole devices
and of processes.
"""

from __future__ import annotations

import dataclasses
import os
import threading
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from types import ModuleType

from gpumemwidget.backends.counters import AcceleratorBackend
from gpumemwidget.backends.cuda.backend import CudaBackend
from gpumemwidget.backends.driver.gpu_processes import (
    ProcessTree,
    add_processes,
    find_kernel,
    has_cuda_context,
    has_reserved,
    join_children,
)
from gpumemwidget.backends.driver.nvml import NvmlMonitor, TimeLimitedMonitor
from gpumemwidget.backends.hooks import TorchImportHook
from gpumemwidget.backends.host import HostBackend
from gpumemwidget.backends.libraries import (
    is_silent_one_imported,
    list_known_libraries,
    list_silent_libraries,
)
from gpumemwidget.backends.protocol import (
    DeviceMonitor,
    GpuLibrary,
    MemoryBackend,
    ProcessesByBytes,
    ProcessSource,
)
from gpumemwidget.errors import BackendError, Notes, describe_exception
from gpumemwidget.model.devices import (
    HOST,
    BytesByDevice,
    ChildProcess,
    Chip,
    DeviceInfo,
    DeviceState,
    DeviceUse,
    HardwareNote,
    HardwareNoteKind,
    KernelUse,
    LibraryUse,
    Limit,
    LimitRequest,
    Reading,
    Segment,
    rank_device,
)
from gpumemwidget.model.traces import AllocatorTrace


class Hardware:
    """The memory of this process on every device, and the devices themselves.

    Args:
        backends: sources of counters, in the order in which their devices are shown.
        monitor: the source for whole devices; ``None`` where there is none.
        processes: the source for processes; the operating system, if not given, or the monitor
            where it describes the processes that it lists (a simulation, a recording).
        libraries: other libraries that say what they have of a GPU.
    """

    def __init__(
        self,
        backends: Sequence[MemoryBackend],
        monitor: DeviceMonitor | None = None,
        *,
        processes: ProcessSource | None = None,
        libraries: Sequence[GpuLibrary] = (),
    ) -> None:
        self._backends = tuple(backends)
        self._monitor = None if monitor is None else TimeLimitedMonitor(monitor)
        if processes is None:
            processes = monitor if isinstance(monitor, ProcessSource) else ProcessTree()
        self._processes = processes
        self._libraries = tuple(libraries)
        #: What the driver said last, for when it is slow.
        self._own_uses: BytesByDevice = ()
        #: The pid of this process once it has a CUDA context, which stays; a forked child has none.
        self._pid_in_cuda: int | None = None
        self._import_hook = TorchImportHook(self._join)
        self._lock = threading.Lock()
        self._closed = False
        self._notes: Notes[HardwareNote] = Notes()
        #: The number of events of the running trace; ``None`` where none runs.
        self._n_events: int | None = None

    # -- Counters ----------------------------------------------------------------------------------

    def list_devices(self) -> tuple[DeviceInfo, ...]:
        """Return the devices that have counters now: the touched GPUs, and the host last."""
        # A list between, here and below: the sampler's thread reads, and where another thread lists
        # all living objects meanwhile, a tuple can't grow (https://bugs.python.org/issue15108).
        return tuple([info for backend in self._backends for info in backend.list_devices()])

    def read(self) -> tuple[Reading, ...]:
        """Return a reading of each device with counters, with the peaks of the running span."""
        return tuple([reading for backend in self._backends for reading in backend.read()])

    def read_allocated(self, device: str) -> int:
        """Return the bytes that are allocated on a device now; 0 where that is not known."""
        kind = device.partition(":")[0]
        readings = [r for backend in self._backends if backend.kind == kind for r in backend.read()]
        return next((r.allocated_bytes or 0 for r in readings if r.device == device), 0)

    def start_span(self) -> tuple[Reading, ...]:
        """Begin a span of high-water marks on all devices, and return its first readings."""
        return tuple([reading for backend in self._backends for reading in backend.start_span()])

    def read_exact(self) -> tuple[Reading, ...]:
        """Return readings without shortcuts, with the peaks of the running span."""
        return tuple([reading for backend in self._backends for reading in backend.read_exact()])

    def read_as_user(self) -> tuple[Reading, ...]:
        """Return readings whose peaks are those that the user's own calls return."""
        return tuple([reading for backend in self._backends for reading in backend.read_as_user()])

    def reset_peaks(self, devices: Collection[str] | None = None) -> tuple[str, ...]:
        """Reset the peaks as the user's own calls would, of all devices or of some.

        Returns:
            The devices whose peaks begin anew.

        Raises:
            BackendError: a device refuses.
        """
        return tuple(
            device for backend in self._backends for device in backend.reset_peaks(devices)
        )

    def empty_cache(self) -> None:
        """Give back what is cached and unused, everywhere.

        Raises:
            BackendError: a device refused.
        """
        for backend in self._backends:
            backend.empty_cache()

    def find_host_counter(self) -> Callable[[], int] | None:
        """Return a fast call that gives malloc's bytes in use; ``None`` where that is unknown."""
        counters = (backend.find_counter() for backend in self._backends)
        return next((counter for counter in counters if counter is not None), None)

    def available_host_bytes(self) -> int | None:
        """Return the host memory that can be taken without swapping or being killed.

        ``None`` where that is unknown.
        """
        memory = self._read_memory(HOST)
        return None if memory is None else memory[0]

    def _read_memory(self, device: str) -> tuple[int, int] | None:
        backend = self._find_backend(device)
        return None if backend is None else backend.read_memory(device)

    # -- What only some backends have --------------------------------------------------------------

    def read_segments(self) -> tuple[Segment, ...]:
        """Return the segments and blocks of the devices whose allocator lists them."""
        return tuple(segment for backend in self._backends for segment in backend.read_segments())

    def read_chip(self, device: str) -> Chip | None:
        """Return a device's chip; ``None`` where that is not known, or asking would touch it."""
        backend = self._find_backend(device)
        return None if backend is None else backend.read_chip(device)

    def read_pinned(self) -> int | None:
        """Return the bytes of pinned host memory; ``None`` if no backend counts it."""
        counts = (backend.read_pinned() for backend in self._backends)
        return next((n_bytes for n_bytes in counts if n_bytes is not None), None)

    def release_workspaces(self) -> bool:
        """Free cuBLAS's workspaces, and return whether there were any.

        Raises:
            BackendError: a device refused, or a CUDA graph is alive that may use them.
        """
        done = [backend.release_workspaces() for backend in self._backends]
        return any(done)

    def start_trace(self, *, n_events: int = 1_000_000) -> tuple[HardwareNote, ...]:
        """Begin to note each allocation; return a note for each device that can't be traced.

        PyTorch need not be there yet: it is traced from when the user imports it. Of all devices
        together the newest events are kept; a million take some 300 MB while the trace runs.
        """
        with self._lock:
            self._n_events = n_events
            backends = self._backends
        try:
            return tuple(
                note for backend in backends for note in backend.start_trace(n_events=n_events)
            )
        except BaseException:  # A Ctrl-C in one of them: no trace may stay half started.
            self.end_trace()
            raise

    def end_trace(self, *, snapshot_to: Path | None = None) -> tuple[AllocatorTrace, ...]:
        """Return what was noted since; see ``MemoryBackend.end_trace``."""
        with self._lock:
            self._n_events = None
            backends = self._backends
        return tuple(
            trace for backend in backends for trace in backend.end_trace(snapshot_to=snapshot_to)
        )

    # -- Limits ------------------------------------------------------------------------------------

    def set_limit(self, device: str, request: LimitRequest) -> None:
        """Let this process reserve no more than a limit on a device.

        Raises:
            BackendError: torch has not been imported, there is no such device, it has no limits,
                or it refuses.
        """
        backend = self._find_backend(device)
        if backend is None:
            raise BackendError(
                f"{device} can't be limited yet: import a torch that has CUDA first, as the limit "
                "is PyTorch's own"
            )
        backend.set_limit(device, request)

    def read_limits(self) -> tuple[Limit, ...]:
        """Return the limits of the devices in use, whoever set them, and those that wait."""
        return tuple(limit for backend in self._backends for limit in backend.read_limits())

    def _find_backend(self, device: str) -> MemoryBackend | None:
        """Return the backend that has a device in use, or else is of the device's kind."""
        kind = device.partition(":")[0]
        for backend in self._backends:
            if any(info.device == device for info in backend.list_devices()):
                return backend
        return next((backend for backend in self._backends if backend.kind == kind), None)

    # -- Whole devices -----------------------------------------------------------------------------

    def list_all_devices(self) -> tuple[DeviceInfo, ...]:
        """Return every device that can be seen, touched or not: GPUs first, the host last.

        The totals of GPUs are the driver's, where there is one.
        """
        infos = {info.device: info for info in self.list_devices()}
        if self._monitor is not None:
            uuids = {info.device: info.uuid for info in infos.values() if info.uuid is not None}
            for seen in self._monitor.list_infos(uuids):
                counted = infos.get(seen.device, seen)
                # The total is the driver's, as in nvidia-smi: PyTorch's lacks the driver's own.
                infos[seen.device] = dataclasses.replace(
                    counted,
                    total_bytes=seen.total_bytes or counted.total_bytes,
                    uuid=seen.uuid or counted.uuid,
                )
        return tuple([infos[device] for device in sorted(infos, key=rank_device)])

    def read_devices(self) -> tuple[DeviceState, ...]:
        """Return the counters and the whole use of every device that can be seen, touched or not.

        The peaks are those that the user's own calls return.
        """
        readings = _index(self.read_as_user())
        infos = self.list_all_devices()
        return tuple(
            [DeviceState(info, readings.get(info.device), self.read_use(info)) for info in infos]
        )

    def read_use(self, info: DeviceInfo) -> DeviceUse | None:
        """Return the whole device's use now, other processes included; ``None``: unknown.

        Of the host all that can't be had is in use. PyTorch asks the driver itself where NVML does
        not know a device: on ROCm, on XPU, and in containers without the driver's capability
        "utility". A GPU that shares the host's memory has the host's figures.
        """
        device = info.device
        use = None if self._monitor is None else self._monitor.read_use(device)
        if use is not None and (not use.is_shared or use.used_bytes is not None):
            return use
        memory = self._read_memory(device if use is None else HOST)
        if memory is None:
            return use
        free_bytes, total_bytes = memory
        taken = (total_bytes - free_bytes, free_bytes, total_bytes)
        if use is None:
            return DeviceUse(device, *taken)
        return DeviceUse(device, *taken, use.utilization_percent, driver_bytes=0, is_shared=True)

    def read_own_use(self, device: str) -> int | None:
        """Return the bytes that this process takes on a device, its CUDA context included.

        ``None``: there is no driver, or it knows this process by another pid, as in a container.
        """
        found = self._list_own([device], self.list_devices(), hurries=False)
        return dict(found or ()).get(device)

    def take_device_states(self, *, with_segments: bool = True) -> tuple[DeviceState, ...]:
        """Return all that is known of every device at one moment: GPUs, touched or not, host.

        This takes some 0.2 ms a GPU, and as long as ``read_segments``, if blocks are read too. The
        peaks are those that the user's own calls return.
        """
        infos = self.list_all_devices()
        before = _index(self.read_as_user())
        for _ in range(3):  # Until nothing moves meanwhile.
            states, listed = self._look(before, infos, with_segments=with_segments)
            if all(state.is_at_one_moment for state in states):
                break
            before = {state.info.device: state.reading for state in states if state.reading}
        return add_processes(states, listed, self._processes)

    def _look(
        self, before: Mapping[str, Reading], infos: Sequence[DeviceInfo], *, with_segments: bool
    ) -> tuple[list[DeviceState], dict[str, ProcessesByBytes | None]]:
        """Return what is read of each device now, and the processes that the driver lists there."""
        segments: dict[str, list[Segment]] = {}
        for segment in self.read_segments() if with_segments else ():
            segments.setdefault(segment.device, []).append(segment)
        asked = {i.device: (self.read_use(i), self._list_processes(i.device)) for i in infos}
        after = _index(self.read_as_user())
        states = []
        for info in infos:
            device, on_host = info.device, info.device == HOST
            # malloc's count is not read twice in a row where it is slow.
            reading = (before if on_host else after).get(device)
            state = DeviceState(
                info,
                reading,
                asked[device][0],
                segments=tuple(segments.get(device, ())),
                pinned_bytes=self.read_pinned() if on_host else None,
            )
            is_steady = on_host or _is_steady(before.get(device), state)
            states.append(dataclasses.replace(state, is_at_one_moment=is_steady))
        return states, {device: processes for device, (_, processes) in asked.items()}

    # -- Other libraries ---------------------------------------------------------------------------

    def read_libraries(self, device: str) -> tuple[LibraryUse, ...]:
        """Return what other libraries of this process have of a GPU, those unknown last.

        Their own code is asked: call this only where somebody asks, and no cell runs.
        """
        if not self._is_on(device):
            return ()
        found = []
        for library in self._libraries:
            try:
                use = library.read_use(device)
            except Exception as exc:  # noqa: BLE001 - code of others
                reason = describe_exception(exc)
                unread = HardwareNoteKind.UNREAD
                self._notes.add(HardwareNote(unread, reason, device, f"{library.name}'s memory"))
                found.append(LibraryUse(library.name))
            else:
                if use is not None:
                    found.append(use)
        known = {use.name for use in found}
        found += [LibraryUse(name) for name in list_silent_libraries() if name not in known]
        return tuple(sorted(found, key=lambda use: use.used_bytes is None))

    def list_caches(self) -> tuple[tuple[str, str, int | None], ...]:
        """Return the libraries and GPUs with a cache that can be emptied, and its bytes."""
        return tuple(
            (use.name, info.device, use.cached_bytes)
            for info in self.list_all_devices()
            for use in self.read_libraries(info.device)
            if use.can_empty
        )

    def read_own_uses(self) -> BytesByDevice:
        """Return the bytes that this process takes on each GPU that it is on, as the driver has it.

        Its CUDA context is included. ``()`` where there is no driver, or it knows this process by
        another pid. Where other libraries may be, all GPUs are asked, each by one call of the
        driver's library. Where that takes too long, the last answer is returned.
        """
        infos = self.list_devices()
        names = [info.device for info in infos if info.device != HOST]
        asks_all = self.has_other_libraries()
        if not names and not asks_all:
            return ()
        found = self._list_own(None if asks_all else names, infos)
        if found is not None:
            self._own_uses = found
        return self._own_uses

    def has_other_libraries(self) -> bool:
        """Return whether a library other than PyTorch that may be on a GPU is imported."""
        for library in self._libraries:
            if library.is_imported:
                return True
        return bool(self._libraries) and is_silent_one_imported()

    def _list_own(
        self, devices: Sequence[str] | None, infos: Iterable[DeviceInfo], *, hurries: bool = True
    ) -> BytesByDevice | None:
        """Return the bytes of this process on those of these GPUs that it is on; ``None``: all.

        ``None`` if the driver has not answered in time.
        """
        if self._monitor is None:
            return ()
        uuids = {info.device: info.uuid for info in infos if info.uuid is not None}
        own_pid = self._processes.own_pid
        found = self._monitor.list_own(own_pid, devices, uuids, hurries=hurries)
        return found if found is None or self._is_own(found) else ()

    def _is_own(self, found: BytesByDevice) -> bool:
        """Return whether what the driver lists under this process's pid is this process's."""
        own_pid = self._processes.own_pid
        if not found or self._processes.are_pids_certain([own_pid]):
            return True
        gpus = [backend for backend in self._backends if backend.kind != HOST]
        readings = [reading for backend in gpus for reading in backend.read()]
        if any(reading.reserved_bytes for reading in readings):
            return has_reserved(found, readings)
        # Looking for a context goes through all open files, so it ends once one was found.
        if self._pid_in_cuda != own_pid and has_cuda_context(own_pid):
            self._pid_in_cuda = own_pid
        return self._pid_in_cuda == own_pid

    def empty_libraries(self) -> tuple[tuple[tuple[str, str, int | None], ...], tuple[str, ...]]:
        """Have other libraries give back what they keep for later.

        Returns:
            For each library and GPU, by these names, the bytes that the driver has got back
            (``None`` where it doesn't know this process); and why others refuse, a line each.
        """
        known = {library.name: library for library in self._libraries}
        given, refusals = [], []
        for name, device, _ in self.list_caches():
            before = self.read_own_use(device)
            try:
                known[name].empty_cache(device)
            except Exception as exc:  # noqa: BLE001 - code of others
                refusals.append(f"{name} on {device}: {describe_exception(exc)}")
                continue
            after = self.read_own_use(device)
            freed = None if before is None or after is None else before - after
            given.append((name, device, freed))
        return tuple(given), tuple(refusals)

    def _is_on(self, device: str) -> bool:
        """Return whether this process is known to be on a GPU: nothing new begins there then."""
        if device == HOST:
            return False
        is_touched = any(info.device == device for info in self.list_devices())
        return is_touched or bool(self.read_own_use(device))

    def list_children(self) -> tuple[ChildProcess, ...]:
        """Return the processes below this one, with what they take of each device and of the host.

        Cheap enough for once a second: a millisecond on a machine of some hundred processes.
        """
        children, monitor = self._processes.list_children(), self._monitor
        if monitor is None or not children:
            return children
        readings = _index(self.read_as_user())
        listed = {info.device: monitor.list_processes(info.device) for info in monitor.list_infos()}
        return join_children(children, listed, readings, self._processes)

    def list_kernels(self) -> tuple[KernelUse, ...]:
        """Return what each Jupyter kernel of this machine takes of the GPUs that can be seen.

        In a container, where the driver's pids may be other processes', there is this kernel alone,
        with what PyTorch has reserved.
        """
        own_pid = self._processes.own_pid
        taken: dict[tuple[str, str], list[int | None]] = {}
        readings = _index(self.read())
        for info in self.list_all_devices():
            if info.device == HOST:
                continue
            listed = dict(self._list_processes(info.device) or ())
            if not self._processes.are_pids_certain(listed):
                listed = {pid: n_bytes for pid, n_bytes in listed.items() if pid == own_pid}
            if info.device in readings and listed.get(own_pid) is None:
                listed[own_pid] = readings[info.device].reserved_bytes
            for pid, n_bytes in listed.items():
                kernel_id = find_kernel(pid)
                if kernel_id is not None:
                    key = kernel_id, info.device
                    taken.setdefault(key, []).append(n_bytes)
        return tuple(
            KernelUse(*key, None if None in amounts else sum(n_bytes or 0 for n_bytes in amounts))
            for key, amounts in taken.items()
        )

    def _list_processes(self, device: str) -> ProcessesByBytes | None:
        return None if self._monitor is None else self._monitor.list_processes(device)

    # -- Notes and the end -------------------------------------------------------------------------

    def take_notes(self) -> tuple[HardwareNote, ...]:
        """Return what could not be read and why, each once."""
        notes = [note for backend in self._backends for note in backend.take_notes()]
        notes += self._notes.take()
        if self._monitor is not None:
            notes += self._monitor.take_notes()
        return tuple(notes)

    def close(self) -> None:
        """Take away whatever was added to the process. May be called twice."""
        with self._lock:
            self._closed = True
        self._import_hook.cancel()
        for backend in self._backends:
            backend.close()
        if self._monitor is not None:
            self._monitor.close()

    # -- torch joins -------------------------------------------------------------------------------

    def await_torch(self) -> None:
        """Let torch's backends join: now if torch is imported, else when the user imports it."""
        self._import_hook.expect()

    def _join(self, torch: ModuleType) -> None:
        # Later backends stand first. A build for CUDA may have an extension's devices beside it.
        self._add(AcceleratorBackend, torch)
        self._add(CudaBackend, torch)

    def _add(self, make: Callable[[ModuleType], MemoryBackend], torch: ModuleType) -> None:
        try:
            backend = make(torch)
        except BackendError:
            return  # A build of torch without such devices is no failure.
        except Exception as exc:  # noqa: BLE001 - this runs within the user's `import torch`
            # The same may be missing for both kinds.
            reason = describe_exception(exc)
            self._notes.add(HardwareNote(HardwareNoteKind.NOT_RECORDED, reason))
            return
        with self._lock:
            is_closed = self._closed
            if not is_closed:
                self._backends = (backend, *self._backends)
                n_events = self._n_events
        if is_closed:
            backend.close()
            return
        if n_events is not None:
            for note in backend.start_trace(n_events=n_events):
                self._notes.add(note)


def _is_steady(before: Reading | None, state: DeviceState) -> bool:
    """Return whether the counters stayed, and count what the segments hold."""
    counters, then = (
        None if reading is None else (reading.allocated_bytes, reading.reserved_bytes)
        for reading in (state.reading, before)
    )
    if counters is None or counters[1] is None or not state.segments:
        return counters == then
    blocks = (block for segment in state.segments for block in segment.blocks)
    allocated = sum(block.n_bytes for block in blocks if block.state == "active_allocated")
    reserved = sum(segment.n_bytes for segment in state.segments)
    return counters == then == (allocated, reserved)


def _index(readings: Iterable[Reading]) -> dict[str, Reading]:
    return {reading.device: reading for reading in readings}


#: Makes the hardware that is found in place of this machine's: see ``use_hardware``.
_make_hardware: Callable[[], Hardware] | None = None


def use_hardware(make: Callable[[], Hardware] | None) -> None:
    """Let ``detect_hardware`` return what ``make`` makes; ``None``: this machine's hardware again.

    Simulated GPUs (``gpumemwidget.testing``) replace a machine's with it.
    """
    global _make_hardware  # noqa: PLW0603 - there is one machine
    _make_hardware = make
    close_kept_hardware()


def detect_hardware() -> Hardware:
    """Return this machine's hardware: the host, the driver, and GPUs once torch is there."""
    if _make_hardware is not None:
        return _make_hardware()
    hardware = Hardware([HostBackend()], NvmlMonitor(), libraries=list_known_libraries())
    hardware.await_torch()
    return hardware


_kept_lock = threading.Lock()
#: By its user and process, hardware that stays.
_kept: dict[tuple[str, int], Hardware] = {}


def keep_hardware(user: str) -> Hardware:
    """Return this machine's hardware for what measures without the extension, found once for each.

    It stays: with it would go what torch's own peaks were before. Each user has one of its own,
    whose resets of peaks look to the others like the program's. A forked child has one of its own,
    too: a thread of its parent's may have held a lock of the other one.

    Args:
        user: ``"traces"``, ``"recordings"``, ``"checks"``.
    """
    with _kept_lock:
        if (user, os.getpid()) not in _kept:
            _kept[user, os.getpid()] = detect_hardware()
        return _kept[user, os.getpid()]


def take_hardware(user: str) -> Hardware | None:
    """Hand over what ``keep_hardware`` keeps for a user, if anything, to somebody who closes it."""
    with _kept_lock:
        return _kept.pop((user, os.getpid()), None)


def close_kept_hardware() -> None:
    """Close what ``keep_hardware`` keeps, for all of its users."""
    # The last one first: its overlays lie over those of the others.
    for user, _ in reversed(list(_kept)):
        hardware = take_hardware(user)
        if hardware is not None:
            hardware.close()
