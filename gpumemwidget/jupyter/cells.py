"""From IPython's events to cells: which runs are a person's cells, where they begin and end.

IPython calls ``pre_run_cell`` and ``post_run_cell`` for more than that: for the body of
``%%capture``, for code that calls ``run_cell``, for runs that the front end keeps out of the
history, on ipykernel 7 also from a subshell's thread; and for an empty cell, and for the one that
holds ``%load_ext``, only the second of the two. Every run is kept on a stack here, by the
``ExecutionInfo`` that both events carry, so that each end finds its own beginning.

Whatever fails in here is told once and never reaches the cell.
"""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from threading import get_ident
from types import FrameType
from typing import TYPE_CHECKING, Any, Protocol

from gpumemwidget.jupyter.interrupts import run_uninterrupted
from gpumemwidget.measure.cells import build_record
from gpumemwidget.records import CellRecord, Status

if TYPE_CHECKING:
    from IPython.core.interactiveshell import (
        ExecutionInfo,
        ExecutionResult,
        InteractiveShell,
    )

    from gpumemwidget.jupyter.stops import CellStops
    from gpumemwidget.measure.cells import RunningCell
    from gpumemwidget.measure.monitor import Monitor

__all__ = ["CellEvents", "CellOoms", "CellOutputs"]


class CellOutputs(Protocol):
    """What is shown for a cell, beside its record."""

    @property
    def is_tracing(self) -> bool:
        """Whether a report of the cell has been asked for."""
        ...

    def open(self, source: str) -> None:
        """A cell begins; nothing of it has been measured yet."""
        ...

    def close(self, record: CellRecord | None, *, showed_result: bool) -> None:
        """It has ended; ``None`` where nothing could be recorded."""
        ...


class CellOoms(Protocol):
    """What is noticed of memory that runs out, and said below the traceback."""

    def start(self) -> None:
        """A cell that is recorded begins."""
        ...

    def end_inner(self, result: ExecutionResult | None) -> None:
        """A run within it has ended."""
        ...

    def end(self, record: CellRecord | None, result: ExecutionResult | None) -> None:
        """It has ended; ``None`` where nothing could be recorded, or IPython knows no more."""
        ...


@dataclass(slots=True, eq=False)
class _Run:
    """One call of ``run_cell`` that has not returned."""

    #: An ``ExecutionInfo``; its fields have no types that fit all versions of IPython.
    info: Any
    #: Whether a person ran it: then it is recorded.
    is_cell: bool
    #: Where only its report was asked for: what is to be known of its start.
    aside: tuple[RunningCell, tuple[str, ...]] | None = None
    #: Whether a display had failed when it began: then that tells nothing of this run.
    display_had_failed: bool = False
    #: What became of the runs within it: ``%%capture`` hides the error of its body.
    inner_status: Status = "ok"


