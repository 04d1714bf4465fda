"""The contract for the one door to hardware.

Everything above asks for memory through these protocols, so that a recording can stand in for a
GPU. ``tests/backends/test_contract.py`` holds every implementation to what is said here.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Literal, Protocol, runtime_checkable

from gpumemwidget.devices import ChildProcess, Limit, PinnedUse
from gpumemwidget.records import DeviceInfo, DeviceUse, Reading, Segment
from gpumemwidget.traces import AllocatorTrace

__all__ = ["DeviceMonitor", "MemoryBackend", "ProcessSource", "Relation"]

#: What a process is to this one: see ``ProcessUse``.
Relation = Literal["own", "child", "other"]


@runtime_checkable
class MemoryBackend(Protocol):
    """A source of this process's memory counters: the caching allocator, malloc, a recording.

    No method initialises a device, changes the current one, or changes what the user's own calls
    return. All may be called from any thread.
    """

    #: ``"cuda"``, ``"host"``, ``"replay"``, ``"xpu"``: of devices what their names begin with.
    kind: str

    def list_devices(self) -> tuple[DeviceInfo, ...]:
        """The devices that have counters now: those that the user has touched."""
        ...

    def read(self) -> tuple[Reading, ...]:
        """One reading for each of these devices; the peaks are those of the running span.

        Outside a span the peaks run since the last span began, or since the process did.
        """
        ...

    def start_span(self) -> tuple[Reading, ...]:
        """Begin a new span of high-water marks, invisibly to the user; what stands at its start.

        A span that was running ends.
        """
        ...

    def end_span(self) -> tuple[Reading, ...]:
        """What stands at the span's end, with its peaks.

        A device that was first touched within the span is there too: its counters began at 0.
        """
        ...

    def read_as_user(self) -> tuple[Reading, ...]:
        """Readings whose peaks are those that the user's own calls tell: since *their* last reset.

        Where the user has no such call, since the process began.
        """
        ...

    def read_segments(self) -> tuple[Segment, ...]:
        """What the allocator has from each touched device, and the blocks it is cut into.

        Of each device that is listed all segments are, by their addresses: together they are what
        is reserved, and their ``active_allocated`` blocks what is allocated, to the byte, as long
        as nobody allocates meanwhile. The blocks of a segment lie side by side, from its first
        byte to its last. ``()`` where there is no such allocator, or it does not tell.
        """
        ...

    @property
    def is_tracing(self) -> bool:
        """Whether a trace was started and not ended."""
        ...

    def start_trace(self, *, n_events: int) -> tuple[str, ...]:
        """Begin to note each allocation, and drop a trace that was running.

        Args:
            n_events: how many events to keep, of all devices together: the newest.

        Returns:
            Why there is none, a sentence each, where there are devices that can't be traced.
        """
        ...

    def end_trace(self, *, snapshot_to: Path | None = None) -> tuple[AllocatorTrace, ...]:
        """What was noted since, on each touched device; from then on it is as it was before.

        ``()`` where no trace was running, and where there is no such allocator.

        Args:
            snapshot_to: a file for PyTorch's own memory viewer; one of that name is replaced. If it
                can't be written, that is a note.
        """
        ...

    def set_sites(self, *, is_on: bool) -> str:
        """Keep the line of each live block from now on, or no longer; what was done, in one line.

        ``""`` where there is no such allocator.
        """
        ...

    def read_pinned(self) -> PinnedUse | None:
        """Pinned host memory, as PyTorch's allocator for it counts it; it is never begun by us.

        ``None`` where there is no such allocator, it does not tell, or nobody has used it yet.
        """
        ...

    def set_limit(
        self, device: str, limit_bytes: int | None, *, share: float | None = None
    ) -> None:
        """Let this process reserve no more than this on a device; ``None``: all of it.

        A device that nobody has touched stays so: the limit waits until it is in use.

        Args:
            device: one of this backend's kind.
            limit_bytes: may be less than what is reserved, which then stays.
            share: of the whole, in its place; above 0, up to 1.

        Raises:
            BackendError: there is no such device, it has no limits, or it refuses.
        """
        ...

    def read_limits(self) -> tuple[Limit, ...]:
        """The limits of the devices in use, set by us or by the user, and those that wait.

        In the order of the devices. A device that can have none is not there.
        """
        ...

    def reset_peaks(self, devices: Collection[str] | None = None) -> tuple[str, ...]:
        """Set the peaks back as the user's own call would, on each touched device.

        Args:
            devices: only on those of them that are among these.

        Returns:
            The devices whose peaks now begin anew, for the user and for ``read_as_user``; those of
            the running span are not lost by it.
        """
        ...

    def empty_cache(self) -> None:
        """Give back to the device what is cached and unused, on each touched device."""
        ...

    def release_workspaces(self) -> str | None:
        """Free what cuBLAS keeps to work in, for the allocator to give back; what was done.

        ``None`` where such a thing does not exist.
        """
        ...

    def take_notes(self) -> tuple[str, ...]:
        """Sentences on what failed since the last call, each failure once."""
        ...

    def close(self) -> None:
        """Take away whatever the backend added to the process. May be called twice."""
        ...


@runtime_checkable
class DeviceMonitor(Protocol):
    """A source for whole devices, other processes too: the driver's management library."""

    def list_infos(self) -> tuple[DeviceInfo, ...]:
        """All devices that this process can see, touched or not, under PyTorch's names."""
        ...

    def match(self, uuids: Mapping[str, str]) -> None:
        """Set its numbering right by the UUIDs of the devices that PyTorch has under these names.

        The driver's own order may be another, where PyTorch has not been asked yet.
        """
        ...

    def read_use(self, device: str) -> DeviceUse | None:
        """The whole device now; ``None`` where it can't be read."""
        ...

    def read_own_use(self, device: str) -> int | None:
        """What this process takes there; ``None`` where the driver does not know it."""
        ...

    def list_processes(self, device: str) -> tuple[tuple[int, int | None], ...] | None:
        """The processes that use the device, each once: number and bytes, by their numbers.

        Those that compute and those that draw. The numbers are the driver's: within a container
        they may be the machine's own, which mean nothing there. Bytes are ``None`` where the driver
        gives none. ``None`` where it does not list the processes at all.
        """
        ...

    def list_failures(self, device: str) -> tuple[str, ...]:
        """Why something of the device can't be read now, a sentence each; ``()`` where all can."""
        ...

    @property
    def processes(self) -> ProcessSource | None:
        """Whose the numbers of processes are; ``None``: the operating system's, here and now."""
        ...

    def take_notes(self) -> tuple[str, ...]:
        """Sentences on what failed since the last call, each failure once."""
        ...

    def close(self) -> None:
        """Let go of the library. May be called twice."""
        ...


@runtime_checkable
class ProcessSource(Protocol):
    """A source for processes: the operating system, or a recording."""

    @property
    def own_pid(self) -> int:
        """The number of the process whose memory this is about."""
        ...

    @property
    def are_numbers_certain(self) -> bool:
        """Whether a number that the driver tells is certain to be the same process's here.

        It is not within a container, where the driver may count as the machine does.
        """
        ...

    def list_children(self) -> tuple[ChildProcess, ...]:
        """The running processes below this one, by their numbers; without their devices.

        One that was below it once stays so, whoever is above it now.
        """
        ...

    def describe(
        self, pids: Collection[int], *, are_ours: bool | None
    ) -> Mapping[int, tuple[Relation, str | None]]:
        """What processes are to this one, and what they run; ``None``: that can't be seen.

        Args:
            pids: their numbers, from the driver.
            are_ours: whether these are the numbers that processes have here; ``None``: that is not
                known.
        """
        ...
