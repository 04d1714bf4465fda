"""Follow cells and loops for memory that grows, and keep what was found."""

from __future__ import annotations

import linecache
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Literal

from gpumemwidget.backends.optimizer_steps import OptimizerStepHook
from gpumemwidget.growth.lines import GrowthLines, LineChanges, sum_lines
from gpumemwidget.growth.loops import LoopEvents
from gpumemwidget.growth.runs import RepeatedCells
from gpumemwidget.growth.steps import Loop, LoopWatch, find_growing
from gpumemwidget.growth.survey import Group, Survey, take_survey
from gpumemwidget.model.cells import CellRecord
from gpumemwidget.model.devices import HOST
from gpumemwidget.model.growth import Leak, LeakLine
from gpumemwidget.recording.monitor import Callbacks
from gpumemwidget.session.interrupts import send_later
from gpumemwidget.session.tracer import is_tracing

if TYPE_CHECKING:
    from gpumemwidget.growth.levels import Trend
    from gpumemwidget.model.devices import DeviceInfo
    from gpumemwidget.recording.cells import RunningCell
    from gpumemwidget.session.session import Session
    from gpumemwidget.tracing.sources import IsEntry

#: Seconds that the search for what grows may take, at a cell's end and while it runs.
_SURVEY_S, _RUNNING_SURVEY_S = 1.0, 0.5
#: Maximum number of leaks that are kept, and of cells with any, the last ones that were seen.
_MAX_LEAKS = 64
#: Maximum number of leaks that are told of one cell, the largest.
_MAX_TOLD = 3


