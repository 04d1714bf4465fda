"""The Device tab's kernel side: whole devices in parts, the map of one, the notebook's children.

The parts need the walk through the user's objects, so they are computed only when no cell runs, on
the main thread, and only while somebody sees them. What the driver says, and which processes there
are below this one, is told about once a second, also while a cell runs: that is when they work.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection
from typing import Any

from gpumemwidget.jupyter.devicemessages import (
    describe_bridge,
    describe_children,
    describe_map,
    describe_use,
)
from gpumemwidget.jupyter.messages import Message, describe_failure
from gpumemwidget.jupyter.variables import schedule_on_main
from gpumemwidget.measure.monitor import Monitor
from gpumemwidget.owners.base import Shell

__all__ = ["DevicePanel"]

#: Cells often come in a row (Run All): the devices are looked at when they have paused.
_PAUSE_S = 0.3
#: How long the walk through the user's objects may take; after a cell nobody has asked for it.
_ASKED_S = 2.0
_AFTER_CELL_S = 0.5
#: How often the driver and the system are asked for what is live; a tick may come a bit early.
_LIVE_S = 0.95


class DevicePanel:
    """Tells the views of whole devices.

    Args:
        monitor: says when no cell runs.
        shell: IPython's names and references.
        send: sends a message to all views.
        guard: runs an action and shows its failure in the views.
        seen: which devices the views that can be seen show in parts; none: nobody looks.
        schedule: runs an action on the main thread, after a delay.
    """

    def __init__(
        self,
        monitor: Monitor,
        shell: Shell,
        send: Callable[[Message], None],
        *,
        guard: Callable[[Callable[[], None]], None],
        seen: Callable[[], Collection[str]],
        schedule: Callable[[Callable[[], None], float], None] = schedule_on_main,
    ) -> None:
        self._monitor = monitor
        self._shell = shell
        self._send = send
        self._guard = guard
        self._seen = seen
        self._schedule = schedule
        self._looks_soon = False
        #: Whether somebody has asked for what is about to be computed.
        self._is_asked = False
        self._live_s: float | None = None
        self._live: Message | None = None
        self._lock = threading.Lock()

    def look_soon(self) -> None:
        """Tell of the devices as soon as no cell runs; several wishes are one."""
        self._is_asked = True
        if self._monitor.running is not None:
            self._send({"kind": "device", "state": "queued"})
        self._look_in(0.0)
        self.tell_live(anyway=True)

    def note_change(self) -> None:
        """A cell has run: tell of the devices when the cells have paused, if somebody looks."""
        if self._seen():
            self._look_in(_PAUSE_S)

    def tell_live(self, *, anyway: bool = False) -> None:
        """Tell what the driver and the system say now, if somebody looks and it is time.

        May be called from any thread, as often as one likes.

        Args:
            anyway: also where it is not time yet, and where nothing is new.
        """
        if not self._seen():
            return
        now_s = self._monitor.clock.now()
        with self._lock:
            is_time = self._live_s is None or now_s - self._live_s >= _LIVE_S
            if not is_time and not anyway:
                return
            self._live_s = now_s
        hardware = self._monitor.hardware
        live: Message = {
            "kind": "live",
            "devices": [describe_use(report) for report in hardware.read_devices()],
            **describe_children(hardware.list_children()),
        }
        if live != self._live or anyway:
            self._live = live
            self._send(live)

    def _look_in(self, delay_s: float) -> None:
        if self._looks_soon and delay_s:
            return
        self._looks_soon = True
        self._schedule(lambda: self._monitor.when_idle(self._look), delay_s)

    def _look(self) -> None:
        # A wish of before a queued one was met has been met with it.
        if self._looks_soon:
            is_asked, self._looks_soon, self._is_asked = self._is_asked, False, False
            self._guard(lambda: self._tell(is_asked=is_asked))

    def _tell(self, *, is_asked: bool) -> None:
        devices = self._seen()
        if not devices:
            # The tab was closed meanwhile; who opens it again asks anew.
            return
        self._send({"kind": "device", "state": "running"})
        try:
            told = self._describe(devices, _ASKED_S if is_asked else _AFTER_CELL_S)
        except (Exception, KeyboardInterrupt) as exc:  # noqa: BLE001 - shown where the click was
            self._send({"kind": "device", "state": "failed", "message": describe_failure(exc)})
            return
        self._send({"kind": "device", "state": "done", **told})

    def _describe(self, devices: Collection[str], budget_s: float) -> dict[str, Any]:
        from gpumemwidget.jupyter.bridgeapi import take_bridges  # noqa: PLC0415 - opens sooner

        taken = take_bridges(self, with_maps=True, budget_s=budget_s)
        return {
            "wall_s": self._monitor.clock.wall(),
            "notes": list(taken.notes),
            "bridges": [describe_bridge(each) for each in taken.records],
            "maps": {
                device: describe_map(each)
                for device, each in taken.maps.items()
                if device in devices
            },
        }

    # -- What the bridges are taken of -------------------------------------------------------------

    @property
    def monitor(self) -> Monitor:
        """Whose devices these are."""
        return self._monitor

    @property
    def shell(self) -> Shell:
        """Whose objects are on them."""
        return self._shell
