"""Measure named spans of a program, which may lie within one another and overlap.

The allocator has one high-water mark. So it is read and reset wherever a span begins or ends, and
each span's peak is the highest of the stretches that it is made of.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable
from dataclasses import dataclass, replace

from gpumemwidget.backends.hardware import Hardware
from gpumemwidget.model.cells import CellDevice, Status
from gpumemwidget.model.devices import Reading
from gpumemwidget.model.processes import RunningSpan, SpanRecord
from gpumemwidget.recording.cells import RunningCell, build_record, lift_peaks

#: The lane of a task of another thread that tells nobody when it begins and ends: a thread of ours
#: looks again and again, and so begins and ends the span a little late. Its peaks count as sampled,
#: as the first moments of the task are not in them. It lies around the spans of all other lanes.
SEEN: Hashable = object()


@dataclass(slots=True, eq=False)
class OpenSpan:
    """A span that has begun."""

    running: RunningSpan
    cell: RunningCell
    #: The highest peaks since it began.
    ends: tuple[Reading, ...] = ()
    shared_with: int = 0
    #: True where the lane is ``SEEN``.
    is_seen: bool = False
    #: The name and the number of its record, where only its end tells what it was.
    ended_as: tuple[str, int | None] | None = None


class Spans:
    """The spans of one program.

    Args:
        hardware: the machine's memory; spans of its peaks begin at every call.
        now: returns seconds since the recording began.
    """

    def __init__(self, hardware: Hardware, now: Callable[[], float]) -> None:
        self._hardware = hardware
        self._now = now
        self._lock = threading.Lock()
        self._is_closed = False
        self._open: list[OpenSpan] = []
        #: The open spans of each lane, by which nested spans are told from those side by side.
        self._lanes: dict[Hashable, list[OpenSpan]] = {}
        #: The highest peaks of all stretches.
        self._ends: tuple[Reading, ...] = ()

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
            lane: spans of one lane lie within one another, others side by side; this thread unless
                told otherwise. ``SEEN`` is around all.

        Raises:
            BackendError: the memory can't be read.
        """
        with self._lock:
            if self._is_closed:
                return None
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
            span = OpenSpan(running, cell, is_seen=lane is SEEN)
            self._open.append(span)
            if not span.is_seen:
                lane = threading.get_ident() if lane is None else lane
                self._lanes.setdefault(lane, []).append(span)
            self._count_shared()
            return span

    def end(self, span: OpenSpan, status: Status = "ok") -> SpanRecord | None:
        """End a span, and return its record; ``None`` if it has ended already.

        Raises:
            BackendError: the memory can't be read.
        """
        with self._lock:
            if span not in self._open:
                return None
            try:
                after = self._end_stretch()
            finally:
                self._forget(span)
            end_s = self._now()
        record = build_record(
            span.cell,
            lift_peaks(after, span.ends),
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
            devices=tuple(map(_mark_sampled, record.devices)) if span.is_seen else record.devices,
            number=number,
            shared_with=span.shared_with,
        )

    def close(self) -> None:
        """Measure nothing more: the peaks are the program's own again. May be called twice."""
        with self._lock:
            self._is_closed = True
            self._open.clear()
            self._lanes.clear()

    @property
    def open_spans(self) -> tuple[OpenSpan, ...]:
        """The spans that are open, in the order in which they began."""
        return tuple(self._open)

    def find_peaks(self, readings: tuple[Reading, ...]) -> tuple[Reading, ...]:
        """Return readings of the running stretch with the highest peaks of all stretches."""
        with self._lock:
            return lift_peaks(readings, self._ends)

    def _forget(self, span: OpenSpan) -> None:
        self._open.remove(span)
        for lane, spans in list(self._lanes.items()):
            if span in spans:
                spans.remove(span)
            if not spans:
                del self._lanes[lane]

    def _end_stretch(self) -> tuple[Reading, ...]:
        """End the stretch, add its peaks to the open spans, and begin another."""
        ends = self._hardware.end_span()
        self._ends = lift_peaks(ends, self._ends)
        for span in tuple(self._open):
            span.ends = lift_peaks(ends, span.ends)
        self._hardware.start_span()
        return ends

    def _count_shared(self) -> None:
        n_others = len(self._lanes) - 1
        for span in tuple(self._open):
            span.shared_with = max(span.shared_with, n_others)


def _mark_sampled(device: CellDevice) -> CellDevice:
    return replace(device, peak_is=device.peak_is and "sampled")
