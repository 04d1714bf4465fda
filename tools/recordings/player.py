"""Play recordings: their moments one by one, as counters and as the driver of whole devices."""

from __future__ import annotations

import math
import threading
import time
from array import array
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from gpumemwidget.backends.protocol import MemoryBackend, Relation
from gpumemwidget.backends.snapshot import StackTable
from gpumemwidget.errors import BackendError, BadInputError
from gpumemwidget.model.devices import (
    HOST,
    ChildProcess,
    DeviceInfo,
    DeviceUse,
    HardwareNote,
    HardwareNoteKind,
    Limit,
    LimitRequest,
    Reading,
    Segment,
)
from gpumemwidget.model.traces import (
    AllocatorTrace,
    NoteKind,
    TraceAction,
    TraceEvents,
    TraceNote,
)
from gpumemwidget.recording.running_cell import lift_peaks
from tools.recordings.recording import AllocatorEvent, Event, Recording

_NO_HISTORY = (
    "this recording holds no history of the allocator: record one with "
    "`python -m tools.record --trace`"
)


class RecordingPlayer:
    """A recording and the position in it, which begins at the first event and never goes back."""

    def __init__(self, recording: Recording) -> None:
        self.recording = recording
        self.position = 0
        self._lock = threading.Lock()

    @property
    def n_events(self) -> int:
        """The number of events."""
        return len(self.recording.events)

    @property
    def event(self) -> Event:
        """The event at the position."""
        return self.recording.events[self.position]

    def advance(self, n_events: int = 1) -> int:
        """Go on by some events, to the last at most; return by how many.

        Raises:
            BadInputError: the number is negative.
        """
        if n_events < 0:
            raise BadInputError(f"can't go on by {n_events} events: only forward")
        with self._lock:
            before = self.position
            self.position = min(before + n_events, self.n_events - 1)
            return self.position - before


# -- Counters --------------------------------------------------------------------------------------


def _begin_peaks(reading: Reading) -> Reading:
    """Return a reading whose peaks begin with it, where peaks are recorded at all."""
    has_allocated = reading.allocated_peak_bytes is not None
    has_reserved = reading.reserved_peak_bytes is not None
    return replace(
        reading,
        allocated_peak_bytes=reading.allocated_bytes if has_allocated else None,
        reserved_peak_bytes=reading.reserved_bytes if has_reserved else None,
        peak_is=None if reading.peak_is is None else "exact",
    )


