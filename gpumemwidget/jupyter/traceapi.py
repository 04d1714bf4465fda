"""Traces for code: a ``with`` block in a script or in a cell, and the files that traces are in."""

from __future__ import annotations

import dataclasses
import os
import sys
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, TypeVar

from gpumemwidget.errors import BadInputError, FileError, GpuMemError
from gpumemwidget.jupyter.cellsources import find_block_sources
from gpumemwidget.jupyter.interrupts import run_uninterrupted, send_later
from gpumemwidget.jupyter.memtrace import MemtraceOptions
from gpumemwidget.jupyter.tracing import MOST_EVENTS, N_EVENTS, Tracer, find_plain_hardware
from gpumemwidget.libraries import is_library
from gpumemwidget.measure.cells import RunningCell, build_record
from gpumemwidget.measure.clock import SystemClock
from gpumemwidget.measure.files import find_target, refuse_target
from gpumemwidget.measure.tracefile import check_target, read_trace, write_trace
from gpumemwidget.records import CellRecord, Reading, Status
from gpumemwidget.traces import BlockNames, CellTrace, DeviceTrace

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

    from gpumemwidget.backends.hardware import Hardware
    from gpumemwidget.jupyter.extension import Extension

__all__ = ["Trace", "check_options", "load_trace", "make_trace"]

#: As PyTorch's memory viewer expects it.
_SNAPSHOT_SUFFIXES = (".pickle", ".pkl")
_NAMES_BUDGET_S = 0.5
_T = TypeVar("_T")
_PLACEHOLDER = "a trace that has not ended"


def check_options(
    hardware: Hardware,
    *,
    device: str | None = None,
    n_lines: int | None = None,
    depth: int | None = None,
    n_events: int | None = None,
    snapshot: str | os.PathLike[str] | None = None,
    export: str | os.PathLike[str] | None = None,
    force: bool = False,
    live: bool = True,
) -> MemtraceOptions:
    """What a trace is asked for, checked before anything is traced.

    Raises:
        BadInputError: there is no such device, or a count that we can't take.
        FileError: a file that can't be written, or is there already.
    """
    if device is not None:
        known = [report.info.device for report in hardware.read_devices()]
        if device not in known:
            raise BadInputError(f"no device {device!r} here: choose from {', '.join(known)}")
    if n_events is not None and not (isinstance(n_events, int) and 1 <= n_events <= MOST_EVENTS):
        raise BadInputError(f"{n_events!r} events can't be kept: give 1 to {MOST_EVENTS}")
    if depth is not None and not (isinstance(depth, int) and depth >= 0):
        raise BadInputError(f"{depth!r} is no depth: give 0 or a whole number above it")
    if force and snapshot is None and export is None:
        raise BadInputError("--force goes with --export FILE or --snapshot FILE: name the file")
    targets = {
        "--snapshot": None if snapshot is None else _check_snapshot(snapshot, force=force),
        "--export": None if export is None else check_target(_name(export), force=force),
    }
    return MemtraceOptions(
        device=device,
        live=live,
        n_lines=n_lines,
        depth=depth,
        n_events=n_events,
        snapshot=targets["--snapshot"],
        export=targets["--export"],
        force=force,
    )


def make_trace(
    *,
    device: str | None = None,
    n_events: int | None = None,
    depth: int | None = None,
    snapshot: str | os.PathLike[str] | None = None,
    force: bool = False,
) -> Trace:
    """See ``gpumemwidget.trace``."""
    extension = _find_extension()
    hardware = find_plain_hardware() if extension is None else extension.monitor.hardware
    return Trace(
        check_options(
            hardware,
            device=device,
            n_events=n_events,
            depth=depth,
            snapshot=snapshot,
            force=force and snapshot is not None,
        )
    )


