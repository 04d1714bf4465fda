"""Send what happens to the dashboard's views while cells run, and know whether anybody looks.

The samples of a tick go out as one small binary message. All messages carry a running number, so
that a view which missed one asks for the whole state again. While no view can be seen nothing is
sampled and nothing is sent.

Samples travel as rows: the time, then of each device allocated, reserved and the peaks of both, all
as little-endian float64 (exact for bytes up to 2**53), NaN for an unknown figure. A row of one GPU
and the host is 72 bytes. With them go the start of the running cell on the monitor's clock, and the
wall's clock less the monitor's, which jumps when the wall's is set or the machine slept.

``js/store.js`` reads the dictionaries that records are described by: a field that is renamed here
is renamed there.

A driver may hang, and a cell's start and end take the feed's lock: nothing asks a driver under it.
"""

from __future__ import annotations

import math
import struct
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

from gpumemwidget.model.cells import CellDevice, CellRecord
from gpumemwidget.model.devices import DeviceInfo, Reading, Sample
from gpumemwidget.model.leaks import Leak
from gpumemwidget.recording.history import thin_samples
from gpumemwidget.recording.monitor import Monitor
from gpumemwidget.recording.running_cell import RunningCell
from gpumemwidget.report.leaks import describe_leak, mark_leak, note_running_leak
from gpumemwidget.widgets.page import Message, Viewers

#: Name of a view that is on its way: the cell that shows it still runs, or its page is being loaded
#: anew. It speaks up as soon as it can be heard.
_EXPECTED = "expected"
#: Bytes of rows that go with the state.
_MAX_ROWS_BYTES = 96 * 1024

_N_COUNTERS = 4


@dataclass(slots=True)
class _View:
    """What one view shows."""

    is_visible: bool
    shows_variables: bool
    #: The device that the view shows in parts; ``None`` while its tab is not open.
    device: str | None
    shows_processes: bool


