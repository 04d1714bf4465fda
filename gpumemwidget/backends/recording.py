"""Recordings of real counters: what is in one, and the file that holds it.

A recording is a list of timed events, each with the readings of all devices. The file is JSON with
its units stated, small enough to keep beside tests, and refused when it is not whole.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

from gpumemwidget.backends.histfile import (
    EVENT_COLUMNS,
    format_rules,
    parse_rules,
    parse_traced,
    to_rows,
)
from gpumemwidget.backends.snapfile import (
    BLOCK_COLUMNS,
    SEGMENT_COLUMNS,
    BadSnapshotError,
    RowReader,
    StackTable,
)
from gpumemwidget.devices import ChildProcess, Limit, PinnedUse, ProcessUse
from gpumemwidget.errors import FileError, RecordingError
from gpumemwidget.records import DeviceInfo, DeviceUse, PeakIs, Reading, Segment
from gpumemwidget.traces import ACTIONS, AllocatorRules, TraceEvents

__all__ = [
    "Action",
    "Event",
    "Recording",
    "format_recording",
    "load_recording",
    "parse_recording",
    "save_recording",
]

_FORMAT = "gpumemwidget recording"
_VERSION = 1

#: What gave an event's readings. ``tick``: the end of one span, and at once the start of the next.
Action = Literal["read", "start_span", "end_span", "tick"]


@dataclass(frozen=True, slots=True)
class Event:
    """The readings of all devices in use at one moment."""

    #: Seconds since the recording began.
    time_s: float
    action: Action
    readings: tuple[Reading, ...]
    #: Whole devices, where they were read with it.
    uses: tuple[DeviceUse, ...] = ()
    #: The allocator's snapshot of this moment; ``None`` where none was taken.
    segments: tuple[Segment, ...] | None = None
    #: The allocator's events since the moment before, of each device that has any. Their times are
    #: microseconds since the recording began.
    traced: tuple[tuple[str, TraceEvents], ...] = ()
    #: Who was on each device, ``None`` where the driver did not tell; not of those that are as they
    #: were at the event before.
    processes: tuple[tuple[str, tuple[ProcessUse, ...] | None], ...] = ()
    #: Why something of a device could not be read, in the same way.
    failures: tuple[tuple[str, tuple[str, ...]], ...] = ()
    #: The processes below the recorded one; ``None``: as they were.
    children: tuple[ChildProcess, ...] | None = None
    #: Pinned host memory; ``None``: as it was.
    pinned: PinnedUse | None = None
    #: The devices' limits; ``None``: as they were.
    limits: tuple[Limit, ...] | None = None


@dataclass(frozen=True, slots=True)
class Recording:
    """A session's counters."""

    #: The devices that have counters, in the order in which they are shown.
    devices: tuple[DeviceInfo, ...]
    #: What the driver's library listed, in use or not.
    visible: tuple[DeviceInfo, ...]
    events: tuple[Event, ...]
    #: What was recorded, and on what machine.
    about: str = ""
    #: What the allocator's events go by.
    rules: AllocatorRules = field(default_factory=AllocatorRules)
    #: False where the history had lost some of the allocator's events.
    is_whole: bool = True


#: The file's columns: name, what a value must be, and whether it may be null.
_Check = Callable[[Any], bool]


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and value != ""


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _is_percent(value: Any) -> bool:
    return _is_count(value) and value <= 100


def _is_peak_kind(value: Any) -> bool:
    return value in get_args(PeakIs)


_INFO_COLUMNS: dict[str, tuple[_Check, bool]] = {
    "device": (_is_text, False),
    "name": (_is_text, False),
    "total_bytes": (_is_count, True),
    "limit_bytes": (_is_count, True),
    "uuid": (_is_text, True),
}
_READING_COLUMNS: dict[str, tuple[_Check, bool]] = {
    "device": (_is_text, False),
    "allocated_bytes": (_is_count, True),
    "reserved_bytes": (_is_count, True),
    "allocated_peak_bytes": (_is_count, True),
    "reserved_peak_bytes": (_is_count, True),
    "peak_is": (_is_peak_kind, True),
    "num_alloc_retries": (_is_count, True),
    "num_ooms": (_is_count, True),
}
_USE_COLUMNS: dict[str, tuple[_Check, bool]] = {
    "device": (_is_text, False),
    "used_bytes": (_is_count, True),
    "free_bytes": (_is_count, True),
    "total_bytes": (_is_count, True),
    "utilization_percent": (_is_percent, True),
}
_UNITS = {"_bytes": "bytes", "_s": "seconds since the recording began", "_percent": "0 to 100"}


