"""Serve the Device tab: whole devices in parts, the map of each, its use over time, and children.

The parts need a walk through the user's objects, so they are computed only when no cell runs, on
the main thread, and while a view shows them. Processes below this one are listed about once a
second, also while a cell runs: that is when they work. The drivers are asked once a second too,
while any view can be seen: over about that long they average how busy a GPU is.

A message stays small however many processes there are and however finely memory is cut: what is
left out or put together is counted. ``js/device.js`` and its neighbours read these messages.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass

from gpumemwidget.model.breakdowns import Breakdown, BreakdownPart, MapBlock, MapSegment, SegmentMap
from gpumemwidget.model.devices import HOST, MOST_CHILDREN, ChildProcess, DeviceReport, PinnedUse
from gpumemwidget.recording.monitor import Monitor
from gpumemwidget.report.charts.segments import list_looks
from gpumemwidget.report.render.palette import PART_COLORS
from gpumemwidget.report.wording.parts import (
    find_look,
    list_breakdown_notes,
    list_pinned,
    name_look,
    name_part,
    tell_part,
)
from gpumemwidget.report.wording.words import cut_words
from gpumemwidget.session.session import Session
from gpumemwidget.widgets.messages import Message, describe_failure
from gpumemwidget.widgets.panel import CELL_PAUSE_S, Panel

#: Minimum number of seconds between two questions to the drivers; a sampler's tick may be early.
_ASK_EVERY_S = 0.95
#: Maximum number of moments that a page which joins gets.
_MAX_MOMENTS = 900
#: Seconds that the walk through the user's objects may take.
_WALK_BUDGET_S = 0.5
#: Minimum number of seconds between two lists of the children.
_CHILDREN_EVERY_S = 0.95
#: Maximum number of parts within a part, such as processes among the others.
_MAX_PARTS = 12
_MAX_CHILDREN = 50
#: Maximum number of blocks in a message, and of a segment.
_MAX_BLOCKS = 5000
_MAX_OF_SEGMENT = 600
#: Maximum number of characters of an owner or a line: paths through the user's objects may be long.
_MAX_WORDS = 200
#: Blocks narrower than this share of their segment can't be told apart: those alike are one.
_NARROW = 1 / 400


class DevicePanel(Panel):
    """Tells the views of whole devices.

    Args:
        session: see ``Panel``.
        send: see ``Panel``.
        guard: see ``Panel``.
        seen: returns the devices that visible views show in parts; none: nobody looks.
    """

    def __init__(
        self,
        session: Session,
        send: Callable[[Message], None],
        *,
        guard: Callable[[Callable[[], object]], None],
        seen: Callable[[], Collection[str]],
    ) -> None:
        super().__init__(session, send, guard=guard)
        self._seen = seen
        self._looks_soon = False
        self._children_s: float | None = None
        self._children: Message | None = None
        self._lock = threading.Lock()

    def look_soon(self) -> None:
        """Send the devices as soon as no cell runs; several requests are answered once."""
        if self._monitor.running is not None:
            self._send({"kind": "device", "state": "queued"})
        self._look_in(0.0)
        self.send_children(anyway=True)

    def note_change(self) -> None:
        """Send the devices when the cells have paused, if somebody looks."""
        if self._seen():
            self._look_in(CELL_PAUSE_S)

    def send_children(self, *, anyway: bool = False) -> None:
        """Send the processes below this one, if somebody looks and a second has passed.

        May be called from any thread, at any rate.

        Args:
            anyway: also before a second has passed, and if nothing is new.
        """
        if not self._seen():
            return
        now_s = self._monitor.clock.now()
        with self._lock:
            is_time = self._children_s is None or now_s - self._children_s >= _CHILDREN_EVERY_S
            if not is_time and not anyway:
                return
            self._children_s = now_s
        children = self._monitor.hardware.list_children()
        message: Message = {"kind": "live", **describe_children(children)}
        if message != self._children or anyway:
            self._children = message
            self._send(message)

    def _look_in(self, delay_s: float) -> None:
        if self._looks_soon and delay_s:
            return
        self._looks_soon = True
        self._run_when_idle(self._look, delay_s)

    def _look(self) -> None:
        # Two requests may be queued; the first look has answered both.
        is_due, self._looks_soon = self._looks_soon, False
        devices = self._seen()
        # None is seen if the tab was closed meanwhile; opening it asks again.
        if not is_due or not devices:
            return
        self._send({"kind": "device", "state": "running"})
        try:
            told = self._describe(devices)
        except (Exception, KeyboardInterrupt) as exc:  # noqa: BLE001 - shown where the click was
            self._send({"kind": "device", "state": "failed", "message": describe_failure(exc)})
            return
        self._send({"kind": "device", "state": "done", **told})

    def _describe(self, devices: Collection[str]) -> Message:
        taken = self._session.breakdown(budget_s=_WALK_BUDGET_S)
        return {
            "wall_s": self._monitor.clock.wall(),
            "notes": list(taken.notes),
            "breakdowns": [describe_breakdown(breakdown) for breakdown in taken.records],
            "maps": {
                device: describe_map(segment_map)
                for device, segment_map in taken.maps.items()
                if device in devices
            },
        }


class DeviceUseHistory:
    """The drivers' figures of whole devices over time, sent to the views.

    Args:
        monitor: its hardware is asked, by its clock.
        send: sends a message to all views.
        is_seen: whether any view can be seen.
    """

    def __init__(
        self, monitor: Monitor, send: Callable[[Message], None], *, is_seen: Callable[[], bool]
    ) -> None:
        self._monitor = monitor
        self._send = send
        self._is_seen = is_seen
        self._asked_s: float | None = None
        self._now: list[Message] = []
        #: For each moment its time, and for each GPU what was in use and how busy it was.
        self._moments: deque[tuple[float, dict[str, list[int | None]]]] = deque(maxlen=_MAX_MOMENTS)
        self._lock = threading.Lock()

    def send(self) -> None:
        """Send the drivers' figures, if a view is seen and a second has passed; on any thread."""
        if self._is_seen() and self._ask():
            self._send({"kind": "use", "time_s": self._asked_s, "devices": self._now})

    def describe(self) -> Message:
        """Return what a page that joins needs: the newest figures, and those before."""
        self._ask()
        with self._lock:
            moments = list(self._moments)
        return {"devices": self._now, "moments": [list(moment) for moment in moments]}

    def _ask(self) -> bool:
        """Ask the drivers if a second has passed; return whether it has."""
        now_s = self._monitor.clock.now()
        with self._lock:
            if self._asked_s is not None and now_s - self._asked_s < _ASK_EVERY_S:
                return False
            self._asked_s = now_s
        hardware = self._monitor.hardware
        reports = hardware.read_devices()
        devices = []
        for report in reports:
            device = report.info.device
            is_own = report.reading is not None and device != HOST
            own = hardware.read_own_use(device) if is_own else None
            devices.append({**describe_use(report), "own": own})
        with self._lock:
            self._now = devices
            self._moments.append(
                (
                    now_s,
                    {
                        use["device"]: [use["used"], use["busy"]]
                        for use in devices
                        if use["device"] != HOST and use["used"] is not None
                    },
                )
            )
        return True


