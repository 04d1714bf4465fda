"""Read the counters at intervals on a thread, with little disturbance.

A cell that computes in C or Python holds the interpreter's lock for 10 to 50 ms at a time, so ticks
come late. Late ticks are dropped, as several readings of one moment are of no use.
"""

from __future__ import annotations

import contextvars
import queue
import threading
import time
from collections.abc import Callable

from gpumemwidget.model.devices import Reading, Sample


class Clock:
    """A clock to measure with and a clock to name a moment with: the machine's own."""

    def now(self) -> float:
        """Return seconds that never go back, from an arbitrary start."""
        return time.perf_counter()

    def wall(self) -> float:
        """Return seconds since the epoch, UTC; may jump when the machine's clock is set."""
        return time.time()


class Sampler:
    """Samples at a steady interval while a cell runs, and once a second between cells.

    Its owner calls ``start`` and ``stop`` under a lock.

    Attributes:
        due_s: when the next sample is due, on the clock.

    Args:
        read: returns the readings of one moment; its exceptions go to ``on_error``.
        clock: the clock that stamps the samples.
        on_sample: called with each sample, on the sampler's thread.
        on_error: called with each exception of ``read`` and of ``on_sample``.
        interval_s: seconds between samples while a cell runs.
        idle_interval_s: seconds between samples while none runs.
    """

    def __init__(
        self,
        read: Callable[[], tuple[Reading, ...]],
        *,
        clock: Clock,
        on_sample: Callable[[Sample], None],
        on_error: Callable[[Exception], None],
        interval_s: float = 0.1,
        idle_interval_s: float = 1.0,
    ) -> None:
        self._read = read
        self._clock = clock
        self._on_sample = on_sample
        self._on_error = on_error
        self._interval_s = interval_s
        self._idle_interval_s = idle_interval_s
        self.due_s = clock.now()
        self._in_cell = False
        self._thread: threading.Thread | None = None
        #: Ends the wait of the thread that may go on; ``None`` if none may. A queue, as an Event is
        #: Python code and two locks.
        self._wake: queue.SimpleQueue[None] | None = None

    @property
    def is_running(self) -> bool:
        """Return whether the thread runs and shall not stop."""
        return self._wake is not None and self._thread is not None and self._thread.is_alive()

    def start(self) -> None:
        """Start the thread in a copy of the caller's context, unless it runs already.

        The context carries the cell whose output the thread's messages belong to.
        """
        if self.is_running:
            return
        # A new one for each thread: one that is stuck in a driver must not go on later.
        self._wake = queue.SimpleQueue()
        self.due_s = self._clock.now()
        self._thread = threading.Thread(
            target=contextvars.copy_context().run,
            args=(self._run, self._wake),
            name="gpumemwidget-sampler",
            daemon=True,
        )
        self._thread.start()

    def stop(self) -> None:
        """Let the thread stop. May be called twice, and from the thread.

        A thread that hangs in a read stops after it, and drops the sample.
        """
        wake, self._wake = self._wake, None
        if wake is not None:
            wake.put(None)

    def join(self, timeout_s: float = 1.0) -> bool:
        """Wait for the thread that is to stop; return whether it has."""
        thread = self._thread
        if thread is None:
            return True
        if thread is not threading.current_thread():
            thread.join(timeout_s)
        return not thread.is_alive()

    def start_cell(self) -> None:
        """Sample at the interval of cells, from the next one on."""
        self._in_cell = True
        # Read once: the thread itself may have ended the sampling meanwhile.
        wake = self._wake
        if wake is not None:
            wake.put(None)

    def end_cell(self) -> None:
        """Sample at the interval between cells."""
        self._in_cell = False

    def _run(self, wake: queue.SimpleQueue[None]) -> None:
        while self._wake is wake:
            try:
                wake.get(timeout=max(0.0, self.due_s - self._clock.now()))
            except queue.Empty:
                self._tick(wake)
            else:
                self.due_s = min(self.due_s, self._clock.now() + self._interval_s)

    def _tick(self, wake: queue.SimpleQueue[None] | None) -> None:
        """Take one sample, unless another thread has begun meanwhile; set when the next is due."""
        time_s = self._clock.now()
        try:
            readings = self._read()
            if self._wake is not wake:
                return
            self._on_sample(Sample(time_s, readings))
        except Exception as exc:  # noqa: BLE001 - reported, and the next sample may go well
            self._on_error(exc)
            if self._wake is not wake:
                return
        # Late ticks are dropped, and a slow read is not followed by another at once.
        delay_s = self._interval_s if self._in_cell else self._idle_interval_s
        due_s, now_s = self.due_s + delay_s, self._clock.now()
        self.due_s = due_s if due_s > now_s else now_s + delay_s
