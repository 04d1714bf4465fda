"""Find loops that keep more memory with each step, while they run, and the lines that keep it.

Steps are marked by optimizers and ``gpumemwidget.watch``, and from Python 3.12 on by the turns of
the slow loops in the cells' own code. ``sys.monitoring`` reports each jump back to a loop's
beginning, in the code objects that are asked for alone:
https://docs.python.org/3/library/sys.monitoring.html. All other code runs as fast as ever. Earlier
Pythons could only report jumps by tracing all code, which slows it.
"""

from __future__ import annotations

import dis
import functools
import sys
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from types import CodeType, FrameType
from typing import Any

from gpumemwidget.backends.hardware import Hardware
from gpumemwidget.backends.hooks import find_monitoring, take_tool_number
from gpumemwidget.errors import is_our_error, keep_from_cell
from gpumemwidget.leaks.levels import MIN_STEPS, Levels, Trend
from gpumemwidget.leaks.survey import Gain, Group, Survey, find_gains
from gpumemwidget.model.devices import HOST
from gpumemwidget.tracing.line_watch import LineReadings, LineWatch, Place, watch_lines
from gpumemwidget.tracing.sources import IsEntry

#: Number of steps between two looks at who holds what, at least.
_MIN_BETWEEN = 5
#: Maximum number of loops of a cell that are followed.
_MAX_LOOPS = 16


@dataclass(slots=True)
class Loop:
    """A loop of the running cell."""

    #: For a loop that is known by its turns alone, the number of steps that were marked otherwise
    #: at its last turn. A loop without an optimizer may keep graphs until a backward pass behind
    #: it, as an episode does.
    n_marked: int | None = None
    #: Those that step in it, by their ``id``.
    optimizers: dict[int, weakref.ref[Any]] = field(default_factory=dict)
    n_steps: int = 0
    #: When the first step and the last one ended.
    began_s: float = 0.0
    last_s: float = 0.0
    #: Number of steps at whose end the memory was read, and the one after which it is read next.
    n_read: int = 0
    next_read: int = 2
    #: By device, the memory in use at the ends of steps.
    levels: dict[str, Levels] = field(default_factory=dict)
    #: Who held what when growth was first seen, and the number of steps until then.
    first: Survey | None = None
    n_first: int = 0
    #: The step from which on who holds what is looked at again.
    next_look: int = 0
    #: By device, the step after which lines were read, and the file and line that grew.
    lines: dict[str, tuple[int, Place]] = field(default_factory=dict)

    def find_trends(self) -> dict[str, Trend]:
        """Return the steady growth of each device until the last step."""
        found = ((device, levels.find_trend()) for device, levels in self.levels.items())
        return {device: trend for device, trend in found if trend is not None}

    def can_compare(self) -> bool:
        """Return whether enough steps were made since growth was first seen."""
        return self.first is not None and self.n_steps >= self.n_first + _MIN_BETWEEN

    def is_outdated(self, trend: Trend) -> bool:
        """Return whether growth began after the first survey: what grew before would count too."""
        return trend.since > self.n_first + _MIN_BETWEEN

    def compare(
        self, survey: Survey, find_capacity: Callable[[str], int | None]
    ) -> list[tuple[Trend, list[Gain], int]]:
        """Return what has grown with the steps since the first survey, for each device.

        It has gained about what the steps have added, with a storage for most of them. A loop may
        collect its results, and layers: plain tensors are reported once they are about to fill the
        device (``find_capacity`` knows a GPU's memory). Autograd graphs are reported from the start
        where the loop's own optimizer has changed what they begin with, so that no backward pass
        can follow.

        Returns:
            For each device its growth, what has gained, and over how many steps.
        """
        found = []
        for device, trend in self.find_trends().items():
            n_steps = self.n_steps - max(self.n_first, trend.since)
            if n_steps < _MIN_BETWEEN or self.is_outdated(trend):
                continue
            capacity = None if device == HOST else find_capacity(device)
            # So much of what is meant to be kept is about to fill the device.
            fills = capacity is not None and trend.rise_bytes >= 0.1 * capacity
            gains = [
                gain
                for gain in find_gains(self.first, survey, device, n_steps * trend.each_bytes)
                if (fills or (self.n_marked is None and self._has_passed(gain.group)))
                and gain.is_of_most(n_steps)
            ]
            if gains:
                found.append((trend, gains, n_steps))
        return found

    def _has_passed(self, group: Group) -> bool:
        """Return whether autograd graphs begin with what the loop's optimizer changes."""
        optimizers = [optimizer for known in self.optimizers.values() if (optimizer := known())]
        if not optimizers or group.leaves is None or not group.in_graph:
            return group.in_graph
        parts = [part for optimizer in optimizers for part in optimizer.param_groups]
        return any(id(parameter) in group.leaves for part in parts for parameter in part["params"])


