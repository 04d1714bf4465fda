"""Record the memory of this machine's devices, to be played back elsewhere."""

from __future__ import annotations

import dataclasses
import threading
import time
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence

from gpumemwidget.backends.hardware import Hardware
from gpumemwidget.backends.protocol import DeviceMonitor
from gpumemwidget.model.devices import DeviceState, DeviceUse, Reading
from gpumemwidget.model.segments import Segment
from gpumemwidget.model.traces import ACTIONS, AllocatorTrace, TraceEvents
from gpumemwidget.testing.recording import AllocatorEvent, Event, Recording, Surroundings


class Recorder:
    """Reads hardware at chosen moments, and keeps what it says.

    The peaks between any two of these moments can be told from the recording, exactly where the
    hardware tells them exactly. Recording begins spans of its own on the hardware.

    Args:
        hardware: what is recorded. The caller closes it.
        monitor: what lists the whole devices; without it, they are not recorded.
        clock_ns: returns nanoseconds since the epoch, as the allocator's history counts them.
        about: what is recorded, and on what machine.
        max_events: from this number on, nothing more is kept.
    """

    def __init__(
        self,
        hardware: Hardware,
        monitor: DeviceMonitor | None = None,
        *,
        clock_ns: Callable[[], int] = time.time_ns,
        about: str = "",
        max_events: int = 100_000,
    ) -> None:
        self._hardware = hardware
        self._monitor = monitor
        self._clock_ns = clock_ns
        self._max_events = max_events
        self._start_us = clock_ns() // 1000
        self._lock = threading.Lock()
        self._recording = Recording(devices=(), visible=(), events=(), about=about)
        self._events: list[Event] = []
        self._surroundings = Surroundings()
        #: The place of the running trace's first event.
        self._trace_start = 0

    @property
    def n_events(self) -> int:
        """The number of events that were kept."""
        return len(self._events)

    def tick(self, *, with_segments: bool = False) -> tuple[Reading, ...]:
        """Record this moment, and return its readings with the peaks since the one before.

        Args:
            with_segments: record the allocators' segments too.
        """
        with self._lock:
            ended, started = self._hardware.end_span(), self._hardware.start_span()
            # Peaks from before the recording are no part of it.
            readings = ended if self._events else started
            if len(self._events) < self._max_events:
                segments = self._hardware.read_segments() if with_segments else None
                self._keep(readings, segments)
            return readings

    def start_trace(self, *, n_events: int = 1_000_000) -> tuple[str, ...]:
        """Record this moment, and each allocation from now on; return why that can't be done."""
        notes = self._hardware.start_trace(n_events=n_events)
        self.tick()
        self._trace_start = len(self._events) - 1
        return notes

    def end_trace(self) -> tuple[AllocatorTrace, ...]:
        """Record this moment, and what was allocated since ``start_trace``, which is returned."""
        n_events = self.n_events
        self.tick()
        with self._lock:
            traces = self._hardware.end_trace()
            # If it was full before, it lacks the moment at which the traces end.
            if traces and self.n_events > n_events:
                start = self._trace_start
                self._events[start:] = _add_traces(self._events[start:], traces, self._start_us)
                self._recording = dataclasses.replace(
                    self._recording,
                    rules=traces[0].rules,
                    is_whole=all(trace.is_whole for trace in traces),
                )
            return traces

    def to_recording(self) -> Recording:
        """Return what was recorded until now."""
        with self._lock:
            visible = () if self._monitor is None else self._monitor.list_infos()
            return dataclasses.replace(self._recording, visible=visible, events=tuple(self._events))

    def _keep(self, readings: tuple[Reading, ...], segments: tuple[Segment, ...] | None) -> None:
        # Limits come and go, so they are recorded with the events.
        listed = self._hardware.list_devices()
        infos = {each.device: dataclasses.replace(each, limit_bytes=None) for each in listed}
        # In the latest order: a GPU that comes into use later stands before the host.
        gone = [each for each in self._recording.devices if each.device not in infos]
        self._recording = dataclasses.replace(self._recording, devices=(*infos.values(), *gone))
        states = {
            state.info.device: state
            for state in self._hardware.take_device_states(with_segments=False)
        }
        surroundings = self._read_surroundings(states)
        is_same = bool(self._events) and surroundings == self._surroundings
        self._surroundings = surroundings
        # The machine's clock may be set back.
        time_s = max(
            self._events[-1].time_s if self._events else 0.0,
            (self._clock_ns() // 1000 - self._start_us) / 1e6,
        )
        self._events.append(
            Event(
                time_s,
                readings,
                self._list_uses(states),
                segments,
                surroundings=None if is_same else surroundings,
            )
        )

    def _list_uses(self, states: Mapping[str, DeviceState]) -> tuple[DeviceUse, ...]:
        visible = () if self._monitor is None else self._monitor.list_infos()
        uses = ((info.device, states.get(info.device)) for info in visible)
        return tuple(
            # A device that answers nothing is recorded as unknown.
            DeviceUse(device, None, None, None) if state is None or state.use is None else state.use
            for device, state in uses
        )

    def _read_surroundings(self, states: Mapping[str, DeviceState]) -> Surroundings:
        hardware, monitor = self._hardware, self._monitor
        processes = {device: state.processes for device, state in states.items()}
        failures = {}
        if monitor is not None:
            # Only the driver's own words: a player concludes from them anew.
            for info in monitor.list_infos():
                failures[info.device] = monitor.list_failures(info.device)
                if monitor.list_processes(info.device) == ():
                    processes[info.device] = ()
        return Surroundings(
            processes=processes,
            failures=failures,
            children=tuple(
                dataclasses.replace(child, devices=()) for child in hardware.list_children()
            ),
            pinned=hardware.read_pinned(),
            limits=tuple(
                dataclasses.replace(limit, reserved_bytes=None) for limit in hardware.read_limits()
            ),
        )


def list_allocator_events(
    events: TraceEvents, *, start_us: int = 0, start: int = 0, stop: int | None = None
) -> tuple[AllocatorEvent, ...]:
    """Return the entries from ``start`` to ``stop``, with their times counted from ``start_us``."""
    columns = (
        events.actions,
        events.addresses,
        events.sizes,
        events.times_us,
        events.streams,
        events.stacks,
    )
    rows = zip(*(column[start:stop] for column in columns), strict=True)
    return tuple(
        AllocatorEvent(
            action=ACTIONS[action],
            address=address,
            n_bytes=n_bytes,
            time_us=max(0, time_us - start_us),
            stream=stream,
            frames=events.stack_table[stack],
        )
        for action, address, n_bytes, time_us, stream, stack in rows
    )


def _add_traces(
    events: Sequence[Event], traces: Sequence[AllocatorTrace], start_us: int
) -> list[Event]:
    """Return events with what the allocators did before each, and their segments at both ends.

    Args:
        events: from the moment at which the traces start to the one at which they end.
        traces: one for each device.
        start_us: when the recording began, in microseconds since the epoch.
    """
    before = tuple(segment for trace in traces for segment in trace.before)
    after = tuple(segment for trace in traces for segment in trace.after)
    completed = [dataclasses.replace(events[0], segments=before)]
    starts = dict.fromkeys((trace.device for trace in traces), 0)
    for event in events[1:]:
        is_last = event is events[-1]
        traced = []
        for trace in traces:
            times_us, start = trace.events.times_us, starts[trace.device]
            until_us = start_us + round(event.time_s * 1e6)
            stop = len(times_us) if is_last else bisect_right(times_us, until_us, lo=start)
            starts[trace.device] = stop
            if stop > start:
                entries = list_allocator_events(
                    trace.events, start_us=start_us, start=start, stop=stop
                )
                traced.append((trace.device, entries))
        segments = after if is_last else event.segments
        completed.append(dataclasses.replace(event, segments=segments, traced=tuple(traced)))
    return completed
