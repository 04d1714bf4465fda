"""Trace a cell or a ``with`` block: the allocators' history, module calls, the host's lines.

A part that fails costs its own lines alone: the report has a note on it, and the cell and its
record are as they would be without it.
"""

from __future__ import annotations

import dataclasses
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, TypeVar

from gpumemwidget.backends.cuda.module_calls import CallRecorder
from gpumemwidget.backends.hardware import keep_hardware
from gpumemwidget.errors import (
    BadInputError,
    BusyError,
    FileError,
    describe_exception,
    forgets_frames,
)
from gpumemwidget.model.cells import CellRecord, Status
from gpumemwidget.model.devices import HOST, HardwareNote, Reading, Sample, check_device
from gpumemwidget.model.ownership import BlockNames
from gpumemwidget.model.traces import (
    AllocatorTrace,
    CallMark,
    CellTrace,
    DeviceTrace,
    HostLines,
    NoteKind,
    TraceNote,
    TraceRequest,
)
from gpumemwidget.recording.files import find_target, refuse_target
from gpumemwidget.recording.running_cell import RunningCell, build_record
from gpumemwidget.recording.sampler import Clock
from gpumemwidget.report.render.output import Report, ShowsReport
from gpumemwidget.session.interrupts import InterruptHold, send_later
from gpumemwidget.session.session import find_session
from gpumemwidget.tracing.line_watch import LineReadings, LineWatch, describe_lines, watch_lines
from gpumemwidget.tracing.sources import find_block_sources, is_library

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

    from gpumemwidget.backends.hardware import Hardware
    from gpumemwidget.session.session import Session
    from gpumemwidget.tracing.sources import IsEntry, Sources


#: File name endings that PyTorch's memory viewer expects.
SNAPSHOT_SUFFIXES = (".pickle", ".pkl")

_T = TypeVar("_T")
#: Held by the tracer that runs, if any: a process has one history and one set of marks.
_lock = threading.Lock()


def make_trace_request(
    hardware: Hardware,
    *,
    device: str | None = None,
    n_lines: int | None = None,
    snapshot: str | os.PathLike[str] | None = None,
    force: bool = False,
) -> TraceRequest:
    """Return what a trace is asked for, checked before anything is traced; see ``TraceRequest``.

    Raises:
        BadInputError: there is no such device.
        FileError: the snapshot can't be written, or is there already and ``force`` is not given.
    """
    if device is not None:
        check_device(device, [info.device for info in hardware.list_all_devices()])
    target = None
    if snapshot is not None:
        target = find_target(snapshot)
        if target.suffix.lower() not in SNAPSHOT_SUFFIXES:
            raise FileError(
                f"{target.name!r} is not a name for a snapshot: give one that ends in "
                f"{' or '.join(SNAPSHOT_SUFFIXES)}"
            )
        refuse_target(target, force=force)
    return TraceRequest(device=device, n_lines=n_lines, snapshot=target)


