"""Keep the recording of one process, within bounds."""

from __future__ import annotations

import threading
from collections import deque
from contextlib import nullcontext
from dataclasses import replace
from typing import Literal, TypeAlias

from gpumemwidget.model.devices import HOST, DeviceInfo, Reading, Sample
from gpumemwidget.model.ooms import OomCard
from gpumemwidget.model.processes import (
    DevicePeak,
    ProcessInfo,
    ProcessState,
    RunningSpan,
    SpanRecord,
)
from gpumemwidget.recording.history import History, find_extremes
from gpumemwidget.recording.running_cell import PEAK_KINDS
from gpumemwidget.remote.messages import (
    Began,
    Counters,
    Devices,
    Ended,
    Figures,
    Message,
    Peaks,
    RanOut,
    SpanBegan,
    SpanEnded,
    Uses,
)

#: Maximum number of spans that are kept, the newest.
_MAX_SPANS = 10_000

#: By device, *allocated* and *reserved* in bytes; ``None``: unknown.
_Values: TypeAlias = dict[str, Figures]
_Column: TypeAlias = list[int | None]
_UNKNOWN = Figures(None, None)


class ProcessLog:
    """Keeps what was recorded of a process so far. Any thread may add to it and ask it.

    Attributes:
        info: which process it is; ``None`` before its first message.
        devices: the devices with counters.
        use: the whole GPUs, as they were written last.
        running: the innermost open span; ``None``: none is open.
    """

    def __init__(self) -> None:
        self.info: ProcessInfo | None = None
        self.devices: tuple[DeviceInfo, ...] = ()
        self.use = Uses(0.0, ())
        self.running: RunningSpan | None = None
        self._history = History()
        #: Samples that the history does not have yet.
        self._pending: list[Counters] = []
        # A finalizer of the recorded program may add something while this thread asks.
        self._lock = threading.RLock()
        #: By device in the newest sample, the last known values of *allocated* and *reserved*.
        self._known: _Values = {}
        self._peaks: dict[str, DevicePeak] = {}
        self._spans: deque[SpanRecord] = deque(maxlen=_MAX_SPANS)
        self._n_spans = 0
        self._cards: deque[OomCard] = deque(maxlen=8)
        self._heard_s = 0.0
        self._end: Ended | None = None
        self._n_unread = 0

    def limit(self, capacity: int) -> None:
        """Keep no more samples and spans than this from now on. Peaks are taken from all."""
        with self._lock:
            self._history.capacity = capacity
            self._spans = deque(self._spans, maxlen=min(capacity, _MAX_SPANS))

    @property
    def history(self) -> History:
        """The samples, on the clock of seconds since the recording began."""
        self.flush()
        return self._history

    def flush(self) -> None:
        """Look at the samples that have come, all at once: one by one it takes twice as long."""
        with self._lock:
            samples, self._pending = self._pending, []
            if not samples:
                return
            known = self._known
            columns: list[_Column] = []
            for device in dict.fromkeys(device for sample in samples for device in sample.counters):
                figures = [sample.counters.get(device, _UNKNOWN) for sample in samples]
                allocated = [figure.allocated_bytes for figure in figures]
                reserved = [figure.reserved_bytes for figure in figures]
                columns += [allocated, reserved]
                highest = _find_highest(allocated), _find_highest(reserved)
                peak = DevicePeak(device, *highest, "sampled")
                # Nearly all samples are below the peak, and to join two peaks takes time.
                if _is_above(peak, self._peaks.get(device)):
                    self._raise_peak(peak)
                before = known.get(device, _UNKNOWN)
                known[device] = Figures(
                    _find_last(allocated, before.allocated_bytes),
                    _find_last(reserved, before.reserved_bytes),
                )
            self._known = {device: known[device] for device in samples[-1].counters}
            self._note_heard(max(sample.time_ms for sample in samples) / 1000)
            for sample in self._choose(samples, columns):
                readings = _make_readings(sample.counters)
                self._history.append(Sample(sample.time_ms / 1000, readings))
            self._history.thin(nullcontext())

    def _choose(self, samples: list[Counters], columns: list[_Column]) -> list[Counters]:
        """Return samples without most of those that the history would thin out again.

        To make its records of them takes most of the time.
        """
        length = 5 * len(columns) * len(samples) // (2 * self._history.capacity)
        if not columns or length < 5 * len(columns):
            return samples
        places: list[int] = []
        for start in range(0, len(samples), length):
            stretch = range(start, min(start + length, len(samples)))
            places += find_extremes(stretch, highest=columns, lowest=columns[::2])
        places.append(len(samples) - 1)
        return [samples[place] for place in dict.fromkeys(places)]

    def take(self, message: Message | None) -> None:
        """Add a message; ``None``: a line that is none.

        A message that does not fit to those before it is passed over.
        """
        with self._lock:
            if type(message) is Counters:
                self._pending.append(message)
                if len(self._pending) >= 20_000:
                    self.flush()
            elif message is None:
                self._n_unread += 1
            else:
                self._take(message)

    def _take(self, message: Message) -> None:
        if type(message) is SpanEnded:
            self._take_span(message.span)
        elif type(message) is SpanBegan:
            self.running = message.span
            if message.span is not None:
                self._note_heard(message.span.start_s)
        elif type(message) is Devices:
            self.devices = message.devices
        elif type(message) is Uses:
            self.use = message
        elif type(message) is Peaks:
            for peak in message.peaks:
                self._raise_peak(peak)
            self._note_heard(message.time_s)
        elif type(message) is RanOut:
            self._cards.append(message.card)
            self._note_heard(message.time_s)
        elif type(message) is Ended:
            self._end, self.running = message, None
            self._note_heard(message.time_s)
        elif type(message) is Began and self.info is None:
            self.info = message.process

    @property
    def peaks(self) -> tuple[DevicePeak, ...]:
        """The highest figures of each device so far."""
        with self._lock:
            self.flush()
            return tuple(self._peaks.values())

    def describe(self, *, is_alive: bool) -> ProcessState | None:
        """Return the state; ``None`` before the first message.

        Args:
            is_alive: whether the process is known to run, or was heard of lately.
        """
        with self._lock:
            self.flush()
            if self.info is None:
                return None
            status: Literal["running", "ended", "failed", "lost"] = (
                "running" if is_alive else "lost"
            )
            error = "" if self._end is None else self._end.error
            if self._end is not None:
                status = "failed" if error else "ended"
            return ProcessState(
                info=self.info,
                status=status,
                heard_s=self._heard_s,
                devices=self.devices,
                readings=_make_readings(self._known),
                uses=self.use.uses,
                own_bytes=self.use.own_bytes,
                peaks=tuple(self._peaks.values()),
                running=self.running,
                spans=tuple(self._spans),
                n_dropped_spans=self._n_spans - len(self._spans),
                ooms=tuple(self._cards),
                error=error,
                n_unread=self._n_unread,
            )

    def _note_heard(self, time_s: float) -> None:
        self._heard_s = max(self._heard_s, time_s)

    def _take_span(self, span: SpanRecord) -> None:
        self._spans.append(span)
        self._n_spans += 1
        for device in span.devices:
            self._raise_peak(
                DevicePeak(
                    device.device,
                    device.allocated.peak_bytes,
                    device.reserved.peak_bytes,
                    device.peak_is,
                    span.name,
                    span.number,
                    span.shared_with,
                )
            )
        self._note_heard(span.start_s + span.duration_s)

    def _raise_peak(self, new: DevicePeak) -> None:
        old = self._peaks.get(new.device)
        if old is None and len(self._peaks) >= 1024:
            return
        self._peaks[new.device] = new if old is None else _join_peaks(old, new)