class CellEvents:
    """The two callbacks.

    Args:
        shell: whose cells these are.
        monitor: measures them.
        outputs: shows what was asked for.
        ooms: tells of memory that runs out.
        report_failure: is told what failed of ours, and why.
    """

    def __init__(
        self,
        shell: InteractiveShell,
        monitor: Monitor,
        outputs: CellOutputs,
        ooms: CellOoms,
        report_failure: Callable[[str, Exception], None],
    ) -> None:
        self._shell = shell
        self._monitor = monitor
        self._outputs = outputs
        self._ooms = ooms
        self._report_failure = report_failure
        self._thread = threading.main_thread().ident
        self._runs: list[_Run] = []
        #: Once there was a budget that stops cells.
        self._stops: CellStops | None = None

    @property
    def is_running(self) -> bool:
        """Whether the calling thread is the one that runs cells, and is running one."""
        return get_ident() == self._thread and bool(self._runs)

    def register(self) -> None:
        """Take part in the shell's events; a cell that is running now counts from here on."""
        events = self._shell.events
        events.register("pre_run_cell", self.pre_run_cell)
        events.register("post_run_cell", self.post_run_cell)
        if get_ident() == self._thread:
            self._runs = [_Run(info, is_cell=False) for info in _list_running(self._shell)]
            if self._runs and self._runs[0].info.store_history:
                self._runs[0].is_cell = True
                self._start(self._runs[0].info, partial=True)

    def unregister(self) -> None:
        """Leave the shell's events. May be called twice."""
        for event, callback in (
            ("pre_run_cell", self.pre_run_cell),
            ("post_run_cell", self.post_run_cell),
        ):
            if callback in self._shell.events.callbacks[event]:
                self._shell.events.unregister(event, callback)
        self._runs.clear()
        if self._stops is not None:
            self._stops.close()

    # -- The callbacks -----------------------------------------------------------------------------

    def pre_run_cell(self, info: Any) -> None:
        """A run begins; ``info`` is its ``ExecutionInfo``."""
        if get_ident() == self._thread:
            run_uninterrupted(self._guard, "following the cells", self._begin, info)

    def post_run_cell(self, result: ExecutionResult | None) -> None:
        """A run has ended, or an empty cell was run; ``None`` where IPython knows no more."""
        if get_ident() == self._thread:
            run_uninterrupted(self._guard, "following the cells", self._end, result)

    def _begin(self, info: Any) -> None:
        if self._runs and info.store_history and len(_list_running(self._shell)) <= 1:
            # The end of what is on the stack never came, for this one runs alone.
            self._abandon()
        is_outermost = not self._runs
        run = _Run(
            info,
            is_cell=is_outermost and info.store_history,
            display_had_failed=self._has_display_failed(),
        )
        self._runs.append(run)
        if is_outermost:
            self._guard("preparing a cell's output", self._outputs.open, info.raw_cell)
            if run.is_cell:
                self._start(info, partial=False)
            elif self._outputs.is_tracing:
                self._guard("measuring a run", self._start_aside, run)

    def _end(self, result: ExecutionResult | None) -> None:
        run = self._find_run(result)
        status = _read_status(result)
        if run is None:
            if result is not None and not self._runs:
                self._record_empty(result.info)
            return
        while self._runs.pop() is not run:
            pass  # What began within it and never ended went with it.
        if status == "ok" and not run.display_had_failed and self._has_display_failed():
            status = "error"
        if status == "ok":
            status = run.inner_status
        if run.is_cell:
            self._finish(result, status)
        elif run.aside is not None:
            self._finish_aside(run.aside, result, status)
        elif self._runs and status != "ok":
            self._runs[-1].inner_status = status
            self._guard("noticing OOMs", self._ooms.end_inner, result)

    def _has_display_failed(self) -> bool:
        """Whether ipykernel (7.3) answers "error" because the repr of the cell's value raised.

        IPython's result says nothing of it, and there is no public word for it.
        """
        return getattr(self._shell, "_last_traceback_during_displayhook", False)

    def _find_run(self, result: ExecutionResult | None) -> _Run | None:
        """The run that has ended; ``None`` for one that never began (an empty cell)."""
        if not self._runs:
            return None
        if result is None or result.info is None:
            return self._runs[-1]
        for run in reversed(self._runs):
            if run.info is result.info:
                return run
        # Where the run itself was broken off, IPython makes a new info for its result.
        innermost = self._runs[-1]
        is_same = innermost.info.raw_cell == result.info.raw_cell
        return innermost if is_same and result.error_in_exec is not None else None

    # -- Measuring ---------------------------------------------------------------------------------

    def _start(self, info: Any, *, partial: bool) -> None:
        self._ooms.start()
        try:
            cell = self._monitor.start_cell(
                # IPython has counted on already: the number of this cell is the one before.
                execution_count=self._shell.execution_count - 1,
                cell_id=getattr(info, "cell_id", None),
                source=info.raw_cell,
                partial=partial,
            )
        except Exception as exc:  # noqa: BLE001 - a failure of ours is never the cell's
            self._report_failure("recording a cell's start", exc)
            return
        if cell.budgets is not None and cell.budgets.stops:
            self._guard("watching a cell's budget", self._watch_budget, cell)

    def _watch_budget(self, cell: RunningCell) -> None:
        from gpumemwidget.jupyter.stops import CellStops  # noqa: PLC0415 - few need it

        if self._stops is None:
            self._stops = CellStops(self._shell, self._monitor, self._report_failure)
        self._stops.start(cell)

    def _finish(self, result: ExecutionResult | None, status: Status) -> None:
        if self._stops is not None:
            self._guard("watching a cell's budget", self._stops.end)
        record = None
        try:
            record = self._monitor.end_cell(
                status=status,
                execution_count=None if result is None else result.execution_count,
            )
        except Exception as exc:  # noqa: BLE001 - a failure of ours is never the cell's
            self._report_failure("recording a cell's end", exc)
        try:
            self._ooms.end(record, result)
        except Exception as exc:  # noqa: BLE001 - a failure of ours is never the cell's
            self._report_failure("showing the card of an OOM", exc)
        self._show(record, result)

    def _show(self, record: CellRecord | None, result: ExecutionResult | None) -> None:
        showed_result = result is None or not result.success or result.result is not None
        try:
            self._outputs.close(record, showed_result=showed_result)
        except Exception as exc:  # noqa: BLE001 - a failure of ours is never the cell's
            self._report_failure("showing a cell's report", exc)

    def _start_aside(self, run: _Run) -> None:
        """Begin to measure a run that is no cell (its caller keeps it out of the history)."""
        known_devices = self._monitor.history.devices()
        cell = self._monitor.start_cell(
            execution_count=None, cell_id=None, source=run.info.raw_cell
        )
        run.aside = (cell, known_devices)

    def _finish_aside(
        self,
        aside: tuple[RunningCell, tuple[str, ...]],
        result: ExecutionResult | None,
        status: Status,
    ) -> None:
        """The report of a run that leaves no record in the ledger."""
        cell, known_devices = aside

        def build() -> CellRecord:
            end_s = self._monitor.clock.now()
            after = self._monitor.end_span()
            self._monitor.discard_cell()
            return build_record(
                cell, after, end_s=end_s, status=status, known_devices=known_devices
            )

        self._show(self._guard("measuring a run", build), result)

    def _record_empty(self, info: Any) -> None:
        """Record a cell with nothing in it, for which IPython counts no execution."""
        if info is None or not info.store_history or info.raw_cell.strip():
            return

        def record() -> None:
            self._monitor.start_cell(
                execution_count=None, cell_id=getattr(info, "cell_id", None), source=""
            )
            self._monitor.end_cell(status="ok")

        self._guard("recording an empty cell", record)

    def _abandon(self) -> None:
        was_measured = self._runs[0].is_cell or self._runs[0].aside is not None
        self._runs.clear()
        if self._stops is not None:
            self._guard("watching a cell's budget", self._stops.end)
        if was_measured:
            self._guard("giving up a cell without an end", self._monitor.discard_cell)
            self._guard(
                "giving up a cell's output",
                self._outputs.close,
                None,
                showed_result=False,
            )

    def _guard(
        self, what: str, action: Callable[..., object], *args: object, **options: object
    ) -> CellRecord | None:
        """Call ``action``; give the record that it gave. What it raises is told, no more."""
        try:
            outcome = action(*args, **options)
        except Exception as exc:  # noqa: BLE001 - a failure of ours is never the cell's
            self._report_failure(what, exc)
            return None
        return outcome if isinstance(outcome, CellRecord) else None


def _read_status(result: ExecutionResult | None) -> Status:
    """How a run ended, as far as its result tells."""
    if result is None:
        return "interrupted"
    # ipykernel ends a cell that awaits by cancelling its task.
    if isinstance(result.error_in_exec, (KeyboardInterrupt, asyncio.CancelledError)):
        return "interrupted"
    return "ok" if result.success else "error"


def _list_running(shell: InteractiveShell) -> list[ExecutionInfo]:
    """The runs that the calling code is part of, outermost first, read from the Python stack.

    IPython tells nobody what it is running; its coroutine's frame holds the ``info`` that the
    run's end will bring. Only used at the extension's load and for runs within runs.
    """
    infos = []
    frame: FrameType | None = sys._getframe()  # noqa: SLF001 - public by its documentation, in spite of its name
    while frame is not None:
        if frame.f_code.co_name == "run_cell_async" and frame.f_locals.get("self") is shell:
            info = frame.f_locals.get("info")
            if info is not None:
                infos.append(info)
        frame = frame.f_back
    infos.reverse()
    return infos
