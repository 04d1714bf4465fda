"""Follow IPython's events, and show the monitor where a person's cells begin and end.

IPython calls ``pre_run_cell`` and ``post_run_cell`` for more than cells: for the body of
``%%capture``, for code that calls ``run_cell``, for runs that the front end keeps out of the
history, on ipykernel 7 also from a subshell's thread; and for an empty cell, and for the one that
holds ``%load_ext``, only the second of the two. Every run is kept on a stack here, by the
``ExecutionInfo`` that both events carry, so that each end finds its own beginning.

A failure in here is shown once and never reaches the cell.
"""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from threading import get_ident
from types import FrameType
from typing import TYPE_CHECKING, Any

from IPython import version_info as ipython_version

from gpumemwidget.model.cells import Status
from gpumemwidget.progress import Progress, listen
from gpumemwidget.session.interrupts import InterruptHold, RaiseInterrupt, run_to_end

if TYPE_CHECKING:
    from IPython.core.interactiveshell import (
        ExecutionInfo,
        ExecutionResult,
        InteractiveShell,
    )

    from gpumemwidget.jupyter.outputs import LeakCards, OomCards, Outputs
    from gpumemwidget.session.session import Session


@dataclass(slots=True, eq=False)
class _Run:
    """One call of ``run_cell`` that has not returned."""

    info: Any  #: an ``ExecutionInfo``; its fields have no types that fit all versions of IPython
    is_cell: bool  #: true for a cell that a person ran, which is recorded
    #: Status of the runs within this one: ``%%capture`` hides the error of its body.
    inner_status: Status = "ok"


