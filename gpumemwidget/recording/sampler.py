"""Read the counters at intervals on a thread, with little disturbance.

A cell that computes in C or Python holds the interpreter's lock for 10 to 50 ms at a time, so ticks
come late. Late ticks are dropped, as several readings of one moment are of no use.
"""

from __future__ import annotations

import contextvars
import math
import queue
import threading
import time
from collections.abc import Callable
from typing import TypeAlias

from gpumemwidget.errors import BadInputError
from gpumemwidget.model.devices import Reading, Sample
from gpumemwidget.recording.forks import survive_fork

#: Queue that ends the thread's wait: C throughout, where an Event is Python code and two locks.
_Wakes: TypeAlias = "queue.SimpleQueue[None]"
#: Smallest change that counts, in bytes: our own samples move an idle process by kilobytes.
_QUIET_BYTES = 1024**2


class Clock:
    """A clock to measure with and a clock to name a moment with: the machine's own."""

    def now(self) -> float:
        """Return seconds that never go back, from an arbitrary start."""
        return time.perf_counter()

    def wall(self) -> float:
        """Return seconds since the epoch, UTC; may jump when the machine's clock is set."""
        return time.time()


class Sampler:
    """Samples at a steady interval, and more slowly while nothing happens.

    The interval doubles while no cell runs and no device changes by 1 MiB or more. The first change
    that is seen, or the start of a cell, sets it back.

    Attributes:
        delay_s: seconds from one sample to the next now.
        due_s: when the next sample is due, on the clock.

    Args:
        read: returns the readings of one moment; its exceptions go to ``on_error``.
        clock: the clock that stamps the samples.
        on_sample: called with each sample, on the sampler's thread.
        on_error: called with each exception of ``read`` and of ``on_sample``.
        interval_s: seconds between samples.
        slowest_s: maximum seconds between samples while nothing happens.

    Raises:
        BadInputError: the interval is not a positive number of seconds.
    """

    def __init__(
        self,
        read: Callable[[], tuple[Reading, ...]],
        *,
        clock: Clock,
        on_sample: Callable[[Sample], None],
        on_error: Callable[[Exception], None],
        interval_s: float = 0.1,
        slowest_s: float = 1.0,
    ) -> None:
        self._read = read
        self._clock = clock
        self._on_sample = on_sample
        self._on_error = on_error
        self._interval_s = _check_interval(interval_s)
        self._slowest_s = slowest_s
        self.delay_s = interval_s
        self.due_s = clock.now()
        self._busy = False
        self._anchor: tuple[Reading, ...] | None = None
        self._thread: threading.Thread | None = None
        self._stop_asked = threading.Event()
        self._wake: _Wakes = queue.SimpleQueue()
        self._lock = threading.RLock()
        survive_fork(self)

    @property
    def interval_s(self) -> float:
        """Seconds between samples while something happens.

        Raises:
            BadInputError: set to what is no positive number of seconds.
        """
        return self._interval_s

    @interval_s.setter
    def interval_s(self, interval_s: float) -> None:
        self._interval_s = _check_interval(interval_s)
        self._hurry()

    @property
    def is_running(self) -> bool:
        """Return whether the thread runs and has not been told to stop."""
        thread = self._thread
        return thread is not None and thread.is_alive() and not self._stop_asked.is_set()

    def start(self) -> None:
        """Start the thread in a copy of the caller's context, unless it runs already.

        The context carries the cell whose output the thread's messages belong to.
        """
        with self._lock:
            if self.is_running:
                return
            # New ones for each thread: one that is stuck in a driver must not go on later.
            self._stop_asked = threading.Event()
            self._wake = queue.SimpleQueue()
            self._anchor = None
            self.delay_s = self._interval_s
            self.due_s = self._clock.now()
            context = contextvars.copy_context()
            self._thread = threading.Thread(
                target=context.run,
                args=(self._run, self._stop_asked, self._wake),
                name="gpumemwidget-sampler",
                daemon=True,
            )
            self._thread.start()

    def stop(self, *, timeout_s: float = 1.0) -> bool:
        """Tell the thread to stop, and wait for it. May be called twice, and from the thread.

        Args:
            timeout_s: how long to wait; 0 for not at all.

        Returns:
            Whether the thread has stopped. If not, it hangs in a read, stops after it, and drops
            the sample.
        """
        with self._lock:
            thread = self._thread
            self._stop_asked.set()
            self._wake.put(None)
        if thread is None:
            return True
        if thread is not threading.current_thread() and timeout_s > 0:
            thread.join(timeout_s)
        return not thread.is_alive()

    def start_cell(self) -> None:
        """Set the interval back, and keep it while the cell runs."""
        self._busy = True
        if self.delay_s > self._interval_s:
            self._hurry()

    def end_cell(self) -> None:
        """Let the interval grow while nothing changes."""
        self._busy = False

    def tick(self) -> None:
        """Take one sample, as the thread does each time, and set when the next is due."""
        self._tick(None)

    def reset_after_fork(self) -> None:
        """Forget the thread in a forked child, where it does not run."""
        self._lock = threading.RLock()
        self._stop_asked = threading.Event()
        self._wake = queue.SimpleQueue()
        self._thread = None

    def _hurry(self) -> None:
        self.delay_s = self._interval_s
        self._wake.put(None)

    @property
    def _slowest_now_s(self) -> float:
        return max(self._slowest_s, self._interval_s)

    def _run(self, stop_asked: threading.Event, wake: _Wakes) -> None:
        while not stop_asked.is_set():
            try:
                wake.get(timeout=max(0.0, self.due_s - self._clock.now()))
            except queue.Empty:
                self._tick(stop_asked)
            else:
                self.delay_s = self._interval_s
                self.due_s = min(self.due_s, self._clock.now() + self.delay_s)

    def _tick(self, stop_asked: threading.Event | None) -> None:
        time_s = self._clock.now()
        try:
            readings = self._read()
            if stop_asked is not None and stop_asked.is_set():
                return
            self._choose_delay(readings)
            self._on_sample(Sample(time_s, readings))
        except Exception as exc:  # noqa: BLE001 - reported, and the next sample may go well
            self.delay_s = self._slowest_now_s
            self._on_error(exc)
        # Late ticks are dropped, and a slow read is not followed by another at once.
        due_s, now_s = self.due_s + self.delay_s, self._clock.now()
        self.due_s = due_s if due_s > now_s else now_s + self.delay_s

    def _choose_delay(self, readings: tuple[Reading, ...]) -> None:
        if self._busy or self._anchor is None or _has_changed(self._anchor, readings):
            self._anchor = readings
            self.delay_s = self._interval_s
        else:
            self.delay_s = min(2 * self.delay_s, self._slowest_now_s)


def _check_interval(interval_s: float) -> float:
    """Return the interval.

    Raises:
        BadInputError: it is not a positive number of seconds.
    """
    if not (math.isfinite(interval_s) and interval_s > 0):
        raise BadInputError(
            f"{interval_s!r} is no interval: give a positive number of seconds, as in 0.1"
        )
    return interval_s


def _has_changed(old: tuple[Reading, ...], new: tuple[Reading, ...]) -> bool:
    if len(old) != len(new):
        return True
    return any(
        was.device != now.device
        or _differs(was.allocated_bytes, now.allocated_bytes)
        or _differs(was.reserved_bytes, now.reserved_bytes)
        for was, now in zip(old, new, strict=True)
    )


def _differs(was: int | None, now: int | None) -> bool:
    if was is None or now is None:
        return was is not now
    return abs(now - was) >= _QUIET_BYTES
