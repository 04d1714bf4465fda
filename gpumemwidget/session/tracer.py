"""Trace a cell or a ``with`` block: the allocators' history, module calls and the host's lines.

A part that fails costs its own lines alone: the report has a note on it, and the cell and its
record are as they would be without it.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from gpumemwidget.backends.cuda.module_calls import CallRecorder
from gpumemwidget.errors import BusyError, FileError, describe_exception
from gpumemwidget.model.cells import CellRecord
from gpumemwidget.model.devices import HOST, HardwareNote, check_device
from gpumemwidget.model.ownership import BlockNames
from gpumemwidget.model.traces import (
    AllocatorTrace,
    CallMark,
    CellTrace,
    NoteKind,
    TraceNote,
    TraceRequest,
)
from gpumemwidget.recording.files import find_target, refuse_target
from gpumemwidget.session.interrupts import send_later
from gpumemwidget.tracing.line_watch import LineReadings, LineWatch, describe_lines, watch_lines

if TYPE_CHECKING:
    from types import FrameType

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