class CellEvents:
    """Follows the shell's cells through two of its events."""

    def __init__(
        self,
        shell: InteractiveShell,
        session: Session,
        outputs: Outputs,
        ooms: OomCards,
        leaks: LeakCards,
    ) -> None:
        self._shell = shell
        self._monitor = session.monitor
        self._outputs = outputs
        self._ooms = ooms
        self._leaks = leaks
        self._reporting = session.reporting
        self._thread = threading.main_thread().ident
        self._runs: list[_Run] = []
        #: Holds a Ctrl-C back while a run begins or ends.
        self._hold = InterruptHold()
        #: In the shell's list while a cell begins that was interrupted before its first line.
        self._raise_interrupt = RaiseInterrupt()

    @property
    def is_running(self) -> bool:
        """True if the calling thread is the one that runs cells, and is running one."""
        return get_ident() == self._thread and bool(self._runs)

    def register(self) -> None:
        """Take part in the shell's events; a cell that is running now counts from here on."""
        self._shell.events.register("pre_run_cell", self._pre_run_cell)
        self._shell.events.register("post_run_cell", self._post_run_cell)
        if get_ident() == self._thread:
            self._runs = [_Run(info, is_cell=False) for info in _list_running(self._shell)]
            if self._runs and self._runs[0].info.store_history:
                self._runs[0].is_cell = True
                self._start(self._runs[0].info, partial=True)

    def unregister(self) -> None:
        """Leave the shell's events. May be called twice."""
        events = self._shell.events
        for event, callback in (
            ("pre_run_cell", self._pre_run_cell),
            ("post_run_cell", self._post_run_cell),
        ):
            if callback in events.callbacks[event]:
                events.unregister(event, callback)
        self._runs.clear()
        self._let_cells_run()

    # -- The events --------------------------------------------------------------------------------

    def _pre_run_cell(self, info: Any) -> None:
        """Note that a run begins; ``info`` is its ``ExecutionInfo``."""
        if self._follow(lambda: self._begin(info)):
            self._shell.ast_transformers.append(self._raise_interrupt)

    def _post_run_cell(self, result: ExecutionResult | None) -> None:
        """Note that a run has ended, or an empty cell was run; ``None``: IPython knows no more."""
        error: BaseException | None = None
        try:
            if self._follow(lambda: run_to_end(self._end, result)):
                error = KeyboardInterrupt()
        except Exception as exc:  # noqa: BLE001 - a timeout of the user's, the cell's end being done
            error = exc.with_traceback(None)
        if error is None:
            return
        if result is not None and result.success:
            # Cells that wait behind are not run then, as with a Ctrl-C a moment before.
            result.error_in_exec = error
        elif isinstance(error, KeyboardInterrupt):
            return  # The cell has ended already.
        self._shell.showtraceback((type(error), error, None))

    def _follow(self, action: Callable[[], None]) -> bool:
        """Do what an event is for, on the thread of the cells; return whether a Ctrl-C came.

        One that comes before it is held back keeps the action from beginning, and not from being
        done: a cell that is not seen to end would count as running.
        """
        is_cut = has_begun = False
        while not has_begun:
            try:
                if get_ident() != self._thread:
                    return False
                with InterruptHold() as self._hold:
                    has_begun = True
                    self._hold.is_due |= is_cut
                    with self._reporting("following the cells"):
                        action()
            except KeyboardInterrupt:
                is_cut = True
        return is_cut or self._hold.is_due

    def _begin(self, info: Any) -> None:
        if self._runs and info.store_history and len(_list_running(self._shell)) <= 1:
            # The end of what is on the stack never came, for this one runs alone.
            self._abandon()
        run = _Run(info, is_cell=not self._runs and info.store_history)
        self._runs.append(run)
        if run.is_cell:
            with self._reporting("preparing a cell's output"):
                self._outputs.open(info.raw_cell)
            self._start(info, partial=False)

    def _let_cells_run(self) -> None:
        transformers = self._shell.ast_transformers
        if self._raise_interrupt in transformers:
            transformers.remove(self._raise_interrupt)

    def _end(self, result: ExecutionResult | None) -> None:
        # Long work from here on (a report, a release that has waited) says how far it has got, and
        # is broken off there by a Ctrl-C. That one is handed on after the work.
        with suppress(KeyboardInterrupt), listen(self._break_off):
            self._end_run(result)

    @property
    def _is_interrupted(self) -> bool:
        return self._hold.is_noted or self._hold.is_due

    def _break_off(self, _progress: Progress) -> None:
        if self._is_interrupted:
            raise KeyboardInterrupt

    def _end_run(self, result: ExecutionResult | None) -> None:
        self._let_cells_run()
        run = self._find_run(result)
        status = _read_status(result)
        if status == "ok" and self._is_interrupted:
            status = "interrupted"
        if run is None:
            return
        while self._runs.pop() is not run:
            pass  # Drop runs that began within this one and never ended.
        if status == "ok":
            status = run.inner_status
        if run.is_cell:
            self._finish(result, status)
        elif self._runs and status != "ok":
            self._runs[-1].inner_status = status
            with self._reporting("noticing OOMs"):
                self._ooms.end_inner(result)

    def _find_run(self, result: ExecutionResult | None) -> _Run | None:
        """Return the run that has ended; ``None`` for a run that never began (an empty cell)."""
        if not self._runs:
            return None
        if result is None or result.info is None:
            return self._runs[-1]
        for run in reversed(self._runs):
            if run.info is result.info:
                return run
        # If the run itself was broken off, IPython makes a new info for its result.
        innermost = self._runs[-1]
        is_same = innermost.info.raw_cell == result.info.raw_cell
        return innermost if is_same and result.error_in_exec is not None else None

    # -- Measuring ---------------------------------------------------------------------------------

    def _start(self, info: Any, *, partial: bool) -> None:
        self._ooms.start()
        with self._reporting("recording a cell's start"):
            # IPython counts the cell at its start from 9.8 on, and at its end before.
            self._monitor.start_cell(
                execution_count=self._shell.execution_count - int(ipython_version[:2] >= (9, 8)),
                cell_id=getattr(info, "cell_id", None),
                source=info.raw_cell,
                partial=partial,
            )

    def _finish(self, result: ExecutionResult | None, status: Status) -> None:
        record = None
        with self._reporting("recording a cell's end"):
            count = None if result is None else result.execution_count
            record = self._monitor.end_cell(status=status, execution_count=count)
        try:
            with self._reporting("showing the card of an OOM"):
                self._ooms.end(record, result)
        finally:  # A Ctrl-C that stops the card must not leave the cell's trace open.
            # A syntax error, or a magic that IPython refuses: no line ran.
            has_run = result is None or result.error_before_exec is None
            with self._reporting("showing a cell's report"):
                self._outputs.close(record, has_run=has_run)
            with self._reporting("reporting what grows"):
                self._leaks.end()

    def _abandon(self) -> None:
        was_measured = self._runs[0].is_cell
        self._runs.clear()
        if was_measured:
            with self._reporting("giving up a cell without an end"):
                self._monitor.discard_cell()
            with self._reporting("giving up a cell's output"):
                self._outputs.close(None)


def _read_status(result: ExecutionResult | None) -> Status:
    """Return how a run ended, by its result."""
    if result is None:
        return "interrupted"
    # IPython keeps an interrupt before the first line apart from one in a line, and ipykernel ends
    # a cell that awaits by cancelling its task.
    for error in (result.error_before_exec, result.error_in_exec):
        if isinstance(error, (KeyboardInterrupt, asyncio.CancelledError)):
            return "interrupted"
    return "ok" if result.success else "error"


def _list_running(shell: InteractiveShell) -> list[ExecutionInfo]:
    """Return the runs that the calling code is part of, outermost first, from the Python stack.

    IPython has no list of what is running; its coroutine's frame holds the ``info`` that the run's
    end will bring. Only used when the extension is loaded, and for runs within runs.
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
