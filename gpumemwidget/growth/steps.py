"""Find loops that keep more memory with each step, while they run."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from types import FrameType

from gpumemwidget.backends.hardware import Hardware
from gpumemwidget.growth.levels import MIN_STEPS, Levels, Trend
from gpumemwidget.growth.lines import GrowthLines, LineChanges, sum_lines
from gpumemwidget.growth.survey import Group, Survey
from gpumemwidget.model.devices import HOST

#: Share of a cell's time that following its steps may take, and the seconds that it may always.
_SHARE, _GRACE_S = 0.005, 0.025
#: Levels are looked at for growth each time that so many were read.
_LOOK_EVERY = 5
#: Number of steps whose lines are read, once there is growth.
_N_LINE_STEPS = 4
#: Share of the steps in each of which a holder must have gained a storage, and of the growth that
#: it must have, to be what grows.
_MIN_SHARE = 0.5
#: Share of a device's memory from which tensors that a loop collects are told, too. Results are
#: collected on purpose, as evaluation does; so much of them is about to fill the device.
_FILLS = 0.1


class LoopWatch:
    """Follows the steps of one cell, and notices what grows with them.

    Args:
        hardware: the machine's memory.
        list_files: returns the names of the files of all cells that ran.
        on_interrupt: called for a Ctrl-C that landed in our own code: it sends another.
    """

    def __init__(
        self,
        hardware: Hardware,
        *,
        list_files: Callable[[], Sequence[str]],
        on_interrupt: Callable[[], None],
    ) -> None:
        self._hardware = hardware
        self._list_files = list_files
        self._on_interrupt = on_interrupt
        self._clock = time.perf_counter
        self._start_s = self._clock()
        self._spent_s = 0.0
        self._n_steps = self._n_read = 0
        self._levels: dict[str, Levels] = {}
        self._reading: GrowthLines | None = None
        self._lines_from = (0, 0)
        self._lines_device = ""
        self._next_look = 0
        #: The growth of each device, and what its lines added, once they were read.
        self.trends: dict[str, Trend] = {}
        self.lines: dict[str, LineChanges] = {}

    @property
    def n_steps(self) -> int:
        """Return the number of steps so far."""
        return self._n_steps

    def step(self) -> bool:
        """Note that a step of a loop has ended; return whether there is growth to look into."""
        self._n_steps += 1
        begin_s = self._clock()
        if self._spent_s > _GRACE_S + _SHARE * (begin_s - self._start_s):
            return False
        for reading in self._hardware.read():
            if reading.allocated_bytes is not None:
                levels = self._levels.setdefault(reading.device, Levels())
                levels.add(self._n_steps, reading.allocated_bytes)
        self._n_read += 1
        self._read_lines()
        if self._n_read >= MIN_STEPS and self._n_read % _LOOK_EVERY == 0:
            self.find_trends()
            self._watch_lines()
        self._spent_s += self._clock() - begin_s
        return bool(self.trends) and self._reading is None and self._n_steps >= self._next_look

    def may_take(self, seconds: float) -> bool:
        """Return whether something that takes so long is no more than its share of the time."""
        return seconds <= 2 * _SHARE * (self._clock() - self._start_s)

    def charge_look(self, seconds: float) -> None:
        """Note that growth was looked into: the next look waits until the steps have doubled."""
        self._start_s += seconds
        self._next_look = 2 * self._n_steps

    def find_trends(self) -> dict[str, Trend]:
        """Return the steady growth of each device until now."""
        found = ((device, levels.find_trend()) for device, levels in self._levels.items())
        self.trends = {device: trend for device, trend in found if trend is not None}
        return self.trends

    def close(self) -> None:
        """Stop reading lines. May be called twice."""
        lines, self._reading = self._reading, None
        if lines is not None:
            lines.stop()

    # -- Lines -------------------------------------------------------------------------------------

    def _watch_lines(self) -> None:
        device = next((each for each in self.trends if each not in self.lines), None)
        if device is None or self._reading is not None:
            return
        files = self._list_files()
        frame: FrameType | None = sys._getframe(1)  # noqa: SLF001 - public by its documentation
        while frame is not None and frame.f_code.co_filename not in files:
            frame = frame.f_back
        if frame is None:
            return
        lines = GrowthLines(self._hardware, device, on_interrupt=self._on_interrupt)
        if lines.start(frame, files):
            self._reading = lines
            self._lines_device = device
            self._lines_from = (self._n_steps, self._read(device))

    def _read_lines(self) -> None:
        if self._reading is None or self._n_steps < self._lines_from[0] + _N_LINE_STEPS:
            return
        lines, self._reading = self._reading, None
        device = self._lines_device
        grown_bytes = self._read(device) - self._lines_from[1]
        self.lines[device] = sum_lines(lines.stop(), grown_bytes)

    def _read(self, device: str) -> int:
        return next(
            (r.allocated_bytes or 0 for r in self._hardware.read() if r.device == device), 0
        )


def find_growing(
    survey: Survey, device: str, trend: Trend, total_bytes: int | None
) -> Group | None:
    """Return the group of storages that grows with the steps; ``None`` if there is none.

    It has gained a storage in most steps, and most of the growth. Autograd graphs, and what a
    module or an optimizer keeps, are not meant to grow so; plain tensors may be, unless they are
    about to fill the device.

    Args:
        survey: who holds what.
        device: the device that grows.
        trend: its growth.
        total_bytes: the device's memory.
    """
    fills = device != HOST and total_bytes is not None and trend.rise_bytes >= _FILLS * total_bytes
    found = [
        group
        for group in survey.groups.values()
        if group.device == device
        and not group.is_bounded
        and group.n_storages >= _MIN_SHARE * trend.n_steps
        and group.n_bytes >= _MIN_SHARE * trend.rise_bytes
        and (group.in_graph or group.in_model or fills)
    ]
    return max(found, key=lambda group: group.n_bytes, default=None)
