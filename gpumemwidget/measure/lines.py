"""The host's counterpart of an allocator's history: what each line of a cell did to malloc's count.

What is in use is read as each line of the cell's own code begins, so that every byte belongs to the
innermost line of it that ran. What rises and falls again within one line is not seen, nor what the
libraries' functions did each. The peak is the highest that was read, and says so.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable
from types import FrameType

from gpumemwidget.measure.linehooks import IsEntry, LineHooks
from gpumemwidget.measure.linemonitoring import MonitoringHooks
from gpumemwidget.measure.linereader import N_LINES, LineReader, LineReadings
from gpumemwidget.measure.linesums import LineSum, LineSums, Moment
from gpumemwidget.measure.linetracing import SettraceHooks
from gpumemwidget.measure.sources import Source, Sources
from gpumemwidget.records import CellDevice, Frame, Span
from gpumemwidget.traces import (
    DeviceTrace,
    Layer,
    LineUse,
    PeakPart,
    SourceLine,
    SourceUnit,
    Timeline,
)

__all__ = ["RESOLUTION_BYTES", "LineWatch", "describe_lines"]

#: A line that moved less than this is not told of: malloc keeps small pieces that were freed for
#: their next use and counts them as in use, and Python's own tables come and go.
RESOLUTION_BYTES = 4096
#: Lines with a band of their own in the timeline.
_N_LAYERS = 8
#: Of a file that is no cell, lines shown around those that did something.
_N_AROUND = 2

_BEFORE = "before the cell"
_NO_LINE = "no line"


class LineWatch:
    """Reads one cell, or one ``with`` block, line by line.

    Args:
        read: the bytes in use.
        on_interrupt: called for a Ctrl-C that landed in our own code: it sends another.
        clock_ns: nanoseconds that never go back.
    """

    def __init__(
        self,
        read: Callable[[], int],
        *,
        on_interrupt: Callable[[], None],
        clock_ns: Callable[[], int] = time.perf_counter_ns,
    ) -> None:
        self._reader = LineReader(read, clock_ns=clock_ns)
        kind = MonitoringHooks if sys.version_info >= (3, 12) else SettraceHooks
        self._hooks: LineHooks = kind(self._reader, on_interrupt)

    @property
    def files(self) -> tuple[str, ...]:
        """The files whose lines are read, as far as code of theirs has run, in that order."""
        return self._hooks.files

    def start_at(self, is_entry: IsEntry) -> str | None:
        """Read the file of each code for which ``is_entry`` holds, on this thread.

        Returns:
            Why that can't be done, in a few words; ``None`` where it is.
        """
        return self._hooks.start_at(is_entry)

    def start_in(self, frame: FrameType) -> str | None:
        """Read the file of a frame that is running on this thread; see ``start_at``."""
        return self._hooks.start_in(frame)

    def stop(self) -> LineReadings:
        """End it, and put back what was changed."""
        self._hooks.stop()
        failure = self._hooks.failure
        notes = []
        if failure is not None:
            why = f"{type(failure).__name__}: {failure}".rstrip(": ")
            notes.append(f"Reading the lines failed ({why}) and ended there.")
        elif self._hooks.was_displaced:
            notes.append(
                "Tracing was switched off or taken over in between (by sys.settrace, or by a "
                "recursion up to its limit), and the lines after that were not read."
            )
        if self._hooks.saw_threads:
            notes.append("Of the code's threads only the one that ran the cell was read.")
        return self._reader.stop(self._hooks.files, tuple(notes), has_failed=failure is not None)


def describe_lines(
    readings: LineReadings,
    sources: Sources,
    *,
    cell: CellDevice | None = None,
    duration_s: float = math.inf,
) -> DeviceTrace:
    """What was read, as the trace of the host.

    Args:
        readings: what was read.
        sources: the cell, or the file that the ``with`` block stands in, and its parts.
        cell: the host in the cell's record.
        duration_s: how long the cell took: the last reading may come after its last line.
    """
    source = sources.traced
    sums = _name_lines(readings, sources)
    moments = sums.list_moments()
    before_bytes, after_bytes = _read_ends(sums, cell)
    shown = {
        line: each
        for line, each in sums.lines.items()
        if line and each.added_bytes >= RESOLUTION_BYTES
    }
    small = [each for line, each in sums.lines.items() if line not in shown]
    held = {line: sums.peak.held_bytes.get(line, 0) for line in shown}
    uses = {line: _build_use(each, held[line]) for line, each in shown.items()}
    # The counter's own may be a few bytes more than what we read last.
    peak_bytes = max(before_bytes, after_bytes, sums.peak.in_use_bytes)
    peak_before_bytes = sums.peak.in_use_bytes - sum(sums.peak.held_bytes.values())
    unplaced = LineUse(
        allocated_bytes=sum(each.added_bytes for each in small),
        n_allocs=sum(each.n_rises for each in small),
        # With the few bytes between our first and last readings and the counter's own.
        net_bytes=after_bytes - sums.before_bytes - sum(use.net_bytes for use in uses.values()),
        at_peak_bytes=peak_bytes - peak_before_bytes - sum(held.values()),
        highest_bytes=max((each.highest_bytes for each in small), default=0),
    )
    return DeviceTrace(
        device="host" if cell is None else cell.device,
        source="lines",
        allocated=Span(before_bytes, after_bytes, peak_bytes),
        reserved=Span(None, None, None) if cell is None else cell.reserved,
        peak_is="sampled",
        timeline=_build_timeline(moments, held, source, readings.start_ns, duration_s),
        units=(_build_unit(source, uses),),
        before=LineUse(
            allocated_bytes=before_bytes,
            n_allocs=0,
            net_bytes=sums.before_bytes,
            at_peak_bytes=peak_before_bytes,
            highest_bytes=before_bytes,
        ),
        unplaced=unplaced,
        peak=_list_parts(
            source,
            held,
            peak_before_bytes,
            sums.peak.in_use_bytes - peak_before_bytes - sum(held.values()),
        ),
        n_events=readings.n_readings,
        notes=(*readings.notes, *_describe_reading(readings)),
    )


def _name_lines(readings: LineReadings, sources: Sources) -> LineSums:
    """The sums by the lines of the cell, where they were by those of the files that ran."""

    def name(counted: int) -> int:
        file, line = divmod(counted, N_LINES)
        frame = Frame(readings.files[file] if line else "", line, "")
        return sources.find_line(frame) or 0

    numbers = {counted: name(counted) for counted in readings.sums.lines}
    if all(counted == line for counted, line in numbers.items()):
        return readings.sums
    return readings.sums.rename(numbers)


def _read_ends(sums: LineSums, cell: CellDevice | None) -> tuple[int, int]:
    before_bytes = None if cell is None else cell.allocated.before_bytes
    after_bytes = None if cell is None else cell.allocated.after_bytes
    return (
        sums.start_bytes if before_bytes is None else before_bytes,
        sums.now_bytes if after_bytes is None else after_bytes,
    )


def _build_use(each: LineSum, at_peak_bytes: int) -> LineUse:
    return LineUse(
        allocated_bytes=each.added_bytes,
        n_allocs=each.n_rises,
        net_bytes=each.held_bytes,
        at_peak_bytes=at_peak_bytes,
        highest_bytes=each.highest_bytes,
    )


def _build_unit(source: Source, uses: dict[int, LineUse]) -> SourceUnit:
    texts = source.lines
    last = max([len(texts), *uses])
    numbers = range(1, last + 1)
    if source.kind == "file":
        near = {line + step for line in uses for step in range(-_N_AROUND, _N_AROUND + 1)}
        shown = [number for number in numbers if number in near]
    else:
        shown = list(numbers)
    return SourceUnit(
        name=source.name,
        filename=source.filename,
        kind=source.kind,
        lines=tuple(
            SourceLine(line=number, text=_find_text(texts, number), use=uses.get(number))
            for number in shown
        ),
    )


def _build_timeline(
    moments: list[Moment],
    held: dict[int, int],
    source: Source,
    start_ns: int,
    duration_s: float,
) -> Timeline:
    texts = source.lines
    by_size = sorted((line for line in held if held[line]), key=lambda line: -held[line])
    chosen = by_size[:_N_LAYERS]
    layers = [
        Layer(
            label=f"line {line}",
            text=_find_text(texts, line).strip(),
            unit=source.name,
            line=line,
            held_bytes=tuple(each.held_bytes.get(line, 0) for each in moments),
        )
        for line in chosen
    ]
    others = tuple(
        sum(n for line, n in each.held_bytes.items() if line and line not in chosen)
        for each in moments
    )
    if any(others):
        layers.append(Layer("other lines", "", None, None, others))
    unplaced = tuple(each.held_bytes.get(0, 0) for each in moments)
    if any(unplaced):
        layers.append(Layer(_NO_LINE, "", None, None, unplaced))
    before = tuple(each.in_use_bytes - sum(each.held_bytes.values()) for each in moments)
    in_use = tuple(each.in_use_bytes for each in moments)
    return Timeline(
        times_s=tuple(min((each.time_ns - start_ns) / 1e9, duration_s) for each in moments),
        allocated_bytes=in_use,
        reserved_bytes=(None,) * len(moments),
        layers=(Layer(_BEFORE, "", None, None, before), *layers),
        peak=max(range(len(in_use)), key=in_use.__getitem__),
        n_moments=len(moments),
    )


def _list_parts(
    source: Source, held: dict[int, int], before_bytes: int, unplaced_bytes: int
) -> tuple[PeakPart, ...]:
    # How many blocks they are, malloc does not tell.
    parts = [
        PeakPart(f"line {line}", source.name, line, "unknown", None, n_bytes, 0)
        for line, n_bytes in held.items()
        if n_bytes
    ]
    if before_bytes:
        parts.append(PeakPart(_BEFORE, None, None, "unknown", None, before_bytes, 0))
    if unplaced_bytes:
        parts.append(PeakPart(_NO_LINE, None, None, "unknown", None, unplaced_bytes, 0))
    return tuple(sorted(parts, key=lambda part: -part.n_bytes))


def _find_text(texts: list[str], line: int) -> str:
    return texts[line - 1] if line <= len(texts) else ""


def _describe_reading(readings: LineReadings) -> list[str]:
    notes = []
    if readings.gap_since_ns is not None and readings.gap_ns:
        duration_ns = max(1, readings.end_ns - readings.start_ns)
        percent = max(0, min(99, 100 - round(100 * readings.gap_ns / duration_ns)))
        since_s = (readings.gap_since_ns - readings.start_ns) / 1e9
        notes.append(
            f"From {since_s:.2f} s on not each line was read, for that would have slowed the cell: "
            f"{percent}% of its time was. What came in between is shared out among the lines read "
            "last, as theirs was, so that their figures are estimates."
        )
    if any(each.returned_bytes >= RESOLUTION_BYTES for each in readings.sums.lines.values()):
        notes.append(
            "What a line gave back is taken from a line that had added as much, else from the one "
            "that added last: malloc does not tell which it was."
        )
    return notes
