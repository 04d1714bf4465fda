"""The cell that goes beyond a budget with ``--stop``, interrupted as by the person's own Ctrl-C.

A thread reads the counters every 20 ms while such a cell runs, and sends SIGINT to the main thread
when it sees the cell beyond its budget. Between the sending and the handling the cell may have
ended; so for the time of the cell a handler of ours stands before the one that was there, and asks
what the signal has met:

- the cell's own code: it is passed on
- the loop, while the cell awaits: the cell's task is cancelled, as ipykernel does it
- code of ours, IPython's around the cell and for its value, or such as Python lets no exception out
  of: it is dropped, and sent again with the next sample
- the hook of the cell's end: it is taken back there
- nothing: it came just before a blocking call, which Python then begins all the same, so it is sent
  again

In a kernel a cell that awaits is asked to end through its loop, as ipykernel does it. If it never
lets the loop take its turn, it is interrupted in its own code after all.

So it meets no next cell and no idle kernel. What a person sends is passed on always. A cell is
interrupted once: if it catches that and goes on, it is only marked.
"""

from __future__ import annotations

import asyncio
import math
import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import TYPE_CHECKING, Any, Literal

from IPython.core.interactiveshell import InteractiveShell

from gpumemwidget.jupyter.interrupts import (
    change_handler,
    find_handler,
    send_interrupt,
    take_back_interrupt,
)
from gpumemwidget.jupyter.stopped import asks_loop, find_what_runs, runs_cell
from gpumemwidget.measure.budget import Crossing, find_crossing
from gpumemwidget.measure.forks import survive_fork
from gpumemwidget.measure.sampler import Sampler
from gpumemwidget.records import Sample

if TYPE_CHECKING:
    from gpumemwidget.measure.cells import RunningCell
    from gpumemwidget.measure.monitor import Monitor

__all__ = ["CellStops"]

#: Seconds between samples while a cell may be stopped.
_INTERVAL_S = 0.02
#: How soon a signal that met nothing is sent again, at first and at last: each makes the system
#: calls of libraries return early.
_FIRST_AGAIN_S = 0.02
_LAST_AGAIN_S = 1.0
#: Of two signals the second may arrive when the first has been met.
_ECHO_S = 0.05
#: How long a loop may take to end a cell that it was asked to end.
_LOOP_TAKES_S = 0.5