class LoopWatch:
    """Follows the loops of one cell, and notices what grows with their steps.

    Attributes:
        loops: by what marks their steps: an optimizer's id, ``""`` for ``watch``, or what
            ``LoopEvents`` identifies a loop by.

    Args:
        hardware: the machine's memory.
        take_survey: returns who holds what; it gets the seconds that it may take.
        list_files: returns the names of the files of all cells that ran.
        on_interrupt: called for a Ctrl-C that landed in our own code: it sends another.
        clock: returns a time in seconds.
        cpu_clock: returns the seconds of the calling thread's work.
    """

    def __init__(
        self,
        hardware: Hardware,
        *,
        take_survey: Callable[[float], Survey | None],
        list_files: Callable[[], Sequence[str]],
        on_interrupt: Callable[[], None],
        clock: Callable[[], float] = time.perf_counter,
        cpu_clock: Callable[[], float] = time.thread_time,
    ) -> None:
        self.loops: dict[object, Loop] = {}
        self._hardware = hardware
        self._take_survey = take_survey
        self._list_files = list_files
        self._on_interrupt = on_interrupt
        self._clock = clock
        self._cpu_clock = cpu_clock
        self._start_s = self._clock()
        self._spent_s = self._looked_s = 0.0
        #: Number of steps that optimizers and ``watch`` have marked.
        self._n_marked = 0
        #: Seconds that a look at who holds what takes, by the last one.
        self._look_s = 0.0
        #: The lines that are read now, of which loop and device, and from which step on.
        self._reading: tuple[LineWatch, Loop, str, int] | None = None

    def count(self, key: object, optimizer: object = None) -> Loop | None:
        """Count a step that has ended; return its loop if ``read`` is to be called.

        The key is that of ``loops``; the optimizer is the one that has made the step, if one has.
        """
        loop = self.loops.get(key)
        now_s = self._clock()
        if loop is None:
            if len(self.loops) == _MAX_LOOPS:
                return None
            loop = self.loops[key] = Loop(began_s=now_s)
            if optimizer is not None:
                self.note_optimizer(key, optimizer)
        if loop.n_marked is None:
            self._n_marked += 1
        loop.n_steps += 1
        loop.last_s = now_s
        if self._reading is not None and self._reading[1] is loop:
            return loop
        if loop.n_steps < loop.next_read:
            return None
        has_risen = any(levels.has_risen for levels in loop.levels.values())
        is_needed = loop.n_read < MIN_STEPS or has_risen
        # Of the thread's own time, which other processes do not lengthen.
        may_take_s = 0.002 * max(now_s - self._start_s, 1)
        if is_needed or self._spent_s <= may_take_s:
            return loop
        # Asking at each step whether there is time would take some, too.
        loop.next_read = loop.n_steps + 1 + loop.n_steps // 16
        return None

    def follow_turns(self, key: object) -> bool:
        """Return whether a loop's turns are steps that nothing else marks.

        They are not within a module's call: the layers in its loop keep what the backward needs.

        Args:
            key: what ``LoopEvents`` identifies the loop by.
        """
        loop = self.loops.get(key)
        if loop is None:
            if len(self.loops) == _MAX_LOOPS or _is_within_module():
                return False
            self.loops[key] = Loop(n_marked=self._n_marked, began_s=self._clock())
        elif loop.n_marked != self._n_marked:
            del self.loops[key]
            return False
        return True

    def note_optimizer(self, key: object, optimizer: object) -> None:
        """Note that an optimizer steps in a loop."""
        loop = self.loops.get(key)
        if loop is not None and len(loop.optimizers) < _MAX_LOOPS:
            loop.optimizers[id(optimizer)] = weakref.ref(optimizer)

    def read(self, loop: Loop) -> Survey | None:
        """Read the memory at the end of a loop's step, and look into growth.

        Returns:
            Who holds what now, if the loop can be compared with an earlier moment; else ``None``.
        """
        begin_cpu_s = self._cpu_clock()
        loop.n_read += 1
        # A slow malloc's count is read each time only where there is nothing else to follow.
        has_gpu = any(info.device != HOST for info in self._hardware.list_devices())
        for reading in self._hardware.read() if has_gpu else self._hardware.read_exact():
            if reading.allocated_bytes is not None:
                levels = loop.levels.setdefault(reading.device, Levels())
                levels.add(loop.n_steps, reading.allocated_bytes)
        # A slow allocator's count is not always read.
        n_levels = max((levels.n_added for levels in loop.levels.values()), default=0)
        # Growth is to be reported by the thirtieth step. A reading takes 20 µs, and seven times as
        # long with cold caches.
        n_more = 1 if n_levels < 12 else round(0.25 * loop.n_steps)
        loop.next_read = loop.n_steps + n_more
        self._end_lines(loop)
        trends: dict[str, Trend] = {}
        if loop.n_read >= MIN_STEPS and self._reading is None:
            trends = loop.find_trends()
        self._spent_s += self._cpu_clock() - begin_cpu_s
        is_due = bool(trends) and loop.n_steps >= loop.next_look
        survey = self._look() if is_due else None
        self._read_lines(loop, trends)
        if survey is None:
            return None
        loop.next_look = 2 * loop.n_steps
        if loop.first is None or all(loop.is_outdated(trend) for trend in trends.values()):
            loop.first, loop.n_first = survey, loop.n_steps
        # A loop without an optimizer is compared at the cell's end alone.
        return survey if loop.can_compare() and loop.optimizers else None

    def read_end(self) -> None:
        """Read the memory at the cell's end: a short loop's last steps may not have been read."""
        loops = [loop for loop in self.loops.values() if loop.can_compare()]
        for reading in self._hardware.read() if loops else ():
            for loop in loops:
                levels = loop.levels.get(reading.device)
                if levels is not None and reading.allocated_bytes is not None:
                    levels.add_last(loop.n_steps, reading.allocated_bytes)

    def list_comparable(self) -> list[Loop]:
        """Return the loops that grow, and since whose last step no other loop has begun."""
        latest_s = max((loop.began_s for loop in self.loops.values()), default=0.0)
        return [
            loop
            for loop in self.loops.values()
            if loop.last_s >= latest_s and loop.can_compare() and loop.find_trends()
        ]

    def stop_lines(self) -> None:
        """Stop reading lines. May be called twice."""
        reading, self._reading = self._reading, None
        if reading is not None:
            lines, loop, device, since = reading
            loop.lines[device] = since, find_growing_line(lines.stop())

    # -- Who holds what ----------------------------------------------------------------------------

    def _look(self) -> Survey | None:
        """Return who holds what now, if there is time to look."""
        # Two looks are compared, and one takes 0.15 s in a large process.
        may_take_s = 0.5 + 0.005 * (self._clock() - self._start_s) - self._looked_s
        if self._look_s > may_take_s:
            return None
        begin_s = self._cpu_clock()
        survey = self._take_survey(0.5)
        took_s = self._cpu_clock() - begin_s
        self._looked_s += took_s
        if survey is None or not survey.is_complete:
            # A survey that was cut short wants more time; without any it took none.
            self._look_s = max(self._look_s, 2 * took_s)
            return None
        self._look_s = took_s
        return survey

    # -- Lines -------------------------------------------------------------------------------------

    def _read_lines(self, loop: Loop, trends: dict[str, Trend]) -> None:
        """Begin to read lines for growth that began after those that were read before."""
        wanted = (name for name, trend in trends.items() if not _has_lines(loop, name, trend))
        device = next(wanted, None)
        if device is None:
            return
        files = self._list_files()
        frame: FrameType | None = sys._getframe(1)  # noqa: SLF001 - public by its documentation
        while frame is not None and frame.f_code.co_filename not in files:
            frame = frame.f_back
        if frame is None:
            return
        lines = start_lines(self._hardware, device, frame, files, on_interrupt=self._on_interrupt)
        if lines is not None:
            self._reading = lines, loop, device, loop.n_steps

    def _end_lines(self, loop: Loop) -> None:
        if self._reading is None:
            return
        lines, read, _, since = self._reading
        # What a line adds in each of four steps is known then.
        if not lines.is_on or (loop is read and loop.n_steps >= since + 4):
            self.stop_lines()
        elif loop.began_s > read.last_s and loop.n_read >= MIN_STEPS:
            # The loop whose lines are read may be over. If it goes on, they are read again.
            self._reading = None
            lines.stop()


