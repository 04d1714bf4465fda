"""Plays recordings back: a memory backend and a device monitor that need no hardware.

Every feature is tested and demonstrated on it. It moves by hand (``Playback.advance``) or by a
clock, and answers spans that begin and end anywhere (see ``bounds``).
"""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from gpumemwidget.backends.bounds import Track
from gpumemwidget.backends.recording import Event, Recording, load_recording
from gpumemwidget.backends.replaystate import ReplayProcesses, Standing
from gpumemwidget.backends.replaytrace import ReplayTracer
from gpumemwidget.backends.script import Step, play_script
from gpumemwidget.backends.snapwrite import format_snapshot, write_snapshot
from gpumemwidget.devices import Limit, PinnedUse
from gpumemwidget.errors import BackendError, BadInputError, FileError
from gpumemwidget.records import HOST, DeviceInfo, DeviceUse, Reading, Segment
from gpumemwidget.traces import AllocatorTrace

__all__ = ["Playback", "ReplayBackend", "ReplayMonitor"]


class Playback:
    """A recording and the position in it. It begins at the first event.

    Args:
        recording: what is played.
        clock: seconds, from any start; the position then follows it. Without one, ``advance``.
        loop: begin again after the last event, for as long as somebody asks.
    """

    def __init__(
        self,
        recording: Recording,
        *,
        clock: Callable[[], float] | None = None,
        loop: bool = False,
    ) -> None:
        self.recording = recording
        self._clock = clock
        self._loop = loop
        self._start_s = clock() if clock is not None else 0.0
        self._times_s = [event.time_s for event in recording.events]
        # The last event stands for as long as the mean one, else it would never be seen.
        length_s = self._times_s[-1] - self._times_s[0]
        self._turn_s = length_s * (1 + 1 / max(1, len(self._times_s) - 1))
        self._position = 0
        self._lock = threading.Lock()

    @property
    def n_events(self) -> int:
        """Events in one turn."""
        return len(self._times_s)

    @property
    def position(self) -> int:
        """Events passed since the beginning, over all turns; 0 at the first event."""
        with self._lock:
            if self._clock is not None:
                self._position = max(self._position, self._find(self._clock() - self._start_s))
            return self._position

    @property
    def is_over(self) -> bool:
        """Whether the last event is reached and no other turn follows."""
        return not self._loop and self.position == self.n_events - 1

    def advance(self, n_events: int = 1) -> int:
        """Go on by some events, to the last at most; how many it were.

        Raises:
            BadInputError: a negative number, or the position follows a clock.
        """
        if n_events < 0 or self._clock is not None:
            raise BadInputError(f"can't go on by {n_events} events: only forward, without a clock")
        with self._lock:
            before = self._position
            self._position += n_events
            if not self._loop:
                self._position = min(self._position, self.n_events - 1)
            return self._position - before

    def get_event(self, position: int) -> Event:
        """The event at a position of any turn."""
        return self.recording.events[position % self.n_events]

    def get_time_s(self, position: int) -> float:
        """When the event at a position of any turn comes, as the recording counts its time."""
        turns, place = divmod(position, self.n_events)
        return turns * self._turn_s + self._times_s[place]

    def _find(self, elapsed_s: float) -> int:
        """The position of the last event that is not later."""
        first_s = self._times_s[0]
        time_s = first_s + max(0.0, elapsed_s)
        turns = 0
        if self._loop and self._turn_s > 0:
            turns = int((time_s - first_s) // self._turn_s)
            time_s -= turns * self._turn_s
        place = max(0, bisect_right(self._times_s, time_s) - 1)
        return turns * self.n_events + place


class ReplayBackend:
    """A recording as a ``MemoryBackend``.

    What is recorded can't be changed, so ``empty_cache`` does nothing.

    Args:
        playback: where it stands; share it with a ``ReplayMonitor``.
    """

    kind = "replay"

    def __init__(self, playback: Playback) -> None:
        self.playback = playback
        self._lock = threading.Lock()
        self._tracks: dict[str, Track] = {}
        self._notes: list[str] = []
        self._at = -1
        self._tracer = ReplayTracer(playback)
        self._standing = Standing(playback)
        #: Each device's last reading in the recording, for totals that go on over turns.
        self._final: dict[str, Reading] = {}
        for event in playback.recording.events:
            self._final.update((reading.device, reading) for reading in event.readings)

    @classmethod
    def from_file(
        cls,
        path: str | Path,
        *,
        clock: Callable[[], float] | None = None,
        loop: bool = False,
    ) -> ReplayBackend:
        """A backend that plays a file.

        Raises:
            FileError: the file can't be read.
            RecordingError: it is not ours, cut short, or of another version.
        """
        return cls(Playback(load_recording(path), clock=clock, loop=loop))

    @classmethod
    def from_script(
        cls,
        steps: Sequence[Step],
        *,
        clock: Callable[[], float] | None = None,
        loop: bool = False,
        **options: Any,
    ) -> ReplayBackend:
        """A backend that plays what a script does to simulated devices.

        Args:
            steps: see ``gpumemwidget.backends.script``.
            clock: see ``Playback``.
            loop: see ``Playback``.
            options: for ``play_script``.

        Raises:
            BadInputError: a step can't be carried out.
        """
        return cls(Playback(play_script(steps, **options), clock=clock, loop=loop))

    def list_devices(self) -> tuple[DeviceInfo, ...]:
        """The devices that were touched up to now, in the recording's order."""
        with self._lock:
            self._follow()
            return tuple(self._list_infos())

    def read(self) -> tuple[Reading, ...]:
        """What stood at this position, with the peaks since the span began."""
        return self._answer()

    def start_span(self) -> tuple[Reading, ...]:
        """Begin a span here."""
        return self._answer(start=True)

    def end_span(self) -> tuple[Reading, ...]:
        """What stood at this position, with the peaks since the span began."""
        return self._answer()

    def read_as_user(self) -> tuple[Reading, ...]:
        """What stood at this position, with the peaks since the recording began."""
        return self._answer(as_user=True)

    def read_segments(self) -> tuple[Segment, ...]:
        """The snapshot that was taken at this position; ``()`` where there was none."""
        return self.playback.get_event(self.playback.position).segments or ()

    @property
    def is_tracing(self) -> bool:
        """Whether a trace runs."""
        return self._tracer.is_tracing

    def start_trace(self, *, n_events: int) -> tuple[str, ...]:
        """Begin a trace here; a sentence, where the recording holds no events."""
        return self._tracer.start(n_events=n_events)

    def end_trace(self, *, snapshot_to: Path | None = None) -> tuple[AllocatorTrace, ...]:
        """The recorded events since then, as if they happened now."""
        touched = [info.device for info in self.list_devices() if info.device != HOST]
        traces = self._tracer.end(touched)
        if traces and snapshot_to is not None:
            try:
                write_snapshot(format_snapshot(traces), snapshot_to)
            except FileError as exc:
                self._notes.append(str(exc))
        return traces

    def read_pinned(self) -> PinnedUse | None:
        """What was pinned at this position."""
        return self._standing.follow().pinned

    def set_limit(
        self,
        device: str,
        limit_bytes: int | None,  # noqa: ARG002 - the protocol's
        *,
        share: float | None = None,  # noqa: ARG002 - as above
    ) -> None:
        """Nothing: a recording stays what it is.

        Raises:
            BackendError: always.
        """
        raise BackendError(f"{device} is played from a recording, whose limits stay as they are")

    def read_limits(self) -> tuple[Limit, ...]:
        """The limits that stood at this position, of the devices in use and of those that wait."""
        limits = self._standing.follow().limits
        reserved = {reading.device: reading.reserved_bytes for reading in self.read()}
        return tuple(
            replace(limit, reserved_bytes=reserved.get(limit.device))
            for limit in limits
            if limit.is_waiting or limit.device in reserved
        )

    def reset_peaks(self, devices: Collection[str] | None = None) -> tuple[str, ...]:
        """Let the user's peaks begin anew here, as the user's own call would."""
        with self._lock:
            self._follow()
            reset = [info.device for info in self._list_infos() if info.device != HOST]
            reset = [each for each in reset if devices is None or each in devices]
            for each in reset:
                self._tracks[each].reset_user()
            return tuple(reset)

    def set_sites(self, *, is_on: bool) -> str:  # noqa: ARG002 - the protocol's
        """Nothing: a recording stays what it is."""
        return "a recording keeps the lines that it has" if self._tracer.has_gpu else ""

    def release_workspaces(self) -> None:
        """Nothing: a recording stays what it is."""

    def empty_cache(self) -> None:
        """Nothing: a recording stays what it is."""

    def take_notes(self) -> tuple[str, ...]:
        """Sentences on files that could not be written."""
        notes, self._notes = tuple(self._notes), []
        return notes

    def close(self) -> None:
        """End a trace that runs; nothing was added to the process."""
        self._tracer.end(())

    def _answer(self, *, start: bool = False, as_user: bool = False) -> tuple[Reading, ...]:
        with self._lock:
            self._follow()
            n_turns = self._at // self.playback.n_events
            readings = []
            for info in self._list_infos():
                track = self._tracks[info.device]
                if start:
                    track.start_span()
                final = self._final[info.device]
                readings.append(track.to_reading(n_turns, final, as_user=as_user))
            return tuple(readings)

    def _list_infos(self) -> list[DeviceInfo]:
        limits = {each.device: each.limit_bytes for each in self._standing.follow().limits}
        return [
            replace(info, limit_bytes=limits.get(info.device, info.limit_bytes))
            for info in self.playback.recording.devices
            if info.device in self._tracks
        ]

    def _follow(self) -> None:
        """Pass all events up to the playback's position."""
        position = self.playback.position
        # Of many turns that nobody looked at, one is like another.
        n_events = self.playback.n_events
        if position - self._at > 2 * n_events:
            self._at += (position - self._at) // n_events * n_events - n_events
        while self._at < position:
            self._at += 1
            self._pass(self.playback.get_event(self._at))

    def _pass(self, event: Event) -> None:
        begins_turn = self._at % self.playback.n_events == 0
        for reading in event.readings:
            track = self._tracks.get(reading.device)
            if track is None:
                self._tracks[reading.device] = Track(reading)
            elif begins_turn:
                track.jump(reading)
            else:
                track.pass_event(reading, starts=event.action == "start_span")
        if event.action in ("start_span", "tick"):
            for reading in event.readings:
                self._tracks[reading.device].restart_marks()


class ReplayMonitor:
    """A recording's whole devices as a ``DeviceMonitor``.

    Args:
        playback: where it stands; a ``ReplayBackend`` has it as ``.playback``.
    """

    def __init__(self, playback: Playback) -> None:
        self._playback = playback
        self._standing = Standing(playback)
        self._processes = ReplayProcesses(playback)
        self._is_closed = False

    def list_infos(self) -> tuple[DeviceInfo, ...]:
        """What the driver listed when it was recorded."""
        return () if self._is_closed else self._playback.recording.visible

    def match(self, uuids: Mapping[str, str]) -> None:
        """Nothing: the recording has PyTorch's names."""

    def read_use(self, device: str) -> DeviceUse | None:
        """The whole device at this position; ``None`` where it was not read until here."""
        use = None if self._is_closed else self._standing.follow().uses.get(device)
        # A device that answered nothing was read all the same.
        return None if use is None or _is_empty(use) else use

    def read_own_use(self, device: str) -> int | None:
        """What the recorded process took; ``None`` where the recording does not tell."""
        return dict(self.list_processes(device) or ()).get(self._processes.own_pid)

    def list_processes(self, device: str) -> tuple[tuple[int, int | None], ...] | None:
        """Who was on it at this position; ``None`` where the recording does not tell."""
        if self._is_closed:
            return None
        listed = self._standing.follow().processes.get(device)
        if listed is None:
            return None
        return tuple((use.pid, use.n_bytes) for use in sorted(listed, key=lambda use: use.pid))

    def list_failures(self, device: str) -> tuple[str, ...]:
        """What could not be read at this position."""
        return () if self._is_closed else self._standing.follow().failures.get(device, ())

    @property
    def processes(self) -> ReplayProcesses:
        """The processes of the recording."""
        return self._processes

    def take_notes(self) -> tuple[str, ...]:
        """Nothing: what failed when it was recorded is unknown here."""
        return ()

    def close(self) -> None:
        """List no devices any more."""
        self._is_closed = True


def _is_empty(use: DeviceUse) -> bool:
    return use.used_bytes is use.free_bytes is use.utilization_percent is None