class Trace:
    """A ``with`` block whose lines are told; ``gpumemwidget.trace()`` makes it.

    Args:
        options: what is asked for.
        trace: what was told, where it comes from a file.
    """

    def __init__(self, options: MemtraceOptions, trace: CellTrace | None = None) -> None:
        self._options = options
        self._trace = trace
        self._open: _Open | None = None

    def __enter__(self) -> Trace:
        if self._open is not None or self._trace is not None:
            raise BadInputError("this trace was used already: make another one")
        frame: FrameType | None = sys._getframe(1)  # noqa: SLF001 - public by its documentation
        while frame is not None and frame.f_back is not None:
            if not is_library(frame.f_code.co_filename):
                break
            frame = frame.f_back
        begun_in = frame or sys._getframe(1)  # noqa: SLF001 - as above
        try:
            self._open = _run_whole(lambda: _Open(self._options, begun_in))
        except GpuMemError as exc:
            # Our own lines say nothing of why.
            error = exc.with_traceback(None)
        else:
            return self
        raise error

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        block, self._open = self._open, None
        if block is not None:
            status: Status = "ok" if kind is None else "error"
            if kind is not None and issubclass(kind, KeyboardInterrupt):
                status = "interrupted"
            self._trace = _run_whole(lambda: block.close(status))

    @property
    def trace(self) -> CellTrace:
        """All that is told.

        Raises:
            BadInputError: the block has not ended.
        """
        if self._trace is None:
            raise BadInputError("the block has not ended: ask the trace after it")
        return self._trace

    @property
    def record(self) -> CellRecord:
        """Before, after and peak on each device, as of a cell; bytes and seconds."""
        return self.trace.record

    @property
    def devices(self) -> tuple[DeviceTrace, ...]:
        """What the block's lines did to each device."""
        return self.trace.devices

    def figure(self, device: str | None = None) -> Figure:
        """The timeline as a figure of plotly's; of one device, or of all for ``None``.

        Raises:
            BadInputError: that device was not traced.
        """
        from gpumemwidget.report.figures import figure_trace  # noqa: PLC0415 - brings plotly

        traced = [each.device for each in self.devices]
        if device is not None and device not in traced:
            raise BadInputError(f"{device!r} was not traced: {', '.join(traced) or 'nothing'} was")
        return figure_trace(self.trace, device)

    def to_html(self) -> str:
        """The report as static HTML."""
        from gpumemwidget.report.report import report_trace  # noqa: PLC0415 - when it is used

        return report_trace(self.trace, ()).html

    def to_text(self) -> str:
        """The report as plain text."""
        from gpumemwidget.report.report import report_trace  # noqa: PLC0415 - when it is used

        return report_trace(self.trace, ()).text

    def export(self, path: str | os.PathLike[str], *, force: bool = False) -> Path:
        """Write lines and timeline to a ``.json``, which ``load_trace`` reads.

        Raises:
            FileError: it can't be written there; nothing was.
        """
        return write_trace(self.trace, path, force=force)

    def _repr_html_(self) -> str | None:
        return None if self._trace is None else self.to_html()

    def __repr__(self) -> str:
        return _PLACEHOLDER if self._trace is None else self.to_text()


def load_trace(path: str | os.PathLike[str]) -> Trace:
    """A trace that was exported to a ``.json``, or a snapshot of PyTorch's under any other name.

    Raises:
        FileError: it can't be read, or is not such a file.
    """
    source = find_target(_name(path))
    if source.suffix.lower() == ".json":
        return Trace(MemtraceOptions(), read_trace(source))
    from gpumemwidget.jupyter.snapshots import read_snapshot  # noqa: PLC0415 - when it is used

    return Trace(MemtraceOptions(), read_snapshot(source))


