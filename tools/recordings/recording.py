"""Recordings of what the memory of real or simulated devices does: records, files, a recorder.

A file is the ``Recording`` as JSON, compressed by gzip: ``zcat FILE`` shows it. It is read and
written by msgspec, which holds every value to the type of its field.
"""

from __future__ import annotations

import dataclasses
import gzip
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from gpumemwidget.backends.hardware import Hardware
from gpumemwidget.errors import FileError
from gpumemwidget.model.devices import (
    HOST,
    ChildProcess,
    DeviceInfo,
    DeviceUse,
    Frame,
    HardwareNote,
    Limit,
    ProcessUse,
    Reading,
    Segment,
)
from gpumemwidget.model.traces import AllocatorRules, AllocatorTrace, TraceAction, TraceEvents


@dataclass(frozen=True, slots=True)
class AllocatorEvent:
    """One entry of an allocator's history."""

    #: The word of a ``gpumemwidget.model.traces.TraceAction``.
    action: str
    #: The block's address; for an ``oom`` the free memory of the device.
    address: int
    n_bytes: int
    #: Microseconds since the recording began.
    time_us: int
    stream: int
    #: Frames that were running, innermost first.
    frames: tuple[Frame, ...] = ()


@dataclass(frozen=True, slots=True)
class Event:
    """One moment of a recording; mappings are by device."""

    #: Seconds since the recording began.
    time_s: float
    #: The counters of the devices in use. Their peaks are those since the event before.
    readings: tuple[Reading, ...]
    #: The whole devices, where the driver told of them.
    uses: tuple[DeviceUse, ...] = ()
    #: The allocators' segments; ``None`` where no snapshot was taken.
    segments: tuple[Segment, ...] | None = None
    #: Allocator events of each device, in the event with which a trace ends.
    traced: tuple[tuple[str, tuple[AllocatorEvent, ...]], ...] = ()
    #: The processes on a device; ``None`` where the driver does not tell.
    processes: Mapping[str, tuple[ProcessUse, ...] | None] = field(default_factory=dict)
    #: The processes below the recorded one, without their devices: ``processes`` has those.
    children: tuple[ChildProcess, ...] = ()
    #: Pinned host memory. PyTorch counts it from its first use on.
    pinned_bytes: int | None = None
    #: The limits of the devices, without what is reserved: the readings have that.
    limits: tuple[Limit, ...] = ()


@dataclass(frozen=True, slots=True)
class Recording:
    """The memory of some devices over some time."""

    #: The devices with counters, in the order in which they are shown.
    devices: tuple[DeviceInfo, ...]
    #: All devices but the host, in use or not.
    visible: tuple[DeviceInfo, ...]
    #: At least one, in the order of their times.
    events: tuple[Event, ...]
    #: The recorded program and its machine.
    about: str = ""
    #: The settings of the allocator whose history was recorded.
    rules: AllocatorRules = field(default_factory=AllocatorRules)
    #: False where the history had lost some of the allocator's events.
    is_whole: bool = True


# -- Files -----------------------------------------------------------------------------------------


def encode_recording(recording: Recording) -> bytes:
    """Return a recording as JSON: what a file contains, without its compression."""
    return msgspec.json.encode(recording)


def decode_recording(data: bytes) -> Recording:
    """Return the recording that ``encode_recording`` made ``data`` of.

    Raises:
        msgspec.MsgspecError: it is something else, or cut short.
    """
    return msgspec.json.decode(data, type=Recording)


def load_recording(path: str | Path) -> Recording:
    """Read a recording from a file."""
    return decode_recording(gzip.decompress(Path(path).read_bytes()))


def save_recording(recording: Recording, path: str | Path) -> None:
    """Write a recording into a new file, whose name should end in ``.json.gz``.

    Raises:
        FileError: the file is there already or can't be written.
    """
    # Without the time, equal recordings give equal files.
    data = gzip.compress(encode_recording(recording), mtime=0)
    try:
        with Path(path).open("xb") as file:
            file.write(data)
    except FileExistsError:
        raise FileError(f"{path} is there already: choose another name") from None
    except OSError as error:
        raise FileError(f"{path} can't be written: {error.strerror or error}") from error


# -- Recording -------------------------------------------------------------------------------------


