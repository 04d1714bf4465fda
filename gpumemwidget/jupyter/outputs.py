"""Show what belongs under a cell: the report of ``%%memtrace``, a summary line, cards.

An input transformer takes the line ``%%memtrace`` out and the cell events do the measuring, so the
cell runs as if the line were not there: ``await``, other cell magics, the last value, tracebacks
with their line numbers and the status that stops "Run All" stay its own. (A cell magic that runs
its body itself loses one or the other of these.)

A card is shown under each cell that ends with an OOM, and under each that keeps more with each run.
It is static HTML, so that a saved notebook, a page without a kernel and a reloaded one all show it
whole. Where there is a kernel, the page puts buttons into it. A model's old value that takes memory
beside the new one is reported here, too.
"""

from __future__ import annotations

import linecache
import re
import textwrap
import threading
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from contextvars import copy_context
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from IPython.core.getipython import get_ipython
from IPython.core.interactiveshell import InteractiveShell
from IPython.display import DisplayHandle, display

from gpumemwidget.errors import BusyError
from gpumemwidget.model.cells import CellRecord
from gpumemwidget.model.devices import Sample
from gpumemwidget.model.leaks import Leak, Rebinding
from gpumemwidget.model.ooms import OomCard, OomEvent, Remedy
from gpumemwidget.model.traces import CellTrace, TraceRequest
from gpumemwidget.oom.detection import OomSign, find_oom
from gpumemwidget.recording.history import thin_samples
from gpumemwidget.recording.running_cell import RunningCell, build_record
from gpumemwidget.report.leaks import (
    find_release,
    list_cuts,
    report_leak,
    report_rebinding,
    word_release,
)
from gpumemwidget.session.leak_watch import LeakWatch
from gpumemwidget.session.oom_watch import EndedRun, OomWatch
from gpumemwidget.session.rebinds import RebindWatch
from gpumemwidget.session.session import Session
from gpumemwidget.session.tracer import Tracer
from gpumemwidget.tracing.sources import find_cell_sources, make_is_entry
from gpumemwidget.widgets.progress_line import NOTHING, show_progress

if TYPE_CHECKING:
    from gpumemwidget.recording.monitor import Monitor
    from gpumemwidget.report.render.output import Report

#: IPython publishes no types for it.
_display: Any = display
#: Seconds until a running cell shows its report, and at least between two states of it.
_LIVE_EVERY_S = 1.0

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
        if found is None:
            return lines
        n_head = found[1]
        # IPython has removed the indentation that all lines shared; the body may have more of it.
        body = textwrap.dedent("".join(lines[n_head:])).splitlines(keepends=True)
        first = next((line for line in body if not line.isspace()), "")
        if first.startswith("%%"):
            # Another cell magic, which IPython looks for in the first line only.
            return body[body.index(first) :]
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
        has_budgets = is_partial and bool(self._session.monitor.budgets.bytes_by_device)
        if not (shows_line or is_predicted or has_budgets):
            return
        from gpumemwidget.report.cell import (  # noqa: PLC0415 - when needed
            report_cell_line,
            report_crossings,
            report_score,
        )

        shown = (
            report_cell_line(record) if shows_line else None,
            report_score(record) if is_predicted else None,
            report_crossings(record) if has_budgets else None,
        )
        for report in filter(None, shown):
            _display(report)


class _LiveReport:
    """The report of a cell while it runs, updated on the sampler's thread.

    It is a static output, so a page whose kernel dies keeps the last state. A short cell has none.
    """

    def __init__(self, shell: InteractiveShell, monitor: Monitor, device: str | None) -> None:
        self._shell = shell
        self._publisher = shell.display_pub
        self._monitor = monitor
        self._device = device
        self._due_s = _LIVE_EVERY_S
        # By the context of the cell its output is found, also from another thread.
        self._context = copy_context()
        self._output: Any = None
        self._is_closed = False
        self._lock = threading.Lock()
        self._stop_listening = monitor.sampled.add(self._follow)

    def close(self) -> None:
        """Take the output away."""
        self._stop_listening()
        with self._lock:
            self._is_closed = True
            if self._output is not None:
                self._output.update(NOTHING, raw=True)

    def _follow(self, samples: Sequence[Sample]) -> None:
        cell = self._monitor.running
        # While the cell captures what is displayed, a report of ours would be among it.
        if cell is None or self._shell.display_pub is not self._publisher:
            return
        elapsed_s = samples[-1].time_s - cell.start_s
        if elapsed_s < self._due_s:
            return
        # After less than 1 % more of the cell's time no change is seen.
        self._due_s = elapsed_s + max(_LIVE_EVERY_S, 0.01 * elapsed_s)
        report = self._describe(cell, samples[-1])
        with self._lock:
            if self._is_closed:
                return
            if self._output is None:
                self._output = self._context.run(_display, report, display_id=True)
            else:
                self._output.update(report)

    def _describe(self, cell: RunningCell, last: Sample) -> object:
        from gpumemwidget.report.cell import report_unfinished  # noqa: PLC0415 - when needed

        record = build_record(
            cell,
            last.readings,
            end_s=last.time_s,
            status="interrupted",
            known_devices=[reading.device for reading in cell.before],
        )
        samples = thin_samples(self._monitor.history.samples(cell.start_s), 1000)
        return report_unfinished(_pick_device(record, self._device), samples)


