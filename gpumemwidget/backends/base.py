"""The contract for the one door to hardware.

Everything above asks for memory through these two protocols, so that a recording can stand in for a
GPU. ``tests/backends/test_contract.py`` holds every implementation to what is said here.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Protocol, runtime_checkable

from gpumemwidget.records import DeviceInfo, DeviceUse, Reading, Segment
from gpumemwidget.traces import AllocatorTrace

__all__ = ["DeviceMonitor", "MemoryBackend"]


@runtime_checkable
class MemoryBackend(Protocol):
    """A source of this process's memory counters: the caching allocator, malloc, a recording.

    No method initialises a device, changes the current one, or changes what the user's own calls
    return. All may be called from any thread.
    """

    #: ``"cuda"``, ``"host"``, ``"replay"``.
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

    def take_notes(self) -> tuple[str, ...]:
        """Sentences on what failed since the last call, each failure once."""
        ...

    def close(self) -> None:
        """Let go of the library. May be called twice."""
        ...
