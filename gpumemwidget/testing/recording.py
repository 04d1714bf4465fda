"""Recordings: what the memory of real or simulated devices did, as records and as a file.

A file is the recording's records as JSON, compressed by gzip: ``zcat FILE`` shows it. It is read
and written by msgspec, which holds every value to the type of its field.
"""

from __future__ import annotations

import dataclasses
import gzip
import math
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from gpumemwidget.errors import FileError, RecordingError
from gpumemwidget.model.devices import (
    ChildProcess,
    DeviceInfo,
    DeviceUse,
    Limit,
    PinnedUse,
    ProcessUse,
    Reading,
)
from gpumemwidget.model.segments import Frame, Segment
from gpumemwidget.model.traces import ACTIONS, AllocatorRules

__all__ = [
    "AllocatorEvent",
    "Change",
    "Event",
    "Recording",
    "Surroundings",
    "decode_recording",
    "encode_recording",
    "load_recording",
    "save_recording",
]


@dataclass(frozen=True, slots=True)
class AllocatorEvent:
    """One entry of an allocator's history."""

    #: One of ``gpumemwidget.model.traces.ACTIONS``.
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
class Change:
    """A difference to the event before; an empty field is unchanged."""

    #: The processes on a device; ``None`` where the driver does not tell.
    processes: tuple[tuple[str, tuple[ProcessUse, ...] | None], ...] = ()
    #: Why something of a device can't be read.
    failures: tuple[tuple[str, tuple[str, ...]], ...] = ()
    #: The processes below the recorded one.
    children: tuple[ChildProcess, ...] | None = None
    #: Pinned host memory. PyTorch counts it from its first use on.
    pinned: PinnedUse | None = None
    #: The limits of the devices, without what is reserved: the readings have that.
    limits: tuple[Limit, ...] | None = None


@dataclass(frozen=True, slots=True)
class Surroundings:
    """Processes, failures, children, pinned memory and limits at one event; mappings by device."""

    processes: Mapping[str, tuple[ProcessUse, ...] | None] = field(default_factory=dict)
    failures: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    children: tuple[ChildProcess, ...] = ()
    pinned: PinnedUse | None = None
    limits: tuple[Limit, ...] = ()

    def apply(self, change: Change) -> Surroundings:
        """Return what is known after a change."""
        return Surroundings(
            processes={**self.processes, **dict(change.processes)},
            failures={**self.failures, **dict(change.failures)},
            children=self.children if change.children is None else change.children,
            pinned=self.pinned if change.pinned is None else change.pinned,
            limits=self.limits if change.limits is None else change.limits,
        )

    def compare(self, before: Surroundings) -> Change:
        """Return the change that leads here from ``before``."""
        return Change(
            processes=tuple(
                (device, uses)
                for device, uses in self.processes.items()
                if uses != before.processes.get(device)
            ),
            failures=tuple(
                (device, reasons)
                for device, reasons in self.failures.items()
                if reasons != before.failures.get(device, ())
            ),
            children=None if self.children == before.children else self.children,
            pinned=None if self.pinned == before.pinned else self.pinned,
            limits=None if self.limits == before.limits else self.limits,
        )


@dataclass(frozen=True, slots=True)
class Event:
    """One moment of a recording."""

    #: Seconds since the recording began.
    time_s: float
    #: The counters of the devices in use. Their peaks are those since the event before.
    readings: tuple[Reading, ...]
    #: The whole devices, where the driver told of them.
    uses: tuple[DeviceUse, ...] = ()
    #: The allocators' segments; ``None`` where no snapshot was taken.
    segments: tuple[Segment, ...] | None = None
    #: Allocator events of each device since the event before, where a history was recorded.
    traced: tuple[tuple[str, tuple[AllocatorEvent, ...]], ...] = ()
    change: Change = field(default_factory=Change)


@dataclass(frozen=True, slots=True)
class Recording:
    """The memory of some devices over some time."""

    #: The devices with counters, in the order in which they are shown.
    devices: tuple[DeviceInfo, ...]
    #: The devices that the driver listed, in use or not.
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


@dataclass(frozen=True, slots=True)
class _Content:
    """A file's content: its format's name and version, and the recording."""

    format: Literal["gpumemwidget recording"]
    version: Literal[3]
    recording: Recording


