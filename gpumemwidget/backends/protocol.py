"""The contract of every source of hardware's figures, and so what can be asked of it.

Every source of counters is a ``MemoryBackend``; what it does not have it answers as the base class
does. A ``DeviceMonitor`` describes whole devices, a ``ProcessSource`` processes.
``tests/backends/test_contract.py`` holds all implementations to what is said here.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Literal, Protocol, runtime_checkable

from gpumemwidget.errors import BackendError
from gpumemwidget.model.devices import (
    HOST,
    ChildProcess,
    Chip,
    DeviceInfo,
    DeviceUse,
    HardwareNote,
    HardwareNoteKind,
    LibraryUse,
    Limit,
    LimitRequest,
    Reading,
    Segment,
)
from gpumemwidget.model.traces import AllocatorTrace

#: How a process is related to this one: see ``ProcessUse``.
Relation = Literal["own", "child", "other"]
#: Pids with their bytes on a device, by ascending pid; bytes are ``None`` where they are unknown.
ProcessesByBytes = tuple[tuple[int, int | None], ...]


class MemoryBackend(ABC):
    """A source of this process's memory counters: the caching allocator, malloc, a recording.

    No method of a backend initialises a device, changes the current one, or changes what the user's
    own calls return. Any thread may call all of them.
    """

    #: ``"cuda"``, ``"host"``, ``"replay"``, ``"xpu"``: how the names of the devices begin.
    kind: str

    @abstractmethod
    def list_devices(self) -> tuple[DeviceInfo, ...]:
        """Return the devices that have counters now, which are those that the user has touched."""

    @abstractmethod
    def read(self) -> tuple[Reading, ...]:
        """Return a reading of each touched device, with the peaks of the running span.

        Outside a span the peaks run since the last span began, or since the process did.
        """

    @abstractmethod
    def start_span(self) -> tuple[Reading, ...]:
        """Begin a span of high-water marks, unseen by the user, and return its first readings.

        A span that was running ends.
        """

    def read_exact(self) -> tuple[Reading, ...]:
        """Return readings without shortcuts, also where ``read`` takes some, with the span's peaks.

        The peaks stay until the next span. A device that was first touched within the span is among
        them: its counters began at 0.
        """
        return self.read()

    @abstractmethod
    def read_as_user(self) -> tuple[Reading, ...]:
        """Return readings whose peaks are those that the user's own calls return.

        Such peaks run since the user's last reset, or since the process began where the user has no
        call to reset them.
        """

    def reset_peaks(self, devices: Collection[str] | None = None) -> tuple[str, ...]:
        """Reset the peaks as the user's own call would, on each touched device.

        Args:
            devices: leave all other devices alone.

        Returns:
            The devices whose peaks begin anew, for the user and for ``read_as_user``; those of the
            running span are not lost by it.

        Raises:
            BackendError: a device refuses.
        """
        return ()

    def empty_cache(self) -> None:
        """Give back to the device what is cached and unused, on each touched device.

        Raises:
            BackendError: a device refuses.
        """

    def take_notes(self) -> tuple[HardwareNote, ...]:
        """Return notes on what failed since the last call, each failure once."""
        return ()

    def close(self) -> None:
        """Take away whatever the backend added to the process. May be called twice."""

    def read_memory(self, device: str) -> tuple[int, int] | None:
        """Return the free and the total bytes of a touched device, other processes included.

        ``None`` for a device that nobody has touched, or that can't be asked.
        """
        return None

    def read_chip(self, device: str) -> Chip | None:
        """Return a device's chip; ``None`` where that is not known, or asking would touch it."""
        return None

    def read_pinned(self) -> int | None:
        """Return the bytes of pinned host memory that PyTorch's allocator has from the system.

        ``None`` where it does not count, or nobody has pinned memory yet.
        """
        return None

    def find_counter(self) -> Callable[[], int] | None:
        """Return a fast call that gives malloc's bytes in use; ``None`` where that is unknown."""
        return None

    def release_workspaces(self) -> bool:
        """Free cuBLAS's workspaces, for the allocator to give back; return whether any was there.

        Raises:
            BackendError: the device refuses, or something alive may use them.
        """
        return False

    def read_segments(self) -> tuple[Segment, ...]:
        """Return the segments of each touched device, and the blocks that they are cut into.

        Of each device that is listed all segments are, by their addresses: together they are what
        is reserved, and their ``active_allocated`` blocks what is allocated, to the byte, as long
        as nobody allocates meanwhile. The blocks of a segment lie side by side, from its first
        byte to its last. ``()`` where the allocator can't be asked now.
        """
        return ()

    # -- The history -------------------------------------------------------------------------------

    def start_trace(self, *, n_events: int) -> tuple[HardwareNote, ...]:
        """Begin to note each allocation, and drop a trace that was running.

        Args:
            n_events: how many events to keep, of all devices together: the newest.

        Returns:
            Why there is none, a note each, where there are devices that can't be traced.
        """
        return tuple(
            HardwareNote(HardwareNoteKind.NOT_TRACED, device=info.device)
            for info in self.list_devices()
            if info.device != HOST
        )

    def end_trace(self, *, snapshot_to: Path | None = None) -> tuple[AllocatorTrace, ...]:
        """Return what was noted since, on each touched device, and leave the history as it was.

        ``()`` where no trace was running.

        Args:
            snapshot_to: a file for PyTorch's own memory viewer; one of that name is replaced. If it
                can't be written, that is a note.
        """
        return ()

    # -- Limits ------------------------------------------------------------------------------------

    def set_limit(self, device: str, request: LimitRequest) -> None:
        """Let this process reserve no more than a limit on a device.

        A device that nobody has touched stays so: the limit waits for CUDA, or is refused.

        Args:
            device: one of this backend's kind.
            request: the limit, which may be less than what is reserved; that then stays.

        Raises:
            BackendError: there is no such device, it has no limits, or it refuses.
        """
        raise BackendError(
            f"{device} can't be limited: limits are for CUDA alone, choose one of its devices"
        )

    def read_limits(self) -> tuple[Limit, ...]:
        """Return the limits of the devices in use, whoever set them, and those that wait.

        In the order of the devices. A device that can have none is left out.
        """
        return ()