def format_recording(recording: Recording) -> str:
    """A recording as the file's text: one line an event."""
    stacks = StackTable()
    events = [_format_event(event, stacks) for event in recording.events]
    has_traces = any(event.traced for event in recording.events)
    has_snapshots = has_traces or any(event.segments is not None for event in recording.events)
    snapshot_columns = {
        "events": ["time_s", "action", "readings", "uses", "segments"],
        "segments": list(SEGMENT_COLUMNS),
        "blocks": list(BLOCK_COLUMNS),
        "frames": ["filename", "line", "function"],
    }
    trace_columns = {
        "events": [*snapshot_columns["events"], "traced"],
        "traced": ["device", "trace_events"],
        "trace_events": list(EVENT_COLUMNS),
    }
    head = {
        "format": _FORMAT,
        "version": _VERSION,
        "about": recording.about,
        "units": _UNITS,
        "columns": {
            "devices": list(_INFO_COLUMNS),
            "visible": list(_INFO_COLUMNS),
            "events": ["time_s", "action", "readings", "uses"],
            "readings": list(_READING_COLUMNS),
            "uses": list(_USE_COLUMNS),
            **(snapshot_columns if has_snapshots else {}),
            **(trace_columns if has_traces else {}),
        },
        **(
            {
                "actions": ACTIONS,
                "rules": format_rules(recording.rules),
                "is_whole": recording.is_whole,
            }
            if has_traces
            else {}
        ),
        **(stacks.to_head() if has_snapshots else {}),
        "devices": _to_rows(recording.devices, _INFO_COLUMNS),
        "visible": _to_rows(recording.visible, _INFO_COLUMNS),
        "n_events": len(recording.events),
    }
    lines = [f"{json.dumps(name)}: {json.dumps(value)}," for name, value in head.items()]
    return "\n".join(["{", *lines, '"events": [', ",\n".join(events), "]", "}", ""])


def _format_event(event: Event, stacks: StackTable) -> str:
    values: list[Any] = [
        round(event.time_s, 6),
        event.action,
        _to_rows(event.readings, _READING_COLUMNS),
        _to_rows(event.uses, _USE_COLUMNS),
    ]
    if event.segments is not None or event.traced:
        values.append(None if event.segments is None else stacks.to_rows(event.segments))
    if event.traced:
        values.append(to_rows(event.traced, stacks))
    return json.dumps(values)


def parse_recording(text: str, *, source: str = "recording") -> Recording:
    """A recording out of a file's text.

    Args:
        text: all of the file.
        source: what to call it in errors.

    Raises:
        RecordingError: it is not ours, cut short, of another version, or contradicts itself.
    """
    try:
        data = json.loads(text)
    except (ValueError, RecursionError):
        if _FORMAT in text[:200]:
            raise RecordingError(f"{source} is cut short or damaged: record it again") from None
        data = None
    if not isinstance(data, dict) or data.get("format") != _FORMAT:
        raise RecordingError(f"{source} is no recording of gpumemwidget's: choose another file")
    if data.get("version") != _VERSION:
        raise RecordingError(
            f"{source} is a recording of version {data.get('version')!r}, and this release reads "
            f"version {_VERSION}: record it again"
        )
    try:
        return _to_recording(data)
    except _BadRecordingError as error:
        raise RecordingError(f"{source} is damaged: {error}; record it again") from None