class ReplayBackend(MemoryBackend):
    """The counters of a recording, as a ``MemoryBackend``. What is recorded can't be changed.

    Args:
        player: where the recording stands. Several backends and monitors may share it.
    """

    kind = "replay"

    def __init__(self, player: RecordingPlayer) -> None:
        self.player = player
        self._lock = threading.Lock()
        #: The readings of this position, with the peaks of the span, and the user's.
        self._span: tuple[Reading, ...] = ()
        self._user: tuple[Reading, ...] = ()
        #: The position up to which readings were included.
        self._included = -1
        #: First position of the running trace, its time in microseconds since the epoch, and the
        #: number of events to keep.
        self._trace_start: tuple[int, int, int] | None = None
        events = player.recording.events
        self._has_history = any(event.traced for event in events)
        self._has_gpu = any(each.device.startswith("cuda:") for each in player.recording.devices)

    def list_devices(self) -> tuple[DeviceInfo, ...]:
        """Return the devices that were in use up to now, in the recording's order."""
        limits = {each.device: each.limit_bytes for each in self.player.event.limits}
        infos = {info.device: info for info in self.player.recording.devices}
        return tuple(
            replace(infos[each.device], limit_bytes=limits.get(each.device)) for each in self.read()
        )

    def read(self) -> tuple[Reading, ...]:
        """Return the readings of this position, with the peaks since the span began."""
        with self._lock:
            self._follow()
            return self._span

    def start_span(self) -> tuple[Reading, ...]:
        """Begin a span at this position, and return its readings."""
        with self._lock:
            self._follow()
            readings = self.player.recording.events[self._included].readings
            begun = {each.device: _begin_peaks(each) for each in readings}
            self._span = tuple(begun.get(each.device, each) for each in self._span)
            return self._span

    def read_as_user(self) -> tuple[Reading, ...]:
        """Return the readings of this position, with the peaks since the recording began."""
        with self._lock:
            self._follow()
            return self._user

    def read_segments(self) -> tuple[Segment, ...]:
        """Return the snapshot of this position; ``()`` where none was taken."""
        return self.player.event.segments or ()

    def read_pinned(self) -> int | None:
        """Return what was pinned at this position."""
        return self.player.event.pinned_bytes

    def read_limits(self) -> tuple[Limit, ...]:
        """Return the limits of the devices in use at this position, and those that waited."""
        reserved = {reading.device: reading.reserved_bytes for reading in self.read()}
        return tuple(
            replace(limit, reserved_bytes=reserved.get(limit.device))
            for limit in self.player.event.limits
            if limit.is_waiting or limit.device in reserved
        )

    def set_limit(self, device: str, request: LimitRequest) -> None:  # noqa: ARG002 - none is set
        """Refuse: a recording stays what it is.

        Raises:
            BackendError: always.
        """
        raise BackendError(f"{device} is played from a recording, whose limits stay as they are")

    def close(self) -> None:
        """End the running trace."""
        self._trace_start = None

    # -- Traces ------------------------------------------------------------------------------------

    def start_trace(self, *, n_events: int) -> tuple[HardwareNote, ...]:
        """Begin a trace at this position; return why not, where no history was recorded."""
        self._trace_start = None
        if not self._has_gpu:
            return ()
        if not self._has_history:
            return (HardwareNote(HardwareNoteKind.MESSAGE, _NO_HISTORY),)
        self._trace_start = (self.player.position, time.time_ns() // 1000, n_events)
        return ()

    def end_trace(self, *, snapshot_to: Path | None = None) -> tuple[AllocatorTrace, ...]:
        """Return what the allocators did since ``start_trace``, as if it happened just now."""
        if self._trace_start is None:
            return ()
        (start, start_us, n_events), self._trace_start = self._trace_start, None
        devices = [info.device for info in self.list_devices() if info.device != HOST]
        events = self.player.recording.events[start : self.player.position + 1]
        n_kept = max(1, n_events // max(1, len(devices)))
        traces = [self._make_trace(device, events, start_us, n_kept) for device in devices]
        notes = () if snapshot_to is None else (TraceNote(NoteKind.NO_SNAPSHOT),)
        return tuple(replace(trace, notes=notes) for trace in traces)

    def _make_trace(
        self, device: str, events: Sequence[Event], start_us: int, n_kept: int
    ) -> AllocatorTrace:
        recording, first, last = self.player.recording, events[0], events[-1]
        first_us, last_us = round(first.time_s * 1e6), round(last.time_s * 1e6)
        # Events after the last moment were recorded with it.
        end_us = math.inf if last is recording.events[-1] else last_us
        entries = [
            entry
            for event in recording.events
            for entry in dict(event.traced).get(device, ())
            if first_us < entry.time_us <= end_us
        ]
        return AllocatorTrace(
            device=device,
            before=tuple(each for each in first.segments or () if each.device == device),
            events=_to_columns(entries[-n_kept:], start_us - first_us),
            after=tuple(each for each in last.segments or () if each.device == device),
            start_us=start_us,
            end_us=start_us + last_us - first_us,
            rules=recording.rules,
            is_whole=recording.is_whole and first.segments is not None and len(entries) <= n_kept,
        )

    # -- Following the player ----------------------------------------------------------------------

    def _follow(self) -> None:
        """Include the readings of all events up to the player's position."""
        events = self.player.recording.events
        for event in events[self._included + 1 : self.player.position + 1]:
            self._included += 1
            self._span = self._lift(self._span, event)
            self._user = self._lift(self._user, event)

    def _lift(self, readings: tuple[Reading, ...], event: Event) -> tuple[Reading, ...]:
        """Return an event's readings with the peaks before it, in the recording's order."""
        # The counters of a device that is new began at 0, or before the recording.
        lifted = {each.device: each for each in lift_peaks(event.readings, readings)}
        devices = [info.device for info in self.player.recording.devices]
        return tuple(lifted[device] for device in devices if device in lifted)


class ReplayMonitor:
    """The whole devices of a recording.

    Args:
        player: where the recording stands.
    """

    def __init__(self, player: RecordingPlayer) -> None:
        self._player = player
        self.is_closed = False

    def list_infos(
        self,
        uuids: Mapping[str, str] | None = None,  # noqa: ARG002 - the devices have PyTorch's names
    ) -> tuple[DeviceInfo, ...]:
        """Return what the driver listed."""
        return () if self.is_closed else self._player.recording.visible

    def read_use(self, device: str) -> DeviceUse | None:
        """Return a whole device at this position; ``None`` where it was not told."""
        uses = () if self.is_closed else self._player.event.uses
        return next((use for use in uses if use.device == device), None)

    def list_processes(self, device: str) -> tuple[tuple[int, int | None], ...] | None:
        """Return who was on a device at this position; ``None`` where it was not told."""
        listed = None if self.is_closed else self._player.event.processes.get(device)
        if listed is None:
            return None
        return tuple((use.pid, use.n_bytes) for use in sorted(listed, key=lambda use: use.pid))

    def read_process(self, device: str, pid: int) -> int | None:
        """Return the bytes of one process on a GPU."""
        return dict(self.list_processes(device) or ()).get(pid)

    @property
    def own_pid(self) -> int:
        """The recorded process's number; 0 where the driver did not list it."""
        return next(
            (pid for pid, (relation, _) in self._list_known().items() if relation == "own"), 0
        )

    def list_children(self) -> tuple[ChildProcess, ...]:
        """Return the children at this position."""
        return self._player.event.children

    def describe(self, pids: Collection[int]) -> Mapping[int, tuple[Relation, str | None]]:
        """Return the relation of processes to the recorded one, and their names."""
        known = self._list_known()
        return {pid: known.get(pid, ("other", None)) for pid in pids}

    def are_pids_certain(self, pids: Collection[int]) -> bool:  # noqa: ARG002 - the protocol's
        """Return that the pids are believed; where they were not, none are recorded."""
        return True

    def take_notes(self) -> tuple[HardwareNote, ...]:
        """Return nothing: failures are recorded with the device's use."""
        return ()

    def close(self) -> None:
        """List no device any more."""
        self.is_closed = True

    def _list_known(self) -> dict[int, tuple[Relation, str | None]]:
        listed = self._player.event.processes.values()
        return {use.pid: (use.relation, use.name) for uses in listed for use in uses or ()}


def _to_columns(entries: Sequence[AllocatorEvent], shift_us: int) -> TraceEvents:
    """Return entries in the columns of ``TraceEvents``, with their times moved."""
    stacks = StackTable()
    return TraceEvents(
        actions=bytes(TraceAction[each.action.upper()] for each in entries),
        addresses=array("Q", [each.address for each in entries]),
        sizes=array("q", [each.n_bytes for each in entries]),
        times_us=array("q", [each.time_us + shift_us for each in entries]),
        streams=array("q", [each.stream for each in entries]),
        stacks=array("i", [stacks.place_frames(each.frames) for each in entries]),
        stack_table=tuple(stacks.stacks),
    )