def _is_within_module() -> bool:
    """Return whether a module is called."""
    frame: FrameType | None = sys._getframe(1)  # noqa: SLF001 - public by its documentation
    while frame is not None:
        if frame.f_globals.get("__name__") == "torch.nn.modules.module":
            return True
        frame = frame.f_back
    return False


def _has_lines(loop: Loop, device: str, trend: Trend) -> bool:
    return device in loop.lines and loop.lines[device][0] >= trend.since


# -- Lines -----------------------------------------------------------------------------------------

#: Time that reading may always take: only a cell or a few steps that grow are read.
_GRACE_NS = 200_000_000


def start_lines(
    hardware: Hardware,
    device: str,
    where: IsEntry | FrameType,
    files: Sequence[str],
    *,
    on_interrupt: Callable[[], None],
) -> LineWatch | None:
    """Read a device's memory at each line of a cell and of files; ``None`` if that can't be done.

    A Ctrl-C that landed in our own code calls ``on_interrupt``, which sends another.
    """
    counter = hardware.find_host_counter()
    if device != HOST:
        counter = functools.partial(hardware.read_allocated, device)
    if counter is None:
        return None
    watch = watch_lines(counter, on_interrupt=on_interrupt, grace_ns=_GRACE_NS)
    return watch if watch.start(where, also=files) else None