def load_recording(path: str | Path) -> Recording:
    """A recording out of a file.

    Raises:
        FileError: the file can't be read.
        RecordingError: see ``parse_recording``.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise FileError(f"{path} can't be read: {error.strerror or error}") from error
    except UnicodeDecodeError:
        text = ""
    return parse_recording(text, source=str(path))


def save_recording(recording: Recording, path: str | Path) -> None:
    """Write a recording to a new file.

    Raises:
        FileError: the file is there already, or can't be written.
    """
    try:
        with Path(path).open("x", encoding="utf-8") as file:
            file.write(format_recording(recording))
    except FileExistsError:
        raise FileError(f"{path} is there already: choose another name") from None
    except OSError as error:
        raise FileError(f"{path} can't be written: {error.strerror or error}") from error


class _BadRecordingError(Exception):
    """What is wrong with a recording, as part of a sentence."""


def _to_recording(data: dict[str, Any]) -> Recording:
    devices = tuple(
        DeviceInfo(**row) for row in _from_rows(data, "devices", _INFO_COLUMNS, "devices")
    )
    visible = tuple(
        DeviceInfo(**row) for row in _from_rows(data, "visible", _INFO_COLUMNS, "visible")
    )
    rows = data.get("events")
    if not isinstance(rows, list) or data.get("n_events") != len(rows):
        n_found = len(rows) if isinstance(rows, list) else 0
        raise _BadRecordingError(f"it holds {n_found} of {data.get('n_events')} events")
    if not rows:
        raise _BadRecordingError("it holds no event")
    known = {info.device for info in devices}
    events: list[Event] = []
    try:
        snapshots = RowReader(data)
        rules = parse_rules(data["rules"]) if "rules" in data else AllocatorRules()
    except BadSnapshotError as error:
        raise _BadRecordingError(f"of its head, {error}") from None
    for number, row in enumerate(rows):
        event = _to_event(row, f"event {number}", snapshots)
        if events and event.time_s < events[-1].time_s:
            raise _BadRecordingError(f"event {number} is earlier than the one before")
        read = {reading.device for reading in event.readings}
        read.update(segment.device for segment in event.segments or ())
        read.update(device for device, _ in event.traced)
        unknown = read - known
        if unknown:
            raise _BadRecordingError(f"event {number} reads {min(unknown)}, which is not listed")
        events.append(event)
    about = data.get("about")
    about = about if isinstance(about, str) else ""
    is_whole = data.get("is_whole", True) is True
    return Recording(devices, visible, tuple(events), about, rules, is_whole)


def _to_event(row: Any, where: str, snapshots: RowReader) -> Event:
    if not isinstance(row, list) or len(row) not in (4, 5, 6):
        raise _BadRecordingError(f"{where} is no list of four to six")
    time_s, action, *_ = row
    is_time = isinstance(time_s, (int, float)) and not isinstance(time_s, bool)
    if not is_time or not math.isfinite(time_s) or time_s < 0:
        raise _BadRecordingError(f"{where} has no time")
    if action not in get_args(Action):
        raise _BadRecordingError(f"{where} is a {action!r}, which is unknown")
    readings = _from_rows(row, 2, _READING_COLUMNS, f"{where}'s readings")
    uses = _from_rows(row, 3, _USE_COLUMNS, f"{where}'s uses")
    try:
        has_segments = len(row) == 5 or (len(row) == 6 and row[4] is not None)
        segments = snapshots.parse(row[4]) if has_segments else None
        traced = parse_traced(row[5], snapshots) if len(row) == 6 else ()
    except BadSnapshotError as error:
        raise _BadRecordingError(f"of {where}'s snapshot, {error}") from None
    return Event(
        time_s=float(time_s),
        action=action,
        readings=tuple(Reading(**reading) for reading in readings),
        uses=tuple(DeviceUse(**use) for use in uses),
        segments=segments,
        traced=traced,
    )


def _to_rows(records: Iterable[Any], columns: dict[str, tuple[_Check, bool]]) -> list[list[Any]]:
    return [[getattr(record, name) for name in columns] for record in records]


def _from_rows(
    holder: Any, key: Any, columns: dict[str, tuple[_Check, bool]], where: str
) -> list[dict[str, Any]]:
    rows = holder.get(key) if isinstance(holder, dict) else holder[key]
    if not isinstance(rows, list):
        raise _BadRecordingError(f"{where} is no list")
    found = []
    for row in rows:
        if not isinstance(row, list) or len(row) != len(columns):
            raise _BadRecordingError(f"{where} has a row that is not of {len(columns)} values")
        for value, (name, (is_good, may_be_null)) in zip(row, columns.items(), strict=True):
            if not (may_be_null if value is None else is_good(value)):
                raise _BadRecordingError(f"{where} has {value!r} for {name}")
        found.append(dict(zip(columns, row, strict=True)))
    if len({row["device"] for row in found}) != len(found):
        raise _BadRecordingError(f"{where} has a device twice")
    return found