def encode_recording(recording: Recording) -> bytes:
    """Return a recording as JSON: what a file contains, without its compression.

    Raises:
        FileError: msgspec is not installed.
    """
    msgspec = _import_msgspec()
    content = _Content("gpumemwidget recording", 3, recording)
    data: bytes = msgspec.json.encode(content)
    return data


def decode_recording(data: bytes, *, source: str = "recording") -> Recording:
    """Return the recording that ``encode_recording`` made ``data`` of.

    Args:
        data: JSON.
        source: what to call it in errors.

    Raises:
        RecordingError: it is something else, is cut short, or contradicts itself.
        FileError: msgspec is not installed.
    """
    msgspec = _import_msgspec()
    try:
        content: _Content = msgspec.json.decode(data, type=_Content)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        if b"gpumemwidget recording" not in data[:100]:
            raise RecordingError(
                f"{source} is no recording of gpumemwidget's: choose another file"
            ) from None
        raise RecordingError(f"{source} is damaged: {error}; record it again") from None
    fault = next(_find_faults(content.recording), None)
    if fault is not None:
        raise RecordingError(f"{source} is damaged: {fault}; record it again")
    return content.recording


def load_recording(path: str | Path) -> Recording:
    """Read a recording from a file.

    Raises:
        FileError: the file can't be read, or msgspec is not installed.
        RecordingError: it is no recording, or it is damaged.
    """
    try:
        data = gzip.decompress(Path(path).read_bytes())
    except (EOFError, zlib.error):
        raise RecordingError(f"{path} is cut short or damaged: record it again") from None
    except gzip.BadGzipFile:
        raise RecordingError(
            f"{path} is no recording of gpumemwidget's: choose another file"
        ) from None
    except OSError as error:
        raise FileError(f"{path} can't be read: {error.strerror or error}") from error
    return decode_recording(data, source=str(path))


def save_recording(recording: Recording, path: str | Path) -> None:
    """Write a recording into a new file, whose name should end in ``.json.gz``.

    Raises:
        FileError: the file is there already or can't be written, or msgspec is not installed.
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


def _import_msgspec() -> Any:
    """Return msgspec, which only files need: simulated GPUs and scripts do without."""
    try:
        import msgspec  # noqa: PLC0415 - an extra
    except ModuleNotFoundError:
        raise FileError(
            "recordings are read and written by msgspec, which is not installed: "
            'pip install "gpumemwidget[testing]"'
        ) from None
    return msgspec


def _find_faults(recording: Recording) -> Iterator[str]:
    """Yield what the types of a recording's fields allow and no recording can be, one by one."""
    if not recording.events:
        yield "it holds no event"
    known = {info.device for info in recording.devices}
    before_s = 0.0
    for number, event in enumerate(recording.events):
        if not before_s <= event.time_s < math.inf:
            yield f"event {number} has no time, or is earlier than the one before"
        before_s = event.time_s
        named = [reading.device for reading in event.readings]
        segments = event.segments or ()
        for device in (*named, *(each.device for each in segments), *dict(event.traced)):
            if device not in known:
                yield f"event {number} reads {device}, which is not listed"
        if len(set(named)) < len(named):
            yield f"event {number} reads a device twice"
        for segment in segments:
            end = segment.address
            for block in segment.blocks:
                if block.address != end or block.n_bytes <= 0:
                    yield f"event {number} has blocks that don't lie side by side"
                end += block.n_bytes
            if end != segment.address + segment.n_bytes:
                yield f"event {number} has a segment that its blocks don't fill"
        for _, traced in event.traced:
            if not all(map(_is_possible, traced)):
                yield f"event {number} has an impossible event of the allocator"
    yield from _find_negatives(recording)


def _is_possible(event: AllocatorEvent) -> bool:
    """Return whether the values fit into ``TraceEvents``."""
    values = (event.n_bytes, event.time_us, event.stream)
    return (
        event.action in ACTIONS
        and 0 <= event.address < 1 << 64
        and all(0 <= value < 1 << 63 for value in values)
    )


def _find_negatives(value: object, name: str = "recording") -> Iterator[str]:
    """Yield the fields of nested records whose numbers are below 0."""
    if isinstance(value, tuple):
        for each in value:
            yield from _find_negatives(each, name)
    elif dataclasses.is_dataclass(value):
        for each in dataclasses.fields(value):
            yield from _find_negatives(getattr(value, each.name), each.name)
    elif isinstance(value, (int, float)) and value < 0:
        yield f"{name} is {value}, and can't be negative"
