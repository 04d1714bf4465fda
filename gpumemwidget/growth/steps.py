"""Find loops that keep more memory with each step, while they run."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import FrameType

from gpumemwidget.backends.hardware import Hardware
from gpumemwidget.growth.levels import MIN_STEPS, Levels, Trend
from gpumemwidget.growth.lines import GrowthLines, LineChanges, read_allocated, sum_lines
from gpumemwidget.growth.survey import Group, Survey
from gpumemwidget.model.devices import HOST

#: Share of a cell's time that following its steps may take, and the seconds that it may always:
#: of the thread's own time, which other processes do not lengthen.
_SHARE, _GRACE_S = 0.005, 0.01
#: Seconds between two readings of a loop, at least, after the first ones: one takes 20 µs.
_EVERY_S, _N_FREE = 0.001, 64
#: Levels are looked at for growth each time that so many were read.
_LOOK_EVERY = 5
#: Number of steps whose lines are read, once there is growth.
_N_LINE_STEPS = 4
#: Share of the steps in each of which a holder must have gained a storage, and of the growth that
#: it must have, to be what grows.
_MIN_SHARE = 0.5
#: A holder with more than so many times of what all steps have added was there before them.
_MAX_SHARE = 1.5
#: Share of a device's memory from which tensors that a loop without training collects are told,
#: too. Evaluation collects its results; so much of them is about to fill the device.
_FILLS = 0.1
#: Maximum number of loops of a cell that are followed.
_MAX_LOOPS = 16


@dataclass(slots=True)
class Loop:
    """A loop of the running cell, by what tells of its steps.

    Attributes:
        trains: whether its steps are an optimizer's, or were told outright.
        n_steps: how many steps have ended.
        n_read: after how many of them the memory was read, and ``read_s`` when last.
        levels: by device, the memory in use at their ends.
    """

    trains: bool
    n_steps: int = 0
    n_read: int = 0
    read_s: float = -math.inf
    levels: dict[str, Levels] = field(default_factory=dict)

    def find_trends(self) -> dict[str, Trend]:
        """Return the steady growth of each device until the last step."""
        found = ((device, levels.find_trend()) for device, levels in self.levels.items())
        return {device: trend for device, trend in found if trend is not None}


class LoopWatch:
    """Follows the loops of one cell, and notices what grows with their steps.

    Attributes:
        loops: by what tells of their steps: ``""`` for an optimizer or ``watch``, else the file and
            the line.
        lines: by device, what the lines have added, once they were read.

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
        self.loops: dict[object, Loop] = {}
        self.lines: dict[str, LineChanges] = {}
        self._hardware = hardware
        self._list_files = list_files
        self._on_interrupt = on_interrupt
        self._clock = time.perf_counter
        self._start_s = self._clock()
        self._spent_s = 0.0
        self._next_look = 0
        #: The lines that are read now: of which loop and device, and from which step and level on.
        self._reading: tuple[GrowthLines, Loop, str, int, int] | None = None

    def step(self, key: object, *, trains: bool) -> dict[str, Trend]:
        """Note that a step of a loop has ended.

        Args:
            key: what told of it; see ``loops``.
            trains: whether it is an optimizer's step, or was told outright.

        Returns:
            By device the growth that is to be looked into; mostly empty.
        """
        loop = self.loops.get(key)
        if loop is None:
            if len(self.loops) == _MAX_LOOPS:
                return {}
            loop = self.loops[key] = Loop(trains)
        loop.n_steps += 1
        begin_s, begin_cpu_s = self._clock(), time.thread_time()
        is_early = loop.n_read >= _N_FREE and begin_s - loop.read_s < _EVERY_S
        if is_early or self._spent_s > _GRACE_S + _SHARE * (begin_s - self._start_s):
            return {}
        loop.n_read += 1
        loop.read_s = begin_s
        for reading in self._hardware.read():
            if reading.allocated_bytes is not None:
                levels = loop.levels.setdefault(reading.device, Levels())
                levels.add(loop.n_steps, reading.allocated_bytes)
        self._end_lines(loop)
        trends: dict[str, Trend] = {}
        if loop.n_read >= MIN_STEPS and loop.n_read % _LOOK_EVERY == 0:
            trends = loop.find_trends()
            self._read_lines(loop, trends)
        self._spent_s += time.thread_time() - begin_cpu_s
        is_due = trains and self._reading is None and loop.n_steps >= self._next_look
        return trends if is_due else {}

    def may_take(self, seconds: float) -> bool:
        """Return whether something that takes so long is no more than its share of the time."""
        return seconds <= 2 * _SHARE * (self._clock() - self._start_s)

    def charge_look(self, loop: Loop, seconds: float) -> None:
        """Note that growth was looked into: the next look waits until the steps have doubled."""
        self._start_s += seconds
        self._next_look = 2 * loop.n_steps

    def close(self) -> None:
        """Stop reading lines. May be called twice."""
        reading, self._reading = self._reading, None
        if reading is not None:
            lines, _, device, _, level = reading
            self._keep_lines(lines, device, level)

    # -- Lines -------------------------------------------------------------------------------------

    def _read_lines(self, loop: Loop, trends: dict[str, Trend]) -> None:
        device = next((each for each in trends if each not in self.lines), None)
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
            self._reading = (
                lines,
                loop,
                device,
                loop.n_steps,
                read_allocated(self._hardware, device),
            )

    def _end_lines(self, loop: Loop) -> None:
        if self._reading is None:
            return
        lines, read, device, since, level = self._reading
        if loop is read and loop.n_steps >= since + _N_LINE_STEPS:
            self._reading = None
            self._keep_lines(lines, device, level)

    def _keep_lines(self, lines: GrowthLines, device: str, level: int) -> None:
        grown_bytes = read_allocated(self._hardware, device) - level
        self.lines[device] = sum_lines(lines.stop(), grown_bytes)


def find_growing(
    survey: Survey, loop: Loop, device: str, trend: Trend, total_bytes: int | None
) -> Group | None:
    """Return the group of storages that grows with a loop's steps; ``None`` if there is none.

    It has about what the steps have added, with a storage for most of them. What trains is not
    meant to keep anything with each step. What does not train may collect its results: but no
    autograd graphs, not in a module, and not in a chain; unless they are about to fill the device.
    Parameters are left out: an optimizer that makes its state for one after the other grows beside
    them.

    Args:
        survey: who holds what.
        loop: the loop.
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
        and not group.is_parameter
        and group.n_storages >= _MIN_SHARE * trend.n_steps
        and group.n_bytes >= _MIN_SHARE * trend.rise_bytes
        and group.n_bytes <= _MAX_SHARE * trend.each_bytes * loop.n_steps
        and (loop.trains or group.in_graph or group.in_model or group.is_chain or fills)
    ]
    return max(found, key=lambda group: group.n_bytes, default=None)
