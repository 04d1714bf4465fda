"""Recordings: what the memory of real or simulated devices did, as records and as a file.

A file is the ``Recording`` as JSON, compressed by gzip: ``zcat FILE`` shows it. It is read and
written by msgspec, which holds every value to the type of its field.
"""

from __future__ import annotations

import gzip
import math
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

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
from gpumemwidget.model.traces import AllocatorRules


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
class Surroundings:
    """Processes, failures, pinned memory and limits at one moment; mappings are by device."""

    #: The processes on a device; ``None`` where the driver does not tell.
    processes: Mapping[str, tuple[ProcessUse, ...] | None] = field(default_factory=dict)
    #: Why something of a device can't be read.
    failures: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    #: The processes below the recorded one, without their devices: ``processes`` has those.
    children: tuple[ChildProcess, ...] = ()
    #: Pinned host memory. PyTorch counts it from its first use on.
    pinned: PinnedUse | None = None
    #: The limits of the devices, without what is reserved: the readings have that.
    limits: tuple[Limit, ...] = ()


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
    #: ``None``: as at the event before.
    surroundings: Surroundings | None = None


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


def encode_recording(recording: Recording) -> bytes:
    """Return a recording as JSON: what a file contains, without its compression.

    Raises:
        FileError: msgspec is not installed.
    """
    data: bytes = _import_msgspec().json.encode(recording)
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
        recording: Recording = msgspec.json.decode(data, type=Recording)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise _refuse(source, error) from None
    _check_events(recording, source)
    return recording


def load_recording(path: str | Path) -> Recording:
    """Read a recording from a file.

    Raises:
        FileError: the file can't be read, or msgspec is not installed.
        RecordingError: it is no recording, or it is damaged.
    """
    try:
        data = gzip.decompress(Path(path).read_bytes())
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise _refuse(str(path), error) from None
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


def _check_events(recording: Recording, source: str) -> None:
    """Refuse what the types of a recording's fields allow and no player can follow.

    Raises:
        RecordingError: there are no events, they are not in order, or name an unlisted device.
    """
    if not recording.events:
        raise _refuse(source, "it holds no event")
    known = {info.device for info in recording.devices}
    before_s = 0.0
    for number, event in enumerate(recording.events):
        if not before_s <= event.time_s < math.inf:
            raise _refuse(source, f"event {number} has no time, or is earlier than the one before")
        before_s = event.time_s
        for device in (*(reading.device for reading in event.readings), *dict(event.traced)):
            if device not in known:
                raise _refuse(source, f"event {number} reads {device}, which is not listed")


def _refuse(source: str, reason: object) -> RecordingError:
    return RecordingError(
        f"{source} is no recording, or damaged: {reason}; choose another file, or record it again"
    )
