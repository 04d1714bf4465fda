"""Make messages of what is measured in this process, and hand them to whoever passes them on.

A flood of short spans becomes few messages: those of a second, or of longer where very many were
told, are joined by their name and how they ended. Their peaks are the highest of all.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping
from dataclasses import replace

from gpumemwidget.model.cells import CellDevice, Span, Status
from gpumemwidget.model.devices import BytesByDevice, DeviceInfo, DeviceUse, Reading, Sample
from gpumemwidget.model.ooms import OomCard
from gpumemwidget.model.processes import DevicePeak, ProcessInfo, RunningSpan, SpanRecord
from gpumemwidget.recording.cells import PEAK_KINDS
from gpumemwidget.recording.history import thin_samples
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
from gpumemwidget.remote.process_log import ProcessLog

#: Seconds within which spans are joined: a second up to so many records of spans, two seconds at
#: twice as many.
_JOINED_S = 1.0
_PATIENT_SPANS = 5_000
#: Maximum number of names whose short spans wait; those of others wait under one name.
_MAX_NAMES = 32
_OTHERS = "other spans"
#: Minimum seconds between two told peaks.
_PEAKS_EVERY_S = 1.0
#: Maximum number of samples and of spans, the newest, that are told again.
_RETOLD_SAMPLES = 200
_RETOLD_SPANS = 200


class Teller:
    """Tells of one process; any thread may call it, and a forked child of the process is silent.

    Args:
        take: is given each message; it is called by one thread at a time, and returns ``False``
            where it has dropped samples, so that the next one must not count from them.
    """

    def __init__(self, take: Callable[[Message], bool]) -> None:
        self._take = take
        self._pid = os.getpid()
        # A finalizer or a signal handler may end a span while this thread tells something.
        self._lock = threading.RLock()
        #: The devices of the samples' columns as they were told, and the newest value of each.
        self._columns: tuple[DeviceInfo, ...] | None = None
        self._last: list[int] = []
        #: By name and status, the short spans that wait to be told, and until when.
        self._short: dict[tuple[str, Status], SpanRecord] = {}
        self._short_until_s = 0.0
        #: The names of the spans that have waited since the last time that all were told.
        self._short_names: set[str] = set()
        self._n_spans = 0
        #: The innermost open span, and the one that was told last.
        self._running: RunningSpan | None = None
        self._told_running: RunningSpan | None = None
        self._told_use: tuple[tuple[DeviceUse, ...], BytesByDevice] = ((), ())
        self._told_peaks: tuple[DevicePeak, ...] = ()
        self._peaks_told_s = float("-inf")
        self._has_ended = False

    def begin(self, process: ProcessInfo) -> None:
        """Tell which process this is."""
        self._tell(Began(process))

    def tell_sample(
        self, sample: Sample, devices: Mapping[str, DeviceInfo], *, origin_s: float
    ) -> None:
        """Tell the counters of a moment.

        Args:
            sample: the counters.
            devices: what is known of each device, by its name.
            origin_s: when the recording began, on the clock of the sample.
        """
        names = [reading.device for reading in sample.readings]
        columns = tuple(devices.get(name) or DeviceInfo(name, name, None) for name in names)
        with self._lock:
            if columns != self._columns:
                self._columns, self._last = columns, [0] * (2 * len(columns))
                if not self._pass_on(Devices(columns)):
                    return
            counters = [
                value
                for reading in sample.readings
                for value in (reading.allocated_bytes, reading.reserved_bytes)
            ]
            changes = [
                None if value is None else value - last
                for value, last in zip(counters, self._last, strict=True)
            ]
            self._last = [
                last if value is None else value
                for value, last in zip(counters, self._last, strict=True)
            ]
            self._pass_on(Counters(round((sample.time_s - origin_s) * 1000), changes))
            self._send_due_spans(sample.time_s - origin_s)
            self._correct_running()

    def tell_use(
        self, time_s: float, uses: tuple[DeviceUse, ...], own_bytes: BytesByDevice
    ) -> None:
        """Tell of whole GPUs, if that is something new."""
        if (uses, own_bytes) != self._told_use:
            self._told_use = uses, own_bytes
            self._tell(Uses(time_s, uses, own_bytes))

    def tell_peaks(self, time_s: float, ends: tuple[Reading, ...], *, is_last: bool) -> None:
        """Tell the peaks since the recording began, if they are new: at most once a second."""
        peaks = tuple(
            DevicePeak(end.device, end.allocated_peak_bytes, end.reserved_peak_bytes, end.peak_is)
            for end in ends
            if end.peak_is is not None
        )
        with self._lock:
            is_due = is_last or time_s >= self._peaks_told_s + _PEAKS_EVERY_S
            if is_due and peaks != self._told_peaks:
                self._pass_on(Peaks(time_s, peaks))
                self._peaks_told_s, self._told_peaks = time_s, peaks

    def repeat(self, time_s: float, process: ProcessInfo, peaks: tuple[DevicePeak, ...]) -> None:
        """Tell again which process this is, and its peaks: a message may be lost on its way."""
        with self._lock:
            self._pass_on(Began(process))
            self._pass_on(Peaks(time_s, peaks))

    def begin_span(self, span: RunningSpan) -> None:
        """Tell that a span begins, unless it may be one of a flood."""
        with self._lock:
            self._running = span
            if span.name not in self._short_names and len(self._short_names) < _MAX_NAMES:
                self._send_running(span)

    def end_span(self, span: SpanRecord, running: RunningSpan | None) -> None:
        """Tell of a span that has ended; ``running`` is the innermost that is still open."""
        with self._lock:
            self._running = running
            self._send_due_spans(span.start_s + span.duration_s)
            if span.duration_s >= self._joined_s:
                # Spans within this one come first.
                self._send_short_spans()
                self._send_span(span)
                return
            if not self._short_names:
                self._short_until_s = span.start_s + self._joined_s
            if len(self._short_names) >= _MAX_NAMES and span.name not in self._short_names:
                span = replace(span, name=_OTHERS, number=None)
            self._short_names.add(span.name)
            kind = span.name, span.status
            earlier = self._short.get(kind)
            self._short[kind] = span if earlier is None else _join(earlier, span)

    def tell_oom(self, card: OomCard, time_s: float) -> None:
        """Tell of an OOM that has ended a span or the program."""
        with self._lock:
            self._send_short_spans()
            self._pass_on(RanOut(time_s, card))

    def end(self, time_s: float, error: str = "") -> None:
        """Tell that the recording ends, and nothing more."""
        with self._lock:
            self._send_short_spans()
            self._pass_on(Ended(time_s, error))
            self._has_ended = True

    def call_between(self, act: Callable[[], None]) -> None:
        """Call ``act`` between two messages; the next sample does not count from one before."""
        with self._lock:
            self._send_short_spans()
            act()
            self._columns = None

    # -- Within the lock ---------------------------------------------------------------------------

    @property
    def _joined_s(self) -> float:
        return max(_JOINED_S, self._n_spans / _PATIENT_SPANS)

    def _send_due_spans(self, now_s: float) -> None:
        if now_s >= self._short_until_s:
            self._send_short_spans()
            if self._running is not None and self._running != self._told_running:
                self._send_running(self._running)

    def _send_short_spans(self) -> None:
        while self._short:
            self._send_span(self._short.pop(next(iter(self._short))))
        self._short_names.clear()

    def _correct_running(self) -> None:
        """Tell what runs now, where the span that was told last as running has ended.

        Unless a newer one runs: in a flood that is so at nearly all times.
        """
        told, running = self._told_running, self._running
        if told is not None and (running is None or running.start_s < told.start_s):
            self._send_running(running)

    def _send_running(self, span: RunningSpan | None) -> None:
        self._told_running = span
        self._pass_on(SpanBegan(span))

    def _send_span(self, span: SpanRecord) -> None:
        self._n_spans += 1
        self._told_running = self._running
        self._pass_on(SpanEnded(span, self._running))

    def _tell(self, message: Message) -> None:
        with self._lock:
            self._pass_on(message)

    def _pass_on(self, message: Message) -> bool:
        """Hand a message on; return whether it was taken, with the samples before it."""
        is_taken = os.getpid() == self._pid and not self._has_ended and self._take(message)
        if not is_taken:
            self._columns = None
        return is_taken


# -- Telling again ---------------------------------------------------------------------------------


def send_kept_state(log: ProcessLog, take: Callable[[Message], bool]) -> None:
    """Tell a new listener what is kept of a process: its peaks, and the newest of all else."""
    state = log.describe(is_alive=True)
    if state is None:
        return
    teller = Teller(take)
    devices = {info.device: info for info in state.devices}
    teller.begin(state.info)
    take(Peaks(state.heard_s, state.peaks))
    for sample in thin_samples(log.history.samples(), _RETOLD_SAMPLES):
        teller.tell_sample(sample, devices, origin_s=0.0)
    for span in state.spans[-_RETOLD_SPANS:]:
        take(SpanEnded(span))
    for card in state.ooms:
        take(RanOut(state.heard_s, card))
    take(Uses(state.heard_s, state.uses, state.own_bytes))
    if state.running is not None:
        take(SpanBegan(state.running))


# -- Joining spans ---------------------------------------------------------------------------------


def _join(first: SpanRecord, second: SpanRecord) -> SpanRecord:
    """Join two spans of a kind, of which ``second`` has ended last; it may have begun first.

    The time is their sum: between them may lie other spans.
    """
    earlier = min(first, second, key=lambda span: span.start_s)
    before = {device.device: device for device in earlier.devices}
    peaks = {device.device: device for device in first.devices}
    is_next = first.number is not None and second.number == first.number + first.n_spans
    return replace(
        second,
        start_s=earlier.start_s,
        duration_s=round(first.duration_s + second.duration_s, 6),
        devices=tuple(
            _join_device(before.get(each.device), peaks.get(each.device), each)
            for each in second.devices
        ),
        number=first.number if is_next else None,
        n_spans=first.n_spans + second.n_spans,
        shared_with=max(first.shared_with, second.shared_with),
    )


def _join_device(
    earlier: CellDevice | None, first: CellDevice | None, second: CellDevice
) -> CellDevice:
    if first is None or earlier is None:
        return second
    return replace(
        second,
        allocated=_join_counter(earlier.allocated, first.allocated, second.allocated),
        reserved=_join_counter(earlier.reserved, first.reserved, second.reserved),
        peak_is=max(first.peak_is, second.peak_is, key=PEAK_KINDS.index),
        num_alloc_retries=_add(first.num_alloc_retries, second.num_alloc_retries),
        num_ooms=_add(first.num_ooms, second.num_ooms),
    )


def _join_counter(earlier: Span, first: Span, second: Span) -> Span:
    is_known = first.peak_bytes is not None and second.peak_bytes is not None
    peak = max(first.peak_bytes or 0, second.peak_bytes or 0) if is_known else None
    return Span(earlier.before_bytes, second.after_bytes, peak)


def _add(first: int | None, second: int | None) -> int | None:
    return None if first is None or second is None else first + second