# -- Whole devices and processes -------------------------------------------------------------------


@runtime_checkable
class DeviceMonitor(Protocol):
    """A source for whole devices, other processes too: the driver's management library."""

    def list_infos(self, uuids: Mapping[str, str] | None = None) -> tuple[DeviceInfo, ...]:
        """Return all devices that this process can see, touched or not, under PyTorch's names.

        Args:
            uuids: those of devices that PyTorch has under these names, by which the numbering is
                corrected from now on: the driver's own order may be another. UUIDs of devices that
                are not the driver's are ignored.
        """

    def read_use(self, device: str) -> DeviceUse | None:
        """Return the use of the whole device now, or the driver's reason why it is unknown.

        ``None`` for a device that is not the driver's.
        """

    def list_processes(self, device: str) -> ProcessesByBytes | None:
        """Return the processes that compute or draw on the device, each once.

        The pids are the driver's: within a container they may be the machine's own, which mean
        nothing there. ``None`` where the driver does not list the processes at all.
        """

    def read_process(self, device: str, pid: int) -> int | None:
        """Return the bytes of one process that computes on the device, as it is listed above.

        ``None`` where it is not listed.
        """

    def take_notes(self) -> tuple[HardwareNote, ...]:
        """Return notes on what failed since the last call, each failure once."""

    def close(self) -> None:
        """Let go of the library. May be called twice."""


class GpuLibrary(Protocol):
    """Another library that allocates memory of GPUs, beside PyTorch's allocator."""

    #: What users call it: ``CuPy``.
    name: str

    @property
    def is_imported(self) -> bool:
        """Whether it may have memory."""

    def read_use(self, device: str) -> LibraryUse | None:
        """Return the library's use of a device; ``None`` where it does not use the device."""

    def empty_cache(self, device: str) -> None:
        """Give back what it keeps for later, of a device that this process is on."""


@runtime_checkable
class ProcessSource(Protocol):
    """A source for processes: the operating system, or a recording."""

    @property
    def own_pid(self) -> int:
        """The pid of the process whose memory is shown."""

    def are_pids_certain(self, pids: Collection[int]) -> bool:
        """Return whether the driver's pids are certain to be the same processes' here.

        Within a container, where the driver may count as the machine does, they are if one is that
        of a child which has a CUDA context.
        """

    def list_children(self) -> tuple[ChildProcess, ...]:
        """Return the running processes below this one, by their pids, without their devices."""

    def describe(self, pids: Collection[int]) -> Mapping[int, tuple[Relation, str | None]]:
        """Return each process's relation to this one, and its name; ``None``: that can't be seen.

        Args:
            pids: those that processes have here.
        """