def find_growing_line(readings: LineReadings) -> tuple[str, int] | None:
    """Return the file and the line that added at least half of what has stayed; or ``None``.

    What is given back is subtracted from the last line that took exactly as much, or else from the
    last lines that took any.
    """
    added: list[tuple[Place, int]] = []
    for line, change in readings.events:
        if change > 0:
            added.append((line, change))
            continue
        left = -change
        last_ones = reversed(range(max(0, len(added) - 1000), len(added)))
        same = next((n for n in last_ones if added[n][1] == left), None)
        if same is not None:
            del added[same]
            continue
        while added and left > 0:
            last, n_bytes = added.pop()
            if n_bytes > left:
                added.append((last, n_bytes - left))
            left -= n_bytes
    kept: dict[Place, int] = {}
    for line, n_bytes in added:
        kept[line] = kept.get(line, 0) + n_bytes
    grown_bytes = sum(readings.changes.values()) + readings.unread_bytes
    largest = max(kept, key=lambda line: kept[line], default=None)
    if largest is None or grown_bytes <= 0 or kept[largest] < 0.5 * grown_bytes:
        return None
    return largest


# -- The turns of loops ----------------------------------------------------------------------------

#: A loop is left alone once so many turns in a row took less on average, in seconds: being called
#: takes some 3 µs with cold caches.
_MIN_TURN_S, _N_TRIED = 0.001, 16
#: Instructions that end a loop's turn. Python 3.12 and later have no others.
_JUMPS_BACK = [dis.opmap[name] for name in dis.opmap if name.startswith("JUMP_BACKWARD")]


