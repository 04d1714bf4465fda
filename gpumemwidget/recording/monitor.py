"""Record every cell, sample the memory, and call those who listen.

A cell's start and its end are the hot path: one reading of the hardware and a small, fixed amount
of work. Exceptions of the hardware and of callbacks are caught, so that no failure of ours becomes
one of the user's cell.
"""

from __future__ import annotations

import math
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Generic, TypeVar

from gpumemwidget.errors import is_from_signal_handler
from gpumemwidget.model.cells import CellRecord, Status
from gpumemwidget.model.devices import HOST, BytesByDevice, Reading, Sample
from gpumemwidget.recording.forks import survive_fork
from gpumemwidget.recording.history import History
from gpumemwidget.recording.ledger import Ledger
from gpumemwidget.recording.limits import Budgets, Expectations
from gpumemwidget.recording.running_cell import (
    RunningCell,
    build_record,
    find_first_line,
    has_only_own_magics,
    lift_peaks,
)
from gpumemwidget.recording.sampler import Clock, Sampler

if TYPE_CHECKING:
    from gpumemwidget.backends.hardware import Hardware

_T = TypeVar("_T")
#: Seconds for which the driver's answer is good for the start of another cell. Asking takes half as
#: long as all the rest of recording a cell.
_FRESH_S = 0.1
#: A cell of less than these seconds takes no memory of a GPU but by PyTorch, and by libraries that
#: are known.
_INSTANT_S = 0.002


class Callbacks(Generic[_T]):
    """Functions to call when one kind of event happens, in the order in which they were added.

    Args:
        on_error: called with the name and the exception of a function that raised; the functions
            after it are still called.
    """

    def __init__(self, on_error: Callable[[str, Exception], None]) -> None:
        self._on_error = on_error
        #: Each by a key of its own. A dictionary's single steps need no lock.
        self._functions: dict[object, Callable[[_T], object]] = {}

    def add(self, function: Callable[[_T], object]) -> Callable[[], None]:
        """Call ``function`` at each event from now on.

        Returns:
            A function that ends this; calling it again changes nothing.
        """
        key = object()
        self._functions[key] = function
        return lambda: self._functions.pop(key, None) and None

    def call(self, value: _T) -> None:
        """Call all functions with ``value``."""
        for function in list(self._functions.values()):
            try:
                function(value)
            except Exception as exc:
                if is_from_signal_handler(exc):
                    raise
                name = getattr(function, "__qualname__", repr(function))
                self._on_error(name.removesuffix(".<locals>.<lambda>"), exc)

    def clear(self) -> None:
        """Call none of the functions any more."""
        self._functions.clear()