class GrowthWatch:
    """Finds what grows from run to run of a cell, and from step to step of its loops.

    Attributes:
        found: called with each leak once for each run of a cell, on the thread that runs it; while
            it runs, if it was found then.

    Args:
        session: the session, which attaches this.
    """

    def __init__(self, session: Session) -> None:
        self.found: Callbacks[Leak] = Callbacks(session.report_failure)
        self._session = session
        self._monitor = session.monitor
        self._make_is_entry: Callable[[str], IsEntry] | None = None
        self._cells = RepeatedCells()
        #: With the cell that each was last seen in.
        self._leaks: dict[tuple[str, str, str], tuple[str, Leak]] = {}
        self._leaks_by_cell: dict[float, tuple[Leak, ...]] = {}
        self._ignored: dict[str, None] = {}
        self._source = ""
        self._start_s = 0.0
        self._thread_id = 0
        self._loops: LoopWatch | None = None
        self._reading: GrowthLines | None = None
        self._told: set[tuple[str, str, str]] = set()
        #: Number of loops that ``watch`` follows now: optimizers' steps are not counted then.
        self._n_watched = 0
        #: Seconds that the last survey of a running cell took.
        self._survey_s = _RUNNING_SURVEY_S
        self._steps = OptimizerStepHook(self._end_optimizer_step)
        self._turns = LoopEvents(self._is_cell, self._end_turn)
        self._remove: list[Callable[[], None]] = []

    def open(self, make_is_entry: Callable[[str], IsEntry]) -> None:
        """Begin.

        Args:
            make_is_entry: returns what tells, for a cell's text, where its code begins.
        """
        self._make_is_entry = make_is_entry
        self._remove = [
            self._monitor.cell_started.add(self._start_cell),
            self._monitor.cell_ended.add(self._end_cell),
        ]
        self._steps.open()
        self._turns.open()

    def close(self) -> None:
        """End, and forget what was found. May be called twice."""
        self._steps.close()
        self._turns.close()
        for remove in self._remove:
            remove()
        self._leave_cell()
        self._leaks.clear()
        self._leaks_by_cell.clear()

    # -- What was found ----------------------------------------------------------------------------

    def list_leaks(self) -> tuple[Leak, ...]:
        """Return the leaks that are known, those that add the most first."""
        leaks = (leak for _, leak in self._leaks.values())
        return tuple(sorted(leaks, key=lambda leak: -leak.each_bytes))

    def list_leaks_by_cell(self) -> Mapping[float, tuple[Leak, ...]]:
        """Return the leaks that were told of each cell, by the cell's ``start_s``."""
        return dict(self._leaks_by_cell)

    def list_ignored(self) -> tuple[str, ...]:
        """Return the holders of which nothing is told any more."""
        return tuple(self._ignored)

    def ignore(self, name: str) -> None:
        """Tell nothing more of what a variable, or a holder as ``%memleak`` names it, keeps."""
        self._ignored[name] = None
        self._leaks = {
            key: seen for key, seen in self._leaks.items() if not self._is_ignored(seen[1])
        }

    def heed(self, name: str) -> bool:
        """Tell of a holder again; return whether it was ignored."""
        return self._ignored.pop(name, self) is None

    def _is_ignored(self, leak: Leak) -> bool:
        return leak.holder in self._ignored or leak.row in self._ignored

    # -- Cells -------------------------------------------------------------------------------------

    def _start_cell(self, cell: RunningCell) -> None:
        self._leave_cell()
        self._turns.start_cell()
        self._source = cell.source
        self._start_s = cell.start_s
        self._thread_id = threading.get_ident()
        self._told.clear()
        device = self._cells.find_suspect(cell.source)
        if device is not None and self._make_is_entry is not None and not is_tracing():
            lines = GrowthLines(self._session.hardware, device, on_interrupt=send_later)
            if lines.start(self._make_is_entry(cell.source), self._list_files()):
                self._reading = lines

    def _end_cell(self, record: CellRecord) -> None:
        try:
            self._find_growth(record)
        finally:
            if record.status == "ok":
                self._forget_ended()

    def _forget_ended(self) -> None:
        """Forget what the cell kept when it ran before, and keeps no longer."""
        self._leaks = {
            key: (source, leak)
            for key, (source, leak) in self._leaks.items()
            if source != self._source or key in self._told
        }

    def _find_growth(self, record: CellRecord) -> None:
        reading, self._reading = self._reading, None
        readings = None if reading is None else reading.stop()
        watch, self._loops = self._loops, None
        growths = self._cells.add(self._source, record)
        grown: list[tuple[Loop, tuple[str, Trend]]] = []
        if watch is not None:
            watch.close()
            # After an error the frames of the exception hold memory, which is no growth.
            if record.status != "error":
                for loop in watch.loops.values():
                    grown += [(loop, each) for each in loop.find_trends().items()]
        survey = self._take_survey(_SURVEY_S) if growths or grown else None
        if survey is None:
            return
        cell = _name_cell(record.execution_count)
        for growth in growths:
            changes = sum_lines(readings, growth.each_bytes)
            grown_groups = self._cells.compare(self._source, survey, growth)[:_MAX_TOLD]
            for group, n_bytes, n_storages in grown_groups:
                each_bytes = min(n_bytes, growth.each_bytes)
                leak = self._describe(group, "run", each_bytes, growth.n_runs, n_storages)
                self._tell(replace(leak, cell=cell, line=self._name_line(changes, group)))
        for loop, trend in grown:
            if watch is not None:
                self._tell_of_loop(watch, loop, survey, trend, cell)

    def _leave_cell(self) -> None:
        watch, self._loops = self._loops, None
        if watch is not None:
            watch.close()
        reading, self._reading = self._reading, None
        if reading is not None:
            reading.stop()

    # -- Steps -------------------------------------------------------------------------------------

    @contextmanager
    def watch_loop(self) -> Iterator[Callable[[], None]]:
        """Yield what ends a step of a loop; optimizers' steps are not counted meanwhile."""
        self._n_watched += 1
        try:
            yield partial(self._end_step, "", trains=True)
        finally:
            self._n_watched -= 1

    def _end_optimizer_step(self, _optimizer_id: int) -> None:
        if not self._n_watched:
            self._end_step("", trains=True)

    def _end_turn(self, place: tuple[str, int]) -> None:
        self._end_step(place, trains=False)

    def _end_step(self, key: object, *, trains: bool) -> None:
        if threading.get_ident() != self._thread_id or self._monitor.running is None:
            return
        with self._session.reporting("following a loop's steps"):
            watch = self._loops
            if watch is None:
                watch = self._loops = LoopWatch(
                    self._session.hardware, list_files=self._list_files, on_interrupt=send_later
                )
            trends = watch.step(key, trains=trains)
            if trends and watch.may_take(self._survey_s):
                self._look_into(watch, watch.loops[key], trends)

    def _look_into(self, watch: LoopWatch, loop: Loop, trends: dict[str, Trend]) -> None:
        begin_s = time.perf_counter()
        survey = self._take_survey(_RUNNING_SURVEY_S)
        self._survey_s = time.perf_counter() - begin_s
        watch.charge_look(loop, self._survey_s)
        running = self._monitor.running
        if survey is not None and running is not None:
            cell = _name_cell(running.execution_count)
            for grown in trends.items():
                self._tell_of_loop(watch, loop, survey, grown, cell)

    def _tell_of_loop(
        self,
        watch: LoopWatch,
        loop: Loop,
        survey: Survey,
        grown: tuple[str, Trend],
        cell: str,
    ) -> None:
        device, trend = grown
        info = self._find_device(device)
        total_bytes = None if info is None else info.total_bytes
        group = find_growing(survey, loop, device, trend, total_bytes)
        if group is not None:
            n_storages = max(1, round(group.n_storages / max(1, loop.n_steps)))
            leak = self._describe(group, "step", trend.each_bytes, trend.n_steps, n_storages)
            line = self._name_line(watch.lines.get(device), group)
            self._tell(replace(leak, cell=cell, since=trend.since, line=line))

    # -- Leaks -------------------------------------------------------------------------------------

    def _take_survey(self, budget_s: float) -> Survey | None:
        # Nobody has asked for the survey, which runs beside whatever threads the user has.
        return take_survey(self._session.shell, budget_s=budget_s, depth="names")

    def _describe(
        self,
        group: Group,
        unit: Literal["run", "step"],
        each_bytes: int,
        n_seen: int,
        n_storages: int,
    ) -> Leak:
        return Leak(
            device=group.device,
            unit=unit,
            each_bytes=each_bytes,
            n_seen=n_seen,
            holder=group.holder,
            n_storages=n_storages,
            tensor=group.tensor,
            in_graph=group.in_graph,
            in_model=group.in_model,
            row=group.row,
            n_left=self._count_left(group.device, each_bytes),
            cell_start_s=self._start_s,
        )

    def _tell(self, leak: Leak) -> None:
        key = (leak.device, leak.unit, leak.holder)
        if self._is_ignored(leak) or key in self._told:
            return
        self._told.add(key)
        self._leaks.pop(key, None)
        self._leaks[key] = self._source, leak
        while len(self._leaks) > _MAX_LEAKS:
            del self._leaks[next(iter(self._leaks))]
        leaks = self._leaks_by_cell
        leaks[leak.cell_start_s] = (*leaks.get(leak.cell_start_s, ()), leak)
        while len(leaks) > _MAX_LEAKS:
            del leaks[next(iter(leaks))]
        self.found.call(leak)

    def _name_line(self, changes: LineChanges | None, group: Group) -> LeakLine | None:
        if changes is None:
            return None
        place = changes.find(
            group.holder, in_graph=group.in_graph, largest_bytes=group.largest_bytes
        )
        if place is None:
            return None
        filename, line = place
        number = self._session.shell.read_cell_numbers().get(filename)
        source = filename if number is None else f"In[{number}]"
        text = linecache.getline(filename, line).strip()
        return LeakLine(source, line, text)

    def _find_device(self, device: str) -> DeviceInfo | None:
        devices = self._session.hardware.list_all_devices()
        return next((each for each in devices if each.device == device), None)

    def _is_cell(self, name: str) -> bool:
        return name in self._session.shell.read_cell_numbers()

    def _list_files(self) -> list[str]:
        return list(self._session.shell.read_cell_numbers())

    def _count_left(self, device: str, each_bytes: int) -> int | None:
        hardware, info = self._session.hardware, self._find_device(device)
        use = None if info is None else hardware.read_use(info)
        if use is None or use.free_bytes is None or each_bytes <= 0:
            return None
        free_bytes = use.free_bytes
        if device != HOST:
            reading = next((each for each in hardware.read() if each.device == device), None)
            if reading is not None and reading.reserved_bytes is not None:
                free_bytes += reading.reserved_bytes - (reading.allocated_bytes or 0)
        return free_bytes // each_bytes


def _name_cell(execution_count: int | None) -> str:
    return "the cell" if execution_count is None else f"In[{execution_count}]"
