"""Measure named spans of a program, which may lie within one another and overlap.

The allocator has one high-water mark. So it is read and reset wherever a span begins or ends, and
each span's peak is the highest of the stretches that it is made of. A stretch is noted in the span
that began last, and a span hands what it noted to the one before it when it ends: what a span costs
does not grow with the number of those around it.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Hashable
from dataclasses import dataclass

from gpumemwidget.backends.hardware import Hardware
from gpumemwidget.errors import BusyError
from gpumemwidget.model.cells import Status
from gpumemwidget.model.devices import Reading
from gpumemwidget.model.processes import RunningSpan, SpanRecord
from gpumemwidget.recording.running_cell import RunningCell, build_record, lift_peaks


@dataclass(slots=True, eq=False)
class OpenSpan:
    """A span that has begun."""

    running: RunningSpan
    lane: Hashable
    cell: RunningCell
    #: The highest peaks, and the most lanes, that were noted while it was the one that began last.
    ends: tuple[Reading, ...] = ()
    n_lanes: int = 0
    #: The name and the number of its record, where only its end shows what it was.
    ended_as: tuple[str, int | None] | None = None
    has_ended: bool = False


class Spans:
    """The spans of one program.

    Attributes:
        ends: the highest peaks that no open span has noted.

    Args:
        hardware: the machine's memory; spans of its peaks begin at every call.
        now: returns seconds since the recording began.
    """

    def __init__(self, hardware: Hardware, now: Callable[[], float]) -> None:
        self._hardware = hardware
        self._now = now
        self._lock = threading.Lock()
        self._is_closed = False
        #: The measured spans that are open, in the order in which they began.
        self._open: list[OpenSpan] = []
        #: The number of open spans of each lane: nested spans have one, those side by side several.
        self._lanes: Counter[Hashable] = Counter()
        self.ends: tuple[Reading, ...] = ()

    def start(self) -> None:
        """Begin the first stretch.

        Raises:
            BackendError: the memory can't be read.
        """
        self._hardware.start_span()

    def begin(
        self, name: str, number: int | None = None, *, lane: Hashable | None = None
    ) -> OpenSpan | None:
        """Begin a span; return ``None`` once this is closed.

        Args:
            name: what is done in it.
            number: which one of that name it is.
            lane: spans of one lane lie within one another, others side by side; by default this
                thread.

        Raises:
            BackendError: the memory can't be read.
            BusyError: too many spans are open.
        """
        lane = threading.get_ident() if lane is None else lane
        with self._lock:
            if self._is_closed:
                return None
            # Where spans lie side by side, the end of one looks at all that began later: some 100
            # µs for so many.
            if len(self._open) >= 200:
                raise BusyError("200 spans are open, and those beyond are not recorded")
            before = self._end_stretch()
            running = RunningSpan(name, self._now(), number)
            cell = RunningCell(
                execution_count=number,
                cell_id=None,
                first_line=name,
                started_at=0.0,
                start_s=running.start_s,
                before=before,
            )
            span = OpenSpan(running, lane, cell)
            self._open.append(span)
            self._lanes[lane] += 1
            span.n_lanes = len(self._lanes)
            return span

    def end(self, span: OpenSpan, status: Status = "ok") -> SpanRecord | None:
        """End a span, and return its record; ``None`` if it has ended already.

        Raises:
            BackendError: the memory can't be read.
        """
        with self._lock:
            if span.has_ended or self._is_closed:
                return None
            span.has_ended = True
            try:
                after = self._end_stretch()
            finally:
                ends, n_lanes = self._forget(span)
            end_s = self._now()
        record = build_record(
            span.cell,
            lift_peaks(after, ends),
            end_s=end_s,
            status=status,
            known_devices=[reading.device for reading in span.cell.before],
        )
        name, number = span.ended_as or (record.first_line, record.execution_count)
        return SpanRecord(
            name=name,
            start_s=record.start_s,
            duration_s=round(record.duration_s, 6),
            status=status,
            devices=record.devices,
            number=number,
            shared_with=max(0, n_lanes - 1),
        )

    def close(self) -> None:
        """Measure nothing more: the peaks are the program's own again. May be called twice."""
        with self._lock:
            self._is_closed = True
            self._open.clear()
            self._lanes.clear()

    @property
    def open_spans(self) -> tuple[OpenSpan, ...]:
        """The measured spans that are open, in the order in which they began."""
        return tuple(self._open)

    def find_peaks(self, readings: tuple[Reading, ...]) -> tuple[Reading, ...]:
        """Return readings of the running stretch with the highest peaks of all stretches."""
        with self._lock:
            for span in self._open:
                readings = lift_peaks(readings, span.ends)
            return lift_peaks(readings, self.ends)

    def _forget(self, span: OpenSpan) -> tuple[tuple[Reading, ...], int]:
        """Take a span out, and return its highest peaks and the most lanes that were open."""
        place = self._open.index(span)
        if place:
            before = self._open[place - 1]
            before.ends = lift_peaks(span.ends, before.ends)
            before.n_lanes = max(before.n_lanes, span.n_lanes)
        else:
            self.ends = lift_peaks(span.ends, self.ends)
        ends, n_lanes = span.ends, span.n_lanes
        for later in self._open[place + 1 :]:
            ends, n_lanes = lift_peaks(later.ends, ends), max(n_lanes, later.n_lanes)
        del self._open[place]
        self._lanes[span.lane] -= 1
        if not self._lanes[span.lane]:
            del self._lanes[span.lane]
        return ends, n_lanes

    def _end_stretch(self) -> tuple[Reading, ...]:
        """End the stretch, note its peaks in the span that began last, and begin another."""
        ends = self._hardware.read_exact()
        noting = self._open[-1] if self._open else self
        noting.ends = lift_peaks(ends, noting.ends)
        self._hardware.start_span()
        return ends
