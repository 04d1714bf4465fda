"""Reads the bytes in use at each line of a cell's own code, while the cell runs.

malloc keeps no history, but what stands at each line's start can be read: what came between two
lines' starts was added by the first of them. How the reader is told of lines differs between
releases of Python (``linehooks.py``); here is what they share: the reading itself, which must not
show up in its own figures, and its budget, so that a cell of cheap lines isn't slowed by dear ones.

What cheap lines do between two of their readings is read as one change, a gap; ``linesums.py``
shares it out.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable
from dataclasses import dataclass

from gpumemwidget.measure.linesums import LineSums

__all__ = ["N_LINES", "LineReader", "LineReadings"]

#: The lines of each file begin this far behind those of the one before; a file of more is no cell.
N_LINES = 1 << 16
#: Changes that are kept before they are added up.
_N_SLOTS = 1 << 14
#: The share of the time that reading may take. What is slowed by a quarter waits for a fifth, and
#: not all that it waits for is seen from here.
_SHARE = 0.15
#: What is read however long it takes: so much nobody notices. What was taken of it is given back by
#: a lower share, until there is nothing left of it.
_GRACE_NS = 10_000_000
_LOWER_SHARE = 0.1
#: A reading that takes longer is not made for our own sake.
_DEAR_NS = 100_000
#: What is saved up for the next readings, in ns, and the least in readings.
_CREDIT_NS = 2_000_000
_CREDIT_READINGS = 4


@dataclass(frozen=True, slots=True)
class LineReadings:
    """What was read of a cell."""

    #: The files whose code ran. A line of the second one is counted from ``N_LINES`` on.
    files: tuple[str, ...]
    sums: LineSums
    n_readings: int
    #: On the reader's clock.
    start_ns: int
    end_ns: int
    #: When the first gap began, and how long all of them were; ``None`` where there was none.
    gap_since_ns: int | None
    gap_ns: int
    notes: tuple[str, ...]


class LineReader:
    """Keeps what is in use at each line's start.

    Args:
        read: the bytes in use now.
        clock_ns: nanoseconds that never go back.
        n_slots: how many changes are kept before they are added up.
    """

    def __init__(
        self,
        read: Callable[[], int],
        *,
        clock_ns: Callable[[], int] = time.perf_counter_ns,
        n_slots: int = _N_SLOTS,
    ) -> None:
        self._read = read
        self._clock_ns = clock_ns
        self._times = array("q", bytes(8 * n_slots))
        self._lines = array("l", bytes(array("l").itemsize * n_slots))
        self._values = array("q", bytes(8 * n_slots))
        self._n = 0
        self.n_readings = 0
        #: What a reading costs beside what is seen of it here.
        self.call_ns = 0
        #: The line that runs; 0 for none of the files'.
        self.line = 0
        #: Whether lines run that aren't read.
        self.is_gap = False
        #: What our own sums have taken since the start.
        self._own_bytes = 0
        self._last_bytes = 0
        self._start_ns = self._spent_ns = 0
        self._gap_began_ns = 0
        self._gap_since_ns: int | None = None
        self._gap_ns = 0
        self._dearest_ns = 0
        self._sums = LineSums(0, 0)

    def start(self) -> None:
        """What stands now is what stood before."""
        # The first readings make what later ones find: the code's caches, a function's frame.
        for _ in range(3):
            self.advance(0)
        self._n = self._spent_ns = self.n_readings = self._dearest_ns = 0
        self._own_bytes = 0
        self._start_ns = self._clock_ns()
        self._sums = LineSums(self._start_ns, self._read())
        self._last_bytes = self._read()
        self._own_bytes = self._last_bytes - self._sums.start_bytes

    def advance(self, line: int) -> bool:
        """What came since the last reading is the running line's; from here on ``line`` runs.

        Returns:
            Whether there was too much of reading.
        """
        start_ns = self._clock_ns()
        value = self._read()
        if value != self._last_bytes:
            self._keep(start_ns, value)
        if self.is_gap:
            self.is_gap = False
            self._gap_ns += start_ns - self._gap_began_ns
        self.line = line
        self.n_readings += 1
        end_ns = self._clock_ns()
        cost_ns = end_ns - start_ns + self.call_ns
        self._spent_ns += cost_ns
        self._dearest_ns = max(cost_ns, self._dearest_ns * 7 // 8)
        return self._is_too_much(end_ns - self._start_ns)

    def charge(self, cost_ns: int) -> bool:
        """Time that went by without a reading; whether there was too much of it."""
        self._spent_ns += cost_ns
        if self._spent_ns <= _GRACE_NS:
            return False
        return self._is_too_much(self._clock_ns() - self._start_ns)

    def _is_too_much(self, elapsed_ns: int) -> bool:
        spent_ns = self._spent_ns
        return spent_ns > _GRACE_NS + elapsed_ns * _LOWER_SHARE and spent_ns > elapsed_ns * _SHARE

    def open_gap(self) -> None:
        """From here on lines may run that aren't read."""
        if not self.is_gap:
            self.is_gap = True
            self._gap_began_ns = self._clock_ns()
            if self._gap_since_ns is None:
                self._gap_since_ns = self._gap_began_ns

    def drop_gap(self) -> None:
        """No other line has run since the gap began."""
        self.is_gap = False
        if not self._gap_ns:
            self._gap_since_ns = None

    def wait_s(self) -> float:
        """For how long nothing may be read, so that some readings on end fit into the budget."""
        credit_ns = max(_CREDIT_NS, _CREDIT_READINGS * self._dearest_ns)
        elapsed_ns = self._clock_ns() - self._start_ns
        wanted_ns = self._spent_ns + credit_ns
        due_ns = min(wanted_ns / _SHARE, (wanted_ns - _GRACE_NS) / _LOWER_SHARE)
        return float(min(max((due_ns - elapsed_ns) / 1e9, 0.001), 10.0))

    def exclude(self, action: Callable[[], object]) -> None:
        """Do something that takes memory which isn't the cell's."""
        if self._dearest_ns > _DEAR_NS:
            action()  # A few hundred bytes are not worth two readings.
            return
        start_ns = self._clock_ns()
        before_bytes = self._read()
        action()
        self._leave_out(before_bytes)
        self._spent_ns += self._clock_ns() - start_ns

    def stop(
        self, files: tuple[str, ...], notes: tuple[str, ...], *, has_failed: bool = False
    ) -> LineReadings:
        """Add up what was read; with a last reading, unless reading has failed."""
        if not has_failed:
            self.advance(0)
        self._add_up()
        end_ns = self._clock_ns()
        return LineReadings(
            files=files,
            sums=self._sums,
            n_readings=self.n_readings,
            start_ns=self._start_ns,
            end_ns=end_ns,
            gap_since_ns=self._gap_since_ns,
            gap_ns=self._gap_ns,
            notes=notes,
        )

    def _keep(self, time_ns: int, value: int) -> None:
        n = self._n
        self._times[n] = time_ns
        self._lines[n] = -1 - self.line if self.is_gap else self.line
        self._values[n] = value - self._own_bytes
        self._last_bytes = value
        self._n = n + 1
        if self._n == len(self._times):
            self._add_up()
            self._leave_out(value)

    def _add_up(self) -> None:
        n, self._n = self._n, 0
        self._sums.take(self._times, self._lines, self._values, n)

    def _leave_out(self, before_bytes: int) -> None:
        now_bytes = self._read()
        self._own_bytes += now_bytes - before_bytes
        self._last_bytes += now_bytes - before_bytes
