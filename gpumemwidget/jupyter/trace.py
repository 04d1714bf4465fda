"""What is shown under a cell: the live chart while it runs, the report when it has ended."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from gpumemwidget.jupyter.clears import ClearWatch
from gpumemwidget.jupyter.memtrace import MemtraceOptions, parse_head
from gpumemwidget.records import CellRecord, Sample

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

    from gpumemwidget.jupyter.live import LiveChart
    from gpumemwidget.measure.monitor import Monitor

__all__ = ["Outputs"]


class Outputs:
    """What ``%%memtrace`` and ``%memtrace on`` show, one cell after the other.

    Args:
        shell: where the cells run.
        monitor: takes their samples.
        parse: reads the text behind ``%%memtrace``; ``None`` where it is not valid.
    """

    def __init__(
        self,
        shell: InteractiveShell,
        monitor: Monitor,
        parse: Callable[[str], MemtraceOptions | None],
    ) -> None:
        self._shell = shell
        self._monitor = monitor
        self._parse = parse
        #: Whether every cell gets a line; a change counts from the next cell on.
        self.line_is_on = False
        self._shows_line = False
        self._trace: _Trace | None = None

    @property
    def is_tracing(self) -> bool:
        """Whether the cell that runs will get its report."""
        return self._trace is not None

    def open(self, source: str) -> None:
        """A cell begins; nothing of it has been measured yet."""
        self._shows_line = self.line_is_on
        options = parse_head(source, self._parse)
        if options is not None:
            self.trace(options)

    def trace(self, options: MemtraceOptions) -> None:
        """Give the cell that begins or runs its report; once for each."""
        if self._trace is None:
            # First of all, so that a chart that can't be shown costs the chart alone.
            self._trace = _Trace(self._shell, self._monitor, options)
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


class _Trace:
    """One cell's live chart and report."""

    def __init__(self, shell: InteractiveShell, monitor: Monitor, options: MemtraceOptions) -> None:
        self._shell = shell
        self._monitor = monitor
        self._options = options
        self._chart: LiveChart | None = None
        self._clears: ClearWatch | None = None
        self._handle: Any = None

    def open(self) -> None:
        """Begin to take samples, and show the live chart where there is somebody to see it."""
        self._monitor.want_samples(self)
        if self._options.live and _can_show_live(self._shell):
            from gpumemwidget.jupyter.live import LiveChart  # noqa: PLC0415 - brings ipywidgets

            self._chart = LiveChart(
                self._monitor,
                # IPython has counted on already: the number of this cell is the one before.
                execution_count=self._shell.execution_count - 1,
                device=self._options.device,
            )
            self._clears = ClearWatch(self._shell.display_pub)
            self._handle = _display(self._chart, display_id=True)
            self._monitor.add_listener(self._chart)

    def close(self, record: CellRecord | None, *, showed_result: bool) -> None:
        """Put the report in the live chart's place, or under the cell where there is no chart."""
        self._monitor.unwant_samples(self)
        if self._chart is not None:
            self._monitor.remove_listener(self._chart)
        is_cleared = self._clears is not None and self._clears.stop(showed_result=showed_result)
        is_standing = self._handle is not None and not is_cleared
        try:
            if record is not None:
                report = self._build_report(record)
                if is_standing:
                    self._handle.update(report)
                else:
                    _display(report)
            elif is_standing:
                self._handle.update(_Text("%%memtrace: this cell was not recorded to its end"))
        finally:
            if self._chart is not None:
                self._chart.close()

    def _build_report(self, record: CellRecord) -> object:
        from gpumemwidget.report.report import report_cell  # noqa: PLC0415 - at the first report

        samples = self._monitor.samples_of(record)
        return report_cell(*_limit_to_device(record, samples, self._options.device))


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
    record: CellRecord, samples: Sequence[Sample], device: str | None
) -> tuple[CellRecord, Sequence[Sample]]:
    """The same record and samples with one device left, or all for ``None``."""
    if device is None:
        return record, samples
    return (
        dataclasses.replace(
            record, devices=tuple(each for each in record.devices if each.device == device)
        ),
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
