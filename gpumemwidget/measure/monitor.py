"""The session: cells begin and end here, samples come in, and whoever draws them listens.

The two ends of a cell are the hot path. Each asks the hardware once and does a fixed, small amount
of work; whatever is long or may fail in somebody else's code is caught, so that no failure of ours
becomes one of the user's cell.
"""

from __future__ import annotations

import logging
import threading
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol

from gpumemwidget.measure.budget import Budgets, mark_budgets
from gpumemwidget.measure.cells import RunningCell, build_record, find_first_line, lift_peaks
from gpumemwidget.measure.clock import Clock, SystemClock
from gpumemwidget.measure.forks import survive_fork
from gpumemwidget.measure.history import History
from gpumemwidget.measure.idle import IdleQueue
from gpumemwidget.measure.ledger import Ledger
from gpumemwidget.measure.sampler import Sampler
from gpumemwidget.records import CellRecord, Reading, Sample, Status

if TYPE_CHECKING:
    from gpumemwidget.backends.hardware import Hardware

__all__ = ["Listener", "Monitor", "RunningCell"]

#: Beyond so many different failures nobody reads on.
_MAX_FAILURES = 100
#: Samples that wait for the sampler's next tick to be handed on.
_MAX_UNSENT = 1000
#: A duration is a difference, so a cell's end that is computed from it may be off by a rounding.
_ROUNDING_S = 1e-6

_log = logging.getLogger("gpumemwidget")


class Listener(Protocol):
    """Whoever wants to know as it happens. Exceptions are caught and shown once."""

    def on_cell_started(self, cell: RunningCell) -> None:
        """A cell begins; on the thread that runs it, before its code."""
        ...

    def on_cell_ended(self, record: CellRecord) -> None:
        """A cell has ended and is in the ledger; on the thread that ran it."""
        ...

    def on_samples(self, samples: Sequence[Sample]) -> None:
        """Samples were added to the history: those of one tick, in order of time.

        Comes on the sampler's thread alone, and only while somebody wants samples. The readings of
        the cells' ends since the last tick stand before the tick's own.
        """
        ...


