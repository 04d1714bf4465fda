"""Trace cells with a ``%%memtrace`` line: take the line out, and show the report at the end.

An input transformer takes the line out and the cell events do the measuring, so the cell runs as if
the line were not there: ``await``, other cell magics, the last value, tracebacks with their line
numbers and the status that stops "Run All" stay its own. (A cell magic that runs its body itself
loses one or the other of these.) The summary lines of ``%memtrace on`` are shown here too.
"""

from __future__ import annotations

import dataclasses
import re
import textwrap
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from IPython.core.interactiveshell import InteractiveShell
from IPython.display import display

from gpumemwidget.errors import BusyError
from gpumemwidget.model.cells import CellRecord
from gpumemwidget.model.traces import CellTrace, TraceRequest
from gpumemwidget.session.tracer import Tracer
from gpumemwidget.tracing.sources import find_cell_sources, make_is_entry
from gpumemwidget.widgets.progress_line import show_progress

if TYPE_CHECKING:
    from gpumemwidget.report.render.output import Report
    from gpumemwidget.session.session import Session

#: IPython publishes no types for it.
_display: Any = display
_LINE = re.compile(r"%%memtrace(?![\w?])[ \t]*(?P<options>.*?)[ \t]*\r?\n?")


# -- The line above a cell -------------------------------------------------------------------------


class MemtraceLine:
    """The input transformer that takes a valid ``%%memtrace`` line out of a cell.

    It is in ``input_transformers_cleanup``, so it also sees what other cell magics hand back to
    IPython: the body of ``%%time`` or ``%%capture``. A line with options that are not valid stays,
    so that the cell magic of this name gets it and refuses it.

    Args:
        parse: reads the text behind the magic's name; ``None`` where it is not valid.
        take_request: is called for each cell with what its line asks for; with ``None`` for a cell
            without a valid line.
    """

    #: IPython then leaves it out when it only asks whether a cell is complete, which for cell
    #: magics has a rule of its own (a blank line ends them).
    has_side_effects = True

    def __init__(
        self,
        parse: Callable[[str], TraceRequest | None],
        take_request: Callable[[TraceRequest | None], None],
    ) -> None:
        self._parse = parse
        self._take_request = take_request

    def __call__(self, lines: list[str]) -> list[str]:
        """Return the lines of a cell without the magic's."""
        found = _split_head(lines, self._parse)
        self._take_request(None if found is None else found[0])
        return lines if found is None else self._remove(lines, found[1])

    def _remove(self, lines: list[str], n_head: int) -> list[str]:
        # IPython has removed the indentation that all lines shared; the body may have more of it.
        body = textwrap.dedent("".join(lines[n_head:])).splitlines(keepends=True)
        first = next((line for line in body if not line.isspace()), "")
        if first.startswith("%%"):
            # Another cell magic, which IPython looks for in the first line only.
            body = body[body.index(first) :]
            again = _split_head(body, self._parse)
            return body if again is None else self._remove(body, again[1])
        # An empty line in its stead, so that a traceback names the lines that the notebook shows.
        return ["\n" * n_head, *body]


def _split_head(
    lines: Sequence[str], parse: Callable[[str], TraceRequest | None]
) -> tuple[TraceRequest, int] | None:
    """Return the request in the first line that is not blank, and the number of lines up to it.

    ``None``: the cell begins with something else, or with options that are not valid.
    """
    for n_blank, line in enumerate(lines):
        if line.isspace():
            continue
        match = _LINE.fullmatch(line) if line.startswith("%%") else None
        # Nothing below it: IPython's own message for a cell magic without a body says it best.
        if match is None or n_blank + 1 == len(lines):
            return None
        request = parse(match["options"])
        return None if request is None else (request, n_blank + 1)
    return None


# -- What is shown under a cell --------------------------------------------------------------------


