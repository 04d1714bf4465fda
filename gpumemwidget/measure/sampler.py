"""A thread that reads the counters at intervals, as gently as it can.

A cell that computes in C or Python holds the interpreter's lock for 10 to 50 ms at a time, so ticks
come late. A late tick is dropped: nobody gains from several readings of one moment.
"""

from __future__ import annotations

import contextvars
import math
import queue
import threading
from collections.abc import Callable
from typing import TypeAlias

from gpumemwidget.errors import BadInputError
from gpumemwidget.measure.clock import Clock
from gpumemwidget.measure.forks import survive_fork
from gpumemwidget.records import Reading, Sample

__all__ = ["Sampler"]

#: What ends the thread's wait: it is C throughout, where an event is Python code and two locks.
_Wakes: TypeAlias = "queue.SimpleQueue[None]"
#: Less change than this is the noise of an idle process: our own samples move it by kilobytes.
_QUIET_BYTES = 1024**2


class Sampler:
    """Samples at a steady interval, and more slowly while nothing happens.

    It slows down by doubling when no cell runs and no device has changed by 1 MiB or more, and is
    back at its interval with the first change that it sees, or at once when a cell starts.

    Args:
        read: gives the readings of one moment; its exceptions go to ``on_error``.
        clock: the clock that stamps the samples.
        on_sample: gets each sample, on the sampler's thread.
        on_error: gets each exception of ``read`` and of ``on_sample``.
        interval_s: seconds between samples.
        slowest_s: the longest interval while nothing happens.
        name: the thread's.

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
        name: str = "gpumemwidget-sampler",
    ) -> None:
        self._read = read
        self._clock = clock
        self._on_sample = on_sample
        self._on_error = on_error
        self._interval_s = _check_interval(interval_s)
        self._slowest_s = slowest_s
        self._name = name
        #: Seconds to the next sample, as things stand.
        self.delay_s = interval_s
        #: When the next sample is due, on the clock.
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
        """Whether the thread runs and nobody has told it to stop."""
        thread = self._thread
        return thread is not None and thread.is_alive() and not self._stop_asked.is_set()

    @property
    def is_busy(self) -> bool:
        """Whether a cell runs, so that the interval stays as it was asked for."""
        return self._busy

    def start(self) -> None:
        """Start the thread, in a copy of the caller's context; nothing if it runs already.

        The context carries the cell whose output the thread's messages belong to.
        """
        with self._lock:
            if self.is_running:
                return
            # Each thread has its own: one that is stuck in a driver can't be revived.
            self._stop_asked = threading.Event()
            self._wake = queue.SimpleQueue()
            self._anchor = None
            self.delay_s = self._interval_s
            self.due_s = self._clock.now()
            context = contextvars.copy_context()
            self._thread = threading.Thread(
                target=context.run,
                args=(self._run, self._stop_asked, self._wake),
                name=self._name,
                daemon=True,
            )
            self._thread.start()

    def stop(self, *, timeout_s: float = 1.0) -> bool:
        """Tell the thread to stop, and wait for it. May be called twice, and from the thread.

        Args:
            timeout_s: how long to wait; 0 for not at all.

        Returns:
            Whether it has stopped. If not, it hangs in a read: it will stop after it, and nothing
            more comes of it.
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
        """A cell runs: keep the interval, and be back at it at once."""
        self._busy = True
        if self.delay_s > self._interval_s:
            self._hurry()

    def end_cell(self) -> None:
        """No cell runs: slow down when nothing changes."""
        self._busy = False

    def tick(self) -> None:
        """Take one sample and find out when the next is due: what the thread does each time."""
        self._tick(None)

    def reset_after_fork(self) -> None:
        """In a forked child there is no thread; nothing starts one unless it is asked for."""
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
        # What is past is dropped, and a slow read is not followed by another at once.
        due_s, now_s = self.due_s + self.delay_s, self._clock.now()
        self.due_s = due_s if due_s > now_s else now_s + self.delay_s

    def _choose_delay(self, readings: tuple[Reading, ...]) -> None:
        if self._busy or self._anchor is None or _has_changed(self._anchor, readings):
            self._anchor = readings
            self.delay_s = self._interval_s
        else:
            self.delay_s = min(2 * self.delay_s, self._slowest_now_s)


def _check_interval(interval_s: float) -> float:
    """The interval, if it is one.

    Raises:
        BadInputError: it is no positive number of seconds.
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