class Monitor:
    """Records every cell that it is told of, and samples the memory for those who want it.

    Args:
        hardware: the machine's memory.
        on_failure: shows one sentence to the user; it gets each failure once.
        clock: the session's clock; the system's unless told otherwise.
        interval_s: seconds between samples while something happens.

    Raises:
        BadInputError: the interval is not a positive number of seconds.
    """

    def __init__(
        self,
        hardware: Hardware,
        *,
        on_failure: Callable[[str], None],
        clock: Clock | None = None,
        interval_s: float = 0.1,
    ) -> None:
        self.hardware = hardware
        self.clock: Clock = SystemClock() if clock is None else clock
        self.ledger = Ledger()
        self.history = History()
        #: What each cell may have allocated.
        self.budgets = Budgets()
        #: The cell that runs now.
        self.running: RunningCell | None = None
        self._on_failure = on_failure
        self._failures: set[str] = set()
        self._listeners: tuple[Listener, ...] = ()
        self._idle = IdleQueue(lambda exc: self._report("What waited for the cell's end", exc))
        self._sampler = Sampler(
            hardware.read,
            clock=self.clock,
            on_sample=self._take_sample,
            on_error=self._fail_sample,
            interval_s=interval_s,
        )
        #: Those who want samples, by identity; held weakly where that is possible.
        self._wanted_by: dict[object, Callable[[], object]] = {}
        self._wants_lock = threading.RLock()
        #: Devices that were seen before the running cell began.
        self._known_devices: tuple[str, ...] = ()
        #: One end of a cell is being read: samples of this moment have no place in the history.
        self._reads_cell_end = False
        #: What stood at the ends of spans within the running cell, with their peaks.
        self._inner_ends: tuple[Reading, ...] = ()
        self._unsent: deque[Sample] = deque(maxlen=_MAX_UNSENT)
        self._history_lock = threading.RLock()
        self._closed = False
        survive_fork(self)

    # -- Cells -------------------------------------------------------------------------------------

    def start_cell(
        self,
        *,
        execution_count: int | None,
        cell_id: str | None,
        source: str,
        partial: bool = False,
    ) -> RunningCell:
        """A cell begins: start its span of peaks and read what stands.

        A cell that was running and whose end never came leaves no record.

        Args:
            execution_count: the number in ``In [n]``.
            cell_id: the front end's id of the cell.
            source: the cell as it was typed; its first line goes into the record.
            partial: it began before we were there, so its peaks are at least what we see.
        """
        self._idle.start_cell()
        self._sampler.start_cell()
        self._known_devices = self.history.devices()
        self._inner_ends = ()
        first_line = find_first_line(source)
        started_at = self.clock.wall()
        self._begin_cell_end()
        before = None
        try:
            before = self.hardware.start_span()
        except Exception as exc:  # noqa: BLE001 - a failure of ours is never the user's cell's
            self._report("Reading the memory at a cell's start", exc)
        start_s = self._keep_cell_end(before)
        cell = self.running = RunningCell(
            execution_count=execution_count,
            cell_id=cell_id,
            first_line=first_line,
            started_at=started_at,
            start_s=start_s,
            before=before or (),
            partial=partial,
            start_failed=before is None,
            budgets=self.budgets.table,
        )
        if self._listeners:
            self._tell("on_cell_started", lambda listener: listener.on_cell_started(cell))
        return cell

    def end_cell(self, *, status: Status, execution_count: int | None = None) -> CellRecord | None:
        """The running cell has ended: record it, tell the listeners, then run what waited.

        Args:
            status: how it ended.
            execution_count: its number, where it was not known at the start.

        Returns:
            The record, with ``None`` for what could not be read; ``None`` if no cell was running.
        """
        cell = self.running
        if cell is None:
            return None
        end_s = self._begin_cell_end()
        after = None
        try:
            after = self.hardware.end_span()
            if self._inner_ends:
                after = lift_peaks(after, self._inner_ends)
        except Exception as exc:  # noqa: BLE001 - a failure of ours is never the user's cell's
            self._report("Reading the memory at a cell's end", exc)
        finally:  # A Ctrl-C that comes just here must not cost the record.
            self._keep_cell_end(after, end_s)
            record = build_record(
                cell,
                after,
                end_s=end_s,
                status=status,
                execution_count=execution_count,
                known_devices=self._known_devices,
            )
            if cell.budgets is not None:
                record = mark_budgets(record, cell, self.budgets.table)
            self.running = None
            self.ledger.append(record)
            try:
                if self._listeners:
                    self._tell("on_cell_ended", lambda listener: listener.on_cell_ended(record))
            finally:
                self._leave_cell()
        return record

    def start_span_within(self) -> tuple[Reading, ...]:
        """Begin a span of marks within the running cell, whose own go on over it; what stands.

        Raises:
            BackendError: the hardware could not be read.
        """
        self._inner_ends += self.hardware.end_span()
        return self.hardware.start_span()

    def end_span_within(self) -> tuple[Reading, ...]:
        """What stands at that span's end, with its peaks; the cell's own marks go on.

        Raises:
            BackendError: the hardware could not be read.
        """
        ended = self.hardware.end_span()
        self._inner_ends += ended
        self.hardware.start_span()
        # One for each device is all that a cell with a thousand spans needs.
        self._inner_ends = lift_peaks(self._inner_ends, ())
        return ended

    def end_span(self) -> tuple[Reading, ...]:
        """What stands at the end of the running cell's span, with the cell's peaks.

        Raises:
            BackendError: the hardware could not be read.
        """
        after = self.hardware.end_span()
        return lift_peaks(after, self._inner_ends) if self._inner_ends else after

    def discard_cell(self) -> None:
        """Forget the running cell, if there is one: it leaves no record. What waited runs."""
        if self.running is not None:
            self.running = None
            self._leave_cell()

    def _leave_cell(self) -> None:
        self._sampler.end_cell()
        self._idle.end_cell()

    # -- Samples -----------------------------------------------------------------------------------

    def read_now(self) -> Sample:
        """Read the counters now; the sample goes into the history too.

        Raises:
            BackendError: the hardware could not be read.
        """
        readings = self.hardware.read()
        with self._history_lock:
            sample = Sample(self.clock.now(), readings)
            if not self._reads_cell_end and self.history.append(sample):
                self._unsent.append(sample)
        return sample

    def samples_of(self, record: CellRecord) -> list[Sample]:
        """The samples from a cell's start to its end, both of these included while not thinned."""
        end_s = record.start_s + record.duration_s
        return self.history.samples(record.start_s, end_s + _ROUNDING_S)

    def want_samples(self, who: object) -> None:
        """Sample until ``who`` does not want it any more, or is gone.

        The first one's context becomes the sampler thread's, so call this where messages should
        belong: in the cell that shows the view.
        """
        with self._wants_lock:
            if self._closed:
                return
            key, alive = _point_at(who)
            self._wanted_by[key] = alive
            if not self._sampler.is_running:
                self._unsent.clear()
                self._sampler.start()

    def unwant_samples(self, who: object) -> None:
        """``who`` wants no more samples; one may still be on its way. Nothing if it wanted none."""
        with self._wants_lock:
            self._wanted_by.pop(_point_at(who)[0], None)
            self._stop_if_unwanted()

    @property
    def is_sampling(self) -> bool:
        """Whether the sampler's thread runs."""
        return self._sampler.is_running

    @property
    def interval_s(self) -> float:
        """Seconds between samples while something happens; may be set.

        Raises:
            BadInputError: set to what is no positive number of seconds.
        """
        return self._sampler.interval_s

    @interval_s.setter
    def interval_s(self, interval_s: float) -> None:
        self._sampler.interval_s = interval_s

    def _stop_if_unwanted(self) -> bool:
        gone = [key for key, alive in self._wanted_by.items() if alive() is None]
        for key in gone:
            del self._wanted_by[key]
        if not self._wanted_by:
            self._sampler.stop(timeout_s=0)
        return not self._wanted_by

    def _take_sample(self, sample: Sample) -> None:
        """Keep a sample and hand it on: on the sampler's thread."""
        with self._wants_lock:
            if self._stop_if_unwanted():
                return
        with self._history_lock:
            if not self._reads_cell_end and self.history.append(sample):
                self._unsent.append(sample)
            unsent = tuple(self._unsent)
            self._unsent.clear()
        if unsent:
            self._tell("on_samples", lambda listener: listener.on_samples(unsent))

    def _fail_sample(self, exc: Exception) -> None:
        """Tell of a sample that failed, if anybody wanted it: on the sampler's thread."""
        with self._wants_lock:
            if self._stop_if_unwanted():
                return
        self._report("Sampling the memory", exc)

    def _begin_cell_end(self) -> float:
        """Keep other samples out, so that time goes forward in the history; what time it is."""
        with self._history_lock:
            self._reads_cell_end = True
            return self.clock.now()

    def _keep_cell_end(
        self, readings: tuple[Reading, ...] | None, time_s: float | None = None
    ) -> float:
        """Keep the readings of a cell's end, as of ``time_s`` or else of now; the time of these."""
        with self._history_lock:
            self._reads_cell_end = False
            if time_s is None:
                time_s = self.clock.now()
            if readings:
                sample = Sample(time_s, readings)
                self.history.append(sample)
                self._unsent.append(sample)
        return time_s

    # -- Whoever listens, waits and fails ----------------------------------------------------------

    def add_listener(self, listener: Listener) -> None:
        """Tell ``listener`` from now on; once, however often it is added."""
        if not any(known is listener for known in self._listeners):
            self._listeners = (*self._listeners, listener)

    def remove_listener(self, listener: Listener) -> None:
        """Tell ``listener`` nothing more. Nothing if it is none."""
        self._listeners = tuple(known for known in self._listeners if known is not listener)

    def when_idle(self, action: Callable[[], None]) -> None:
        """Run ``action`` when no cell runs: now, or at the cell's end after the listeners.

        Actions run one at a time and in order: now on this thread, else on the thread of the cell
        that ends (or that of the action before, if that one outlasts a cell). A cell's start does
        not wait for an action that is under way.
        """
        self._idle.add(action)

    @property
    def busy_action(self) -> bool:
        """Whether an action of ``when_idle`` is under way."""
        return self._idle.is_acting

    def report_failure(self, message: str) -> None:
        """Show a failure of ours to the user, each message once."""
        if message in self._failures or len(self._failures) >= _MAX_FAILURES:
            return
        self._failures.add(message)
        try:
            self._on_failure(message)
        except Exception:  # noqa: BLE001 - there is nobody left to tell but the log
            _log.exception("could not show: %s", message)

    def close(self) -> None:
        """Stop sampling, drop the listeners and what waits, close the hardware. Twice is fine."""
        with self._wants_lock:
            self._closed = True
            self._wanted_by.clear()
        self._sampler.stop()
        self._listeners = ()
        self._idle.clear()
        try:
            self.hardware.close()
        except Exception as exc:  # noqa: BLE001 - all of ours has gone by now; it is told
            self._report("Closing the hardware", exc)

    def reset_after_fork(self) -> None:
        """A forked child samples for nobody who wanted it in the parent."""
        self._wants_lock = threading.RLock()
        self._history_lock = threading.RLock()
        self._wanted_by = {}

    def _tell(self, event: str, tell: Callable[[Listener], None]) -> None:
        for listener in self._listeners:
            try:
                tell(listener)
            except Exception as exc:  # noqa: BLE001 - reported; the other listeners are told
                self._report(f"{type(listener).__name__}.{event}", exc)

    def _report(self, what: str, exc: Exception) -> None:
        # By its kind: a text with an address or a count in it would be new each time.
        kind = f"{what}: {type(exc).__name__}"
        if kind not in self._failures:
            self._failures.add(kind)
            self.report_failure(f"{what} failed: {type(exc).__name__}: {exc}")


def _point_at(who: object) -> tuple[object, Callable[[], object]]:
    """What ``who`` is known by, and a call that gives ``None`` once it is gone."""
    try:
        return id(who), weakref.ref(who)
    except TypeError:  # A string or a number: it is known by its value, and stays.
        return who, lambda: who
