"""Serve the Device tab: whole devices in parts, the map of each, its use over time, and children.

The parts need a walk through the user's objects, so they are computed only when no cell runs, on
the main thread, and while a view shows them. The drivers are asked once a second, also while a cell
runs: over about that long they average how busy a GPU is. Then the processes below this one are
listed too, if a view shows them.

A device in view goes out as its static report. ``js/device.js`` reads these messages.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Collection, Sequence
from functools import partial

from gpumemwidget.model.breakdowns import Breakdown
from gpumemwidget.model.devices import HOST, ChildProcess, DeviceState, find_outside_bytes
from gpumemwidget.recording.monitor import Monitor
from gpumemwidget.report.breakdown import report_breakdown
from gpumemwidget.report.render.wording import word_driver_failure
from gpumemwidget.session.whole_devices import DeviceBreakdowns
from gpumemwidget.widgets.page import CELL_PAUSE_S, Message, Page, attempt

#: Minimum number of seconds between two questions to the drivers; a sampler's tick may be early.
_ASK_EVERY_S = 0.95
#: Maximum number of moments that a page which joins gets.
_MAX_MOMENTS = 900
#: Seconds that the walk through the user's objects may take.
_WALK_BUDGET_S = 0.5
#: Maximum number of children in a message.
_MAX_CHILDREN = 50


class DevicePanel:
    """Sends whole devices to the views; ``list_seen`` returns those that visible views show."""

    def __init__(self, page: Page, *, list_seen: Callable[[], Collection[str]]) -> None:
        self._session = page.session
        self._monitor = page.session.monitor
        self._send = page.send
        self._run_when_idle = page.run_when_idle
        self._list_seen = list_seen
        self._looks_soon = False
        self._children: Message | None = None

    def look_soon(self) -> None:
        """Send the devices as soon as no cell runs; several requests are answered once."""
        if self._monitor.running is not None:
            self._send({"kind": "device", "state": "queued"})
        self._look_in(0.0)
        self._children = None
        self.send_children()

    def note_change(self) -> None:
        """Send the devices when the cells have paused, if somebody looks."""
        if self._list_seen():
            self._look_in(CELL_PAUSE_S)

    def send_children(self) -> None:
        """Send the processes below this one, if somebody looks and one is new; on any thread."""
        if not self._list_seen():
            return
        message: Message = {
            "kind": "live",
            **describe_children(self._monitor.hardware.list_children()),
        }
        if message != self._children:
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
        devices = self._list_seen()
        # None is seen if the tab was closed meanwhile; opening it asks again.
        if not is_due or not devices:
            return
        self._send({"kind": "device", "state": "running"})
        self._send({"kind": "device", **attempt(partial(self._describe, devices))})

    def _describe(self, devices: Collection[str]) -> Message:
        taken = self._session.breakdown(budget_s=_WALK_BUDGET_S)
        return {
            "wall_s": self._monitor.clock.wall(),
            "breakdowns": [
                _describe_breakdown(record, taken, is_seen=record.device in devices)
                for record in taken.records
            ],
        }


class DeviceUseHistory:
    """The drivers' figures of whole devices over time, sent to the views."""

    def __init__(
        self, monitor: Monitor, send: Callable[[Message], None], *, is_seen: Callable[[], bool]
    ) -> None:
        self._monitor = monitor
        self._send = send
        self._is_seen = is_seen
        self._asked_s: float | None = None
        self._now: list[Message] = []
        #: For each moment its time, and for each GPU the bytes in use, how busy it was, and the
        #: bytes that this process had there outside PyTorch.
        self._moments: deque[tuple[float, dict[str, list[int | None]]]] = deque(maxlen=_MAX_MOMENTS)
        self._lock = threading.Lock()

    def send(self) -> bool:
        """Send the drivers' figures if they are due, and return whether they were sent."""
        is_due = self._is_seen() and self._ask()
        if is_due:
            self._send({"kind": "use", "time_s": self._asked_s, "devices": self._now})
        return is_due

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
        own = dict(self._monitor.read_own_uses())
        states = hardware.read_devices()
        devices = [_describe_use(state, own.get(state.info.device)) for state in states]
        moment = {
            use["device"]: [use["used"], use["busy"], use["outside"]]
            for use in devices
            if use["device"] != HOST and use["used"] is not None
        }
        with self._lock:
            self._now = devices
            self._moments.append((now_s, moment))
        return True


# -- Messages --------------------------------------------------------------------------------------


def _describe_use(state: DeviceState, own_bytes: int | None) -> Message:
    """Describe a device with what its driver says of it now, and of this process there."""
    use, info, reading = state.use, state.info, state.reading
    reserved_bytes = 0 if reading is None else reading.reserved_bytes
    return {
        "device": info.device,
        "name": info.name,
        "total": (use and use.total_bytes) or info.total_bytes,
        # By PyTorch, or by another library of this process.
        "is_touched": reading is not None or bool(own_bytes),
        "own": own_bytes,
        "outside": find_outside_bytes(own_bytes, reserved_bytes),
        "used": None if use is None else use.used_bytes,
        "free": None if use is None else use.free_bytes,
        "busy": None if use is None else use.utilization_percent,
        # Read at the moment of the driver's figures, which this process's counters outrun.
        "reserved": reading and reading.reserved_bytes,
        "note": word_driver_failure(use.device, use.failure) if use and use.failure else "",
    }


def _describe_breakdown(breakdown: Breakdown, taken: DeviceBreakdowns, *, is_seen: bool) -> Message:
    return {
        "device": breakdown.device,
        # Then nobody knows which of this notebook's children are on it.
        "hides_children": any("children" in part.merged for part in breakdown.parts),
        "html": report_breakdown([breakdown], maps=taken.maps, notes=taken.notes).html
        if is_seen
        else None,
    }


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
    }


def _weigh(child: ChildProcess) -> int:
    # In steps: of resident sizes that are nearly the same none is to overtake the other.
    n_bytes = sum(device_bytes or 0 for _, device_bytes in child.devices) + (
        child.resident_bytes or 0
    )
    return n_bytes.bit_length()