# -- Messages --------------------------------------------------------------------------------------


def describe_use(report: DeviceReport) -> Message:
    """Describe a device with what its driver says of it now."""
    use = report.use
    return {
        "device": report.info.device,
        "name": report.info.name,
        "total": report.info.total_bytes if use is None else use.total_bytes,
        "is_touched": report.reading is not None,
        "used": None if use is None else use.used_bytes,
        "free": None if use is None else use.free_bytes,
        "busy": None if use is None else use.utilization_percent,
        # Read at the moment of the driver's figures, which this process's counters outrun.
        "reserved": None if report.reading is None else report.reading.reserved_bytes,
        "note": report.note or "",
    }


def describe_breakdown(breakdown: Breakdown) -> Message:
    """Describe a device's memory in parts, with the words that go with each."""
    return {
        "device": breakdown.device,
        "name": breakdown.name,
        "total": breakdown.total_bytes,
        "parts": [_describe_part(part, breakdown) for part in breakdown.parts],
        "allocated": breakdown.allocated_bytes,
        "reserved": breakdown.reserved_bytes,
        "used": breakdown.used_bytes,
        "limit": breakdown.limit_bytes,
        "budget": breakdown.budget_bytes,
        "largest_free": breakdown.largest_free_block_bytes,
        "pinned": _describe_pinned(breakdown.pinned),
        "notes": list(list_breakdown_notes(breakdown)),
        # Then nobody knows which of this notebook's children are on it.
        "hides_children": breakdown.may_hide_children,
    }


def _describe_part(part: BreakdownPart, breakdown: Breakdown, within: str = "") -> Message:
    shown, rest = part.parts[:_MAX_PARTS], part.parts[_MAX_PARTS:]
    # A process looks as those that it is one of.
    look = within if part.process is not None and within else find_look(part)
    return {
        "look": look,
        "label": name_part(part, breakdown.device),
        "bytes": part.n_bytes,
        "tell": tell_part(part, breakdown),
        "parts": [_describe_part(inner, breakdown, look) for inner in shown],
        "n_more": len(rest),
        "more": sum(inner.n_bytes for inner in rest),
    }


def _describe_pinned(pinned: PinnedUse | None) -> list[Message]:
    rows = [] if pinned is None else list_pinned(pinned)
    return [{"label": name, "bytes": n_bytes, "tell": tell} for name, n_bytes, tell in rows]