class Feed:
    """Listens to a monitor, and passes on what happens to the views that can be seen.

    ``list_leaks`` returns the leaks that were found in each cell, by the cell's ``start_s``.
    """

    def __init__(
        self,
        monitor: Monitor,
        send: Callable[[Message, list[bytes]], None],
        list_leaks: Callable[[], Mapping[float, Sequence[Leak]]] = dict,
    ) -> None:
        self._monitor = monitor
        self._send = send
        self._list_leaks = list_leaks
        self._views: Viewers[_View] = Viewers(speak_when_idle=True)
        self._seq = 0
        #: The devices of the rows since all devices were last sent.
        self._columns: tuple[str, ...] | None = None
        self._is_wanted = False
        self._is_closed = False
        # One message at a time, so that their numbers go out in order.
        self._lock = threading.RLock()
        #: Ends the callbacks from the monitor.
        self._listening = ExitStack()
        self._listening.callback(monitor.cell_started.add(self._send_started))
        self._listening.callback(monitor.cell_ended.add(self._send_ended))
        self._listening.callback(monitor.sampled.add(self.send_samples))

    # -- What the monitor says ---------------------------------------------------------------------

    def _send_started(self, cell: RunningCell) -> None:
        self._send_numbered({"kind": "started", "cell": _describe_running(cell)})

    def _send_ended(self, record: CellRecord) -> None:
        with self._lock:
            self._views.wait_anew(self._monitor.clock.now())
        # The cell may have set a limit or a budget.
        self._columns = None
        leaks = self._list_leaks().get(record.start_s, ())
        self._send_numbered({"kind": "ended", "record": _describe_cell(record, leaks)})

    def send_leak(self, leak: Leak) -> None:
        """Send a leak that was found in a cell, which may still run."""
        self._send_numbered(
            {"kind": "leak", "start_s": leak.cell_start_s, "leak": _describe_leak(leak)}
        )

    def send_samples(self, samples: Sequence[Sample]) -> None:
        """Send samples as rows, in one message whatever their number."""
        if not self._is_wanted:
            return
        monitor, clock = self._monitor, self._monitor.clock
        columns = monitor.history.devices()
        if columns != self._columns:
            # Before the work: a cell that ends meanwhile wants them once more.
            self._columns = columns
            self._send_numbered({"kind": "devices", "devices": self._describe_devices()})
        with self._lock:
            running = monitor.running
            self._send_numbered(
                {
                    "kind": "rows",
                    "devices": columns,
                    "running_s": None if running is None else running.start_s,
                    "wall_offset_s": clock.wall() - clock.now(),
                },
                pack_rows(samples, columns),
            )
            if running is None:
                self._views.drop_lost(clock.now())
                self._update_sampling()

    def _describe_devices(self) -> list[Message]:
        find_budget = self._monitor.budgets.find
        hardware = self._monitor.hardware
        touched = {info.device for info in hardware.list_devices()}
        # Other libraries may be on further GPUs.
        touched.update(device for device, _ in hardware.read_own_uses())
        return [
            _describe_device(info, find_budget(info.device), is_touched=info.device in touched)
            for info in hardware.list_all_devices()
        ]

    def _send_numbered(self, message: Message, *buffers: bytes) -> None:
        with self._lock:
            if self._is_wanted:
                self._seq += 1
                self._send({**message, "seq": self._seq}, [*buffers])

    # -- Snapshots ---------------------------------------------------------------------------------

    def send_snapshot(self, since_s: float | None = None) -> None:
        """Send the state to all views."""

        def send(snapshot: Message) -> None:
            data = snapshot.pop("data")
            self._send({"kind": "snapshot", **snapshot}, [data])

        self.take_snapshot(since_s, send)

    def take_snapshot(
        self, since_s: float | None = None, use: Callable[[Message], None] = lambda _: None
    ) -> Message:
        """Return the whole state, or what came since a moment: a view goes on from here.

        Args:
            since_s: what the view has already, on the monitor's clock.
            use: called with the state before any message after it is sent.

        Returns:
            The state; under ``data`` the rows, which belong into a message's binary part.
        """
        monitor, clock = self._monitor, self._monitor.clock
        devices, columns = self._describe_devices(), monitor.history.devices()
        max_rows = _MAX_ROWS_BYTES // (8 * (1 + _N_COUNTERS * len(columns)))
        samples = [*thin_samples(monitor.history.samples(since_s), max_rows)]
        with self._lock:
            # What came while the samples were thinned, which takes too long to do it here.
            newest_s = samples[-1].time_s if samples else -math.inf
            samples += [s for s in monitor.history.samples(newest_s) if s.time_s > newest_s]
            running = monitor.running
            # The state is one message: of the past, cells go with it in bounds, as rows do.
            records = monitor.ledger.records[-100:]
            leaks = self._list_leaks()
            snapshot = {
                "seq": self._seq,
                "since_s": since_s,
                "wall_offset_s": clock.wall() - clock.now(),
                "devices": devices,
                "cells": [
                    _describe_cell(record, leaks.get(record.start_s, ())) for record in records
                ],
                "running": None
                if running is None
                else _describe_running(running, leaks.get(running.start_s, ())),
                "columns": columns,
                "gaps": monitor.history.gaps,
                "data": pack_rows(samples, columns),
            }
            use(snapshot)
        return snapshot

    # -- Who is looking ----------------------------------------------------------------------------

    def expect_view(self) -> None:
        """Sample for a view that is about to be shown: on a busy kernel it can't say so yet."""
        self.hear(_EXPECTED, visible=True, variables=False)

    def hear(
        self,
        view: str,
        *,
        visible: bool,
        variables: bool,
        device: str | None = None,
        processes: bool = False,
    ) -> None:
        """Note that a view is there, whether it can be seen, and what it shows."""
        with self._lock:
            if self._is_closed:
                return
            if view != _EXPECTED:
                self._views.said.pop(_EXPECTED, None)
            # A page may send anything, which must not fail later in the middle of a cell.
            shown = device if isinstance(device, str) else None
            now_s = self._monitor.clock.now()
            self._views.hear(view, _View(visible, variables, shown, processes), now_s)
            self._update_sampling()

    def lose(self, view: str) -> None:
        """Note that a view is closed.

        In mid-cell its page may be loaded anew, and can't ask for anything until the cell has
        ended: sampling goes on, so that the plot has no gap, until the view has long been silent.
        """
        with self._lock:
            if self._monitor.running is None:
                self._views.said.pop(view, None)
                self._update_sampling()

    @property
    def is_seen(self) -> bool:
        """True if any view can be seen, as far as is known."""
        return self._is_wanted

    @property
    def has_views(self) -> bool:
        """True if there is any view, seen or not, as far as is known."""
        with self._lock:
            return bool(self._views.said)

    @property
    def shows_variables(self) -> bool:
        """True if the variables of any view can be seen."""
        return any(view.shows_variables for view in self._list_visible())

    @property
    def shows_processes(self) -> bool:
        """True if the processes of any view can be seen."""
        return any(view.shows_processes for view in self._list_visible())

    def list_devices_seen(self) -> frozenset[str]:
        """The devices that the views which can be seen show in parts."""
        return frozenset(view.device for view in self._list_visible() if view.device is not None)

    def _list_visible(self) -> list[_View]:
        with self._lock:
            return [view for view in self._views.said.values() if view.is_visible]

    def close(self) -> None:
        """Send nothing more. May be called twice."""
        with self._lock:
            self._is_closed = True
            self._views.said.clear()
            self._update_sampling()
        self._listening.close()

    def _update_sampling(self) -> None:
        wanted = bool(self._list_visible())
        if wanted and not self._is_wanted:
            self._is_wanted = True
            # Whoever joins has no messages of the time before: their number starts a gap.
            self._seq += 1
            self._monitor.want_samples(self)
        elif not wanted and self._is_wanted:
            self._is_wanted = False
            self._monitor.unwant_samples(self)


