"""Follow cells and loops for memory that grows, and keep what was found."""

from __future__ import annotations

import linecache
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, TypeAlias

from gpumemwidget.backends.hooks import OptimizerStepHook, find_torch
from gpumemwidget.leaks.levels import MIN_GROWTH_BYTES
from gpumemwidget.leaks.runs import MIN_RUNS, RepeatedCells, make_cell_key
from gpumemwidget.leaks.steps import Loop, LoopEvents, LoopWatch, find_growing_line, start_lines
from gpumemwidget.leaks.survey import ModuleContents, Survey, make_holders, take_survey
from gpumemwidget.model.cells import CellRecord
from gpumemwidget.model.devices import HOST
from gpumemwidget.model.leaks import Leak, LeakHolder, LeakLine, UnexplainedGrowth
from gpumemwidget.recording.monitor import Callbacks
from gpumemwidget.session.interrupts import run_uninterrupted, send_later
from gpumemwidget.session.tracer import is_tracing
from gpumemwidget.tracing.sources import make_is_entry

if TYPE_CHECKING:
    from types import CodeType

    from gpumemwidget.model.devices import DeviceInfo
    from gpumemwidget.recording.running_cell import RunningCell
    from gpumemwidget.session.session import Session
    from gpumemwidget.tracing.line_watch import LineWatch, Place

#: Seconds that the search for what grows may take at a cell's end.
_SURVEY_S = 1.0
#: Maximum number of leaks that are kept, and of cells with any, the last ones that were seen.
_MAX_LEAKS = 64

#: A leak's cell, device and unit, and the container that grows most: its parts may be reported
#: together at one time, and the largest alone at another.
_LeakKey: TypeAlias = "tuple[str, str, str, str]"


