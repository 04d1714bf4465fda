"""Write the messages of one recording, and send their lines in batches: to a file, to notebooks.

Where very many spans end, few are written: of each name and status the one with the highest peak,
and how many there were.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Protocol

from gpumemwidget.model.cells import Status
from gpumemwidget.model.devices import (
    HOST,
    BytesByDevice,
    DeviceInfo,
    DeviceUse,
    Reading,
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
    encode,
    is_sample,
)
from gpumemwidget.remote.process_log import ProcessLog

#: Maximum number of samples and of spans, the newest, that a new sink gets.
_MOST_KEPT = 200


class RecordWriter:
    """Writes what happens in this process. Any of its threads may call it, and no forked child.

    Times are in seconds since the recording began.

    Attributes:
        log: what was written: the report at the end is made of it, and what a new sink gets.

    Args:
        sink: takes the lines of the messages.
        process: which process this is.
        sink_name: by which it can be removed.
    """

    def __init__(self, sink: Sink, process: ProcessInfo, *, sink_name: str = "") -> None:
        self.log = ProcessLog()
        # Thinning takes time, and the end of a span may wait for it.
        self.log.history.capacity = 2 * _MOST_KEPT
        self._process = process
        self._sinks = {sink_name: sink}
        # A finalizer may end a span while this thread writes something.
        self._lock = threading.RLock()
        #: When the process and its peaks are written again: a message may get lost.
        self._repeat_due_s = 30.0
        #: By name and status, the spans that are counted, until when, and the number of spans that
        #: have ended meanwhile.
        self._counted: dict[tuple[str, Status], SpanRecord] = {}
        self._counted_until_s = 0.0
        self._n_ended = 0
        #: The innermost open span, and when the beginning of one may be written again.
        self._running: RunningSpan | None = None
        self._beginning_due_s = float("-inf")
        self._written_peaks: tuple[DevicePeak, ...] = ()
        self._peaks_due_s = float("-inf")
        self._has_ended = False
        self._write(Began(process))

    # -- Sinks -------------------------------------------------------------------------------------

    def add_sink(self, name: str, sink: Sink) -> None:
        """Write what was recorded so far to one more sink, and all that comes."""
        with self._lock:
            self._write_counted()
            state = self.log.describe(is_alive=True)
            assert state is not None  # Its beginning was written.
            samples = thin_samples(self.log.history.samples(), _MOST_KEPT)
            kept: list[Message] = [
                *self._describe(state.heard_s),
                *(_make_counters(sample.time_s, sample.readings) for sample in samples),
                *map(SpanEnded, state.spans[-_MOST_KEPT:]),
                *(RanOut(state.heard_s, card) for card in state.ooms),
                Uses(state.heard_s, state.uses, state.own_bytes),
                SpanBegan(state.running),
            ]
            sink.write(b"".join(map(encode, kept)))
            self._sinks[name] = sink

    def remove_sink(self, name: str) -> bool:
        """Write nothing more to a sink, and return whether it is the last one.

        The last one stays until ``close``, which writes the end to it. A name of no sink changes
        nothing.
        """
        is_last = list(self._sinks) == [name]
        if name in self._sinks and not is_last:
            self._sinks.pop(name).close()
        return is_last

    # -- What is recorded --------------------------------------------------------------------------

    def write_sample(
        self, time_s: float, readings: Sequence[Reading], devices: Mapping[str, DeviceInfo]
    ) -> None:
        """Write the counters of a moment; ``devices``: what is known of each, by its name."""
        names = [reading.device for reading in readings]
        infos = tuple(devices.get(name) or DeviceInfo(name, name, None) for name in names)
        with self._lock:
            if infos != self.log.devices:
                self._write(Devices(infos))
            self._write(_make_counters(time_s, readings))
            self._count_anew(time_s)
            self._write_running()
            if time_s >= self._repeat_due_s:
                self._repeat_due_s = time_s + 30.0
                self._write_again(time_s)

    def write_use(
        self, time_s: float, uses: tuple[DeviceUse, ...], own_bytes: BytesByDevice
    ) -> None:
        """Write how much of whole GPUs is in use, if that has changed."""
        if (uses, own_bytes) != (self.log.use.uses, self.log.use.own_bytes):
            self._write(Uses(time_s, uses, own_bytes))

    def write_peaks(self, time_s: float, ends: tuple[Reading, ...], *, is_last: bool) -> None:
        """Write the peaks since the recording began, if they are new: at most once a second."""
        peaks = tuple(
            DevicePeak(end.device, end.allocated_peak_bytes, end.reserved_peak_bytes, end.peak_is)
            for end in ends
            if end.peak_is is not None
        )
        with self._lock:
            if (is_last or time_s >= self._peaks_due_s) and peaks != self._written_peaks:
                self._write(Peaks(time_s, peaks))
                self._peaks_due_s, self._written_peaks = time_s + 1.0, peaks

    def begin_span(self, span: RunningSpan) -> None:
        """Write that a span begins; where very many do, the next sample shows which one runs."""
        with self._lock:
            self._running = span
            if span.start_s >= self._beginning_due_s:
                self._beginning_due_s = span.start_s + 0.5
                self._write_running()

    def end_span(self, span: SpanRecord, running: RunningSpan | None) -> None:
        """Write that a span has ended; ``running`` is the innermost that is still open."""
        with self._lock:
            self._running = running
            self._count_anew(span.start_s + span.duration_s)
            self._n_ended += 1
            # Of those that end within two seconds the first six are written. With 30 spans a second
            # of three names the file of eight hours then has some 100 MB of spans.
            if self._n_ended <= 6:
                self._write(SpanEnded(span))
                return
            key = span.name, span.status
            if key not in self._counted and len(self._counted) >= 16:
                span = replace(span, name="other spans", number=None)
                key = span.name, span.status
            earlier = self._counted.get(key)
            self._counted[key] = span if earlier is None else _count_both(earlier, span)

    def write_oom(self, card: OomCard, time_s: float) -> None:
        """Write the card of an OOM that has ended a span or the program."""
        with self._lock:
            self._write_counted()
            self._write(RanOut(time_s, card))

    def close(self, time_s: float, error: str = "") -> None:
        """Write that the recording ends, with the line of the error that ended the program."""
        with self._lock:
            self._write_counted()
            self._write_again(time_s)
            self._write(Ended(time_s, error))
            self._has_ended = True
        for sink in tuple(self._sinks.values()):
            sink.close()

    # -- Within the lock ---------------------------------------------------------------------------

    def _describe(self, time_s: float) -> list[Message]:
        """Return the process, its devices and its peaks."""
        return [Began(self._process), Devices(self.log.devices), Peaks(time_s, self.log.peaks)]

    def _write_again(self, time_s: float) -> None:
        for message in self._describe(time_s):
            self._write(message)

    def _count_anew(self, now_s: float) -> None:
        """Write what was counted, if it is time, and begin anew."""
        if now_s >= self._counted_until_s:
            self._write_counted()
            self._counted_until_s, self._n_ended = now_s + 2.0, 0

    def _write_counted(self) -> None:
        while self._counted:
            self._write(SpanEnded(self._counted.pop(next(iter(self._counted)))))

    def _write_running(self) -> None:
        if self._running != self.log.running:
            self._write(SpanBegan(self._running))

    def _write(self, message: Message) -> None:
        with self._lock:
            if not self._has_ended:
                self.log.take(message)
                line = encode(message)
                for sink in tuple(self._sinks.values()):
                    sink.write(line)


def _make_counters(time_s: float, readings: Sequence[Reading]) -> Counters:
    figures = {
        reading.device: Figures(reading.allocated_bytes, reading.reserved_bytes)
        for reading in readings
    }
    return Counters(round(time_s * 1000), figures)


def _count_both(earlier: SpanRecord, later: SpanRecord) -> SpanRecord:
    """Return the span with the higher peak, with the count and the time of both."""
    highest = max(earlier, later, key=_sum_peaks)
    return replace(
        highest,
        start_s=min(earlier.start_s, later.start_s),
        duration_s=round(earlier.duration_s + later.duration_s, 6),
        n_spans=earlier.n_spans + later.n_spans,
    )


def _sum_peaks(span: SpanRecord) -> int:
    """Return the peaks of all GPUs together, or the host's."""
    peaks = [device.allocated.peak_bytes for device in span.devices if device.device != HOST]
    host = [device.reserved.peak_bytes for device in span.devices if device.device == HOST]
    return sum(peak or 0 for peak in peaks or host)