# -- Records ---------------------------------------------------------------------------------------


def _describe_device(info: DeviceInfo, budget_bytes: int | None, *, is_touched: bool) -> Message:
    """Describe a device, what may be taken of it, and whether this process uses it."""
    return {
        "device": info.device,
        "is_touched": is_touched,
        "name": info.name,
        "total_bytes": info.total_bytes,
        "limit_bytes": info.limit_bytes,
        "budget_bytes": budget_bytes,
    }


def _describe_running(cell: RunningCell, leaks: Sequence[Leak] = ()) -> Message:
    """Describe a cell that has begun."""
    return {
        "execution_count": cell.execution_count,
        "first_line": cell.first_line,
        "start_s": cell.start_s,
        # By device the bytes allocated and reserved; None if they could not be read.
        "before": None
        if cell.start_failed
        else {
            reading.device: [reading.allocated_bytes, reading.reserved_bytes]
            for reading in cell.before
        },
        "own": cell.is_only_own_magics,
        "leaks": [_describe_leak(leak) for leak in leaks],
    }


def _describe_cell(record: CellRecord, leaks: Sequence[Leak]) -> Message:
    """Describe a cell that has ended, with its change and peak on each device, and its leaks."""
    return {
        "execution_count": record.execution_count,
        "first_line": record.first_line,
        "start_s": record.start_s,
        "duration_s": record.duration_s,
        "status": record.status,
        "own": record.is_only_own_magics,
        "devices": [_describe_cell_device(device) for device in record.devices],
        "leaks": [_describe_leak(leak) for leak in leaks],
    }


def _describe_leak(leak: Leak) -> Message:
    """Describe a leak in words: in the cell's row, above the plot while it runs, and in full."""
    return {
        "device": leak.device,
        "mark": mark_leak(leak),
        "note": note_running_leak(leak) if leak.unit == "step" else "",
        "sentence": describe_leak(leak),
    }


def _describe_cell_device(device: CellDevice) -> Message:
    allocated = device.allocated.peak_bytes
    return {
        "device": device.device,
        "change": device.allocated.change_bytes,
        # The host has no high-water mark of what is allocated, only one of its resident size.
        "peak": device.reserved.peak_bytes if allocated is None else allocated,
        "rise": (device.reserved if allocated is None else device.allocated).rise_bytes,
        "outside": device.outside_change_bytes,
        "peak_of": "reserved" if allocated is None else "allocated",
        "peak_is": device.peak_is,
        # The budget that the cell's peak went beyond.
        "crossed": device.budget_bytes if device.is_over_budget else None,
    }


# -- Rows ------------------------------------------------------------------------------------------


def pack_rows(samples: Iterable[Sample], devices: Sequence[str]) -> bytes:
    """Return samples as rows, with columns for these devices."""
    figures: list[float] = []
    for sample in samples:
        figures.append(sample.time_s)
        readings = {reading.device: reading for reading in sample.readings}
        for device in devices:
            reading = readings.get(device)
            unknown = [math.nan] * _N_COUNTERS
            figures += unknown if reading is None else _list_counters(reading)
    return struct.pack(f"<{len(figures)}d", *figures)


def _list_counters(reading: Reading) -> list[float]:
    counters = (
        reading.allocated_bytes,
        reading.reserved_bytes,
        reading.allocated_peak_bytes,
        reading.reserved_peak_bytes,
    )
    return [math.nan if n_bytes is None else n_bytes for n_bytes in counters]