class LeakWatch:
    """Finds what grows from run to run of a cell, and from step to step of its loops.

    Attributes:
        found: called with each leak once for each run of a cell, on the thread that runs it; while
            it runs, if it was found then.
        updated: called with a leak that was found in this run of the cell, and with what is known
            of it later: at the cell's end, at the latest.
    """

    def __init__(self, session: Session) -> None:
        self.found: Callbacks[Leak] = Callbacks(session.report_failure)
        self.updated: Callbacks[tuple[Leak, Leak]] = Callbacks(session.report_failure)
        self._session = session
        self._monitor = session.monitor
        self._run_code: CodeType | None = None
        self._cells = RepeatedCells()
        self._contents = ModuleContents()
        self._leaks: dict[_LeakKey, Leak] = {}
        self._leaks_by_cell: dict[float, tuple[Leak, ...]] = {}
        self._ignored: dict[str, None] = {}
        self._source = ""
        self._start_s = 0.0
        self._thread_id = 0
        self._loops: LoopWatch | None = None
        #: The lines that are read in the cell that runs, and of which device.
        self._reading: tuple[LineWatch, str] | None = None
        #: The leaks of the cell that runs now, which has reported them.
        self._reported: dict[_LeakKey, Leak] = {}
        #: The loops of the cell that ``watch`` follows: optimizers' steps are not counted then.
        self._watched: set[object] = set()
        #: Until when no survey is taken, on the clock ``time.monotonic``.
        self._rest_until_s = 0.0
        self._steps = OptimizerStepHook(self._end_optimizer_step)
        self._turns = LoopEvents(self._end_turn)
        self._remove: list[Callable[[], None]] = []

    def open(self, run_code: CodeType) -> None:
        """Begin; ``run_code`` is the code of IPython's method that runs the cells' code."""
        self._run_code = run_code
        self._remove = [
            self._monitor.cell_started.add(self._start_cell),
            self._monitor.cell_ended.add(self._end_cell),
            self._session.trace_begins.add(self._stop_lines),
        ]
        self._steps.open()
        self._turns.open(run_code)

    def close(self) -> None:
        """End, and forget what was found. May be called twice."""
        self._steps.close()
        self._turns.close()
        for remove in self._remove:
            remove()
        self._leave_cell()
        self._thread_id = 0  # A loop that ``watch`` follows may go on.
        self._leaks.clear()
        self._leaks_by_cell.clear()

    # -- What was found ----------------------------------------------------------------------------

    def list_leaks(self) -> tuple[Leak, ...]:
        """Return the leaks that are known, those that add the most first."""
        return tuple(sorted(self._leaks.values(), key=lambda leak: -leak.each_bytes))

    def list_unexplained(self) -> tuple[UnexplainedGrowth, ...]:
        """Return the growth of repeated cells that no tensor explains, the most first."""
        return self._cells.list_unexplained()

    def list_leaks_by_cell(self) -> Mapping[float, tuple[Leak, ...]]:
        """Return the leaks that were reported for each cell, by the cell's ``start_s``."""
        heeded = {
            start_s: tuple(filter(None, map(self._heed, leaks)))
            for start_s, leaks in self._leaks_by_cell.items()
        }
        return {start_s: leaks for start_s, leaks in heeded.items() if leaks}

    def list_ignored(self) -> tuple[str, ...]:
        """Return the holders that are no longer reported."""
        return tuple(self._ignored)

    def ignore(self, name: str) -> None:
        """Stop reporting what a variable, or a holder as ``%memleak`` names it, keeps."""
        self._ignored[name] = None
        heeded = {key: self._heed(leak) for key, leak in self._leaks.items()}
        self._leaks = {key: leak for key, leak in heeded.items() if leak is not None}

    def unignore(self, name: str) -> bool:
        """Report a holder again; return whether it was ignored."""
        if name not in self._ignored:
            return False
        del self._ignored[name]
        return True

    def _is_ignored(self, holder: LeakHolder) -> bool:
        names = holder.path, holder.stem, holder.row
        return not self._ignored.keys().isdisjoint(names)

    # -- Cells -------------------------------------------------------------------------------------

    def _start_cell(self, cell: RunningCell) -> None:
        self._leave_cell()
        self._turns.start_cell()
        self._source = cell.source
        self._start_s = cell.start_s
        self._thread_id = threading.get_ident()
        self._reported.clear()
        self._watched.clear()
        self._loops = LoopWatch(
            self._session.hardware,
            take_survey=self._take_survey,
            list_files=self._list_files,
            on_interrupt=send_later,
        )
        if self._cells.has_grown(cell.source):
            self._contents.note_sizes()
        suspect = self._cells.find_suspect(cell.source)
        if suspect is None:
            return
        hardware = self._session.hardware
        changed_bytes = abs(hardware.read_allocated(suspect.device) - suspect.last_bytes)
        survey = self._take_survey(_SURVEY_S) if changed_bytes >= MIN_GROWTH_BYTES else None
        if survey is not None:
            self._cells.note_survey(cell.source, survey)
        if not suspect.needs_line or self._run_code is None or is_tracing():
            return
        is_entry = make_is_entry(self._run_code, cell.source)
        lines = start_lines(
            hardware, suspect.device, is_entry, self._list_files(), on_interrupt=send_later
        )
        if lines is not None:
            self._reading = lines, suspect.device

    def _end_cell(self, record: CellRecord) -> None:
        try:
            self._find_growth(record)
        finally:
            if self._leaks and record.status == "ok":
                self._forget_ended()

    def _forget_ended(self) -> None:
        """Forget what the cell kept when it ran before, and keeps no longer."""
        cell = make_cell_key(self._source)
        self._leaks = {
            key: leak
            for key, leak in self._leaks.items()
            if key[0] != cell or key in self._reported
        }

    def _find_growth(self, record: CellRecord) -> None:
        reading, self._reading = self._reading, None
        readings = None if reading is None else reading[0].stop()
        growths = self._cells.add(self._source, record)
        watch, self._loops = self._loops, None
        loops: list[Loop] = []
        # There is no watch in the cell that loads the extension.
        if watch is not None and watch.loops:
            watch.stop_lines()
            # After an error the frames of the exception hold memory, which is no growth.
            if record.status != "error":
                watch.read_end()
                loops = watch.list_comparable()
        survey = self._take_survey(_SURVEY_S) if growths or loops else None
        if survey is None:
            if growths and find_torch() is None:
                for growth in growths:
                    self._cells.note_unexplained(self._source, growth.device)
            return
        cell = _name_cell(record.execution_count)
        for growth in growths:
            is_read = reading is not None and reading[1] == growth.device
            place = None if readings is None or not is_read else find_growing_line(readings)
            needs_line = False
            gains = self._cells.compare(self._source, survey, growth)
            holders = self._list_heeded(make_holders(gains))
            if holders:
                each_bytes = min(sum(gain.n_bytes for gain in gains), growth.each_bytes)
                leak = Leak(growth.device, "run", each_bytes, growth.n_runs, holders)
                leak = self._complete(leak, cell, place)
                needs_line = leak.line is None
                self._report(leak)
            if growth.n_runs >= MIN_RUNS:
                self._cells.note_line(self._source, is_needed=needs_line)
        if growths:
            self._cells.note_survey(self._source, survey)
        self._report_loops(loops, survey, cell)

    def _leave_cell(self) -> None:
        self._stop_lines()
        self._loops = self._reading = None

    def _stop_lines(self, _: object = None) -> None:
        """Stop reading lines: the cell is over, or the user's own trace reads them."""
        if self._loops is not None:
            self._loops.stop_lines()
        reading, self._reading = self._reading, None
        if reading is not None:
            reading[0].stop()

    # -- Steps -------------------------------------------------------------------------------------

    @contextmanager
    def watch_loop(self) -> Iterator[Callable[[], None]]:
        """Yield what ends a step of a loop; optimizers' steps are not counted meanwhile."""
        loop = object()
        # A generator may be closed in any thread, and cells later.
        if threading.get_ident() == self._thread_id:
            self._watched.add(loop)
        try:
            yield partial(self._end_step, "")
        finally:
            self._watched.discard(loop)

    def _end_optimizer_step(self, optimizer: object) -> None:
        if not self._watched:
            self._end_step(id(optimizer), optimizer)
        elif self._loops is not None and threading.get_ident() == self._thread_id:
            self._loops.note_optimizer("", optimizer)

    def _end_turn(self, key: object) -> bool:
        watch = self._loops
        if watch is not None and threading.get_ident() == self._thread_id:
            if not watch.follow_turns(key):
                return False
            self._end_step(key)
        return True

    def _end_step(self, key: object, optimizer: object = None) -> None:
        watch = self._loops
        if watch is None or threading.get_ident() != self._thread_id:
            return
        loop = watch.count(key, optimizer)
        # A forked child has nobody to report to.
        if loop is not None and os.getpid() == self._session.pid:
            with self._session.reporting("following a loop's steps"):
                run_uninterrupted(self._read_step, watch, loop)

    def _read_step(self, watch: LoopWatch, loop: Loop) -> None:
        survey, running = watch.read(loop), self._monitor.running
        if survey is not None and running is not None:
            self._report_loops([loop], survey, _name_cell(running.execution_count))

    def _report_loops(self, loops: Sequence[Loop], survey: Survey, cell: str) -> None:
        for loop in loops:
            for trend, gains, n_steps in loop.compare(survey, self._find_capacity):
                holders = self._list_heeded(make_holders(gains, n_steps))
                if not holders:
                    continue
                gained_bytes = sum(gain.n_bytes for gain in gains) // n_steps
                each_bytes = min(trend.each_bytes, gained_bytes)
                device = gains[0].group.device
                _, place = loop.lines.get(device, (0, None))
                leak = Leak(device, "step", each_bytes, trend.n_steps, holders, since=trend.since)
                self._report(self._complete(leak, cell, place))

    # -- Leaks -------------------------------------------------------------------------------------

    def _take_survey(self, budget_s: float) -> Survey | None:
        # Nobody has asked for the survey, which runs beside whatever threads the user has.
        begin_s = time.monotonic()
        if begin_s < self._rest_until_s:
            return None
        survey = take_survey(
            self._session.shell,
            budget_s=budget_s,
            depth="names",
            contents=self._contents,
            with_libraries=budget_s == _SURVEY_S,
        )
        if budget_s == _SURVEY_S and (survey is None or not survey.is_complete):
            # There is more than can be walked in that time, or too many autograd nodes: it will be
            # so the next time, too. A hundredth of the time may be spent on that.
            now_s = time.monotonic()
            self._rest_until_s = now_s + (now_s - begin_s) * 100
        return survey

    def _heed(self, leak: Leak) -> Leak | None:
        """Return a leak without the holders that are ignored; ``None`` if all are."""
        holders = self._list_heeded(leak.holders)
        if holders == leak.holders:
            return leak
        each_bytes = min(leak.each_bytes, sum(holder.each_bytes for holder in holders))
        return (
            replace(leak, holders=holders, each_bytes=each_bytes, n_left=None) if holders else None
        )

    def _list_heeded(self, holders: Sequence[LeakHolder]) -> tuple[LeakHolder, ...]:
        return tuple(holder for holder in holders if not self._is_ignored(holder))

    def _complete(self, leak: Leak, cell: str, place: Place) -> Leak:
        """Return a leak with the cell, the line and what is left until the device is full."""
        # What is left of a growth whose other holders are ignored.
        each_bytes = min(leak.each_bytes, sum(holder.each_bytes for holder in leak.holders))
        return replace(
            leak,
            each_bytes=each_bytes,
            n_left=self._count_left(leak.device, each_bytes),
            cell=cell,
            cell_start_s=self._start_s,
            line=self._recall_line(leak, cell) if place is None else self._name_line(*place),
        )

    def _report(self, leak: Leak) -> None:
        """Report a leak, or what has become of it since it was reported in this run."""
        keys = [(*self._make_key(leak)[:3], holder.stem) for holder in leak.holders]
        known_key = next((key for key in keys if key in self._reported), None)
        key, known = keys[0], None
        if known_key is not None:
            key, known = known_key, self._reported[known_key]
            if known.n_seen == leak.n_seen:
                return
        self._reported[key] = leak
        self._leaks.pop(key, None)
        self._leaks[key] = leak
        while len(self._leaks) > _MAX_LEAKS:
            del self._leaks[next(iter(self._leaks))]
        leaks = self._leaks_by_cell
        others = (other for other in leaks.get(leak.cell_start_s, ()) if other is not known)
        leaks[leak.cell_start_s] = (*others, leak)
        while len(leaks) > _MAX_LEAKS:
            del leaks[next(iter(leaks))]
        if known is None:
            self.found.call(leak)
        else:
            self.updated.call((known, leak))

    def _make_key(self, leak: Leak) -> _LeakKey:
        container = leak.holders[0].stem
        return make_cell_key(self._source), leak.device, leak.unit, container

    def _recall_line(self, leak: Leak, cell: str) -> LeakLine | None:
        """Return the line that was found when the cell ran before."""
        known = self._leaks.get(self._make_key(leak))
        line = None if known is None else known.line
        if known is None or line is None or line.source != known.cell:
            return line
        return replace(line, source=cell)

    def _name_line(self, filename: str, line: int) -> LeakLine:
        number = self._session.shell.read_cell_numbers().get(filename)
        source = filename if number is None else f"In [{number}]"
        return LeakLine(source, line, linecache.getline(filename, line).strip())

    def _find_device(self, device: str) -> DeviceInfo | None:
        devices = self._session.hardware.list_all_devices()
        return next((info for info in devices if info.device == device), None)

    def _find_capacity(self, device: str) -> int | None:
        info = self._find_device(device)
        if info is None:
            return None
        return info.total_bytes if info.limit_bytes is None else info.limit_bytes

    def _list_files(self) -> list[str]:
        return list(self._session.shell.read_cell_numbers())

    def _count_left(self, device: str, each_bytes: int) -> int | None:
        hardware, info = self._session.hardware, self._find_device(device)
        use = None if info is None else hardware.read_use(info)
        if info is None or use is None or use.free_bytes is None or each_bytes <= 0:
            return None
        free_bytes = use.free_bytes
        reading = next((found for found in hardware.read() if found.device == device), None)
        if device != HOST and reading is not None and reading.reserved_bytes is not None:
            if info.limit_bytes is not None:
                free_bytes = min(free_bytes, info.limit_bytes - reading.reserved_bytes)
            free_bytes += reading.reserved_bytes - (reading.allocated_bytes or 0)
        return max(0, free_bytes) // each_bytes


def _name_cell(execution_count: int | None) -> str:
    return "the cell" if execution_count is None else f"In [{execution_count}]"
