"""Keep what one recorded process has told, within bounds."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Literal

from gpumemwidget.model.devices import HOST, DeviceInfo, Reading, Sample
from gpumemwidget.model.ooms import OomCard
from gpumemwidget.model.processes import (
    DevicePeak,
    ProcessInfo,
    ProcessState,
    RunningSpan,
    SpanRecord,
)
from gpumemwidget.recording.history import History
from gpumemwidget.remote.messages import (
    Began,
    Counters,
    Devices,
    Ended,
    Message,
    Peaks,
    RanOut,
    SpanBegan,
    SpanEnded,
    Uses,
)

#: Maximum number of spans and of cards that are kept, the newest.
_MAX_SPANS = 10_000
_MAX_CARDS = 8


class ProcessLog:
    """What a process has told so far.

    Attributes:
        info: which process it is; ``None`` before its first message.
        history: its samples, on the clock of seconds since its recording began.
        clock_offset_s: seconds by which the clock of its host is ahead of ours, if measured.
    """

    def __init__(self, *, capacity: int = 10_000) -> None:
        self.info: ProcessInfo | None = None
        self.history = History(capacity)
        self.clock_offset_s: float | None = None
        self._devices: tuple[DeviceInfo, ...] = ()
        #: The newest value of each column of the samples.
        self._columns: list[int | None] = []
        self._last: list[int] = []
        self._readings: tuple[Reading, ...] = ()
        self._use: Uses | None = None
        self._peaks: dict[str, DevicePeak] = {}
        self._running: RunningSpan | None = None
        self._spans: deque[SpanRecord] = deque(maxlen=_MAX_SPANS)
        self._n_spans = 0
        self._cards: deque[OomCard] = deque(maxlen=_MAX_CARDS)
        self._heard_s = 0.0
        self._end: Ended | None = None

    def take(self, message: Message) -> None:
        """Add a message. One that does not fit to those before it is passed over."""
        if type(message) is Counters:
            self._take_counters(message)
        elif type(message) is SpanEnded:
            self._take_span(message.span)
            self._running = message.running
        elif type(message) is SpanBegan:
            self._running = message.span
            self._hear(message.span.start_s)
        elif type(message) is Devices:
            self._devices = message.devices
            self._last = [0] * (2 * len(message.devices))
        elif type(message) is Uses:
            self._use = message
        elif type(message) is Peaks:
            for peak in message.peaks:
                self._peaks.setdefault(peak.device, peak)
        elif type(message) is RanOut:
            self._cards.append(message.card)
            self._hear(message.time_s)
        elif type(message) is Ended:
            self._end, self._running = message, None
            self._hear(message.time_s)
        elif type(message) is Began and self.info is None:
            self.info = message.process

    def describe(self, *, is_alive: bool, n_unread: int = 0) -> ProcessState | None:
        """Return the state; ``None`` before the first message.

        Args:
            is_alive: whether the process is known to run, or was heard of lately.
            n_unread: how many of its messages could not be read.
        """
        if self.info is None:
            return None
        status: Literal["running", "ended", "failed", "lost"] = "running" if is_alive else "lost"
        if self._end is not None:
            status = "failed" if self._end.error else "ended"
        return ProcessState(
            info=self.info,
            status=status,
            heard_s=self._heard_s,
            devices=self._devices,
            readings=self._readings,
            uses=() if self._use is None else self._use.uses,
            own_bytes=() if self._use is None else self._use.own_bytes,
            peaks=tuple(self._peaks.values()),
            running=self._running,
            spans=tuple(self._spans),
            n_dropped_spans=self._n_spans - len(self._spans),
            ooms=tuple(self._cards),
            error="" if self._end is None else self._end.error,
            clock_offset_s=self.clock_offset_s,
            n_unread=n_unread,
        )

    def _hear(self, time_s: float) -> None:
        self._heard_s = max(self._heard_s, time_s)

    def _take_counters(self, message: Counters) -> None:
        if len(message.changes) != len(self._last):
            return
        values: list[int | None] = []
        for place, change in enumerate(message.changes):
            if change is not None:
                self._last[place] += change
            values.append(None if change is None else self._last[place])
        time_s = message.time_ms / 1000
        self._readings = tuple(
            Reading(info.device, values[2 * place], values[2 * place + 1])
            for place, info in enumerate(self._devices)
        )
        self.history.append(Sample(time_s, self._readings))
        for reading in self._readings:
            self._lift(reading.device, reading.allocated_bytes, reading.reserved_bytes, None)
        self._hear(time_s)

    def _take_span(self, span: SpanRecord) -> None:
        self._spans.append(span)
        self._n_spans += 1
        for device in span.devices:
            self._lift(device.device, device.allocated.peak_bytes, device.reserved.peak_bytes, span)
        self._hear(span.start_s + span.duration_s)

    def _lift(
        self, device: str, allocated: int | None, reserved: int | None, span: SpanRecord | None
    ) -> None:
        known = self._peaks.get(device, DevicePeak(device, None, None))
        is_host = device == HOST
        highest, found = (
            (known.reserved_bytes, reserved) if is_host else (known.allocated_bytes, allocated)
        )
        # At equal heights the span tells more than a sample within it.
        is_new = found is not None and (
            highest is None or found > highest or (found == highest and known.span is None)
        )
        if not is_new and (reserved or 0) <= (known.reserved_bytes or 0):
            return
        self._peaks[device] = DevicePeak(
            device,
            _find_highest((known.allocated_bytes, allocated)),
            _find_highest((known.reserved_bytes, reserved)),
            (None if span is None else span.name) if is_new else known.span,
            (None if span is None else span.number) if is_new else known.number,
            (1 if span is None else span.n_spans) if is_new else known.n_spans,
        )


def _find_highest(values: Sequence[int | None]) -> int | None:
    known = [value for value in values if value is not None]
    return max(known, default=None)
