"""Record the memory of this machine's devices, to be played back elsewhere."""

from __future__ import annotations

import dataclasses
import threading
import time
from bisect import bisect_left
from collections.abc import Callable, Sequence

from gpumemwidget.backends.hardware import Hardware
from gpumemwidget.backends.protocol import DeviceMonitor
from gpumemwidget.model.devices import DeviceUse, Limit, Reading
from gpumemwidget.model.segments import Segment
from gpumemwidget.model.traces import ACTIONS, AllocatorTrace, TraceEvents
from gpumemwidget.testing.recording import AllocatorEvent, Change, Event, Recording, Surroundings

__all__ = ["Recorder", "list_allocator_events"]


class Recorder:
    """Reads hardware at chosen moments, and keeps what it says.

    The peaks between any two of these moments can be told from the recording, exactly where the
    hardware tells them exactly. Recording begins spans of its own on the hardware.

    Args:
        hardware: what is recorded. The caller closes it.
        monitor: what lists the whole devices; without it, they are not recorded.
        clock: returns seconds, counted from anywhere.
        about: what is recorded, and on what machine.
        max_events: from this number on, nothing more is kept.
    """

    def __init__(
        self,
        hardware: Hardware,
        monitor: DeviceMonitor | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
        about: str = "",
        max_events: int = 100_000,
    ) -> None:
        self._hardware = hardware
        self._monitor = monitor
        self._clock = clock
        self._max_events = max_events
        self._start_s = clock()
        self._lock = threading.Lock()
        self._recording = Recording(devices=(), visible=(), events=(), about=about)
        self._events: list[Event] = []
        self._surroundings = Surroundings()
        #: First event of the running trace, and the recording's start in microseconds on the clock
        #: of the allocator's history.
        self._trace_start = (0, 0.0)

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
        began_us = time.time_ns() / 1000 - (self._clock() - self._start_s) * 1e6
        self._trace_start = (len(self._events) - 1, began_us)
        return notes

    def end_trace(self) -> tuple[AllocatorTrace, ...]:
        """Record this moment, and what was allocated since ``start_trace``, which is returned."""
        n_events = self.n_events
        self.tick()
        with self._lock:
            traces = self._hardware.end_trace()
            # If it was full before, it lacks the moment at which the traces end.
            if traces and self.n_events > n_events:
                first, began_us = self._trace_start
                self._events[first:] = _add_traces(self._events[first:], traces, began_us)
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
        uses, change = self._read_whole_devices()
        time_s = round(self._clock() - self._start_s, 6)
        self._events.append(Event(time_s, readings, uses, segments, change=change))

    def _read_whole_devices(self) -> tuple[tuple[DeviceUse, ...], Change]:
        """Return the whole devices, and what has changed on them."""
        hardware, monitor = self._hardware, self._monitor
        states = {
            state.info.device: state for state in hardware.take_device_states(with_segments=False)
        }
        visible = () if monitor is None else monitor.list_infos()
        processes = {device: state.processes for device, state in states.items()}
        failures = {}
        if monitor is not None:
            # Only the driver's own words: a player concludes from them anew.
            for info in visible:
                failures[info.device] = monitor.list_failures(info.device)
                if monitor.list_processes(info.device) == ():
                    processes[info.device] = ()
        surroundings = Surroundings(
            processes=processes,
            failures=failures,
            # The devices' own records say how much children take of each.
            children=tuple(
                dataclasses.replace(child, devices=()) for child in hardware.list_children()
            ),
            pinned=hardware.read_pinned(),
            limits=tuple(
                Limit(
                    each.device,
                    each.limit_bytes,
                    each.total_bytes,
                    None,
                    is_waiting=each.is_waiting,
                    share=each.share,
                )
                for each in hardware.read_limits()
            ),
        )
        change = surroundings.compare(self._surroundings)
        self._surroundings = surroundings
        uses = []
        for info in visible:
            state = states.get(info.device)
            # A device that answers nothing is recorded as unknown, else its last answer would stay.
            unknown = DeviceUse(info.device, None, None, None)
            uses.append(unknown if state is None or state.use is None else state.use)
        return tuple(uses), change


def list_allocator_events(
    events: TraceEvents, *, shift_us: float = 0.0, start: int = 0, stop: int | None = None
) -> tuple[AllocatorEvent, ...]:
    """Return the entries from ``start`` to ``stop``, with their times moved, but not before 0."""
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
            time_us=max(0, round(time_us + shift_us)),
            stream=stream,
            frames=events.stack_table[stack],
        )
        for action, address, n_bytes, time_us, stream, stack in rows
    )


def _add_traces(
    events: Sequence[Event], traces: Sequence[AllocatorTrace], began_us: float
) -> list[Event]:
    """Return events with what the allocators did before each, and their segments at both ends.

    Args:
        events: from the moment at which the traces start to the one at which they end.
        traces: one for each device.
        began_us: when the recording began, on the clock of the allocator's history.
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
            until_us = began_us + event.time_s * 1e6
            stop = len(times_us) if is_last else bisect_left(times_us, until_us, lo=start)
            starts[trace.device] = stop
            if stop > start:
                entries = list_allocator_events(
                    trace.events, shift_us=-began_us, start=start, stop=stop
                )
                traced.append((trace.device, entries))
        segments = after if is_last else event.segments
        completed.append(dataclasses.replace(event, segments=segments, traced=tuple(traced)))
    return completed