def describe_children(children: Sequence[ChildProcess]) -> Message:
    """Describe the processes below this one, those with the most memory first."""
    ordered = sorted(children, key=lambda child: (-_weigh(child), child.pid))
    return {
        "children": [
            {
                "pid": child.pid,
                "parent": child.parent_pid,
                "name": child.name,
                "resident": child.resident_bytes,
                "devices": [list(pair) for pair in child.devices],
            }
            for child in ordered[:_MAX_CHILDREN]
        ],
        "n_more_children": max(0, len(ordered) - _MAX_CHILDREN),
        "are_all_counted": len(children) < MOST_CHILDREN,
    }


def _weigh(child: ChildProcess) -> int:
    # In steps: of resident sizes that are nearly the same none is to overtake the other.
    n_bytes = sum(device_bytes or 0 for _, device_bytes in child.devices) + (
        child.resident_bytes or 0
    )
    return n_bytes.bit_length()


# -- The map ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Piece:
    """A block, or a stretch of a free block whose bytes look alike."""

    block: MapBlock
    n_bytes: int
    look: str


def describe_map(segment_map: SegmentMap) -> Message:
    """Describe the segments with their blocks; blocks too narrow to be seen alone are put together.

    A block is ``[bytes, requested, look, owner, place, number of blocks]``, look, owner and place
    as numbers of ``words``; the blocks stand side by side.
    """
    words = _Words()
    looks: dict[str, int] = {}
    segments: list[Message] = []
    n_blocks = 0
    rest: Sequence[MapSegment] = ()
    for at, segment in enumerate(segment_map.segments):
        groups = _narrow(segment)
        n_blocks += len(groups)
        if n_blocks > _MAX_BLOCKS and segments:
            rest = segment_map.segments[at:]
            break
        for piece in (piece for group in groups for piece in group):
            looks[piece.look] = looks.get(piece.look, 0) + piece.n_bytes
        segments.append(_describe_segment(segment, groups, words))
    return {
        "device": segment_map.device,
        "reserved": segment_map.reserved_bytes,
        "allocated": segment_map.allocated_bytes,
        "fragmented": segment_map.fragmented_bytes,
        "largest_free": segment_map.largest_free_block_bytes,
        "segments": segments,
        "words": words.list(),
        "looks": [[look, name_look(look), looks[look]] for look in PART_COLORS if look in looks],
        "n_more": len(rest),
        "more": sum(segment.n_bytes for segment in rest),
    }


def _describe_segment(
    segment: MapSegment, groups: Sequence[Sequence[_Piece]], words: _Words
) -> Message:
    return {
        # Text, as JavaScript's numbers end at 2**53.
        "address": f"{segment.address:#x}",
        "bytes": segment.n_bytes,
        "is_private": segment.is_private,
        "is_expandable": segment.is_expandable,
        "is_small": segment.is_small,
        "blocks": [_describe_pieces(group, words) for group in groups],
    }


class _Words:
    """Texts that many blocks share, by number."""

    def __init__(self) -> None:
        self._numbers: dict[str, int] = {"": 0}

    def find(self, texts: Iterable[str]) -> int:
        """Return the number of the text that all of them are; of the empty text if they differ."""
        different = set(texts)
        text = different.pop() if len(different) == 1 else ""
        return self._numbers.setdefault(text, len(self._numbers))

    def list(self) -> list[str]:
        return list(self._numbers)


def _narrow(segment: MapSegment) -> list[list[_Piece]]:
    pieces = [_Piece(block, end - start, look) for block, start, end, look in list_looks(segment)]
    least_bytes = segment.n_bytes * _NARROW
    groups = _group(pieces, least_bytes, by_look=True)
    if len(groups) > _MAX_OF_SEGMENT:
        groups = _group(pieces, least_bytes, by_look=False)
    return groups


def _group(pieces: Iterable[_Piece], least_bytes: float, *, by_look: bool) -> list[list[_Piece]]:
    """Group narrow neighbours until each group is wide enough to be seen."""
    groups: list[list[_Piece]] = []
    width = least_bytes
    for piece in pieces:
        is_alike = bool(groups) and (not by_look or groups[-1][-1].look == piece.look)
        if is_alike and piece.n_bytes < least_bytes and width < least_bytes:
            groups[-1].append(piece)
            width += piece.n_bytes
        else:
            groups.append([piece])
            width = piece.n_bytes
    return groups


def _describe_pieces(pieces: Sequence[_Piece], words: _Words) -> list[int | None]:
    # A group of blocks has no one requested size.
    requested = pieces[0].block.requested_bytes if len(pieces) == 1 else None
    return [
        sum(piece.n_bytes for piece in pieces),
        requested,
        words.find(piece.look for piece in pieces),
        words.find(cut_words(piece.block.owner, _MAX_WORDS) for piece in pieces),
        words.find(cut_words(piece.block.allocated_at, _MAX_WORDS) for piece in pieces),
        len(pieces),
    ]