def _make_readings(counters: _Values) -> tuple[Reading, ...]:
    return tuple(
        [
            Reading(device, figures.allocated_bytes, figures.reserved_bytes)
            for device, figures in counters.items()
        ]
    )


def _join_peaks(old: DevicePeak, new: DevicePeak) -> DevicePeak:
    """Return the higher of two peaks of a device; at equal heights the more exact one."""
    higher = max(old, new, key=_rank_peak)
    if _find_height(old) == _find_height(new):
        higher = replace(higher, peak_is=min(old.peak_is, new.peak_is, key=_rank_kind))
    return replace(
        higher,
        allocated_bytes=_find_highest([old.allocated_bytes, new.allocated_bytes]),
        reserved_bytes=_find_highest([old.reserved_bytes, new.reserved_bytes]),
    )


def _is_above(new: DevicePeak, old: DevicePeak | None) -> bool:
    if old is None:
        return _find_height(new) >= 0
    return (new.allocated_bytes or 0) > (old.allocated_bytes or 0) or (
        (new.reserved_bytes or 0) > (old.reserved_bytes or 0)
    )


_rank_kind = PEAK_KINDS.index


def _rank_peak(peak: DevicePeak) -> tuple[int, bool, int]:
    """Return the key by which peaks are compared: at equal heights, the one that says more wins."""
    return _find_height(peak), peak.span is not None, -_rank_kind(peak.peak_is)


def _find_height(figures: DevicePeak) -> int:
    """Return *allocated*; on the host, which has no peak of that, *resident*; -1 for unknown."""
    is_host = figures.device == HOST
    n_bytes = figures.reserved_bytes if is_host else figures.allocated_bytes
    return -1 if n_bytes is None else n_bytes


def _find_highest(column: _Column) -> int | None:
    return max((value for value in column if value is not None), default=None)


def _find_last(column: _Column, before: int | None) -> int | None:
    return next((value for value in reversed(column) if value is not None), before)
