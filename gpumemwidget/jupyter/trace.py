"""What is shown under a cell: the live chart while it runs, the report when it has ended."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from IPython.core.interactiveshell import InteractiveShell

from gpumemwidget.errors import BusyError, FileError
from gpumemwidget.jupyter.cellsources import find_cell_sources, make_is_entry
from gpumemwidget.jupyter.clears import ClearWatch
from gpumemwidget.jupyter.interrupts import send_later
from gpumemwidget.jupyter.memtrace import MemtraceOptions, parse_head
from gpumemwidget.jupyter.slots import Slots
from gpumemwidget.records import CellRecord, Sample
from gpumemwidget.traces import BlockNames, CellTrace

if TYPE_CHECKING:
    from gpumemwidget.jupyter.extension import Extension
    from gpumemwidget.jupyter.live import LiveChart
    from gpumemwidget.jupyter.tracing import Tracer
    from gpumemwidget.measure.cells import RunningCell

__all__ = ["Outputs"]

#: The report's outputs behind the first one.
_N_SLOTS = 2
#: How long the search for what blocks are for may take.
_NAMES_BUDGET_S = 0.5


class Outputs:
    """What ``%%memtrace`` and ``%memtrace on`` show, one cell after the other.

    Args:
        extension: whose cells these are.
        parse: reads the text behind ``%%memtrace``; ``None`` where it is not valid.
    """

    def __init__(
        self, extension: Extension, parse: Callable[[str], MemtraceOptions | None]
    ) -> None:
        self._extension = extension
        self._parse = parse
        #: Whether every cell gets a line; a change counts from the next cell on.
        self.line_is_on = False
        self._shows_line = False
        self._source = ""
        self._trace: _Trace | None = None

    @property
    def is_tracing(self) -> bool:
        """Whether the cell that runs will get its report."""
        return self._trace is not None

    def open(self, source: str) -> None:
        """A cell begins; nothing of it has been measured yet."""
        self._shows_line = self.line_is_on
        self._source = source
        options = parse_head(source, self._parse)
        if options is not None:
            self.trace(options)

    def trace(self, options: MemtraceOptions) -> None:
        """Give the cell that begins or runs its report; once for each."""
        if self._trace is None:
            # First of all, so that a chart that can't be shown costs the chart alone.
            self._trace = _Trace(self._extension, options, self._source)
            self._trace.open()

    def close(self, record: CellRecord | None, *, showed_result: bool) -> None:
        """The cell has ended.

        Args:
            record: ``None`` where it could not be recorded.
            showed_result: whether it ended with a value or a traceback.
        """
        trace, self._trace = self._trace, None
        if trace is not None:
            trace.close(record, showed_result=showed_result)
        elif record is not None and self._shows_line and self.line_is_on:
            from gpumemwidget.report.report import report_cell_line  # noqa: PLC0415 - when needed

            _display(report_cell_line(record))
        # The whole report of a trace has it among the rest.
        tells_all = trace is not None and trace.tells_all_devices
        if record is not None and not tells_all and self._may_be_over(record):
            self._warn(record)

    def _may_be_over(self, record: CellRecord) -> bool:
        """Whether it needs to be looked at: most cells have no budget."""
        # One that was interrupted may have taken its budget away.
        has_budgets = self._extension.monitor.budgets.table is not None
        return has_budgets or record.status == "interrupted"

    def _warn(self, record: CellRecord) -> None:
        """Tell of a cell that went beyond its budget."""
        from gpumemwidget.report.report import report_crossings  # noqa: PLC0415 - when needed

        report = report_crossings(record)
        if report is not None:
            _display(report)


class _Trace:
    """One cell's live chart, trace and report; a listener of the monitor, to know its two ends."""

    def __init__(self, extension: Extension, options: MemtraceOptions, source: str) -> None:
        self._extension = extension
        self._shell = extension.ipython
        self._monitor = extension.monitor
        self._options = options
        self._source = source
        self._chart: LiveChart | None = None
        self._clears: ClearWatch | None = None
        self._slots: Slots | None = None
        self._tracer: Tracer | None = None
        self._notes: tuple[str, ...] = ()

    @property
    def tells_all_devices(self) -> bool:
        """Whether the report is of all devices."""
        return self._options.device is None

    def open(self) -> None:
        """Begin to trace, and show the live chart where there is somebody to see it."""
        self._monitor.want_samples(self)
        try:
            self._prepare()
        finally:
            if self._options.live and _can_show_live(self._shell):
                self._show_chart()
            # Last, so that nothing of ours comes between its readings and the cell.
            self._monitor.add_listener(self)
            if self._monitor.running is not None:
                self._begin()

    def on_cell_started(self, cell: RunningCell) -> None:  # noqa: ARG002 - a listener's
        """The cell's first readings have been taken."""
        self._begin()

    def on_cell_ended(self, record: CellRecord) -> None:  # noqa: ARG002 - a listener's
        """Its last readings have been taken."""
        if self._tracer is not None:
            self._tracer.stop()

    def on_samples(self, samples: Sequence[Sample]) -> None:
        """Nothing: the report asks for them at the end."""

    def close(self, record: CellRecord | None, *, showed_result: bool) -> None:
        """Put the report in the live chart's place, or under the cell where there is no chart."""
        self._monitor.remove_listener(self)
        if self._tracer is not None:
            self._tracer.stop()
        self._monitor.unwant_samples(self)
        if self._chart is not None:
            self._monitor.remove_listener(self._chart)
        is_cleared = self._clears is not None and self._clears.stop(showed_result=showed_result)
        slots = None if is_cleared else self._slots
        try:
            if record is not None:
                shown = self._describe(record)
                if slots is not None:
                    slots.fill(shown)
                else:
                    for thing in shown:
                        _display(thing)
            elif slots is not None:
                slots.fill([_Text("%%memtrace: this cell was not recorded to its end")])
        finally:
            if self._chart is not None:
                self._chart.close()

    # -- The trace ---------------------------------------------------------------------------------

    def _prepare(self) -> None:
        from gpumemwidget.jupyter.tracing import N_EVENTS, Tracer  # noqa: PLC0415 - when needed

        tracer = Tracer(
            self._monitor.hardware,
            device=self._options.device,
            n_events=self._options.n_events or N_EVENTS,
            depth=self._options.depth,
            snapshot_to=self._options.snapshot,
            on_interrupt=send_later,
        )
        try:
            tracer.prepare()
        except BusyError as exc:
            self._notes = (f"Which lines took it is not told: {exc}.",)
        else:
            self._tracer = tracer

    def _begin(self) -> None:
        if self._tracer is not None:
            run_code = InteractiveShell.run_code.__code__
            self._tracer.begin_at(make_is_entry(run_code, self._source))

    def _describe(self, record: CellRecord) -> Sequence[object]:
        """What is shown in the end: the plain report where nothing was traced."""
        from gpumemwidget.report.report import (  # noqa: PLC0415 - at the first report
            list_displays,
            report_cell,
            report_trace,
        )

        samples: Sequence[Sample] = self._monitor.samples_of(record)
        device = self._options.device
        trace = None
        try:
            trace = self._trace_lines(record)
        except Exception as exc:  # noqa: BLE001 - the plain report is there all the same
            self._extension.report_failure("telling which lines took it", exc)
        if trace is None:
            plain, samples = _limit_to_device(CellTrace(record, ()), samples, device)
            return [report_cell(plain.record, samples), *map(_Text, self._notes)][: 1 + _N_SLOTS]
        for line in self._write(trace):
            print(line)
        trace, samples = _limit_to_device(trace, samples, device)
        n_lines, depth = self._options.n_lines, self._options.depth
        if self._slots is not None:
            return list_displays(trace, samples, n_lines=n_lines, depth=depth)
        return [report_trace(trace, samples, n_lines=n_lines, depth=depth)]

    def _trace_lines(self, record: CellRecord) -> CellTrace | None:
        if self._tracer is None:
            return None
        number = record.execution_count
        sources = find_cell_sources(
            self._source,
            self._shell.execution_count if number is None else number,
            self._extension.shell.read_cell_numbers(),
            self._tracer.files,
        )
        return self._tracer.describe(record, sources, self._find_names)

    def _find_names(self) -> dict[str, BlockNames]:
        if self._tracer is None or not self._tracer.needs_names:
            return {}
        from gpumemwidget.owners.entries import name_blocks  # noqa: PLC0415 - when needed

        return name_blocks(self._extension.shell, self._monitor.hardware, budget_s=_NAMES_BUDGET_S)

    def _write(self, trace: CellTrace) -> list[str]:
        """Write the files that were asked for; what became of each, in a line."""
        said = []
        options = self._options
        if options.snapshot is not None:
            if self._tracer is not None and self._tracer.has_snapshot:
                said.append(f"snapshot written to {options.snapshot}")
            else:
                said.append("no snapshot was written: no GPU's allocations were traced")
        if options.export is not None:
            from gpumemwidget.measure.tracefile import write_trace  # noqa: PLC0415 - when needed

            try:
                path = write_trace(trace, options.export, force=options.force)
            except FileError as exc:
                said.append(f"%%memtrace: {exc}")
            else:
                said.append(f"trace written to {path}")
        return said

    # -- The chart ---------------------------------------------------------------------------------

    def _show_chart(self) -> None:
        from gpumemwidget.jupyter.live import LiveChart  # noqa: PLC0415 - brings ipywidgets

        self._chart = LiveChart(
            self._monitor,
            # IPython has counted on already: the number of this cell is the one before.
            execution_count=self._shell.execution_count - 1,
            device=self._options.device,
        )
        self._clears = ClearWatch(self._shell.display_pub)
        self._slots = Slots(_display(self._chart, display_id=True), _N_SLOTS)
        self._monitor.add_listener(self._chart)