class _Open:
    """A block that runs."""

    def __init__(self, options: MemtraceOptions, frame: FrameType) -> None:
        self._extension = _find_extension()
        self._filename = frame.f_code.co_filename
        self._snapshot_to = options.snapshot
        monitor = None if self._extension is None else self._extension.monitor
        self._monitor = monitor
        self._hardware = find_plain_hardware() if monitor is None else monitor.hardware
        self._clock = SystemClock() if monitor is None else monitor.clock
        self._tracer = Tracer(
            self._hardware,
            device=options.device,
            n_events=options.n_events or N_EVENTS,
            depth=options.depth,
            snapshot_to=options.snapshot,
            on_interrupt=send_later,
        )
        self._tracer.prepare()
        try:
            started_at = self._clock.wall()
            #: The cell that the block is part of: its own peaks go on over the block's.
            self._cell = None if monitor is None else monitor.running
            before = self._start_span()
            self._block = RunningCell(
                execution_count=None,
                cell_id=None,
                first_line=f"with trace() in {self._name_file()}, line {frame.f_lineno}",
                started_at=started_at,
                start_s=self._clock.now(),
                before=before,
            )
            self._tracer.begin_in(frame)
        except BaseException:
            self._tracer.stop()
            raise

    def close(self, status: Status) -> CellTrace:
        """The block has ended."""
        end_s = self._clock.now()
        notes = []
        try:
            after = self._end_span()
        except Exception as exc:  # noqa: BLE001 - what the block did is not undone by our failure
            after = None
            notes.append(f"Reading the memory at the end failed ({type(exc).__name__}: {exc}).")
        finally:
            self._tracer.stop()
        if self._has_no_snapshot():
            notes.append("No snapshot was written: no GPU's allocations were traced.")
        record = build_record(
            self._block,
            after,
            end_s=end_s,
            status=status,
            known_devices=[reading.device for reading in self._block.before],
        )
        sources = find_block_sources(self._filename, self._read_numbers())
        trace = self._tracer.describe(record, sources, self._find_names)
        return CellTrace(trace.record, trace.devices, (*notes, *trace.notes))

    def _start_span(self) -> tuple[Reading, ...]:
        if self._monitor is not None and self._cell is not None:
            return self._monitor.start_span_within()
        return self._hardware.start_span()

    def _end_span(self) -> tuple[Reading, ...]:
        monitor = self._monitor
        if monitor is None:
            return self._hardware.end_span()
        if monitor.running is not self._cell:
            # A cell has begun or ended meanwhile, and the marks with it.
            after = self._hardware.read()
            self._block = dataclasses.replace(self._block, partial=True)
            return after
        return self._hardware.end_span() if self._cell is None else monitor.end_span_within()

    def _has_no_snapshot(self) -> bool:
        return self._snapshot_to is not None and not self._tracer.has_snapshot

    def _name_file(self) -> str:
        number = self._read_numbers().get(self._filename)
        return Path(self._filename).name if number is None else f"In[{number}]"

    def _read_numbers(self) -> Mapping[str, int]:
        return {} if self._extension is None else self._extension.shell.read_cell_numbers()

    def _find_names(self) -> dict[str, BlockNames]:
        if self._extension is None or not self._tracer.needs_names:
            return {}
        from gpumemwidget.owners.entries import name_blocks  # noqa: PLC0415 - when it is used

        return name_blocks(self._extension.shell, self._hardware, budget_s=_NAMES_BUDGET_S)


def _run_whole(work: Callable[[], _T]) -> _T:
    """Run what must not be left half done; a Ctrl-C waits for its end."""
    if threading.current_thread() is not threading.main_thread():
        return work()
    done: list[_T] = []
    failed: list[Exception] = []

    def attempt() -> None:
        try:
            done.append(work())
        except Exception as exc:  # noqa: BLE001 - raised again below
            failed.append(exc)

    run_uninterrupted(attempt)
    if failed:
        raise failed[0]
    return done[0]


def _find_extension() -> Extension | None:
    """The one that is loaded; a script has none, and needs no IPython for that."""
    module = sys.modules.get("gpumemwidget.jupyter.extension")
    return None if module is None else module.find_extension()


def _check_snapshot(path: str | os.PathLike[str], *, force: bool) -> Path:
    target = find_target(_name(path))
    if target.suffix.lower() not in _SNAPSHOT_SUFFIXES:
        raise FileError(
            f"{target.name!r} is no name for a snapshot: give one that ends in "
            f"{' or '.join(_SNAPSHOT_SUFFIXES)}"
        )
    refuse_target(target, force=force)
    return target


def _name(path: str | os.PathLike[str]) -> str:
    name = os.fspath(path)
    if not name:
        raise BadInputError("a file's name is missing: --export cell.json, --snapshot cell.pickle")
    return name
