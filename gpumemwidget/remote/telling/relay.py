"""Tell a notebook elsewhere of the cells that a loaded extension records in this process.

The allocator has one high-water mark, and the extension reads it. So a relay measures nothing
itself: what the session's monitor has measured goes on, with peaks as exact as they are.
"""

from __future__ import annotations

import atexit
import os
import threading
from collections.abc import Callable, Hashable, Sequence
from typing import Any

from gpumemwidget.model.cells import CellRecord, Status
from gpumemwidget.model.devices import Sample
from gpumemwidget.model.processes import ProcessRole, RunningSpan, SpanRecord
from gpumemwidget.oom.detection import find_oom
from gpumemwidget.recording.cells import RunningCell, name_cell
from gpumemwidget.remote.telling.outlet import Outlet
from gpumemwidget.remote.telling.sinks import Sink
from gpumemwidget.session.oom_watch import EndedRun, OomWatch
from gpumemwidget.session.session import Session
from gpumemwidget.tracing.sources import find_block_sources


class Relay:
    """Tells what a session records, from ``start`` until ``close``.

    Attributes:
        outlet: where all that is told goes.

    Args:
        sink: takes what is told.
        session: the loaded extension.
        sink_name: by which another sink can take its place.
        role: the process's part in a bigger whole, with its number or its label.
    """

    def __init__(
        self,
        sink: Sink,
        session: Session,
        *,
        role: ProcessRole,
        number: int | None = None,
        label: str = "",
        sink_name: str = "",
    ) -> None:
        monitor = self._monitor = session.monitor
        self._session = session
        self._pid = os.getpid()
        self.outlet = Outlet(sink, session.hardware, monitor.clock, sink_name=sink_name)
        self.outlet.begin(role=role, number=number, label=label)
        self._ooms = OomWatch(session.shell, session.hardware, session.report_failure)
        self._removals: list[Callable[[], None]] = []

    def start(self) -> None:
        """Begin to tell."""
        monitor = self._monitor
        _relays.append(self)
        self._ooms.open()
        self._ooms.start()
        if monitor.running is not None:
            self._tell_start(monitor.running)
        self._removals = [
            monitor.cell_started.add(self._tell_start),
            monitor.cell_ended.add(self._tell_end),
            monitor.sampled.add(self._tell_samples),
        ]
        monitor.want_samples(self)
        atexit.register(self.close)

    # -- Spans -------------------------------------------------------------------------------------

    def begin_span(
        self,
        name: str,
        number: int | None = None,
        *,
        lane: Hashable | None = None,  # noqa: ARG002 - as a recorder's
    ) -> Any:
        """Begin a cell of the extension for work that is none; return what ``end_span`` takes.

        Within a cell, or on another thread than that of the cells, there is none.
        """
        is_own_thread = threading.current_thread() is threading.main_thread()
        if self._monitor.running is not None or not is_own_thread:
            return None
        with self._session.reporting("beginning a span"):
            return self._monitor.start_cell(execution_count=number, cell_id=None, source=name)
        return None

    def end_span(self, span: Any, status: Status = "ok") -> None:
        """End a cell that ``begin_span`` began."""
        if span is not None and self._monitor.running is span:
            with self._session.reporting("ending a span"):
                self._monitor.end_cell(status=status)

    def note_error(self, error: BaseException) -> None:
        """Tell of an OOM in an error that ends a cell or a span."""
        with self._session.reporting("describing an OOM"):
            card = self._ooms.end(find_oom(error), self._describe_run)
            if card is not None:
                self.outlet.teller.tell_oom(card, self.outlet.now())
            self._ooms.start()

    def _describe_run(self) -> EndedRun:
        return EndedRun("", "", find_block_sources("", self._session.shell.read_cell_numbers()))

    # -- What the monitor tells --------------------------------------------------------------------

    def _tell_start(self, cell: RunningCell) -> None:
        self._ooms.start()
        start_s = max(0.0, cell.start_s - self.outlet.origin_s)
        name = name_cell(cell.first_line, cell.execution_count)
        self.outlet.teller.begin_span(RunningSpan(name, start_s))

    def _tell_end(self, record: CellRecord) -> None:
        span = SpanRecord(
            name=name_cell(record.first_line, record.execution_count),
            start_s=max(0.0, record.start_s - self.outlet.origin_s),
            duration_s=round(record.duration_s, 6),
            status=record.status,
            devices=record.devices,
        )
        self.outlet.teller.end_span(span, None)

    def _tell_samples(self, samples: Sequence[Sample]) -> None:
        for sample in samples:
            if sample.time_s >= self.outlet.origin_s:
                self.outlet.tell_sample(sample)

    # -- The end -----------------------------------------------------------------------------------

    def leave(self, sink_name: str) -> None:
        """Tell a sink nothing more; with the only one this ends."""
        if self.outlet.leave(sink_name):
            self.close()

    def close(self) -> None:
        """Tell no more; the extension goes on. May be called twice."""
        if self not in _relays or os.getpid() != self._pid:
            return
        _relays.remove(self)
        atexit.unregister(self.close)
        for remove in self._removals:
            remove()
        self._monitor.unwant_samples(self)
        self._ooms.close()
        with self._session.reporting("ending the recording"):
            self.outlet.close()


#: The relay of this process, if it has one.
_relays: list[Relay] = []


def find_relay() -> Relay | None:
    """Return what tells of this process's extension; ``None`` where nothing does."""
    return _relays[-1] if _relays else None
