"""Make messages of what is measured in this process, and hand them to whoever passes them on.

A flood of short spans becomes few messages: spans of one name, one after the other, are joined
until a second has passed, and their peaks are the highest of all. So it is with a few names in
turns, where that is wanted.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace

from gpumemwidget.model.cells import CellDevice, Span
from gpumemwidget.model.devices import BytesByDevice, DeviceInfo, DeviceUse, PeakIs, Sample
from gpumemwidget.model.ooms import OomCard
from gpumemwidget.model.processes import ProcessInfo, RunningSpan, SpanRecord
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

#: Seconds within which spans of one name are joined.
_JOINED_S = 1.0
#: Maximum number of samples and of spans, the newest, that are told again.
_RETOLD_SAMPLES = 200
_RETOLD_SPANS = 200


class Teller:
    """Tells of one process; any thread may call it, and a forked child of the process is silent.

    Args:
        take: is given each message; it is called by one thread at a time, and returns ``False``
            where it has dropped samples, so that the next one must not count from them.
        list_devices: returns the devices with counters.
        n_joined_names: maximum number of names whose spans are joined at a time.
    """

    def __init__(
        self,
        take: Callable[[Message], bool],
        list_devices: Callable[[], tuple[DeviceInfo, ...]],
        *,
        n_joined_names: int = 1,
    ) -> None:
        self._take = take
        self._list_devices = list_devices
        self._pid = os.getpid()
        self._lock = threading.Lock()
        #: The devices of the samples' columns, and the newest value of each column.
        self._columns: tuple[str, ...] | None = None
        self._last: list[int] = []
        self._n_joined_names = n_joined_names
        #: By name, spans that may be joined with the next one; those that began first come first.
        self._short: dict[str, SpanRecord] = {}
        self._running: RunningSpan | None = None
        self._told_use: tuple[tuple[DeviceUse, ...], BytesByDevice] = ((), ())

    def begin(self, process: ProcessInfo) -> None:
        """Tell which process this is."""
        self._tell(Began(process))

    def tell_sample(self, sample: Sample, *, origin_s: float) -> None:
        """Tell the counters of a moment, whose time counts from ``origin_s`` on."""
        with self._lock:
            columns = tuple(reading.device for reading in sample.readings)
            if columns != self._columns:
                self._columns, self._last = columns, [0] * (2 * len(columns))
                infos = {info.device: info for info in self._list_devices()}
                told = tuple(infos.get(name, DeviceInfo(name, name, None)) for name in columns)
                self._pass_on(Devices(told))
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
            self._send_old_spans(sample.time_s - origin_s)

    def tell_use(
        self, time_s: float, uses: tuple[DeviceUse, ...], own_bytes: BytesByDevice
    ) -> None:
        """Tell of whole GPUs, if that is something new."""
        if (uses, own_bytes) != self._told_use:
            self._told_use = uses, own_bytes
            self._tell(Uses(time_s, uses, own_bytes))

    def begin_span(self, span: RunningSpan) -> None:
        """Tell that a span begins, unless it may be one of a flood."""
        with self._lock:
            self._running = span
            if span.name not in self._short:
                self._send_spans(self._n_joined_names - 1)
                self._pass_on(SpanBegan(span))

    def end_span(self, span: SpanRecord, running: RunningSpan | None) -> None:
        """Tell of a span that has ended; ``running`` is the innermost that is still open."""
        with self._lock:
            self._running = running
            short = self._short.get(span.name)
            if short is not None and _may_join(short, span):
                span = _join(short, span)
            else:
                self._send_span(span.name)
                self._send_spans(self._n_joined_names - 1)
            self._short[span.name] = span
            if span.status != "ok":
                self._send_span(span.name)
            else:
                self._send_old_spans(span.start_s + span.duration_s)

    def tell_oom(self, card: OomCard, time_s: float) -> None:
        """Tell of an OOM that has ended a span or the program."""
        with self._lock:
            self._send_spans()
            self._pass_on(RanOut(time_s, card))

    def end(self, time_s: float, error: str = "") -> None:
        """Tell that the recording ends."""
        with self._lock:
            self._send_spans()
            self._pass_on(Ended(time_s, error))

    def call_between(self, act: Callable[[], None]) -> None:
        """Call ``act`` between two messages; the next sample does not count from one before."""
        with self._lock:
            self._send_spans()
            act()
            self._columns = None

    # -- Within the lock ---------------------------------------------------------------------------

    def _send_old_spans(self, now_s: float) -> None:
        if any(now_s - span.start_s >= _JOINED_S for span in self._short.values()):
            self._send_spans()

    def _send_spans(self, n_left: int = 0) -> None:
        """Send what waits, but for the last ``n_left``."""
        for name in list(self._short)[: max(0, len(self._short) - n_left)]:
            self._send_span(name)

    def _send_span(self, name: str) -> None:
        span = self._short.pop(name, None)
        if span is not None:
            self._pass_on(SpanEnded(span, self._running))

    def _tell(self, message: Message) -> None:
        with self._lock:
            self._pass_on(message)

    def _pass_on(self, message: Message) -> None:
        if os.getpid() == self._pid and not self._take(message):
            self._columns = None


# -- Telling again ---------------------------------------------------------------------------------


def retell(log: ProcessLog, take: Callable[[Message], bool]) -> None:
    """Tell a new listener what is kept of a process: its peaks, and the newest of all else."""
    state = log.describe(is_alive=True)
    if state is None:
        return
    teller = Teller(take, lambda: state.devices)
    teller.begin(state.info)
    take(Peaks(state.peaks))
    for sample in thin_samples(log.history.samples(), _RETOLD_SAMPLES):
        teller.tell_sample(sample, origin_s=0.0)
    for span in state.spans[-_RETOLD_SPANS:]:
        take(SpanEnded(span))
    for card in state.ooms:
        take(RanOut(state.heard_s, card))
    take(Uses(state.heard_s, state.uses, state.own_bytes))
    if state.running is not None:
        take(SpanBegan(state.running))


# -- Joining spans ---------------------------------------------------------------------------------


def _may_join(first: SpanRecord, second: SpanRecord) -> bool:
    end_s = second.start_s + second.duration_s
    is_next = second.number is None or second.number == (first.number or 0) + first.n_spans
    return is_next and end_s - first.start_s < _JOINED_S


def _join(first: SpanRecord, second: SpanRecord) -> SpanRecord:
    before = {device.device: device for device in first.devices}
    return replace(
        first,
        duration_s=second.start_s + second.duration_s - first.start_s,
        status=second.status,
        devices=tuple(_join_device(before.get(each.device), each) for each in second.devices),
        n_spans=first.n_spans + second.n_spans,
        shared_with=max(first.shared_with, second.shared_with),
    )


#: From the surest kind of peak to the least sure.
_KINDS: tuple[PeakIs | None, ...] = ("exact", "at least", "sampled", None)


def _join_device(first: CellDevice | None, second: CellDevice) -> CellDevice:
    if first is None:
        return second
    return replace(
        second,
        allocated=_join_counter(first.allocated, second.allocated),
        reserved=_join_counter(first.reserved, second.reserved),
        peak_is=max(first.peak_is, second.peak_is, key=_KINDS.index),
        num_alloc_retries=_add(first.num_alloc_retries, second.num_alloc_retries),
        num_ooms=_add(first.num_ooms, second.num_ooms),
    )


def _join_counter(first: Span, second: Span) -> Span:
    peaks: Sequence[int | None] = (first.peak_bytes, second.peak_bytes)
    known = [peak for peak in peaks if peak is not None]
    peak = max(known) if len(known) == len(peaks) else None
    return Span(first.before_bytes, second.after_bytes, peak)


def _add(first: int | None, second: int | None) -> int | None:
    return None if first is None or second is None else first + second
