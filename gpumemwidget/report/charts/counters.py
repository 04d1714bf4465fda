"""The counters of a device over one cell as a small chart.

*Allocated* is an area, *reserved* a line, and the peak a dashed line over the whole width: that it
was reached is known, but not when. Counters are sampled, so straight lines join the readings, and
what is unknown is a gap. All text stands outside of the SVG, which is stretched.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from gpumemwidget.model.cells import CellDevice, CellRecord
from gpumemwidget.model.devices import Sample
from gpumemwidget.recording.thinning import cut_evenly
from gpumemwidget.report.charts.timeline import choose_range, draw_curve, thin_stretch
from gpumemwidget.report.render.document import Picture
from gpumemwidget.report.render.markup import Html, h, join_html
from gpumemwidget.report.wording.words import format_peak, name_counters
from gpumemwidget.units import format_bytes, format_duration

#: The ``viewBox``; the chart is 56 pixels high and as wide as there is room.
_WIDTH, _HEIGHT = 600, 100
#: Number of stretches of time, of each of which the lowest and the highest reading are drawn.
_N_STRETCHES = 60

#: Seconds since the cell's start, allocated bytes, reserved bytes.
Point = tuple[float, int | None, int | None]


@dataclass(frozen=True, slots=True)
class CounterChart:
    """The chart of one device; the path of a counter that is unknown is empty."""

    device: str
    allocated_path: str
    reserved_path: str
    allocated_name: str
    reserved_name: str
    #: Height of the dashed line; ``None`` if no peak is known.
    peak_y: int | None
    #: ``"peak 3.40 GiB"``, and of what if not of *allocated*.
    peak_label: str
    low_bytes: int
    high_bytes: int
    duration_s: float
    #: Number of readings between the two ends of the cell.
    n_samples: int

    def to_html(self) -> Html:
        """Return the names and the peak above, the scale beside, the time span below the chart."""
        drawn = (
            ("gmw-a", self.allocated_path, self.allocated_name),
            ("gmw-v", self.reserved_path, self.reserved_name),
            ("gmw-p", "" if self.peak_y is None else f"M0 {self.peak_y}H{_WIDTH}", self.peak_label),
        )
        paths = [h(f"path.{key}", d=path) for key, path, _ in drawn if path]
        names = [name for _, path, name in drawn if path]
        legend = [h("span", h(f"i.{key}"), name) for key, path, name in drawn if path]
        span = format_duration(self.duration_s)
        low, high = format_bytes(self.low_bytes), format_bytes(self.high_bytes)
        svg = h(
            "svg",
            *paths,
            role="img",
            aria_label=f"{self.device} over {span}, from {low} to {high}: {', '.join(names)}",
            viewBox=f"0 0 {_WIDTH} {_HEIGHT}",
            preserveAspectRatio="none",
        )
        times = [h("span", "0 s"), h("span", span)]
        if not self.n_samples:
            times.insert(1, h("span", "too short to sample: its ends only"))
        scale = join_html([h("span", high), h("span", low), ""], " ")
        return h(
            "figure.gmw-g",
            h("figcaption", join_html([h("strong", self.device), *legend], " ")),
            h("div.gmw-b", svg, scale, h("div.gmw-x", join_html(times, " "))),
        )


@dataclass(frozen=True, slots=True)
class CounterCharts(Picture):
    """The charts of several devices, side by side where there is room."""

    charts: tuple[CounterChart, ...]

    sheet: ClassVar[str] = "counters"

    def to_html(self) -> Html:
        """Return the charts in one element."""
        return h("div.gmw-s.gmw-pic", *(chart.to_html() for chart in self.charts))


def list_points(record: CellRecord, device: CellDevice, samples: Sequence[Sample]) -> list[Point]:
    """Return the counters over the cell: at its start, at the samples within it, at its end."""
    points: list[Point] = [(0.0, device.allocated.before_bytes, device.reserved.before_bytes)]
    for sample in samples:
        time_s = sample.time_s - record.start_s
        for reading in sample.readings:
            if reading.device == device.device and 0 < time_s < record.duration_s:
                points.append((time_s, reading.allocated_bytes, reading.reserved_bytes))
    end = (record.duration_s, device.allocated.after_bytes, device.reserved.after_bytes)
    return [*points, end]


def plot_device(
    record: CellRecord, device: CellDevice, samples: Sequence[Sample]
) -> CounterChart | None:
    """Return the chart of one device of a cell; ``None`` if not one reading is known."""
    times, allocated, reserved = zip(*list_points(record, device, samples), strict=True)
    names = name_counters(device.device)
    peak_bytes, peak_of = device.allocated.peak_bytes, "peak"
    if peak_bytes is None:
        peak_bytes, peak_of = device.reserved.peak_bytes, f"peak {names.reserved}"
    known = [value for value in (*allocated, *reserved) if value is not None]
    if not known:
        return None
    peak_label = ""
    if peak_bytes is not None:
        known.append(peak_bytes)
        peak_label = f"{peak_of} {format_peak(peak_bytes, device.peak_is)}"
    low, high = choose_range(known)

    def place(n_bytes: int | None) -> int | None:
        if n_bytes is None:
            return None
        return round((1 - min(max((n_bytes - low) / (high - low), 0.0), 1.0)) * _HEIGHT)

    def draw(values: Sequence[int | None], base: int | None = None) -> str:
        stretches = cut_evenly(len(values), _N_STRETCHES)
        thinned = {place for each in stretches for place in thin_stretch(each, [values])}
        kept = sorted({0, *thinned, len(values) - 1})
        # A cell that took no time at all is all end.
        span_s = record.duration_s
        xs = [round(times[i] / span_s * _WIDTH) if span_s > 0 else _WIDTH for i in kept]
        return draw_curve(xs, [place(values[i]) for i in kept], base=base)

    return CounterChart(
        device=device.device,
        allocated_name=names.allocated,
        reserved_name=names.reserved,
        allocated_path=draw(allocated, base=_HEIGHT),
        reserved_path=draw(reserved),
        peak_y=place(peak_bytes),
        peak_label=peak_label,
        low_bytes=low,
        high_bytes=high,
        duration_s=record.duration_s,
        n_samples=len(times) - 2,
    )
