"""What the dashboard's views are told while cells run, and whether anybody is looking.

The samples of a tick go out as one small binary message. All messages carry a running number, so
that a view which missed one asks for the whole state again. While no view can be seen nothing is
sampled and nothing is sent.

What arrives in mid-cell differs: ipykernel 6 hears nothing until the cell has ended, 7.0 to 7.3
hear everything at once on a thread of their own, 7.4 one or the other. So the feed finds out by
itself (``hears_in_mid_cell``), and counts a view as lost only when it was silent although it could
have been heard.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from gpumemwidget.jupyter.messages import (
    Message,
    describe_cell,
    describe_device,
    describe_running,
)
from gpumemwidget.jupyter.stream import (
    UpdateHead,
    count_rows,
    pack_rows,
    pack_update,
    thin_samples,
)
from gpumemwidget.measure.cells import RunningCell
from gpumemwidget.measure.monitor import Monitor
from gpumemwidget.records import CellRecord, Sample

__all__ = ["FULL", "OPENING", "Feed", "SnapshotSize"]

#: Views speak up every 10 seconds. One that could be heard and was not for so long is gone: a
#: notebook that is closed cuts its line to the kernel before its views can say a word.
_LOST_AFTER_S = 25.0
#: Stands for a view that is on its way: the cell that shows it still runs, or its page is being
#: loaded anew. It speaks up as soon as it can be heard.
_EXPECTED = "expected"
_NOT_COMING_AFTER_S = 15.0


@dataclass(frozen=True, slots=True)
class SnapshotSize:
    """How much of the past a snapshot takes along."""

    rows_bytes: int
    n_cells: int


#: Within the message that opens the dashboard, and with the state of a page that is loaded anew.
OPENING = SnapshotSize(rows_bytes=48 * 1024, n_cells=50)
#: What a view asks for once it is there.
FULL = SnapshotSize(rows_bytes=192 * 1024, n_cells=200)


@dataclass(slots=True)
class _Sight:
    """What is known of one view."""

    is_visible: bool
    shows_variables: bool
    #: The device that it shows in parts; ``None``: its tab is not open.
    device: str | None
    heard_s: float


class Feed:
    """Listens to a monitor, and passes on what happens to the views that can be seen.

    Args:
        monitor: what happens.
        send: sends a message with its binary part to all views. A message that was sent may come
            again as the same object, and has not changed then.
        on_hearing: called once, when it is certain that messages arrive in mid-cell.
    """

    def __init__(
        self,
        monitor: Monitor,
        send: Callable[[Message, list[bytes]], None],
        *,
        on_hearing: Callable[[], None] = lambda: None,
    ) -> None:
        self._monitor = monitor
        self._send = send
        self._on_hearing = on_hearing
        self.hears_in_mid_cell = False
        self._views: dict[str, _Sight] = {}
        self._seq = 0
        #: The JSON part of an update: the same object until there is a new device.
        self._rows: Message = {"kind": "rows", "devices": ()}
        #: What the views know of the devices.
        self._devices: list[Message] = []
        self._limits_may_be_new = False
        #: When the last cell ended: from then on every kernel can hear.
        self._idle_since_s = monitor.clock.now()
        self._is_wanted = False
        self._is_closed = False
        # One message at a time, so that their numbers go out in order.
        self._lock = threading.RLock()
        monitor.add_listener(self)

    # -- What the monitor says ---------------------------------------------------------------------

    def on_cell_started(self, cell: RunningCell) -> None:
        """Tell the views that a cell begins."""
        self._tell({"kind": "started", "cell": describe_running(cell)})

    def on_cell_ended(self, record: CellRecord) -> None:
        """Tell the views what the cell did."""
        self._idle_since_s = self._monitor.clock.now()
        self._limits_may_be_new = True
        self._tell({"kind": "ended", "record": describe_cell(record)})

    def on_samples(self, samples: Sequence[Sample]) -> None:
        """Send them as rows, in one message whatever their number."""
        monitor, clock = self._monitor, self._monitor.clock
        with self._lock:
            if not self._is_wanted:
                return
            devices = monitor.history.devices()
            if devices != self._rows["devices"] or self._limits_may_be_new:
                self._limits_may_be_new = False
                self._tell_devices()
                self._rows = {"kind": "rows", "devices": devices}
            self._seq += 1
            running = monitor.running
            head = UpdateHead(
                number=self._seq,
                running_s=None if running is None else running.start_s,
                wall_offset_s=clock.wall() - clock.now(),
                interval_s=monitor.interval_s,
            )
            self._send(self._rows, [pack_update(head, samples, devices)])
            self._drop_lost()

    def _tell_devices(self) -> None:
        """Tell the views which devices there are, with limits and budgets, where that is new."""
        devices = self._describe_devices()
        if devices != self._devices:
            self._devices = devices
            self._tell({"kind": "devices", "devices": devices})

    def _describe_devices(self) -> list[Message]:
        find_budget = self._monitor.budgets.find
        infos = self._monitor.hardware.list_devices()
        return [describe_device(info, find_budget(info.device)) for info in infos]

    def _tell(self, message: Message, buffers: Sequence[bytes] = ()) -> None:
        with self._lock:
            if not self._is_wanted:
                return
            self._seq += 1
            self._send({**message, "seq": self._seq}, list(buffers))

    # -- Snapshots ---------------------------------------------------------------------------------

    def take_snapshot(self, size: SnapshotSize, since_s: float | None = None) -> Message:
        """The whole state, or what came since a moment: all that a view needs to go on from here.

        Args:
            size: how much of the past to take along.
            since_s: what the view has already, on the monitor's clock.

        Returns:
            The state; under ``data`` the rows, which belong into a message's binary part.
        """
        samples = self._take_samples(size, since_s)
        with self._lock:
            return self._describe_state(size, since_s, samples)

    def send_snapshot(self, since_s: float | None = None) -> None:
        """Send the state to all views."""
        samples = self._take_samples(FULL, since_s)
        with self._lock:
            snapshot = self._describe_state(FULL, since_s, samples)
            data = snapshot.pop("data")
            self._send({"kind": "snapshot", **snapshot}, [data])

    def _take_samples(self, size: SnapshotSize, since_s: float | None) -> Sequence[Sample]:
        """What there is now; without the lock, for a long session it takes tenths of a second."""
        history = self._monitor.history
        n_devices = len(history.devices())
        most = count_rows(size.rows_bytes, n_devices) if n_devices else 0
        return thin_samples(history.samples(since_s), most)

    def _describe_state(
        self, size: SnapshotSize, since_s: float | None, samples: Sequence[Sample]
    ) -> Message:
        monitor, clock = self._monitor, self._monitor.clock
        if samples:
            # What came meanwhile is behind the number that goes with the state.
            last_s = samples[-1].time_s
            newer = [each for each in monitor.history.samples(last_s) if each.time_s > last_s]
            samples = [*samples, *newer]
        columns = monitor.history.devices()
        running = monitor.running
        return {
            "seq": self._seq,
            "since_s": since_s,
            "wall_offset_s": clock.wall() - clock.now(),
            "interval_s": monitor.interval_s,
            "devices": self._describe_devices(),
            "cells": [describe_cell(record) for record in monitor.ledger.records[-size.n_cells :]],
            "running": None if running is None else describe_running(running),
            "columns": columns,
            "data": pack_rows(samples, columns),
        }

    # -- Who is looking ----------------------------------------------------------------------------

    def expect_view(self) -> None:
        """A view is about to be shown: sample for it, for on a busy kernel it can't say so yet."""
        self.hear(_EXPECTED, visible=True, variables=False)

    def hear(self, view: str, *, visible: bool, variables: bool, device: str | None = None) -> None:
        """A view says that it is there, whether it can be seen, and what else it shows.

        Args:
            view: which one.
            visible: whether it can be seen.
            variables: whether it shows the variables.
            device: the device that it shows in parts.
        """
        with self._lock:
            if self._is_closed:
                return
            if view != _EXPECTED:
                self._views.pop(_EXPECTED, None)
                self._notice_hearing()
            self._views[view] = _Sight(visible, variables, device, self._monitor.clock.now())
            self._update_wish()

    def lose(self, view: str, *, page_left: bool = False) -> None:
        """A view says that it is closed.

        Where its whole page was left in mid-cell, that may be to load it anew, and then no page can
        ask for anything until the cell has ended: sampling goes on, so that the plot has no gap.
        """
        with self._lock:
            sight = self._views.pop(view, None)
            if page_left and sight is not None and sight.is_visible and self._monitor.running:
                self._views[_EXPECTED] = _Sight(True, False, None, self._monitor.clock.now())
            self._update_wish()

    @property
    def is_seen(self) -> bool:
        """Whether any view can be seen, as far as is known."""
        return self._is_wanted

    @property
    def shows_variables(self) -> bool:
        """Whether the variables of any view can be seen."""
        with self._lock:
            return any(view.is_visible and view.shows_variables for view in self._views.values())

    def list_devices_seen(self) -> frozenset[str]:
        """The devices that the views which can be seen show in parts."""
        with self._lock:
            views = [view for view in self._views.values() if view.is_visible]
        return frozenset(view.device for view in views if view.device is not None)

    def close(self) -> None:
        """Listen no more. May be called twice."""
        with self._lock:
            self._is_closed = True
            self._views.clear()
            self._update_wish()
        self._monitor.remove_listener(self)

    def _notice_hearing(self) -> None:
        if self.hears_in_mid_cell or self._monitor.running is None:
            return
        if threading.current_thread() is not threading.main_thread():
            self.hears_in_mid_cell = True
            self._on_hearing()

    def _drop_lost(self) -> None:
        if self._monitor.running is not None:
            return
        now_s = self._monitor.clock.now()
        lost = [
            name
            for name, view in self._views.items()
            if now_s - max(view.heard_s, self._idle_since_s)
            > (_NOT_COMING_AFTER_S if name == _EXPECTED else _LOST_AFTER_S)
        ]
        for name in lost:
            del self._views[name]
        if lost:
            self._update_wish()

    def _update_wish(self) -> None:
        wanted = any(view.is_visible for view in self._views.values())
        if wanted and not self._is_wanted:
            self._is_wanted = True
            # Whoever joins has no messages of the time before: their number starts a gap.
            self._seq += 1
            self._monitor.want_samples(self)
        elif not wanted and self._is_wanted:
            self._is_wanted = False
            self._monitor.unwant_samples(self)
