"""Recordings of real counters: what is in one, and the file that holds it.

A recording is a list of timed events, each with the readings of all devices. The file is JSON with
its units stated, small enough to keep beside tests, and refused when it is not whole.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

from gpumemwidget.backends.histfile import (
    EVENT_COLUMNS,
    format_rules,
    parse_rules,
    parse_traced,
)
from gpumemwidget.backends.histfile import to_rows as format_traced
from gpumemwidget.backends.rowfile import (
    BadRowError,
    Columns,
    from_rows,
    is_count,
    is_percent,
    is_text,
    to_rows,
)
from gpumemwidget.backends.snapfile import (
    BLOCK_COLUMNS,
    SEGMENT_COLUMNS,
    BadSnapshotError,
    RowReader,
    StackTable,
)
from gpumemwidget.backends.statechanges import Change
from gpumemwidget.backends.statefile import STATE_COLUMNS, format_change, parse_change
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
#: The second version can have what is of whole devices: processes, limits, the driver's bytes. What
#: needs none of it is written as the first, which older releases read too.
_VERSIONS = (1, 2)

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
    #: Processes, children, pinned memory and limits, as far as they are not as they were.
    change: Change = field(default_factory=Change)


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


def _is_peak_kind(value: Any) -> bool:
    return isinstance(value, str) and value in get_args(PeakIs)


_INFO_COLUMNS: Columns = {
    "device": (is_text, False),
    "name": (is_text, False),
    "total_bytes": (is_count, True),
    "limit_bytes": (is_count, True),
    "uuid": (is_text, True),
}
_READING_COLUMNS: Columns = {
    "device": (is_text, False),
    "allocated_bytes": (is_count, True),
    "reserved_bytes": (is_count, True),
    "allocated_peak_bytes": (is_count, True),
    "reserved_peak_bytes": (is_count, True),
    "peak_is": (_is_peak_kind, True),
    "num_alloc_retries": (is_count, True),
    "num_ooms": (is_count, True),
}
_USE_COLUMNS: Columns = {
    "device": (is_text, False),
    "used_bytes": (is_count, True),
    "free_bytes": (is_count, True),
    "total_bytes": (is_count, True),
    "utilization_percent": (is_percent, True),
    "driver_bytes": (is_count, True),
}
#: Of the first version's files.
_FIRST_USE_COLUMNS = {name: _USE_COLUMNS[name] for name in list(_USE_COLUMNS)[:-1]}
_EVENT_COLUMNS = ["time_s", "action", "readings", "uses", "segments", "traced", "changes"]
_UNITS = {"_bytes": "bytes", "_s": "seconds since the recording began", "_percent": "0 to 100"}


def format_recording(recording: Recording) -> str:
    """A recording as the file's text: one line an event."""
    stacks = StackTable()
    has_changes = any(map(_is_of_second_version, recording.events))
    events = [_format_event(event, stacks, has_changes=has_changes) for event in recording.events]
    has_traces = any(event.traced for event in recording.events)
    has_snapshots = has_traces or any(event.segments is not None for event in recording.events)
    snapshot_columns = {
        "events": _EVENT_COLUMNS[:5],
        "segments": list(SEGMENT_COLUMNS),
        "blocks": list(BLOCK_COLUMNS),
        "frames": ["filename", "line", "function"],
    }
    trace_columns = {
        "events": _EVENT_COLUMNS[:6],
        "traced": ["device", "trace_events"],
        "trace_events": list(EVENT_COLUMNS),
    }
    head = {
        "format": _FORMAT,
        "version": _VERSIONS[has_changes],
        "about": recording.about,
        "units": _UNITS,
        "columns": {
            "devices": list(_INFO_COLUMNS),
            "visible": list(_INFO_COLUMNS),
            "events": _EVENT_COLUMNS[:4],
            "readings": list(_READING_COLUMNS),
            "uses": list(_USE_COLUMNS if has_changes else _FIRST_USE_COLUMNS),
            **(snapshot_columns if has_snapshots else {}),
            **(trace_columns if has_traces else {}),
            **({**STATE_COLUMNS, "events": _EVENT_COLUMNS} if has_changes else {}),
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
        "devices": to_rows(recording.devices, _INFO_COLUMNS),
        "visible": to_rows(recording.visible, _INFO_COLUMNS),
        "n_events": len(recording.events),
    }
    lines = [f"{json.dumps(name)}: {json.dumps(value)}," for name, value in head.items()]
    return "\n".join(["{", *lines, '"events": [', ",\n".join(events), "]", "}", ""])


def _is_of_second_version(event: Event) -> bool:
    return event.change != Change() or any(use.driver_bytes is not None for use in event.uses)


def _format_event(event: Event, stacks: StackTable, *, has_changes: bool) -> str:
    columns = _USE_COLUMNS if has_changes else _FIRST_USE_COLUMNS
    change = format_change(event.change)
    values: list[Any] = [
        round(event.time_s, 6),
        event.action,
        to_rows(event.readings, _READING_COLUMNS),
        to_rows(event.uses, columns),
    ]
    if event.segments is not None or event.traced or change:
        values.append(None if event.segments is None else stacks.to_rows(event.segments))
    if event.traced or change:
        values.append(format_traced(event.traced, stacks))
    if change:
        values.append(change)
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
    version = data.get("version")
    if type(version) is not int or version not in _VERSIONS:
        raise RecordingError(
            f"{source} is a recording of version {version!r}, and this release reads versions "
            f"{_VERSIONS[0]} and {_VERSIONS[1]}: record it again"
        )
    try:
        return _to_recording(data)
    except BadRowError as error:
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


def _to_recording(data: dict[str, Any]) -> Recording:
    devices = tuple(
        DeviceInfo(**row) for row in from_rows(data.get("devices"), _INFO_COLUMNS, "devices")
    )
    visible = tuple(
        DeviceInfo(**row) for row in from_rows(data.get("visible"), _INFO_COLUMNS, "visible")
    )
    rows = data.get("events")
    if not isinstance(rows, list) or data.get("n_events") != len(rows):
        n_found = len(rows) if isinstance(rows, list) else 0
        raise BadRowError(f"it holds {n_found} of {data.get('n_events')} events")
    if not rows:
        raise BadRowError("it holds no event")
    known = {info.device for info in devices}
    events: list[Event] = []
    try:
        snapshots = RowReader(data)
        rules = parse_rules(data["rules"]) if "rules" in data else AllocatorRules()
    except BadSnapshotError as error:
        raise BadRowError(f"of its head, {error}") from None
    for number, row in enumerate(rows):
        event = _to_event(row, f"event {number}", snapshots, data["version"])
        if events and event.time_s < events[-1].time_s:
            raise BadRowError(f"event {number} is earlier than the one before")
        read = {reading.device for reading in event.readings}
        read.update(segment.device for segment in event.segments or ())
        read.update(device for device, _ in event.traced)
        unknown = read - known
        if unknown:
            raise BadRowError(f"event {number} reads {min(unknown)}, which is not listed")
        events.append(event)
    about = data.get("about")
    about = about if isinstance(about, str) else ""
    is_whole = data.get("is_whole", True) is True
    return Recording(devices, visible, tuple(events), about, rules, is_whole)


def _to_event(row: Any, where: str, snapshots: RowReader, version: int) -> Event:
    is_first = version == _VERSIONS[0]
    use_columns, longest = (_FIRST_USE_COLUMNS, 6) if is_first else (_USE_COLUMNS, 7)
    if not isinstance(row, list) or not 4 <= len(row) <= longest:
        raise BadRowError(f"{where} is no list of four to {'six' if is_first else 'seven'}")
    time_s, action, *_ = row
    is_time = isinstance(time_s, (int, float)) and not isinstance(time_s, bool)
    if not is_time or not math.isfinite(time_s) or time_s < 0:
        raise BadRowError(f"{where} has no time")
    if action not in get_args(Action):
        raise BadRowError(f"{where} is a {action!r}, which is unknown")
    readings = from_rows(row[2], _READING_COLUMNS, f"{where}'s readings")
    uses = from_rows(row[3], use_columns, f"{where}'s uses")
    try:
        has_segments = len(row) == 5 or (len(row) > 5 and row[4] is not None)
        segments = snapshots.parse(row[4]) if has_segments else None
        traced = parse_traced(row[5], snapshots) if len(row) > 5 else ()
    except BadSnapshotError as error:
        raise BadRowError(f"of {where}'s snapshot, {error}") from None
    return Event(
        time_s=float(time_s),
        action=action,
        readings=tuple(Reading(**reading) for reading in readings),
        uses=tuple(DeviceUse(**use) for use in uses),
        segments=segments,
        traced=traced,
        change=parse_change(row[6], where) if len(row) > 6 else Change(),
    )