class Monitor:
    """Records every cell, and samples the memory for those who want it.

    Attributes:
        running: the cell that runs now.
        budgets: how much each cell may have allocated.
        expectations: how much cells were predicted to allocate (``%%memfit``).
        cell_started: called with the ``RunningCell``, on the thread that runs it, before its code.
        cell_ended: called with the ``CellRecord`` once it is in the ledger, on the same thread.
        sampled: called with the samples of one tick in order of time, on the sampler's thread, and
            only while somebody wants samples. Readings of cells' starts and ends since the last
            tick stand before the tick's own.

    Args:
        hardware: the machine's memory.
        on_failure: called with what failed and the exception, each time.
        clock: the session's clock; the system's if not given.
        interval_s: seconds between samples while a cell runs.
    """

    def __init__(
        self,
        hardware: Hardware,
        *,
        on_failure: Callable[[str, Exception], None],
        clock: Clock | None = None,
        interval_s: float = 0.1,
    ) -> None:
        self.hardware = hardware
        self.clock = Clock() if clock is None else clock
        self.ledger = Ledger()
        self.history = History()
        self.budgets = Budgets()
        self.expectations = Expectations()
        self.running: RunningCell | None = None
        self._on_failure = on_failure
        self.cell_started: Callbacks[RunningCell] = Callbacks(on_failure)
        self.cell_ended: Callbacks[CellRecord] = Callbacks(on_failure)
        self.sampled: Callbacks[Sequence[Sample]] = Callbacks(on_failure)
        #: Actions that wait for the cell's end.
        self._waiting: deque[Callable[[], None]] = deque()
        self._cell_runs = self._is_acting = False
        self._sampler = Sampler(
            hardware.read,
            clock=self.clock,
            on_sample=self._take_sample,
            on_error=self._fail_sample,
            interval_s=interval_s,
        )
        self._wanted_by: weakref.WeakSet[object] = weakref.WeakSet()
        self._wants_lock = threading.RLock()
        #: Devices that were seen before the running cell began.
        self._known_devices: tuple[str, ...] = ()
        #: Readings at the ends of spans within the running cell, with their peaks.
        self._inner_ends: tuple[Reading, ...] = ()
        #: The driver's last answer, and until when it is good for the start of a cell.
        self._own_uses: BytesByDevice = ()
        self._own_until_s = -math.inf
        self._unsent: deque[Sample] = deque(maxlen=1000)
        #: Held while a cell's start or end is read: no sample of that time gets before it.
        self._history_lock = threading.RLock()
        #: Held while the history is thinned; nobody waits for it.
        self._thinning = threading.Lock()
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
        """Begin a cell: start its span of peaks and read the memory.

        A cell that was running and never ended leaves no record.

        Args:
            execution_count: the number in ``In [n]``.
            cell_id: the front end's id of the cell.
            source: the cell as it was typed; its first line goes into the record.
            partial: it began before we were there, so its peaks are lower bounds.
        """
        self._cell_runs = True
        self._sampler.start_cell()
        self._known_devices = self.history.devices()
        self._inner_ends = ()
        first_line = find_first_line(source)
        is_only_own_magics = has_only_own_magics(source)
        started_at = self.clock.wall()
        # No driver is asked under the lock.
        if self.running is not None or self.clock.now() > self._own_until_s:
            self._ask_own()
        own_before = self._own_uses
        with self._history_lock:
            before = self._read(self.hardware.start_span, "the memory at a cell's start")
            start_s = self.clock.now()
            if before:
                self._keep_sample(Sample(start_s, before))
        cell = self.running = RunningCell(
            execution_count=execution_count,
            cell_id=cell_id,
            first_line=first_line,
            started_at=started_at,
            start_s=start_s,
            before=before or (),
            partial=partial,
            start_failed=before is None,
            budgets=self.budgets,
            expected=self.expectations.find(source),
            is_only_own_magics=is_only_own_magics,
            source=source,
            own_before=own_before,
        )
        self.cell_started.call(cell)
        return cell

    def end_cell(self, *, status: Status, execution_count: int | None = None) -> CellRecord | None:
        """Record the running cell, call ``cell_ended``, then run the actions that waited.

        Args:
            status: how it ended.
            execution_count: its number, where it was not known at the start.

        Returns:
            The record, with ``None`` for what could not be read; ``None`` if no cell was running.
        """
        cell = self.running
        if cell is None:
            return None
        after, end_s = None, self.clock.now()
        own_after: BytesByDevice = ()
        try:
            with self._history_lock:
                # Once more: while this thread waited for the lock, a sample may have come.
                end_s = self.clock.now()
                after = self._read(self.hardware.read_exact, "the memory at a cell's end")
                if after:
                    if self._inner_ends:
                        after = lift_peaks(after, self._inner_ends)
                    self._keep_sample(Sample(end_s, after))
            is_instant = end_s - cell.start_s < _INSTANT_S and _list_gpus(after) == _list_gpus(
                cell.before
            )
            if not is_instant or self.hardware.has_other_libraries():
                self._ask_own()
            own_after = self._own_uses
        finally:  # A Ctrl-C that comes just here must not cost the record.
            record = build_record(
                cell,
                after,
                end_s=end_s,
                status=status,
                execution_count=execution_count,
                known_devices=self._known_devices,
                budgets=self.budgets,
                own_after=own_after,
            )
            self.running = None
            self.ledger.append(record)
            try:
                self.cell_ended.call(record)
            finally:
                self._leave_cell()
        return record

    def start_span_within(self) -> tuple[Reading, ...]:
        """Begin a span of peaks within the running cell, and return the readings.

        The cell's own peaks include the span.

        Raises:
            BackendError: the hardware could not be read.
        """
        self._inner_ends += self.hardware.read_exact()
        return self.hardware.start_span()

    def end_span_within(self) -> tuple[Reading, ...]:
        """Return the readings at the end of a span within the cell, with the span's peaks.

        Raises:
            BackendError: the hardware could not be read.
        """
        ended = self.hardware.read_exact()
        self._inner_ends += ended
        self.hardware.start_span()
        # One reading for each device, however many spans the cell has.
        self._inner_ends = lift_peaks(self._inner_ends, ())
        return ended

    def discard_cell(self) -> None:
        """Forget the running cell, which leaves no record, and run the actions that waited."""
        if self.running is not None:
            self.running = None
            self._own_until_s = -math.inf
            self._leave_cell()

    def _leave_cell(self) -> None:
        self._cell_runs = False
        self._sampler.end_cell()
        self._run_waiting()
        # Where no sampler's thread has done so for long.
        self._thin(1.25)

    def _ask_own(self) -> None:
        found = self._read(self.hardware.read_own_uses, "what the driver lists")
        self._own_uses = found or ()
        self._own_until_s = -math.inf if found is None else self.clock.now() + _FRESH_S

    def _read(self, read: Callable[[], _T], what: str) -> _T | None:
        """Return an answer of the hardware's; ``None`` and a report if that fails."""
        try:
            return read()
        except Exception as exc:  # noqa: BLE001 - a failure of ours is never the user's cell's
            self._on_failure(f"Reading {what}", exc)
            return None

    # -- Samples -----------------------------------------------------------------------------------

    def read_now(self) -> Sample:
        """Read the counters now, and keep the sample in the history.

        Raises:
            BackendError: the hardware could not be read.
        """
        readings = self.hardware.read()
        with self._history_lock:
            sample = Sample(self.clock.now(), readings)
            self._keep_sample(sample)
        self._thin()
        return sample

    def read_own_uses(self) -> BytesByDevice:
        """Return what this process has of each GPU now, as its driver has it.

        A cell that runs keeps the most that is outside PyTorch.
        """
        cell = self.running
        if cell is None:
            return self.hardware.read_own_uses()
        what = "the memory in a cell"
        before = self._read(self.hardware.read, what)
        own = self.hardware.read_own_uses()
        after = self._read(self.hardware.read, what)
        if before and after:
            cell.note_outside(own, (*before, *after))
        return own

    def samples_of(self, record: CellRecord) -> list[Sample]:
        """Return the samples from a cell's start to its end, both included while not thinned."""
        end_s = record.start_s + record.duration_s + 1e-6  # it is rounded
        return self.history.samples(record.start_s, end_s)

    def want_samples(self, who: object) -> None:
        """Sample until ``unwant_samples(who)`` is called, or ``who`` is gone.

        The sampler's thread gets the context of the first call, by which its messages belong to a
        cell, or to a page's question: call this in the cell that shows the view, or in the answer.
        """
        with self._wants_lock:
            if self._closed:
                return
            self._wanted_by.add(who)
            if not self._sampler.is_running:
                self._unsent.clear()
                self._sampler.start()

    def unwant_samples(self, who: object) -> None:
        """Sample no more for ``who``; one sample may still be on its way."""
        with self._wants_lock:
            self._wanted_by.discard(who)
        self._stop_if_unwanted()

    @property
    def is_sampling(self) -> bool:
        """Return whether the sampler's thread runs."""
        return self._sampler.is_running

    def _stop_if_unwanted(self) -> bool:
        """Stop sampling if nobody wants samples any more; return whether that is so."""
        with self._wants_lock:
            is_unwanted = len(self._wanted_by) == 0
            if is_unwanted:
                self._sampler.stop()
            return is_unwanted

    def _take_sample(self, sample: Sample) -> None:
        """Keep a sample and call ``sampled``; on the sampler's thread."""
        if self._stop_if_unwanted():
            return
        with self._history_lock:
            self._keep_sample(sample)
            unsent = tuple(self._unsent)
            self._unsent.clear()
        self._thin()
        if unsent:
            self.sampled.call(unsent)

    def _fail_sample(self, exc: Exception) -> None:
        """Report a sample that failed, if it is still wanted; on the sampler's thread."""
        if not self._stop_if_unwanted():
            self._on_failure("Sampling the memory", exc)

    def _keep_sample(self, sample: Sample) -> None:
        """Keep a sample, unless it is older than the last; the caller holds the lock."""
        if self.history.append(sample):
            self._unsent.append(sample)

    def _thin(self, spare: float = 1.0) -> None:
        """Thin the history if it is too long, without the lock that a cell's start and end take."""
        is_due = len(self.history) > spare * self.history.capacity
        if is_due and self._thinning.acquire(blocking=False):
            try:
                self.history.thin(self._history_lock)
            finally:
                self._thinning.release()

    # -- Actions between cells, failures, the end --------------------------------------------------

    def when_idle(self, action: Callable[[], None]) -> None:
        """Run ``action`` when no cell runs: now, or at the cell's end after its callbacks.

        Actions run one at a time and in order, on the thread that runs the cells. Call this on that
        thread, too.
        """
        self._waiting.append(action)
        self._run_waiting()

    def _run_waiting(self) -> None:
        if self._is_acting or self._cell_runs:
            return
        self._is_acting = True
        if self._waiting:  # A release between two cells is not counted for the later one.
            self._own_until_s = -math.inf
        try:
            while self._waiting and not self._cell_runs:
                try:
                    self._waiting.popleft()()
                except Exception as exc:  # noqa: BLE001 - one action's failure is not the next one's
                    self._on_failure("An action after the cell's end", exc)
        finally:
            self._is_acting = False

    def close(self) -> None:
        """Stop sampling, drop callbacks and waiting actions, close the hardware. Twice is fine."""
        with self._wants_lock:
            self._closed = True
            self._wanted_by.clear()
            self._sampler.stop()
        self._sampler.join()
        for callbacks in (self.cell_started, self.cell_ended, self.sampled):
            callbacks.clear()
        self._waiting.clear()
        try:
            self.hardware.close()
        except Exception as exc:  # noqa: BLE001 - reported; all else is closed by now
            self._on_failure("Closing the hardware", exc)

    def reset_after_fork(self) -> None:
        """Renew the locks in a forked child, which has none of the parent's work to do."""
        self._wants_lock = threading.RLock()
        self._history_lock = threading.RLock()
        self._thinning = threading.Lock()
        self._wanted_by = weakref.WeakSet()
        self._waiting = deque()
        self._cell_runs = self._is_acting = False
        self._own_until_s = -math.inf


def _list_gpus(readings: Iterable[Reading] | None) -> list[Reading]:
    return [reading for reading in readings or () if reading.device != HOST]