class CellStops:
    """Interrupts cells, one after the other.

    Args:
        shell: whose cells these are.
        monitor: measures them, and knows the budgets.
        report_failure: is told what failed of ours, and why.
    """

    def __init__(
        self,
        shell: InteractiveShell,
        monitor: Monitor,
        report_failure: Callable[[str, Exception], None],
    ) -> None:
        self._shell = shell
        self._monitor = monitor
        self._report_failure = report_failure
        self._watch = Sampler(
            monitor.hardware.read,
            clock=monitor.clock,
            on_sample=self.look_at,
            on_error=lambda exc: report_failure("watching a cell's budget", exc),
            interval_s=_INTERVAL_S,
            slowest_s=_INTERVAL_S,
            name="gpumemwidget-budget",
        )
        #: The cell that may be interrupted.
        self._cell: RunningCell | None = None
        #: Why a signal was sent that has not been met yet.
        self._sent: Crossing | None = None
        #: When the last one was sent, on the monitor's clock, and how long it is waited for.
        self._sent_s = -math.inf
        self._again_s = _FIRST_AGAIN_S
        self._is_sending = False
        #: When one was met that may arrive once more.
        self._met_s = -math.inf
        #: Since when the loop has been asked to end the cell and has not had its turn.
        self._asked_s: float | None = None
        self._lock = threading.RLock()
        survive_fork(self)

    def start(self, cell: RunningCell) -> None:
        """A cell begins that a budget may stop; on the main thread, which runs it."""
        self._cell, self._asked_s = cell, None
        change_handler(self._put_before)
        self._watch.start()

    def end(self) -> None:
        """It has ended: nothing meets it or what comes after it any more. May be called twice."""
        if self._cell is None:
            return
        with self._lock:
            self._cell = None
        self._watch.stop(timeout_s=0)
        if self._sent is not None or self._monitor.clock.now() - self._sent_s < _ECHO_S:
            take_back_interrupt(lambda: self._sent is not None)
            self._sent = None
        change_handler(_take_away)

    def close(self) -> None:
        """End, and wait for the thread. May be called twice."""
        self.end()
        self._watch.stop()

    def look_at(self, sample: Sample) -> None:
        """Send a signal if a sample shows the cell beyond its budget: on the watching thread."""
        cell = self._cell
        if cell is None or not self._is_due(cell):
            return
        crossing = cell.stopped or find_crossing(cell, self._monitor.budgets.table, sample)
        if crossing is None:
            return
        handler = find_handler()
        if handler is None:
            return  # Held back it would only be dropped: the next sample comes soon.
        with self._lock:
            if self._cell is cell and self._is_due(cell) and self._may_send():
                self._is_sending = True
                self._sent = crossing
                if not _is_ours(handler):
                    # One that the cell's code has put there. It decides what comes of it.
                    cell.stopped = crossing
                send_interrupt()
                self._is_sending = False
                self._sent_s = self._monitor.clock.now()

    def _is_due(self, cell: RunningCell) -> bool:
        """Whether a cell has not been interrupted, or has to be once more."""
        if cell.stopped is None:
            return True
        asked_s = self._asked_s
        return asked_s is not None and self._monitor.clock.now() - asked_s > _LOOP_TAKES_S

    def _may_send(self) -> bool:
        """Whether none is on its way; one that has been for long has met nothing."""
        if self._sent is None:
            self._again_s = _FIRST_AGAIN_S
            return True
        if self._monitor.clock.now() - self._sent_s < self._again_s:
            return False
        self._again_s = min(2 * self._again_s, _LAST_AGAIN_S)
        return True

    def reset_after_fork(self) -> None:
        """A forked child is not stopped, whatever it takes."""
        self._lock = threading.RLock()
        self._cell = self._sent = self._asked_s = None
        self._is_sending = False

    # -- On the main thread, when a signal is handled ----------------------------------------------

    def _put_before(self, previous: Any) -> Any:
        """The handler that decides, before the one that does what is to be done."""
        previous = _take_away(previous)
        if not callable(previous):
            return previous
        is_default = previous is signal.default_int_handler

        only_asks = asks_loop(previous)

        def decide(handler: type, signum: int, frame: FrameType | None) -> object:
            verdict = self._judge(frame, only_asks=only_asks)
            if verdict == "drop":
                return None
            if is_default or verdict == "raise":
                return object.__new__(handler)
            previous(signum, frame)
            return None

        # Python's own handler raises KeyboardInterrupt. Called by a function of ours it would leave
        # that function in the user's traceback; so it is called by the class, as what sets up the
        # object that ``__new__`` gives, when that has returned.
        return type(
            "Handler",
            (_Handler,),
            {
                "__new__": decide,
                "__init__": signal.default_int_handler,
                "__doc__": "What handles SIGINT while a cell runs that its budget may stop.",
                "previous": staticmethod(previous),
            },
        )

    def _judge(
        self, frame: FrameType | None, *, only_asks: bool
    ) -> Literal["pass", "raise", "drop"]:
        """What becomes of a signal that has met ``frame``.

        Args:
            frame: the innermost one.
            only_asks: the handler behind ours only asks the loop to end the cell.
        """
        crossing, self._sent = self._sent, None
        now_s = self._monitor.clock.now()
        if crossing is None:
            # A person's own, save that ours may have been met just before it came.
            is_echo = self._is_sending or now_s - self._met_s < _ECHO_S
            return "drop" if is_echo else "pass"
        if self._is_sending:
            self._met_s = now_s
        cell = self._cell
        # Without a frame it is one that was held back in a hook of ours.
        if cell is None or not self._is_due(cell) or frame is None:
            return "drop"
        runs = find_what_runs(frame, self._shell.user_global_ns)
        if runs == "loop" and self._asked_s is None:
            self._met_s = now_s
            self._cancel(cell, crossing, now_s)
            return "drop"
        # In a kernel the loop is not this cell's alone: there no more can be done.
        is_stuck = self._asked_s is not None and now_s - self._asked_s > _LOOP_TAKES_S
        if runs == "other" or (runs == "loop" and (only_asks or not is_stuck)):
            return "drop"
        self._met_s = now_s
        if cell.stopped is not None:
            self._asked_s = None
            return "raise"
        cell.stopped = crossing
        if only_asks:
            self._ask(now_s)
        return "pass"

    def _ask(self, now_s: float) -> None:
        """The loop is asked to end the cell: note since when, until it has had its turn."""

        def take_turn() -> None:
            self._asked_s = None

        self._asked_s = now_s
        asyncio.get_running_loop().call_soon_threadsafe(take_turn)

    def _cancel(self, cell: RunningCell, crossing: Crossing, now_s: float) -> None:
        """Cancel the cell's task, if it has one that is not done.

        KeyboardInterrupt would leave the loop with half of what it was at. ipykernel's handler does
        the same, but has no way to wake the loop, which then sleeps on.
        """
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:
            return

        def cancel() -> None:
            self._asked_s = None
            for task in asyncio.all_tasks(loop):
                if self._cell is cell and cell.stopped is None and runs_cell(task):
                    cell.stopped = crossing
                    task.cancel()

        self._asked_s = now_s
        loop.call_soon_threadsafe(cancel)


class _Handler:
    """What all of our handlers are, to be known by."""

    previous: Callable[[int, FrameType | None], Any]


def _is_ours(handler: object) -> bool:
    return type(handler) is type and issubclass(handler, _Handler)


def _take_away(handler: Any) -> Any:
    """The handler that stands behind ours; another's as it is."""
    return handler.previous if _is_ours(handler) else handler
