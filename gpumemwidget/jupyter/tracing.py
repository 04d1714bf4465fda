"""What a trace takes, put together: the allocator's history, calls, the host's lines, names.

A ``%%memtrace`` cell and a ``with gpumemwidget.trace()`` block are traced alike. Each part may fail
by itself; then what it tells is missing and a sentence says so, while the cell and its record are
as they would be without it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, TypeVar

from gpumemwidget.backends.calls import CallRecorder
from gpumemwidget.errors import BusyError
from gpumemwidget.records import HOST, CellDevice, CellRecord
from gpumemwidget.traces import AllocatorTrace, BlockNames, CallMark, CellTrace, DeviceTrace

if TYPE_CHECKING:
    from gpumemwidget.backends.hardware import Hardware
    from gpumemwidget.measure.linehooks import IsEntry
    from gpumemwidget.measure.linereader import LineReadings
    from gpumemwidget.measure.lines import LineWatch
    from gpumemwidget.measure.sources import Sources

__all__ = ["MOST_EVENTS", "N_EVENTS", "Tracer", "find_plain_hardware", "take_plain_hardware"]

#: Events of the allocators that are kept, unless told otherwise: some 300 MB while the trace runs.
N_EVENTS = 1_000_000
#: No ring is larger.
MOST_EVENTS = 20_000_000

_T = TypeVar("_T")
_lock = threading.Lock()
#: There is one history and one set of marks in a process.
_running: list[Tracer] = []
#: What is measured where the extension is not loaded.
_plain: list[Hardware] = []


class Tracer:
    """Traces one cell or block, from before it to after it.

    Args:
        hardware: what is traced.
        device: the one to trace; ``None`` for all.
        n_events: how many events of the allocators are kept: the newest.
        depth: how deep the calls below a line are told; ``None``: as deep as they go.
        snapshot_to: a file for PyTorch's own memory viewer.
        on_interrupt: called for a Ctrl-C that landed in our own code: it sends another.
    """

    def __init__(
        self,
        hardware: Hardware,
        *,
        device: str | None = None,
        n_events: int = N_EVENTS,
        depth: int | None = None,
        snapshot_to: Path | None = None,
        on_interrupt: Callable[[], None],
    ) -> None:
        self._hardware = hardware
        self._device = device
        self._n_events = n_events
        self._depth = depth
        self._snapshot_to = snapshot_to
        self._on_interrupt = on_interrupt
        self._has_history = False
        self._has_snapshot = False
        self._start_us: int | None = None
        self._calls: CallRecorder | None = None
        self._watch: LineWatch | None = None
        self._readings: LineReadings | None = None
        self._traces: tuple[AllocatorTrace, ...] = ()
        self._marks: tuple[CallMark, ...] = ()
        self._notes: list[str] = []

    @property
    def has_snapshot(self) -> bool:
        """Whether PyTorch's own kind of snapshot was written."""
        return self._has_snapshot

    def prepare(self) -> None:
        """Begin what may take memory and time of its own: before anything is measured.

        Raises:
            BusyError: another trace is running.
        """
        with _lock:
            if _running:
                raise BusyError(
                    "another trace is running, and there is one at a time: end that one first, or "
                    "leave this one out"
                )
            _running.append(self)
        try:
            if self._device != HOST:
                self._guard("the history of the GPUs", self._start_history)
            if self._device in (None, HOST):
                self._guard("the host's lines", self._prepare_watch)
        except BaseException:
            self.stop()
            raise

    def begin_at(self, is_entry: IsEntry) -> None:
        """The cell is about to run: the code for which ``is_entry`` holds, and its file's."""
        self._begin(lambda watch: watch.start_at(is_entry))

    def begin_in(self, frame: FrameType) -> None:
        """The code to trace is that of ``frame``, which runs already, and its file's."""
        self._begin(lambda watch: watch.start_in(frame))

    def stop(self) -> None:
        """It has ended, and its record is made. May be called twice."""
        try:
            self._stop_parts()
        finally:
            with _lock:
                if self in _running:
                    _running.remove(self)

    @property
    def files(self) -> tuple[str, ...]:
        """The files whose lines were read, that of the cell first; ``()`` where none were."""
        return () if self._readings is None else self._readings.files

    @property
    def needs_names(self) -> bool:
        """Whether the blocks at the end are worth a look at what they are for."""
        return bool(self._traces)

    def describe(
        self,
        record: CellRecord,
        sources: Sources,
        find_names: Callable[[], dict[str, BlockNames]] | None = None,
    ) -> CellTrace:
        """What it all comes to.

        Args:
            record: the cell's, or the block's.
            sources: which files are whose.
            find_names: tells what the blocks are for.
        """
        names = {} if find_names is None else self._guard("the names", find_names) or {}
        devices = []
        for trace in self._traces:
            if self._device in (None, trace.device):
                told = self._guard(
                    f"the lines of {trace.device}",
                    lambda trace=trace: self._describe_device(trace, record, sources, names),  # type: ignore[misc]
                )
                devices += [] if told is None else [told]
        # What the GPUs' lines took is what is asked for where both could be told.
        if self._readings is not None and not devices:
            told = self._guard("the host's lines", lambda: self._describe_host(record, sources))
            devices += [] if told is None else [told]
        self._traces = ()
        return CellTrace(record, tuple(devices), tuple(dict.fromkeys(self._notes)))

    # -- The parts ---------------------------------------------------------------------------------

    def _stop_parts(self) -> None:
        watch, self._watch = self._watch, None
        if watch is not None:
            self._readings = self._guard("the host's lines", watch.stop)
        calls, self._calls = self._calls, None
        if calls is not None:
            self._marks = self._guard("the calls", calls.stop) or ()
            self._notes += map(_as_sentence, calls.take_notes())
        if self._has_history:
            self._has_history = False
            stood = _identify(self._snapshot_to)
            self._traces = self._guard("the history of the GPUs", self._end_history) or ()
            self._notes += self._hardware.take_notes()
            # One that could not be written leaves the file that was there before.
            self._has_snapshot = _identify(self._snapshot_to) not in (None, stood)

    def _start_history(self) -> None:
        self._has_history = True
        self._notes += self._hardware.start_trace(n_events=self._n_events)
        if any(report.info.device != HOST for report in self._hardware.read_devices()):
            self._calls = CallRecorder()
            self._calls.start()

    def _end_history(self) -> tuple[AllocatorTrace, ...]:
        return self._hardware.end_trace(snapshot_to=self._snapshot_to)

    def _prepare_watch(self) -> None:
        used = [info.device for info in self._hardware.list_devices()]
        if HOST not in used or (self._device is None and len(used) > 1):
            return
        counter = self._hardware.find_host_counter()
        if counter is None:
            self._notes.append("This process's malloc does not tell what is in use line by line.")
            return
        from gpumemwidget.measure.lines import LineWatch  # noqa: PLC0415 - where it is used

        self._watch = LineWatch(counter, on_interrupt=self._on_interrupt)

    def _begin(self, start: Callable[[LineWatch], str | None]) -> None:
        self._start_us = time.time_ns() // 1000
        watch = self._watch
        if watch is not None:
            refusal = self._guard("the host's lines", lambda: start(watch))
            if refusal is not None:
                self._watch = None
                self._notes.append(f"The host's lines are not told: {refusal}.")

    def _describe_device(
        self,
        trace: AllocatorTrace,
        record: CellRecord,
        sources: Sources,
        names: dict[str, BlockNames],
    ) -> DeviceTrace:
        from gpumemwidget.measure.tracing import describe_device  # noqa: PLC0415 - where it is used

        return describe_device(
            trace,
            sources=sources,
            start_us=self._start_us or int(record.started_at * 1e6),
            cell=_find_device(record, trace.device),
            marks=self._marks,
            names=names.get(trace.device),
            depth=self._depth,
        )

    def _describe_host(self, record: CellRecord, sources: Sources) -> DeviceTrace | None:
        from gpumemwidget.measure.lines import describe_lines  # noqa: PLC0415 - where it is used

        if self._readings is None:
            return None
        cell = _find_device(record, HOST)
        told = describe_lines(self._readings, sources, cell=cell, duration_s=record.duration_s)
        return told if cell is not None else replace(told, device=HOST)

    def _guard(self, what: str, action: Callable[[], _T]) -> _T | None:
        try:
            return action()
        except Exception as exc:  # noqa: BLE001 - a failure of ours is never the cell's
            cause = f"{type(exc).__name__}: {exc}".splitlines()[0]
            self._notes.append(f"Tracing {what} failed ({cause}).")
            return None


def _find_device(record: CellRecord, device: str) -> CellDevice | None:
    return next((each for each in record.devices if each.device == device), None)


def _identify(path: Path | None) -> tuple[int, int] | None:
    """Which file it is that stands there; ``None`` for none."""
    try:
        found = None if path is None else path.stat()
    except OSError:
        return None
    return None if found is None else (found.st_ino, found.st_mtime_ns)


def _as_sentence(note: str) -> str:
    return f"{note[:1].upper()}{note[1:].rstrip('.')}."


def find_plain_hardware() -> Hardware:
    """The machine's memory where the extension is not loaded, found once for the process.

    It stays: with it would go what torch's own peaks were before the first trace.
    """
    from gpumemwidget.backends.hardware import detect_hardware  # noqa: PLC0415 - when it is used

    with _lock:
        if not _plain:
            _plain.append(detect_hardware())
        return _plain[0]


def take_plain_hardware() -> Hardware | None:
    """The same for an extension that is being loaded, which closes it; ``None``: there is none."""
    with _lock:
        return _plain.pop() if _plain else None