class _Text:
    """A line of plain text as an output."""

    def __init__(self, text: str) -> None:
        self._text = text

    def __repr__(self) -> str:
        return self._text


def _display(thing: object, **options: Any) -> Any:
    from IPython.display import display  # noqa: PLC0415 - only where something is shown

    return display(thing, **options)  # type: ignore[no-untyped-call]


def _limit_to_device(
    trace: CellTrace, samples: Sequence[Sample], device: str | None
) -> tuple[CellTrace, Sequence[Sample]]:
    """The same trace and samples with one device left, or all for ``None``."""
    if device is None:
        return trace, samples
    record = dataclasses.replace(
        trace.record, devices=tuple(each for each in trace.record.devices if each.device == device)
    )
    devices = tuple(each for each in trace.devices if each.device == device)
    return (
        dataclasses.replace(trace, record=record, devices=devices),
        [
            dataclasses.replace(
                sample, readings=tuple(each for each in sample.readings if each.device == device)
            )
            for sample in samples
        ],
    )


def _can_show_live(shell: InteractiveShell) -> bool:
    """Whether what is displayed now goes to a front end, and can be updated there later.

    Under ``%%capture`` another publisher stands in the kernel's place; a terminal has no kernel.
    """
    return hasattr(shell, "kernel") and hasattr(shell.display_pub, "register_hook")