class _CellTrace:
    """The trace of one cell, its live report and the one at its end."""

    def __init__(
        self, shell: InteractiveShell, session: Session, request: TraceRequest, source: str
    ) -> None:
        self.request = request
        self._shell = shell
        self._session = session
        self._monitor = session.monitor
        self._source = source
        self._live: _LiveReport | None = None
        self._tracer: Tracer | None = None
        #: Ends the callbacks from the monitor.
        self._listening = ExitStack()

    def open(self) -> None:
        """Begin to trace, and to show how it goes where there is somebody to see it."""
        tracer = Tracer(self._session.hardware, self.request, self._session)
        try:
            tracer.prepare()
        except BusyError as exc:
            print(f"%%memtrace: lines are not traced: {exc}")
        else:
            self._tracer = tracer
        if _can_show_live(self._shell):
            self._live = _LiveReport(self._shell, self._monitor, self.request.device)
        if self._tracer is None:
            return
        # Last, so that nothing of ours comes between its readings and the cell.
        is_entry = make_is_entry(InteractiveShell.run_code.__code__, self._source)
        self._listening.callback(self._monitor.cell_started.add(lambda _: tracer.begin(is_entry)))
        self._listening.callback(self._monitor.cell_ended.add(lambda _: tracer.stop()))
        if self._monitor.running is not None:
            tracer.begin(is_entry)

    def close(self, record: CellRecord | None, *, has_run: bool) -> None:
        """Take the live report away, and show the last one below what the cell has displayed.

        Displayed anew, so that it is there also if the cell has cleared its output.
        """
        self._listening.close()
        if self._tracer is not None:
            self._tracer.stop()
        try:
            if record is not None and has_run:
                self._show(record)
            elif has_run:
                print("%%memtrace: this cell was not recorded to its end")
        finally:
            if self._live is not None:
                self._live.close()

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
        trace = replace(trace, record=_pick_device(record, self.request.device))
        return report_trace(trace, samples, n_lines=self.request.n_lines)


def _pick_device(record: CellRecord, device: str | None) -> CellRecord:
    """Return the record of one device, or of all for ``None``."""
    if device is None:
        return record
    devices = tuple(part for part in record.devices if part.device == device)
    return replace(record, devices=devices)


def _can_show_live(shell: InteractiveShell) -> bool:
    """Return whether what is displayed now goes to a front end, and can be updated there later.

    Under ``%%capture`` another publisher stands in the kernel's place; a terminal has no kernel.
    """
    return hasattr(shell, "kernel") and hasattr(shell.display_pub, "register_hook")


# -- The cards of OOMs and of leaks ----------------------------------------------------------------


