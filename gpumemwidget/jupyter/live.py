"""The chart that stands in the output of a ``%%memtrace`` cell while the cell runs.

It shows the report that will take its place: the report of the cell's first moment is sent as HTML
once, and from then on only readings, which live.js writes into it. So nothing jumps when the cell
ends, and opening it costs a few KB.

This module brings ipywidgets and anywidget; it is imported when the first chart is shown.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import anywidget
import traitlets

from gpumemwidget.jupyter.wire import Wire
from gpumemwidget.measure.monitor import Monitor, RunningCell
from gpumemwidget.records import CellDevice, CellRecord, Reading, Sample, Span
from gpumemwidget.report.cell import report_cell
from gpumemwidget.report.words import mark_peak, name_cell, name_counters, rank_device

__all__ = ["LiveChart"]

_STATIC = Path(__file__).parent / "static"
_NO_SCRIPT = "export default {}"
#: How many points a page that joins late gets, at most.
_MOST_POINTS = 600


class LiveChart(anywidget.AnyWidget):
    """The live chart of one cell; a listener of the monitor.

    Args:
        monitor: what it listens to.
        execution_count: of the cell.
        device: the one to show; ``None`` for all.
    """

    _esm = "\n".join(
        (_STATIC / name).read_text(encoding="utf-8") for name in ("units.js", "live.js")
    )

    #: The report of the first moment, and what the chart needs beside it.
    report = traitlets.Dict().tag(sync=True)
    #: For a page that joins late: what has been drawn so far, listed when it is asked for.
    points = traitlets.Any([]).tag(sync=True, to_json=lambda _value, self: self._list_points())

    _is_closed = True

    def __init__(
        self, monitor: Monitor, *, execution_count: int | None, device: str | None = None
    ) -> None:
        self._monitor = monitor
        self._count = execution_count
        self._device = device
        self._start_s = monitor.clock.now()
        self._before: tuple[Reading, ...] = self._select(monitor.hardware.read())
        self._sends_before = False
        # Closing on the main thread must not happen in the middle of the sampler's message.
        self._lock = threading.Lock()
        self._wire = Wire(self)
        report = self._describe()
        self._is_closed = False
        super().__init__(report=report)

    def on_cell_started(self, cell: RunningCell) -> None:
        """The cell's clock starts; what stands then goes out with the first sample."""
        self._start_s = cell.start_s
        if cell.before:
            self._before = self._select(cell.before)
            self._sends_before = True

    def on_cell_ended(self, record: CellRecord) -> None:
        """Nothing: the report is about to take the chart's place."""

    def on_samples(self, samples: Sequence[Sample]) -> None:
        """Send the readings of a tick, on the sampler's thread."""
        for sample in samples:
            # The end of the cell before may come with the first tick.
            if sample.time_s >= self._start_s:
                self._send_sample(sample)

    def _send_sample(self, sample: Sample) -> None:
        readings = self._select(sample.readings)
        with self._lock:
            if self._is_closed:
                return
            if [each.device for each in readings] != [each.device for each in self._before]:
                # A device was first touched in this cell, so it began at 0; or one went away.
                known = {each.device: each for each in self._before}
                self._before = tuple(
                    known.get(each.device)
                    or dataclasses.replace(each, allocated_bytes=0, reserved_bytes=0)
                    for each in readings
                )
                self.report = self._describe()
                # A trait's change may be taken up after the next message; messages keep order.
                self._wire.send({"report": self.report})
            message: dict[str, Any] = {"point": self._list_numbers(sample.time_s, readings)}
            if self._sends_before:
                self._sends_before = False
                message["before"] = [_list_counters(each) for each in self._before]
            self._wire.send(message)

    def close(self) -> None:
        """End the chart on every page. May be called twice."""
        # A widget that goes is closed once more, also one whose making failed.
        if self._is_closed:
            return
        with self._lock:
            self._is_closed = True
        # nbclient saves the state of closed widgets too: leave it nothing to save.
        self._esm = _NO_SCRIPT
        self.report = {}
        # ipywidgets makes a model for the layout beside each widget and leaves it open.
        layout = self.layout
        super().close()
        layout.close()

    def _repr_mimebundle_(self, **kwargs: Any) -> tuple[dict[str, Any], dict[str, Any]] | None:
        """The chart; where widgets can't be shown, a word of what is to come."""
        bundle = super()._repr_mimebundle_(**kwargs)
        if bundle is None:
            return None
        data, metadata = bundle
        words = f"{name_cell(self._count)} is running"
        return {**data, "text/plain": words, "text/html": f"<div>{words}</div>"}, metadata

    # -- What is sent ------------------------------------------------------------------------------

    def _select(self, readings: Sequence[Reading]) -> tuple[Reading, ...]:
        """The readings that are shown, in the order of the report."""
        shown = [each for each in readings if self._device in (None, each.device)]
        return tuple(sorted(shown, key=lambda reading: rank_device(reading.device)))

    def _describe(self) -> dict[str, Any]:
        record = CellRecord(
            execution_count=self._count,
            cell_id=None,
            first_line="",
            started_at=0.0,
            start_s=self._start_s,
            duration_s=0.0,
            status="ok",
            devices=tuple(_outline(reading) for reading in self._before),
        )
        names = [name_counters(reading.device) for reading in self._before]
        return {
            "title": name_cell(self._count),
            "html": report_cell(record, ()).html,
            "devices": [
                {
                    "name": reading.device,
                    "allocated": name.allocated,
                    "reserved": name.reserved,
                    "before": _list_counters(reading),
                }
                for reading, name in zip(self._before, names, strict=True)
            ],
        }

    def _list_numbers(self, time_s: float, readings: Sequence[Reading]) -> list[Any]:
        return [
            round(max(0.0, time_s - self._start_s), 3),
            *(
                [
                    reading.allocated_bytes,
                    reading.reserved_bytes,
                    reading.allocated_peak_bytes,
                    reading.reserved_peak_bytes,
                    mark_peak(reading.peak_is),
                ]
                for reading in readings
            ),
        ]

    def _list_points(self) -> list[list[Any]]:
        samples = self._monitor.history.samples(since_s=self._start_s)
        devices = [each.device for each in self._before]
        points = []
        for sample in samples[:: len(samples) // _MOST_POINTS + 1]:
            readings = self._select(sample.readings)
            if [each.device for each in readings] == devices:
                points.append(self._list_numbers(sample.time_s, readings))
        return points


def _list_counters(reading: Reading) -> list[int | None]:
    return [reading.allocated_bytes, reading.reserved_bytes]


def _outline(reading: Reading) -> CellDevice:
    """A device as the report will show it if it does anything: the page fills in the numbers.

    The counters move by a byte, so that there is a chart. malloc's count may be missing from one
    reading and be there in the next: so it counts as known.
    """

    def span(now: int | None, peak: int | None) -> Span:
        start = now or 0
        return Span(start, start + 1, None if peak is None else start + 1)

    return CellDevice(
        device=reading.device,
        allocated=span(reading.allocated_bytes, reading.allocated_peak_bytes),
        reserved=span(reading.reserved_bytes, reading.reserved_peak_bytes),
        peak_is=None if reading.peak_is is None else "exact",
        num_alloc_retries=0,
        num_ooms=0,
    )