class Tracer:
    """Traces one cell or block, from before it to after it."""

    def __init__(
        self, hardware: Hardware, request: TraceRequest, session: Session | None = None
    ) -> None:
        self._hardware = hardware
        self._request = request
        self._session = session
        self._is_running = self._has_history = False
        self._start_us: int | None = None
        self._calls: CallRecorder | None = None
        self._watch: LineWatch | None = None
        self._readings: LineReadings | None = None
        self._traces: tuple[AllocatorTrace, ...] = ()
        self._marks: tuple[CallMark, ...] = ()
        self._notes: list[TraceNote | HardwareNote] = []

    def prepare(self) -> None:
        """Begin parts that take memory and time of their own, before anything is measured.

        Raises:
            BusyError: another trace is running.
        """
        if not _lock.acquire(blocking=False):
            raise BusyError(
                "another trace is running, and there is one at a time: end that one first, or "
                "leave this one out"
            )
        self._is_running = True
        try:
            if self._session is not None:
                self._session.trace_begins.call(None)
                self._session.monitor.want_samples(self)
            if self._request.device != HOST:
                self.guard(self._start_history)
            if self._request.device in (None, HOST):
                self.guard(self._prepare_watch)
        except BaseException:
            self.stop()
            raise

    def begin(self, where: IsEntry | FrameType) -> None:
        """Begin to read lines; see ``LineWatch.start``."""
        self._start_us = time.time_ns() // 1000
        watch = self._watch
        if watch is None:
            return
        # One function may begin a block that another one ends.
        if self.guard(lambda: watch.start(where, outlives_frame=True)) is False:
            self._watch = None
            self._notes.append(TraceNote(NoteKind.LINES_UNREAD))

    def stop(self) -> None:
        """End the trace once the cell's record is made. May be called twice."""
        try:
            self._stop_parts()
        finally:
            if self._session is not None:
                self._session.monitor.unwant_samples(self)
            if self._is_running:
                self._is_running = False
                _lock.release()

    @property
    def files(self) -> tuple[str, ...]:
        """Return the files whose lines were read, the cell's first; ``()`` if none were."""
        return () if self._readings is None else tuple(self._readings.files)

    def describe(self, record: CellRecord, sources: Sources) -> CellTrace:
        """Return the whole trace."""
        if self._request.snapshot is not None and not self._traces:
            self._notes.append(TraceNote(NoteKind.NO_SNAPSHOT))
        from gpumemwidget.ownership.account import take_block_account  # noqa: PLC0415 - when used
        from gpumemwidget.tracing.device_trace import describe_device  # noqa: PLC0415 - when used

        names: dict[str, BlockNames] = {}
        if self._traces and self._session is not None:
            shell, hardware = self._session.shell, self._hardware
            account = self.guard(lambda: take_block_account(shell, hardware, budget_s=0.5))
            names = {} if account is None else account[1]
        counted = {part.device: part for part in record.devices}
        devices = []
        for trace in self._traces:
            if self._request.device in (None, trace.device):
                describe = partial(
                    describe_device,
                    trace,
                    sources=sources,
                    start_us=self._start_us or int(record.started_at * 1e6),
                    cell=counted.get(trace.device),
                    marks=self._marks,
                    names=names.get(trace.device),
                )
                found = self.guard(describe)
                devices += [] if found is None else [found]
        host, readings = None, self._readings
        # A person who traces with a GPU in use asks for the GPUs' lines alone.
        if not devices and readings is not None:
            host = self.guard(partial(describe_lines, readings, sources, counted.get(HOST)))
        self._traces = ()
        return CellTrace(record, tuple(devices), host, tuple(dict.fromkeys(self._notes)))

    # -- The parts ---------------------------------------------------------------------------------

    def _stop_parts(self) -> None:
        watch, self._watch = self._watch, None
        if watch is not None:
            self._readings = self.guard(watch.stop)
        calls, self._calls = self._calls, None
        if calls is not None:
            self._marks = self.guard(calls.stop) or ()
            self._notes += calls.take_notes()
        if self._has_history:
            self._has_history = False
            end = partial(self._hardware.end_trace, snapshot_to=self._request.snapshot)
            self._traces = self.guard(end) or ()
            self._notes += self._hardware.take_notes()

    def _start_history(self) -> None:
        self._has_history = True
        self._notes += self._hardware.start_trace()
        if any(info.device != HOST for info in self._hardware.list_all_devices()):
            self._calls = CallRecorder()
            self._calls.start()

    def _prepare_watch(self) -> None:
        used = [info.device for info in self._hardware.list_devices()]
        if HOST not in used or (self._request.device is None and len(used) > 1):
            return
        counter = self._hardware.find_host_counter()
        if counter is None:
            self._notes.append(TraceNote(NoteKind.MALLOC_UNREAD))
            return
        self._watch = watch_lines(counter, on_interrupt=send_later)

    def guard(self, action: Callable[[], _T]) -> _T | None:
        """Return what an action returns; ``None``, with a note, where it fails."""
        try:
            return action()
        except Exception as exc:  # noqa: BLE001 - a failure of ours is never the cell's
            self._notes.append(TraceNote(NoteKind.FAILED, describe_exception(exc)))
            return None


def is_tracing() -> bool:
    """Return whether a trace is running, which reads lines itself."""
    return _lock.locked()


# -- A with block, or a file -----------------------------------------------------------------------


class Trace(ShowsReport):
    """The trace of a ``with`` block, during it and after; ``gpumemwidget.trace()`` makes it."""

    def __init__(self, request: TraceRequest, trace: CellTrace | None = None) -> None:
        self._request = request
        self._trace = trace
        self._samples: Sequence[Sample] = ()
        self._block: _RunningBlock | None = None

    @forgets_frames
    def __enter__(self) -> Trace:
        if self._block is not None or self._trace is not None:
            raise BadInputError("this trace was used already: make another one")
        # Below the decorator's.
        frame = sys._getframe(2)  # noqa: SLF001 - public by its documentation
        while is_library(frame.f_code.co_filename) and frame.f_back is not None:
            frame = frame.f_back
        with InterruptHold() as hold:
            self._block = _RunningBlock(self._request, frame)
        if hold.is_due:
            # Raised later, it could come before Python has noted that the block has begun.
            self._end("interrupted")
            raise KeyboardInterrupt
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        status: Status = "ok" if kind is None else "error"
        if kind is not None and issubclass(kind, KeyboardInterrupt):
            status = "interrupted"
        with InterruptHold() as hold:
            self._end(status)
        if hold.is_due:
            raise KeyboardInterrupt

    def _end(self, status: Status) -> None:
        block, self._block = self._block, None
        if block is not None:
            self._trace = block.close(status)
            self._samples = block.samples

    @property
    def trace(self) -> CellTrace:
        """Return the whole trace.

        Raises:
            BadInputError: the block has not ended.
        """
        if self._trace is None:
            raise BadInputError("the block has not ended: ask the trace after it")
        return self._trace

    @property
    def record(self) -> CellRecord:
        """Return before, after and peak on each device, in bytes and seconds."""
        return self.trace.record

    @property
    def devices(self) -> tuple[DeviceTrace, ...]:
        """Return the lines of the block with what they did to each GPU."""
        return self.trace.devices

    @property
    def host(self) -> HostLines | None:
        """Return what the block's lines changed on the host; ``None`` if that was not traced."""
        return self.trace.host

    def figure(self) -> Figure:
        """Return the timeline of each traced GPU as a plotly figure.

        Raises:
            BadInputError: no GPU was traced.
        """
        from gpumemwidget.report.charts.timeline import figure_trace  # noqa: PLC0415 - brings plotly

        if not self.devices:
            raise BadInputError("no GPU was traced, and the host has no figure: see to_html()")
        return figure_trace(self.trace)

    def _report(self) -> Report:
        from gpumemwidget.report.trace import report_trace  # noqa: PLC0415 - when it is used

        return report_trace(self.trace, self._samples)

    def _repr_html_(self) -> str | None:
        return None if self._trace is None else self.to_html()

    def __repr__(self) -> str:
        return "a trace that has not ended" if self._trace is None else self.to_text()