class OomCards:
    """Shows a card under each cell that ends with an OOM."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._watch = OomWatch(session.shell, session.hardware, session.report_failure)
        self.open = self._watch.open
        self.close = self._watch.close
        self.start = self._watch.start

    def end_inner(self, result: Any) -> None:
        """Note the OOM of a run within the cell, as ``%%capture`` makes one."""
        self._watch.end_inner(_find_sign(result))

    def end(self, record: CellRecord | None, result: Any) -> None:
        """Show the card of a cell that has ended with an OOM, below its traceback."""
        info = None if result is None else result.info
        source = "" if info is None else info.raw_cell
        card = self._watch.end(_find_sign(result), lambda: self._describe_run(source, record))
        if card is not None:
            predicted = self._session.monitor.expectations.find_remedies(source)
            show_card(replace(card, predicted=predicted), self._session)

    def _describe_run(self, source: str, record: CellRecord | None) -> EndedRun:
        cells = self._session.shell.read_cell_numbers()
        number = None if record is None else record.execution_count
        return EndedRun(
            source, _find_source(cells, number), find_cell_sources(source, number, cells), number
        )


def show_card(card: OomCard, session: Session) -> None:
    """Show the card of an OOM in the cell that runs, or has just ended."""
    from gpumemwidget.report.oom import report_oom  # noqa: PLC0415 - when needed

    session.oom_cards.append(card)
    name = f"gmw-oom-{uuid.uuid4().hex[:12]}"
    _display(report_oom(card, name=name))
    rows = enumerate((*card.listed_ways, None))
    ways = {row: way for row, way in rows if way is None or way.can_do}
    _add_buttons(session, name, ways, card.event.device, card.event)


def _add_buttons(
    session: Session,
    name: str,
    ways: Mapping[int, Remedy | None],
    device: str,
    event: OomEvent | None = None,
) -> None:
    """Give a card its buttons, by its class, where there is a kernel; ``ways`` by their rows."""
    if ways and hasattr(get_ipython(), "kernel"):
        with session.reporting("adding buttons to a card"):
            from gpumemwidget.widgets.oom_buttons import CardButtons  # noqa: PLC0415 - brings ipywidgets

            session.attach(CardButtons).add(name, ways, device, event)


def _find_sign(result: Any) -> OomSign | None:
    """Return the OOM in a run's error."""
    error = None if result is None else result.error_in_exec
    return None if error is None else find_oom(error)


def _find_source(cells: dict[str, int], number: int | None) -> str:
    """Return a cell as it was compiled, its magics made calls; ``""`` if IPython forgot it."""
    names = [name for name, cell_number in cells.items() if cell_number == number]
    return "".join(linecache.getlines(names[-1])) if names else ""


class LeakCards:
    """Shows each leak that a session finds.

    What is found while a cell runs is shown at once, and its card is updated until the cell's
    end. What is found at the end is shown below what the cell has displayed.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        self._watch = session.attach(LeakWatch)
        self._watch.found.add(self._note)
        self._watch.updated.add(self._update)
        session.released.add(self._mark_released)
        self._waiting: list[Leak] = []
        #: The newest cards, with their classes.
        self._cards: dict[Leak, tuple[DisplayHandle, str]] = {}
        self._rebinds = session.attach(RebindWatch)
        self._rebindings: list[Rebinding] = []
        self._rebinds.found.add(self._rebindings.append)

    def open(self) -> None:
        """Begin to follow cells."""
        self._watch.open(InteractiveShell.run_code.__code__)
        self._rebinds.open()

    def end(self) -> None:
        """Show what was found at a cell's end."""
        waiting, self._waiting = self._waiting, []
        for leak in waiting:
            self._show(leak)
        while self._rebindings:
            self._show_rebinding(self._rebindings.pop(0))

    def _note(self, leak: Leak) -> None:
        if self._session.monitor.running is None:
            self._waiting.append(leak)
        else:
            self._show(leak)

    def _show(self, leak: Leak) -> None:
        name = f"gmw-leak-{uuid.uuid4().hex[:12]}"
        card = _display(report_leak(leak, name=name), display_id=True)
        if card is not None:  # There is none in a plain Python.
            self._cards[leak] = card, name
            while len(self._cards) > 20:
                del self._cards[next(iter(self._cards))]
        release = find_release(leak)
        commands = [command for _, command in list_cuts(leak)]
        ways = {} if release is None else {commands.index(word_release(release)): release}
        _add_buttons(self._session, name, ways, leak.device)

    def _update(self, change: tuple[Leak, Leak]) -> None:
        known, leak = change
        if known in self._cards:
            card, name = self._cards[leak] = self._cards.pop(known)
            card.update(report_leak(leak, name=name))  # type: ignore[no-untyped-call]

    def _mark_released(self, _: object) -> None:
        """Grey the cards of leaks whose variables were released."""
        namespace = self._session.shell.user_ns
        for leak, (card, name) in list(self._cards.items()):
            release = find_release(leak)
            names = () if release is None else release.names
            if names and all(namespace.get(variable) is None for variable in names):
                del self._cards[leak]
                report = report_leak(leak, name=name, released=names)
                card.update(report)  # type: ignore[no-untyped-call]

    def _show_rebinding(self, rebinding: Rebinding) -> None:
        if rebinding.name not in self._watch.list_ignored():
            _display(report_rebinding(rebinding))