class Outputs:
    """Shows the reports of ``%%memtrace`` and ``%memtrace on``, one cell after the other."""

    def __init__(self, shell: InteractiveShell, session: Session) -> None:
        self.next_request: TraceRequest | None = None
        self._shell = shell
        self._session = session
        self._shows_line = False
        self._source = ""
        self._trace: _CellTrace | None = None

    def open(self, source: str) -> None:
        """Prepare for a cell that begins; nothing of it has been measured yet."""
        self._shows_line = self._session.shows_line
        self._source = source
        request, self.next_request = self.next_request, None
        if request is not None and "%%memtrace" in source:
            self.trace(request)

    def trace(self, request: TraceRequest) -> None:
        """Give the cell that begins or runs its report, once."""
        if self._trace is None:
            # First of all, so that a chart that can't be shown costs the chart alone.
            self._trace = _CellTrace(self._shell, self._session, request, self._source)
            self._trace.open()

    def close(self, record: CellRecord | None, *, has_run: bool = True) -> None:
        """Show what belongs under a cell that has ended; no line ran after a syntax error."""
        trace, self._trace = self._trace, None
        if trace is not None:
            trace.close(record, has_run=has_run)
        if record is None:
            return
        shows_line = trace is None and self._shows_line and self._session.shows_line
        is_predicted = any(part.predicted_peak_bytes is not None for part in record.devices)
        # The report of a trace of all devices has the budgets among the rest.
        is_partial = trace is None or trace.request.device is not None
        has_budgets = is_partial and bool(self._session.monitor.budgets.list())
        if not (shows_line or is_predicted or has_budgets):
            return
        from gpumemwidget.report import cell as reports  # noqa: PLC0415 - when needed

        shown = (
            reports.report_cell_line(record) if shows_line else None,
            reports.report_score(record) if is_predicted else None,
            reports.report_crossings(record) if has_budgets else None,
        )
        for report in filter(None, shown):
            _display(report)


class _CellTrace:
    """The trace of one cell, and its report."""

    def __init__(
        self, shell: InteractiveShell, session: Session, request: TraceRequest, source: str
    ) -> None:
        self.request = request
        self._shell = shell
        self._session = session
        self._monitor = session.monitor
        self._source = source
        self._tracer: Tracer | None = None
        #: Ends the callbacks from the monitor.
        self._listening = ExitStack()

    def open(self) -> None:
        """Begin to trace."""
        tracer = Tracer(self._session.hardware, self.request, self._session)
        try:
            tracer.prepare()
        except BusyError as exc:
            print(f"%%memtrace: lines are not traced: {exc}")
            return
        self._tracer = tracer
        # Last, so that nothing of ours comes between its readings and the cell.
        is_entry = make_is_entry(InteractiveShell.run_code.__code__, self._source)
        self._listening.callback(self._monitor.cell_started.add(lambda _: tracer.begin(is_entry)))
        self._listening.callback(self._monitor.cell_ended.add(lambda _: tracer.stop()))
        if self._monitor.running is not None:
            tracer.begin(is_entry)

    def close(self, record: CellRecord | None, *, has_run: bool) -> None:
        """Show the report below what the cell has displayed."""
        self._listening.close()
        if self._tracer is not None:
            self._tracer.stop()
        if record is not None and has_run:
            self._show(record)
        elif has_run:
            print("%%memtrace: this cell was not recorded to its end")

    def _show(self, record: CellRecord) -> None:
        try:
            with show_progress("The report of %%memtrace"):
                report = self._describe(record)
        except KeyboardInterrupt as exc:
            print(str(exc) or "A Ctrl-C stopped the report of %%memtrace.")
        else:
            _display(report)

    def _describe(self, record: CellRecord) -> Report:
        from gpumemwidget.report.trace import report_trace  # noqa: PLC0415 - at the first report

        trace, number = CellTrace(record, ()), record.execution_count
        with self._session.reporting("finding which lines took it"):
            if self._tracer is not None:
                sources = find_cell_sources(
                    self._source,
                    self._shell.execution_count if number is None else number,
                    self._session.shell.read_cell_numbers(),
                    self._tracer.files,
                )
                trace = self._tracer.describe(record, sources)
                self._session.keep_trace(trace)
        samples = self._monitor.samples_of(record)
        trace = dataclasses.replace(trace, record=_pick_device(record, self.request.device))
        return report_trace(trace, samples, n_lines=self.request.n_lines)


def _pick_device(record: CellRecord, device: str | None) -> CellRecord:
    """Return the record of one device, or of all for ``None``."""
    if device is None:
        return record
    devices = tuple(part for part in record.devices if part.device == device)
    return dataclasses.replace(record, devices=devices)