def load_trace(path: str | os.PathLike[str]) -> Trace:
    """Load a memory snapshot of PyTorch's as a trace.

    Raises:
        FileError: it can't be read, or is no such file.
    """
    from gpumemwidget.backends.snapshot import load_snapshot  # noqa: PLC0415 - when used
    from gpumemwidget.tracing.device_trace import describe_snapshot  # noqa: PLC0415 - when used

    source = find_target(path)
    if source.exists() and not source.is_file():
        raise FileError(f"{source} is no regular file: choose another one")
    try:
        trace = describe_snapshot(load_snapshot(source), source.name)
    except FileError:
        raise
    except OSError as exc:
        raise FileError(
            f"{source} can't be read: {exc.strerror or exc}; choose another file"
        ) from None
    except Exception as exc:  # noqa: BLE001 - a file from anywhere may lead to any error
        why = describe_exception(exc)[:100]
        raise FileError(
            f"{source} is damaged, or no memory snapshot of PyTorch's ({why}): make one with "
            "torch.cuda.memory._dump_snapshot() or %%memtrace --snapshot"
        ) from None
    return Trace(TraceRequest(), trace)


class _RunningBlock:
    """A traced block from its begin on."""

    def __init__(self, request: TraceRequest, frame: FrameType) -> None:
        self._session = find_session()
        self._filename = frame.f_code.co_filename
        monitor = None if self._session is None else self._session.monitor
        self._monitor = monitor
        self._hardware = keep_hardware("traces") if monitor is None else monitor.hardware
        self._clock = Clock() if monitor is None else monitor.clock
        self._tracer = Tracer(self._hardware, request, self._session)
        #: Readings taken meanwhile, where the extension is loaded.
        self.samples: Sequence[Sample] = ()
        self._tracer.prepare()
        try:
            started_at = self._clock.wall()
            #: The cell that the block is part of: its own peaks go on over the block's.
            self._cell = None if monitor is None else monitor.running
            before = self._start_span()
            self._span = RunningCell(
                execution_count=None,
                cell_id=None,
                first_line=f"with trace() in {self._name_file()}, line {frame.f_lineno}",
                started_at=started_at,
                start_s=self._clock.now(),
                before=before,
            )
            self._tracer.begin(frame)
        except BaseException:
            self._tracer.stop()
            raise

    def close(self, status: Status) -> CellTrace:
        end_s = self._clock.now()
        after = self._tracer.guard(self._end_span)
        self._tracer.stop()
        record = build_record(
            self._span,
            after,
            end_s=end_s,
            status=status,
            known_devices=[reading.device for reading in self._span.before],
        )
        if self._monitor is not None:
            self.samples = self._monitor.samples_of(record)
        sources = find_block_sources(self._filename, self._read_numbers())
        return self._tracer.describe(record, sources)

    def _start_span(self) -> tuple[Reading, ...]:
        if self._monitor is not None and self._cell is not None:
            return self._monitor.start_span_within()
        return self._hardware.start_span()

    def _end_span(self) -> tuple[Reading, ...]:
        monitor = self._monitor
        if monitor is None:
            return self._hardware.read_exact()
        if monitor.running is not self._cell:
            # A cell has begun or ended meanwhile, and the marks with it.
            after = self._hardware.read()
            self._span = dataclasses.replace(self._span, partial=True)
            return after
        return self._hardware.read_exact() if self._cell is None else monitor.end_span_within()

    def _name_file(self) -> str:
        number = self._read_numbers().get(self._filename)
        return Path(self._filename).name if number is None else f"In [{number}]"

    def _read_numbers(self) -> Mapping[str, int]:
        return {} if self._session is None else self._session.shell.read_cell_numbers()
