"""Writes real counters down, so that they can be played back where the hardware is not."""

from __future__ import annotations

import dataclasses
import threading
import time
from bisect import bisect_left
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol, runtime_checkable

from gpumemwidget.backends.base import DeviceMonitor
from gpumemwidget.backends.histfile import cut_events
from gpumemwidget.backends.recording import Action, Event, Recording, save_recording
from gpumemwidget.backends.statechanges import Change, Seen
from gpumemwidget.devices import ChildProcess, DeviceState, Limit
from gpumemwidget.records import DeviceInfo, DeviceUse, Reading, Segment
from gpumemwidget.traces import AllocatorRules, AllocatorTrace

__all__ = ["Recorder", "Source", "WholeSource"]


class Source(Protocol):
    """What can be recorded: a memory backend, or several behind one object."""

    def list_devices(self) -> tuple[DeviceInfo, ...]:
        """The devices that have counters now."""
        ...

    def read(self) -> tuple[Reading, ...]:
        """One reading for each of them."""
        ...

    def start_span(self) -> tuple[Reading, ...]:
        """Begin a span."""
        ...

    def end_span(self) -> tuple[Reading, ...]:
        """End a span."""
        ...

    def read_segments(self) -> tuple[Segment, ...]:
        """The allocator's segments and blocks."""
        ...

    def start_trace(self, *, n_events: int) -> tuple[str, ...]:
        """Begin to note each allocation."""
        ...

    def end_trace(self, *, snapshot_to: Path | None = None) -> tuple[AllocatorTrace, ...]:
        """What was noted since."""
        ...


@runtime_checkable
class WholeSource(Source, Protocol):
    """One that also tells of whole devices, and of who is on them: ``Hardware``."""

    def take_device_states(self, *, with_segments: bool) -> tuple[DeviceState, ...]:
        """All that can be told of every device at one moment."""
        ...

    def list_children(self) -> tuple[ChildProcess, ...]:
        """The processes below this one."""
        ...

    def read_limits(self) -> tuple[Limit, ...]:
        """The limits of the devices."""
        ...