# -- Sinks -----------------------------------------------------------------------------------------

#: Maximum number of bytes that wait where nothing can be sent: some minutes of samples.
_MAX_WAITING_BYTES = 1024 * 1024
#: Maximum seconds to wait for what is sent at the end.
_CLOSE_S = 2.0
#: Has ``is_sending`` on the threads that send.
_local = threading.local()


def is_sending() -> bool:
    """Return whether this is a thread that sends lines, and so may hold a sink's lock."""
    return getattr(_local, "is_sending", False)


class Sink(Protocol):
    """Takes the lines of a recording. It must not wait: a span may end in any thread."""

    def write(self, line: bytes) -> None:
        """Take a line."""
        ...

    def close(self) -> None:
        """Take no more lines. May be called twice."""
        ...


class BatchSink:
    """Sends lines together, on a thread of its own: neither a task nor a program's end waits.

    What can't be sent is kept, within bounds: where too much waits, the samples are dropped, and
    if they are few the older half of all lines.

    Attributes:
        on_failure: is called with what ``send`` raises.

    Args:
        send: sends some lines. What it raises is no failure of the sink: it is called with the same
            lines again when the next ones have come.
        every_s: the seconds in which lines gather.
    """

    def __init__(
        self,
        send: Callable[[bytes], object],
        *,
        every_s: float = 0.5,
    ) -> None:
        self._send = send
        self._every_s = every_s
        self.on_failure: Callable[[Exception], object] = lambda _: None
        self._lock = threading.Lock()
        #: The lines that wait, and their bytes; then the batch that is on its way.
        self._lines: list[bytes] = []
        self._n_bytes = 0
        self._batch = b""
        self._wake = threading.Event()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="gpumemwidget-sending", daemon=True)
        self._thread.start()

    @property
    def has_sent_all(self) -> bool:
        """True where nothing waits."""
        return not (self._lines or self._batch)

    def write(self, line: bytes) -> None:
        """Take a line; nothing is done once this is closed."""
        if self._closed.is_set():
            return
        with self._lock:
            self._lines.append(line)
            self._n_bytes += len(line)
            if self._n_bytes > _MAX_WAITING_BYTES:
                kept = [line for line in self._lines if not is_sample(line)]
                if sum(map(len, kept)) > _MAX_WAITING_BYTES / 2:
                    kept = kept[len(kept) // 2 :]
                self._lines, self._n_bytes = kept, sum(map(len, kept))
        self._wake.set()

    def close(self) -> None:
        """Send what waits, and give up after some seconds. May be called twice."""
        self._closed.set()
        self._wake.set()
        self._thread.join(_CLOSE_S)

    def _run(self) -> None:
        _local.is_sending = True
        is_closed = False
        while not is_closed:
            self._wake.wait()
            self._closed.wait(self._every_s)
            self._wake.clear()
            # Asked only now: a ``close`` just before ``clear`` does not wake this thread again.
            is_closed = self._closed.is_set()
            try:
                while self._take_batch():
                    self._send(self._batch)
                    self._batch = b""
            except Exception as exc:  # noqa: BLE001 - the receiver may be gone for a while
                self.on_failure(exc)

    def _take_batch(self) -> bool:
        """Take what waits, unless the batch before could not be sent; return if there is any."""
        if not self._batch:
            with self._lock:
                self._batch = b"".join(self._lines)
                self._lines.clear()
                self._n_bytes = 0
        return bool(self._batch)
