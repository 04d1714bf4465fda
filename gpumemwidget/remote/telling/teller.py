"""Make messages of what is measured in this process, and hand them to whoever passes them on.

Where very many spans end, few are written: of each name and status the one with the highest peak,
with the number of those that it stands for.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping
from dataclasses import replace

from gpumemwidget.model.cells import Status
from gpumemwidget.model.devices import (
    HOST,
    BytesByDevice,
    DeviceInfo,
    DeviceUse,
    Reading,
    Sample,
)
from gpumemwidget.model.ooms import OomCard
from gpumemwidget.model.processes import DevicePeak, ProcessInfo, RunningSpan, SpanRecord
from gpumemwidget.recording.history import thin_samples
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
from gpumemwidget.remote.process_log import ProcessLog

#: Spans that end within so many seconds are counted together, but for the first few of them, and
#: so are those that begin. With 30 spans a second of three names the file of eight hours then has
#: some 100 MB of spans.
_COUNTED_S = 2.0
_MOST_AT_ONCE = 6
#: Maximum number of names among them; spans of other names are counted under one.
_MAX_NAMES = 16
_OTHERS = "other spans"
#: Minimum seconds between two messages of the span that runs, and of peaks.
_RUNNING_EVERY_S = 0.1
_PEAKS_EVERY_S = 1.0
#: Maximum number of samples and of spans, the newest, that a new listener is told.
_RETOLD_SAMPLES = 200
_RETOLD_SPANS = 200


class Teller:
    """Tells of one process; any thread may call it, and a forked child of the process is silent.

    Args:
        take: is given each message, by one thread at a time. It must not wait: a span may end in
            any thread of the program.
    """

    def __init__(self, take: Callable[[Message], None]) -> None:
        self._take = take
        self._pid = os.getpid()
        # A finalizer may end a span while this thread tells something.
        self._lock = threading.RLock()
        self._devices: tuple[DeviceInfo, ...] = ()
        #: By name and status, the spans that are counted, until when, and the number of spans that
        #: have begun and ended meanwhile.
        self._counted: dict[tuple[str, Status], SpanRecord] = {}
        self._counted_until_s = 0.0
        self._n_begun = self._n_ended = 0
        #: The innermost open span, the one that was told last, and when.
        self._running: RunningSpan | None = None
        self._told_running: RunningSpan | None = None
        self._running_told_s = float("-inf")
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
        infos = tuple(devices.get(name) or DeviceInfo(name, name, None) for name in names)
        counters = {
            reading.device: Figures(reading.allocated_bytes, reading.reserved_bytes)
            for reading in sample.readings
        }
        now_s = sample.time_s - origin_s
        with self._lock:
            if infos != self._devices:
                self._devices = infos
                self._pass_on(Devices(infos))
            self._pass_on(Counters(round(now_s * 1000), counters))
            self._count_anew(now_s)
            if now_s >= self._running_told_s + _RUNNING_EVERY_S:
                self._send_running(now_s)

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
        """Tell the process, its devices and its peaks again: a message may be lost on its way."""
        with self._lock:
            self._pass_on(Began(process))
            self._pass_on(Devices(self._devices))
            self._pass_on(Peaks(time_s, peaks))

    def begin_span(self, span: RunningSpan) -> None:
        """Tell that a span begins; where very many do, the next sample tells which one runs."""
        with self._lock:
            self._running = span
            self._count_anew(span.start_s)
            self._n_begun += 1
            if self._n_begun <= _MOST_AT_ONCE:
                self._send_running(span.start_s)

    def end_span(self, span: SpanRecord, running: RunningSpan | None) -> None:
        """Tell of a span that has ended; ``running`` is the innermost that is still open."""
        now_s = span.start_s + span.duration_s
        with self._lock:
            self._running = running
            self._count_anew(now_s)
            self._n_ended += 1
            if self._n_ended <= _MOST_AT_ONCE and span.n_unmeasured == 0:
                self._pass_on(SpanEnded(span))
                return
            key = span.name, span.status
            if key not in self._counted and len(self._counted) >= _MAX_NAMES:
                key = _OTHERS, span.status
                span = replace(span, name=_OTHERS, number=None)
            earlier = self._counted.get(key)
            self._counted[key] = span if earlier is None else _count_both(earlier, span)

    def tell_oom(self, card: OomCard, time_s: float) -> None:
        """Tell of an OOM that has ended a span or the program."""
        with self._lock:
            self._send_counted()
            self._pass_on(RanOut(time_s, card))

    def end(self, time_s: float, error: str = "") -> None:
        """Tell that the recording ends, and nothing more."""
        with self._lock:
            self._send_counted()
            self._pass_on(Ended(time_s, error))
            self._has_ended = True

    def call_between(self, act: Callable[[], None]) -> None:
        """Call ``act`` between two messages; the devices are told again after it."""
        with self._lock:
            self._send_counted()
            act()
            self._devices = ()

    # -- Within the lock ---------------------------------------------------------------------------

    def _count_anew(self, now_s: float) -> None:
        """Send what was counted, if it is time, and begin anew."""
        if now_s >= self._counted_until_s:
            self._send_counted()
            self._counted_until_s, self._n_begun, self._n_ended = now_s + _COUNTED_S, 0, 0

    def _send_counted(self) -> None:
        while self._counted:
            self._pass_on(SpanEnded(self._counted.pop(next(iter(self._counted)))))

    def _send_running(self, now_s: float) -> None:
        if self._running != self._told_running:
            self._told_running, self._running_told_s = self._running, now_s
            self._pass_on(SpanBegan(self._running))

    def _tell(self, message: Message) -> None:
        with self._lock:
            self._pass_on(message)

    def _pass_on(self, message: Message) -> None:
        if os.getpid() == self._pid and not self._has_ended:
            self._take(message)


# -- Telling again ---------------------------------------------------------------------------------


def send_kept_state(log: ProcessLog, take: Callable[[Message], None]) -> None:
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


# -- Counting spans --------------------------------------------------------------------------------


def _count_both(earlier: SpanRecord, later: SpanRecord) -> SpanRecord:
    """Return the span with the higher peak, with the count and the time of both."""
    highest = max(earlier, later, key=_sum_peaks)
    return replace(
        highest,
        start_s=min(earlier.start_s, later.start_s),
        duration_s=round(earlier.duration_s + later.duration_s, 6),
        n_spans=earlier.n_spans + later.n_spans,
        n_unmeasured=earlier.n_unmeasured + later.n_unmeasured,
    )


def _sum_peaks(span: SpanRecord) -> int:
    """Return the peaks of all GPUs together, or the host's; -1 for a span without a measurement."""
    peaks = [each.allocated.peak_bytes for each in span.devices if each.device != HOST]
    host = [each.reserved.peak_bytes for each in span.devices if each.device == HOST]
    return sum(peak or 0 for peak in peaks or host) if span.devices else -1