class Recorder:
    """Reads hardware at chosen moments, and keeps what it says.

    The peaks between any two of these moments can be told from the recording, exactly where the
    hardware tells them exactly. Recording begins spans of its own on the hardware.

    Args:
        hardware: what is recorded. The caller closes it.
        about: what is recorded, and on what machine.
    """

    def __init__(self, hardware: Hardware, *, about: str = "") -> None:
        self._hardware = hardware
        self._start_us = time.time_ns() // 1000
        self._lock = threading.Lock()
        self._recording = Recording(devices=(), visible=(), events=(), about=about)
        self._events: list[Event] = []
        #: The place of the running trace's first event.
        self._trace_start = 0

    @property
    def n_events(self) -> int:
        """The number of events that were kept."""
        return len(self._events)

    def tick(self, *, with_segments: bool = False) -> None:
        """Record this moment, with the peaks since the one before.

        Args:
            with_segments: record the allocators' segments too.
        """
        with self._lock:
            ended, started = self._hardware.read_exact(), self._hardware.start_span()
            # Peaks from before the recording are no part of it.
            readings = ended if self._events else started
            self._keep(readings, self._hardware.read_segments() if with_segments else None)

    def start_trace(self, *, n_events: int = 1_000_000) -> tuple[HardwareNote, ...]:
        """Record this moment, and each allocation from now on; return why that can't be done."""
        notes = self._hardware.start_trace(n_events=n_events)
        self.tick()
        self._trace_start = len(self._events) - 1
        return notes

    def end_trace(self) -> tuple[AllocatorTrace, ...]:
        """Record this moment, and what was allocated since ``start_trace``, which is returned."""
        self.tick()
        with self._lock:
            traces = self._hardware.end_trace()
            if traces:
                self._add_traces(traces)
                self._recording = dataclasses.replace(
                    self._recording,
                    rules=traces[0].rules,
                    is_whole=all(trace.is_whole for trace in traces),
                )
            return traces

    def to_recording(self) -> Recording:
        """Return what was recorded until now."""
        with self._lock:
            visible = tuple(
                dataclasses.replace(info, limit_bytes=None)
                for info in self._hardware.list_all_devices()
                if info.device != HOST
            )
            return dataclasses.replace(self._recording, visible=visible, events=tuple(self._events))

    def _add_traces(self, traces: Sequence[AllocatorTrace]) -> None:
        """Add what the allocators did, and their segments at both ends, to the first and last."""
        start, end = self._events[self._trace_start], self._events[-1]
        before = tuple(segment for trace in traces for segment in trace.before)
        after = tuple(segment for trace in traces for segment in trace.after)
        traced = tuple(
            (trace.device, tuple(list_allocator_events(trace.events, start_us=self._start_us)))
            for trace in traces
        )
        self._events[self._trace_start] = dataclasses.replace(start, segments=before)
        self._events[-1] = dataclasses.replace(end, segments=after, traced=traced)

    def _keep(self, readings: tuple[Reading, ...], segments: tuple[Segment, ...] | None) -> None:
        # Limits come and go, so they are recorded with the events.
        listed = self._hardware.list_devices()
        infos = {each.device: dataclasses.replace(each, limit_bytes=None) for each in listed}
        # In the latest order: a GPU that comes into use later stands before the host.
        gone = [each for each in self._recording.devices if each.device not in infos]
        self._recording = dataclasses.replace(self._recording, devices=(*infos.values(), *gone))
        states = [
            state
            for state in self._hardware.take_device_states(with_segments=False)
            if state.info.device != HOST
        ]
        children, limits = self._hardware.list_children(), self._hardware.read_limits()
        # The machine's clock may be set back.
        time_s = max(
            self._events[-1].time_s if self._events else 0.0,
            (time.time_ns() // 1000 - self._start_us) / 1e6,
        )
        self._events.append(
            Event(
                time_s,
                readings,
                tuple(state.use for state in states if state.use is not None),
                segments,
                processes={state.info.device: state.processes for state in states},
                children=tuple(dataclasses.replace(child, devices=()) for child in children),
                pinned_bytes=self._hardware.read_pinned(),
                limits=tuple(dataclasses.replace(limit, reserved_bytes=None) for limit in limits),
            )
        )


def list_allocator_events(events: TraceEvents, *, start_us: int = 0) -> list[AllocatorEvent]:
    """Return the entries of a history, with their times counted from ``start_us``."""
    columns = zip(
        events.actions,
        events.addresses,
        events.sizes,
        events.times_us,
        events.streams,
        events.stacks,
        strict=True,
    )
    return [
        AllocatorEvent(
            TraceAction(action).word,
            address,
            n_bytes,
            max(0, time_us - start_us),
            stream,
            events.stack_table[stack],
        )
        for action, address, n_bytes, time_us, stream, stack in columns
    ]