class LoopEvents:
    """Calls back at each turn of the slow loops in the cells' code.

    Args:
        on_turn: is called with what identifies the loop in the running cell, once the loop is known
            to be slow; it must not raise. The loop is left alone if it returns ``False``.
        clock: returns a time in seconds.
    """

    def __init__(
        self,
        on_turn: Callable[[tuple[int, int]], bool],
        *,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._on_turn = on_turn
        self._clock = clock
        self._monitoring: Any = None
        self._tool = 0
        #: By its id, for two cells with the same text have code that is equal.
        self._codes: dict[int, weakref.ref[CodeType]] = {}
        #: For each jump back, by its code's id and its offset in it: since when turns are counted,
        #: their number, and how often so many have been slow.
        self._turns: dict[tuple[int, int], tuple[float, int, int]] = {}

    def open(self, run_code: CodeType) -> None:
        """Begin, where Python reports jumps and has a number for one more tool.

        Args:
            run_code: the code of ``InteractiveShell.run_code``, which runs the cells' code: its
                variable ``code_obj``.
        """
        tool = take_tool_number("gpumemwidget loops")
        if tool is None:
            return
        monitoring = find_monitoring()
        self._monitoring, self._tool = monitoring, tool
        events = monitoring.events
        for event, see in ((events.PY_START, self._see_start), (events.JUMP, self._see_jump)):
            guarded = keep_from_cell(see, _survive, instead=monitoring.DISABLE)
            monitoring.register_callback(tool, event, guarded)
        self._codes[id(run_code)] = weakref.ref(run_code)
        monitoring.set_local_events(tool, run_code, events.PY_START)

    def close(self) -> None:
        """Take everything away. May be called twice."""
        monitoring, self._monitoring = self._monitoring, None
        if monitoring is None:
            return
        for code in filter(None, (known() for known in self._codes.copy().values())):
            monitoring.set_local_events(self._tool, code, 0)
        for event in (monitoring.events.PY_START, monitoring.events.JUMP):
            monitoring.register_callback(self._tool, event, None)
        monitoring.free_tool_id(self._tool)
        self._codes.clear()
        self._turns.clear()

    def start_cell(self) -> None:
        """Count anew: a cell begins."""
        self._turns.clear()

    def _see_start(self, _run_code: CodeType, _offset: int) -> None:
        monitoring = self._monitoring
        if monitoring is None:
            return
        # The frame behind those of this method and of its guard.
        frame = sys._getframe(2)  # noqa: SLF001 - public by its documentation
        for code in list_codes(frame.f_locals["code_obj"]):
            instructions = code.co_code[::2]
            if any(jump in instructions for jump in _JUMPS_BACK):
                # No code of ours runs when it goes: a signal's handler could lose its error there.
                forget = functools.partial(self._codes.pop, id(code))
                self._codes[id(code)] = weakref.ref(code, forget)
                monitoring.set_local_events(self._tool, code, monitoring.events.JUMP)

    def _see_jump(self, code: CodeType, offset: int, target: int) -> Any:
        monitoring = self._monitoring
        if monitoring is None:
            return None
        if target > offset:
            return monitoring.DISABLE
        key = id(code), offset
        now_s = self._clock()
        begin_s, n_turns, n_slow = self._turns.get(key, (now_s, -1, 0))
        n_turns += 1
        if n_turns and now_s - begin_s >= _N_TRIED * _MIN_TURN_S:
            begin_s, n_turns, n_slow = now_s, 0, n_slow + 1
        elif n_turns == _N_TRIED:
            return monitoring.DISABLE
        self._turns[key] = begin_s, n_turns, n_slow
        # One turn may be slow by chance.
        return None if n_slow < 2 or self._on_turn(key) else monitoring.DISABLE


def list_codes(code: CodeType) -> Iterator[CodeType]:
    """Yield a code object and those of the functions and classes that it defines."""
    yield code
    for constant in code.co_consts:
        if type(constant) is CodeType:
            yield from list_codes(constant)


def _survive(exc: BaseException) -> bool:
    return isinstance(exc, Exception) and is_our_error(exc)
