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
from gpumemwidget.report.render.blocks import Picture
from gpumemwidget.report.render.markup import Html, h, join_html
from gpumemwidget.report.wording.words import name_counters, say_peak
from gpumemwidget.units import format_bytes, format_duration

#: The ``viewBox``; the chart is 56 pixels high and as wide as there is room.
_WIDTH, _HEIGHT = 600, 100
#: Number of stretches of time, of each of which the lowest and the highest reading are drawn.
_N_STRETCHES = 60

#: Seconds since the cell's start, allocated bytes, reserved bytes.
Point = tuple[float, int | None, int | None]


@dataclass(frozen=True, slots=True)
class CounterCharts(Picture):
    """The charts of several devices, side by side where there is room."""

    charts: tuple[CounterChart, ...]

    sheet: ClassVar[str] = "counters"

    def to_html(self) -> Html:
        """Return the charts in one element."""
        return h("div.gmw-s.gmw-pic", *(chart.to_html() for chart in self.charts))


def plot_device(
    record: CellRecord, device: CellDevice, samples: Sequence[Sample]
) -> CounterChart | None:
    """Return the chart of one device of a cell; ``None`` if not one reading is known.

    Samples from outside of the cell are left out.
    """
    points: list[Point] = [(0.0, device.allocated.before_bytes, device.reserved.before_bytes)]
    for sample in samples:
        time_s = sample.time_s - record.start_s
        for reading in sample.readings:
            if reading.device == device.device and 0 < time_s < record.duration_s:
                points.append((time_s, reading.allocated_bytes, reading.reserved_bytes))
    end = (record.duration_s, device.allocated.after_bytes, device.reserved.after_bytes)
    points.append(end)
    if all(n_bytes is None for _, *amounts in points for n_bytes in amounts):
        return None
    return CounterChart(device, tuple(points))


@dataclass(frozen=True, slots=True)
class CounterChart:
    """The chart of one device."""

    device: CellDevice
    #: At the cell's start, at the samples within it, at its end.
    points: tuple[Point, ...]

    def to_html(self) -> Html:
        """Return the names and the peak above, the scale beside, the time span below the chart."""
        times_s, allocated, reserved = zip(*self.points, strict=True)
        peak_bytes, peak_label = self._find_peak()
        amounts = (*allocated, *reserved, peak_bytes)
        low, high = choose_range(n_bytes for n_bytes in amounts if n_bytes is not None)

        def place(n_bytes: int | None) -> int | None:
            if n_bytes is None:
                return None
            return round((1 - min(max((n_bytes - low) / (high - low), 0.0), 1.0)) * _HEIGHT)

        def draw(values: Sequence[int | None], base: int | None = None) -> str:
            stretches = cut_evenly(len(values), _N_STRETCHES)
            thinned = {index for each in stretches for index in thin_stretch(each, [values])}
            kept = sorted({0, *thinned, len(values) - 1})
            # A cell that took no time at all is all end.
            span_s = times_s[-1]
            xs = [round(times_s[i] / span_s * _WIDTH) if span_s > 0 else _WIDTH for i in kept]
            return draw_curve(xs, [place(values[i]) for i in kept], base=base)

        names = name_counters(self.device.device)
        peak_y = place(peak_bytes)
        drawn = [
            ("gmw-a", draw(allocated, base=_HEIGHT), names.allocated),
            ("gmw-v", draw(reserved), names.reserved),
            ("gmw-p", "" if peak_y is None else f"M0 {peak_y}H{_WIDTH}", peak_label),
        ]
        drawn = [(key, path, name) for key, path, name in drawn if path]
        span, bottom, top = format_duration(times_s[-1]), format_bytes(low), format_bytes(high)
        listed = ", ".join(name for _, _, name in drawn)
        svg = h(
            "svg",
            *(h(f"path.{key}", d=path) for key, path, _ in drawn),
            role="img",
            aria_label=f"{self.device.device} over {span}, from {bottom} to {top}: {listed}",
            viewBox=f"0 0 {_WIDTH} {_HEIGHT}",
            preserveAspectRatio="none",
        )
        legend = [h("span", h(f"i.{key}"), name) for key, _, name in drawn]
        times = [h("span", "0 s"), h("span", span)]
        if len(times_s) == 2:
            times.insert(1, h("span", "too short to sample: its ends only"))
        scale = join_html([h("span", top), h("span", bottom), ""], " ")
        return h(
            "figure.gmw-g",
            h("figcaption", join_html([h("strong", self.device.device), *legend], " ")),
            h("div.gmw-b", svg, scale, h("div.gmw-x", join_html(times, " "))),
        )

    def _find_peak(self) -> tuple[int | None, str]:
        """Return the peak, of *reserved* where *allocated* has none, and its words."""
        peak_bytes, words = self.device.allocated.peak_bytes, "peak"
        if peak_bytes is None:
            peak_bytes = self.device.reserved.peak_bytes
            words = f"peak {name_counters(self.device.device).reserved}"
        if peak_bytes is None:
            return None, ""
        return peak_bytes, f"{words} {say_peak(peak_bytes, self.device.peak_is)}"