class Recorder:
    """Passes calls on to a source, and keeps what it answers.

    Of a source that tells of whole devices the processes, their bytes, pinned memory and limits are
    kept with every event, as far as they have changed.

    Peaks are best kept by ``tick``: between two ticks they are exact, so that the recording can be
    played back with spans that begin and end at any of them.

    Args:
        source: what is recorded. It stays the caller's to close.
        monitor: what lists the whole devices, which are read with every event, if given.
        clock: seconds, from any start.
        about: what is recorded and on what machine, for the file.
        max_events: from there on nothing more is kept.
    """

    def __init__(
        self,
        source: Source,
        monitor: DeviceMonitor | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
        about: str = "",
        max_events: int = 100_000,
    ) -> None:
        self._source = source
        self._monitor = monitor
        self._clock = clock
        self._about = about
        self._max_events = max_events
        self._start_s = clock()
        self._lock = threading.Lock()
        self._devices: dict[str, DeviceInfo] = {}
        self._events: list[Event] = []
        self._trace_from = 0
        #: When the recording began, on the clock of the allocator's events.
        self._began_us = 0.0
        self._rules = AllocatorRules()
        self._is_whole = True
        self._last = Seen()

    def read(self) -> tuple[Reading, ...]:
        """``read`` of the source."""
        return self._keep("read", self._source.read)

    def start_span(self) -> tuple[Reading, ...]:
        """``start_span`` of the source."""
        return self._keep("start_span", self._source.start_span)

    def end_span(self) -> tuple[Reading, ...]:
        """``end_span`` of the source."""
        return self._keep("end_span", self._source.end_span)

    def tick(self) -> tuple[Reading, ...]:
        """End the running span and begin the next; what stood at the end."""
        return self._keep("tick", self._end_and_start)

    def take_snapshot(self) -> tuple[Segment, ...]:
        """``read_segments`` of the source, kept with a reading of the same moment."""
        found: list[tuple[Segment, ...]] = []

        def ask() -> tuple[Reading, ...]:
            found.append(self._source.read_segments())
            return self._source.read()

        self._keep("read", ask, found)
        return found[0]

    def start_trace(self, *, n_events: int = 1_000_000) -> tuple[str, ...]:
        """``start_trace`` of the source, and a span that begins with it."""
        notes = self._source.start_trace(n_events=n_events)
        self.start_span()
        self._trace_from = len(self._events) - 1
        self._began_us = time.time_ns() / 1000 - (self._clock() - self._start_s) * 1e6
        return notes

    def end_trace(self) -> tuple[AllocatorTrace, ...]:
        """``end_trace`` of the source; what it gives is kept with the moments it belongs to."""
        n_events = self.n_events
        self.end_span()
        with self._lock:
            traces = self._source.end_trace()
            # Where it was full before, the moment that they end at is not there.
            if traces and len(self._events) > n_events:
                self._rules = traces[0].rules
                self._is_whole = all(trace.is_whole for trace in traces)
                first = self._trace_from
                self._events[first:] = _lay_over(self._events[first:], traces, self._began_us)
            return traces

    @property
    def n_events(self) -> int:
        """How many events were kept."""
        return len(self._events)

    def to_recording(self) -> Recording:
        """What was recorded until now."""
        with self._lock:
            return Recording(
                devices=tuple(self._devices.values()),
                visible=() if self._monitor is None else self._monitor.list_infos(),
                events=tuple(self._events),
                about=self._about,
                rules=self._rules,
                is_whole=self._is_whole,
            )

    def save(self, path: str | Path) -> None:
        """Write what was recorded until now to a new file.

        Raises:
            FileError: the file is there already, or can't be written.
        """
        save_recording(self.to_recording(), path)

    def _end_and_start(self) -> tuple[Reading, ...]:
        readings = self._source.end_span()
        self._source.start_span()
        return readings

    def _keep(
        self,
        action: Action,
        ask: Callable[[], tuple[Reading, ...]],
        snapshots: Sequence[tuple[Segment, ...]] = (),
    ) -> tuple[Reading, ...]:
        with self._lock:
            readings = ask()
            if len(self._events) < self._max_events:
                # In the source's latest order: a GPU that comes later stands before the host.
                latest = {info.device: info for info in self._list_devices()}
                self._devices = {**latest, **self._devices, **latest}
                time_s = self._clock() - self._start_s
                segments = snapshots[0] if snapshots else None
                uses, change = self._read_devices()
                self._events.append(Event(time_s, action, readings, uses, segments, change=change))
            return readings

    def _list_devices(self) -> tuple[DeviceInfo, ...]:
        infos = self._source.list_devices()
        if not isinstance(self._source, WholeSource):
            return infos
        # Limits come and go: they stand with the events.
        return tuple(dataclasses.replace(info, limit_bytes=None) for info in infos)

    def _read_devices(self) -> tuple[tuple[DeviceUse, ...], Change]:
        """The whole devices, and what has changed on them."""
        source = self._source
        listed = () if self._monitor is None else self._monitor.list_infos()
        if isinstance(source, WholeSource):
            states = source.take_device_states(with_segments=False)
            seen = Seen.of(states, source.list_children(), source.read_limits())
            change, self._last = seen.compare(self._last), seen
            found = {state.info.device: state.use for state in states}
        else:
            change = Change()
            found = {} if self._monitor is None else _read_uses(self._monitor)
        # A device that answers nothing is written down as that, else its last answer would stand.
        uses = (
            found.get(each.device) or DeviceUse(each.device, None, None, None) for each in listed
        )
        return tuple(uses), change


def _read_uses(monitor: DeviceMonitor) -> dict[str, DeviceUse | None]:
    return {info.device: monitor.read_use(info.device) for info in monitor.list_infos()}


def _lay_over(
    events: Sequence[Event], traces: Sequence[AllocatorTrace], began_us: float
) -> list[Event]:
    """Events with what the allocator did before each, and what stood at both ends of it.

    Args:
        events: the first one stands at the traces' start, the last one at their end.
        traces: of all devices.
        began_us: when the recording began, on the clock of the allocator's events.
    """
    laid = [
        dataclasses.replace(
            events[0], segments=tuple(each for trace in traces for each in trace.before)
        )
    ]
    places = dict.fromkeys((trace.device for trace in traces), 0)
    for event in events[1:]:
        is_last = event is events[-1]
        traced = []
        for trace in traces:
            start, times_us = places[trace.device], trace.events.times_us
            until_us = began_us + event.time_s * 1e6
            stop = len(times_us) if is_last else bisect_left(times_us, until_us, lo=start)
            if stop > start:
                traced.append((trace.device, cut_events(trace.events, start, stop, -began_us)))
            places[trace.device] = stop
        laid.append(dataclasses.replace(event, traced=tuple(traced)))
    after = tuple(each for trace in traces for each in trace.after)
    laid[-1] = dataclasses.replace(laid[-1], segments=after)
    return laid
