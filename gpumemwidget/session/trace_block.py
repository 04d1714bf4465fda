"""Trace a ``with`` block in a script or a cell, and load traces from files."""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import FrameType, TracebackType
from typing import TYPE_CHECKING

from gpumemwidget.backends.hardware import keep_hardware
from gpumemwidget.backends.snapshot import load_snapshot
from gpumemwidget.errors import BadInputError, FileError, describe_exception, forgets_frames
from gpumemwidget.model.cells import CellRecord, Status
from gpumemwidget.model.devices import Reading, Sample
from gpumemwidget.model.traces import CellTrace, DeviceTrace, HostLines, TraceRequest
from gpumemwidget.recording.files import find_target
from gpumemwidget.recording.running_cell import RunningCell, build_record
from gpumemwidget.recording.sampler import Clock
from gpumemwidget.report.render.output import Report, ShowsReport
from gpumemwidget.session.interrupts import InterruptHold
from gpumemwidget.session.session import find_session
from gpumemwidget.session.tracer import Tracer
from gpumemwidget.tracing.device_trace import describe_snapshot
from gpumemwidget.tracing.sources import find_block_sources, is_library

if TYPE_CHECKING:
    from plotly.graph_objects import Figure


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
