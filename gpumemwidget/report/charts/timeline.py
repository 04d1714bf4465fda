"""A device over the time of a cell: its counters, or if it was traced a band for each line.

A chart's ``viewBox`` is stretched to the room that there is, so its text stands beside it, or in an
SVG of its own that is not stretched. *Reserved* is a line.

Counters are sampled, so straight lines join the readings, and what is unknown is a gap. The peak is
a dashed line over the whole width: that it was reached is known, but not when.

What lines hold changes in steps, and so do their bands. Each band is drawn from the bottom to its
upper edge, the highest first, so that the bands below cover it up to their own: one edge for each
in the file. The peak is a dashed line at its moment.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from typing import ClassVar

from gpumemwidget.model.cells import CellDevice, CellRecord
from gpumemwidget.model.devices import Sample
from gpumemwidget.model.traces import DeviceTrace, Origin, Timeline
from gpumemwidget.recording.history import find_extremes
from gpumemwidget.report.render.blocks import Picture
from gpumemwidget.report.render.markup import Html, h, join_html
from gpumemwidget.report.render.palette import N_LINE_BANDS
from gpumemwidget.report.render.wording import (
    count,
    cut_words,
    name_origin,
    name_reserved,
    say_peak,
)
from gpumemwidget.units import format_bytes, format_duration

#: The ``viewBox`` of the counters, which are 56 pixels high, and of the bands.
_COUNTERS_WIDTH, _COUNTERS_HEIGHT = 600, 100
_WIDTH, _HEIGHT = 1000, 400
#: Number of stretches of time, of each of which a few moments are drawn.
_N_COUNTERS_STRETCHES, _N_STRETCHES = 40, 200
#: Maximum numbers of characters of a line's text.
_LEGEND_WIDTH, _TOOLTIP_WIDTH = 60, 200
#: Maximum number of ticks of a scale.
_N_TICKS = 5
#: A scale covers at least this part of its top, so that a rounding is not drawn as a drama.
_FINEST_PART = 200
#: Reserved memory may be this many times as high as the peak and still be on the scale.
_MAX_RESERVED_HEIGHT = 2
#: Share of the time that is drawn beyond its end: what the last line left behind would have no
#: width.
_END_SHARE = 0.03
#: Minimum length of a chart in seconds: no clock tells less apart.
_MIN_SPAN_S = 1e-9


# -- Scales ----------------------------------------------------------------------------------------


def choose_range(values: Iterable[int]) -> tuple[int, int]:
    """Return the bytes at the bottom and at the top of a chart of these values.

    The bottom is 0 unless everything happens in the upper half: then it is a little below the
    lowest value, so that an area still has a body.
    """
    known = list(values)
    low, high = min(known, default=0), max(known, default=0)
    if high <= 0:
        return 0, 1
    if low <= high / 2 or low == high:
        return 0, high
    span = max(high - low, high // _FINEST_PART)
    return max(high - span - span // 5, 0), high


def choose_ticks(top: int, low: int = 0) -> list[int]:
    """Return multiples of the smallest power of two that gives few of them, or the two ends."""
    step = 1
    while (top - low) // step >= _N_TICKS:
        step *= 2
    ticks = list(range(-(-low // step) * step, top + 1, step))
    return ticks if len(ticks) > 1 else [low, top]


def format_tick(n_bytes: int) -> str:
    """Return the label of a tick: ``2 GiB``, ``1.50 GiB``."""
    return format_bytes(n_bytes).replace(".00", "")


def choose_scale(timeline: Timeline) -> tuple[int, int]:
    """Return the bytes at the bottom and at the top of a timeline.

    What is reserved may be many times what is allocated; then it is off the scale, or the lines
    would be too thin to see.
    """
    low, high = choose_range(timeline.allocated_bytes)
    top = max([high, *_list_reserved(timeline)])
    return low, min(top, low + _MAX_RESERVED_HEIGHT * (high - low))


def _list_reserved(timeline: Timeline) -> list[int]:
    return [value for value in timeline.reserved_bytes if value is not None]


def find_end(timeline: Timeline, duration_s: float) -> float:
    """Return the seconds at the right edge of a chart, whose left edge is the cell's start."""
    return max([duration_s, *timeline.times_s[-1:], _MIN_SPAN_S]) * (1 + _END_SHARE)


def thin_moments(
    times_s: Sequence[float], columns: Sequence[Sequence[int | None]], n_stretches: int
) -> list[int]:
    """Return the places of the moments to draw, at most seven for each stretch of time.

    They are the extremes of each of two columns, its first unknown value, and the last moment,
    which holds until the next stretch.
    """
    step_s = max(times_s[-1] - times_s[0], _MIN_SPAN_S) / n_stretches
    kept = {0}
    for _, group in groupby(
        range(len(times_s)), lambda place: int((times_s[place] - times_s[0]) / step_s)
    ):
        places = list(group)
        stretch = range(places[0], places[-1] + 1)
        kept.update((*find_extremes(stretch, highest=columns, lowest=columns), places[-1]))
        for column in columns:
            kept.update([place for place in stretch if column[place] is None][:1])
    return sorted(kept)


def thin_timeline(timeline: Timeline, n_stretches: int) -> list[int]:
    """Return the moments of a timeline to draw, the peak among them."""
    columns = (timeline.allocated_bytes, timeline.reserved_bytes)
    return sorted({timeline.peak, *thin_moments(timeline.times_s, columns, n_stretches)})


def _draw_curve(
    xs: Sequence[int],
    ys: Sequence[int | None],
    *,
    base: int | None = None,
    end_x: int | None = None,
) -> str:
    """Return a curve as an SVG path, with a gap where a value is unknown.

    Args:
        xs: ascending places.
        ys: heights; ``None`` is unknown.
        base: the bottom of an area, to which each piece is closed; ``None`` draws a line.
        end_x: draws steps, each value holding until the next one, and the last until here.
            ``None`` draws straight lines between the values.
    """
    pieces: list[str] = []
    run: list[tuple[int, int]] = []
    for x, y in (*zip(xs, ys, strict=True), (end_x, None)):
        if run and end_x is not None and x is not None:
            run.append((x, run[-1][1]))
        if y is not None and x is not None:
            run.append((x, y))
        elif run:
            pieces.append(_draw_run(run, base))
            run = []
    return "".join(pieces)


def _draw_run(run: Sequence[tuple[int, int]], base: int | None) -> str:
    # A point on a level line, or on an upright one, changes nothing.
    corners = [run[0]]
    for corner, following in pairwise((*run[1:], (None, None))):
        x, y = corner
        if not (corners[-1][1] == y == following[1] or corners[-1][0] == x == following[0]):
            corners.append((x, y))  # type: ignore[arg-type]  # only the last pair has none
    if len(corners) == 1 or corners[0] == corners[-1]:
        # A point alone would not be seen: a short dash.
        corners = [corners[0], (corners[0][0] + 2, corners[0][1])]
    x, y = corners[0]
    path = f"M{x} {y}" if base is None else f"M{x} {base}V{y}"
    for (x, y), (next_x, next_y) in pairwise(corners):
        if y == next_y:
            path += f"h{next_x - x}"
        elif x == next_x:
            path += f"v{next_y - y}"
        else:
            path += f"l{next_x - x} {next_y - y}".replace(" -", "-")
    return path if base is None else f"{path}V{base}"


# -- Counters --------------------------------------------------------------------------------------

#: Seconds since the cell's start, allocated bytes, reserved bytes.
CounterPoint = tuple[float, int | None, int | None]


@dataclass(frozen=True, slots=True)
class CounterCharts(Picture):
    """The charts of several devices, side by side where there is room."""

    charts: tuple[CounterChart, ...]

    sheet: ClassVar[str] = "counters"

    def to_html(self) -> Html:
        """Return the charts in one element."""
        return h("div.gmw-s.gmw-pic", *(chart.to_html() for chart in self.charts))


def plot_counters(
    record: CellRecord, device: CellDevice, samples: Sequence[Sample]
) -> CounterChart | None:
    """Return the chart of one device of a cell; ``None`` if not one reading is known.

    Samples from outside of the cell are left out.
    """
    points: list[CounterPoint] = [
        (0.0, device.allocated.before_bytes, device.reserved.before_bytes)
    ]
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
    points: tuple[CounterPoint, ...]

    def to_html(self) -> Html:
        """Return the names and the peak above, the scale beside, the time span below the chart."""
        times_s, allocated, reserved = zip(*self.points, strict=True)
        peak_bytes, peak_label = self._find_peak()
        amounts = (*allocated, *reserved, peak_bytes)
        low, high = choose_range(n_bytes for n_bytes in amounts if n_bytes is not None)

        kept = thin_moments(times_s, (allocated, reserved), _N_COUNTERS_STRETCHES)
        # A cell that took no time at all is all end.
        span_s = times_s[-1]
        xs = [round((times_s[i] / span_s if span_s > 0 else 1) * _COUNTERS_WIDTH) for i in kept]

        def place(n_bytes: int | None) -> int | None:
            if n_bytes is None:
                return None
            return round(
                (1 - min(max((n_bytes - low) / (high - low), 0.0), 1.0)) * _COUNTERS_HEIGHT
            )

        def draw(values: Sequence[int | None], base: int | None = None) -> str:
            return _draw_curve(xs, [place(values[i]) for i in kept], base=base)

        peak_y = place(peak_bytes)
        drawn = [
            ("gmw-a", draw(allocated, base=_COUNTERS_HEIGHT), "allocated"),
            ("gmw-v", draw(reserved), name_reserved(self.device.device)),
            ("gmw-p", "" if peak_y is None else f"M0 {peak_y}H{_COUNTERS_WIDTH}", peak_label),
        ]
        drawn = [(key, path, name) for key, path, name in drawn if path]
        span, bottom, top = format_duration(times_s[-1]), format_bytes(low), format_bytes(high)
        listed = ", ".join(name for _, _, name in drawn)
        svg = h(
            "svg",
            *(h(f"path.{key}", d=path) for key, path, _ in drawn),
            role="img",
            aria_label=f"{self.device.device} over {span}, from {bottom} to {top}: {listed}",
            viewBox=f"0 0 {_COUNTERS_WIDTH} {_COUNTERS_HEIGHT}",
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
            words = f"peak {name_reserved(self.device.device)}"
        if peak_bytes is None:
            return None, ""
        return peak_bytes, f"{words} {say_peak(peak_bytes, self.device.peak_is)}"


# -- Bands -----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Band:
    """The look of one layer."""

    #: Key of ``BAND_COLORS``; the band's class is ``gmw-k`` and this.
    key: str
    label: str
    text: str


def list_bands(timeline: Timeline) -> tuple[Band, ...]:
    """Return the look of each layer, from the bottom up: colours for lines, greys for the rest."""
    bands = []
    n_lines = 0
    for layer in timeline.layers:
        if layer.line is None:
            key = {Origin.BEFORE_CELL: "b", Origin.OTHER_LINES: "o"}.get(layer.origin, "n")
        else:
            key = str(n_lines % N_LINE_BANDS)
            n_lines += 1
        bands.append(Band(key, name_origin(layer.origin, layer.line), layer.text.strip()))
    return tuple(bands)


def map_bands(timeline: Timeline | None) -> dict[int, str]:
    """Return the key of the colour of each line of the cell, by its number."""
    if timeline is None:
        return {}
    return {
        layer.line: band.key
        for layer, band in zip(timeline.layers, list_bands(timeline), strict=True)
        if layer.line is not None
    }


def describe_device(device: DeviceTrace, duration_s: float) -> tuple[str, ...]:
    """Return the words above a device's timeline: its peak with its time, the number of events."""
    timeline = device.timeline
    words = []
    if timeline is not None:
        drawn_bytes = timeline.allocated_bytes[timeline.peak]
        peak_bytes, peak_is = device.allocated.peak_bytes, device.peak_is
        if peak_bytes is None:
            peak_bytes, peak_is = drawn_bytes, "sampled"
        words.append(f"peak {say_peak(peak_bytes, peak_is)} allocated")
        if peak_bytes == drawn_bytes:
            after_s = timeline.times_s[timeline.peak]
            words[-1] += f", at {format_duration(after_s)} of {format_duration(duration_s)}"
    return (*words, count(device.n_events, "event"))


# -- The chart -------------------------------------------------------------------------------------


def plot_timeline(device: DeviceTrace, duration_s: float) -> TimelineChart | None:
    """Return the chart of one device; ``None`` if it has no timeline."""
    timeline = device.timeline
    if timeline is None or not timeline.times_s or not timeline.layers:
        return None
    end_s = find_end(timeline, duration_s)
    return TimelineChart(device, timeline, duration_s or end_s, end_s, *choose_scale(timeline))


@dataclass(frozen=True, slots=True)
class TimelineChart(Picture):
    """The chart of one device."""

    device: DeviceTrace
    timeline: Timeline
    duration_s: float
    #: Seconds at the right edge.
    end_s: float
    #: Bytes at the bottom and at the top.
    low_bytes: int
    high_bytes: int

    sheet: ClassVar[str] = "timeline"

    def to_html(self) -> Html:
        """Return the chart with its scale, its time span below and its bands' names beside it.

        Where SVG is stripped, the names of the bands and what they held at the peak remain.
        """
        end = h("span", format_duration(self.duration_s))
        return h(
            "figure.gmw-tl",
            h("div.gmw-tp.gmw-pic", self._draw_peak()),
            h("div.gmw-ty.gmw-pic", self._draw_ticks()),
            h("div.gmw-tv.gmw-pic", self._draw_bands()),
            h("div.gmw-tx.gmw-pic", h("span", "0 s"), " ", end),
            self._render_legend(),
        )

    def _place_time(self, time_s: float) -> float:
        """Return the share of the width at which a moment stands."""
        return min(max(time_s / self.end_s, 0.0), 1.0)

    def _place_bytes(self, n_bytes: int) -> float:
        """Return the share of the height, from above, at which an amount stands."""
        height = self.high_bytes - self.low_bytes
        return 1 - min(max((n_bytes - self.low_bytes) / height, 0.0), 1.0)

    def _list_ticks(self) -> list[tuple[float, str]]:
        ticks = choose_ticks(self.high_bytes, self.low_bytes)
        return [(self._place_bytes(tick), format_tick(tick)) for tick in ticks]

    def _list_shown(self) -> list[tuple[Band, int]]:
        """Return the bands that ever held something and their bytes at the peak, from the top."""
        timeline = self.timeline
        shown = [
            (band, layer.held_bytes[timeline.peak])
            for layer, band in zip(timeline.layers, list_bands(timeline), strict=True)
            if any(layer.held_bytes)
        ]
        return shown[::-1]

    def _draw_bands(self) -> Html:
        timeline = self.timeline
        kept = thin_timeline(timeline, _N_STRETCHES)
        xs = [round(_WIDTH * self._place_time(timeline.times_s[place])) for place in kept]

        def draw(values: Sequence[int | None], base: int | None = None) -> str:
            ys = [None if n is None else round(_HEIGHT * self._place_bytes(n)) for n in values]
            return _draw_curve(xs, ys, base=base, end_x=_WIDTH)

        paths = []
        tops = [0] * len(kept)
        for layer, band in zip(timeline.layers, list_bands(timeline), strict=True):
            held = layer.held_bytes
            if any(held):
                tops = [top + held[place] for top, place in zip(tops, kept, strict=True)]
                title = h("title", _describe_band(band, held[timeline.peak], max(held)))
                paths.append(h(f"path.gmw-k{band.key}", title, d=draw(tops, _HEIGHT)))
        reserved = draw([timeline.reserved_bytes[place] for place in kept])
        ticks = [round(_HEIGHT * y) for y, _ in self._list_ticks() if y < 1]
        peak_x = round(_WIDTH * self._place_time(timeline.times_s[timeline.peak]))
        names = ", ".join(f"{band.label} {format_bytes(n)}" for band, n in self._list_shown())
        peak = format_bytes(timeline.allocated_bytes[timeline.peak])
        return h(
            "svg",
            *(h("path.gmw-ti", d=f"M0 {y}H{_WIDTH}") for y in ticks),
            # Some pages strip SVG and keep its text: the words stand apart.
            h("g", join_html(reversed(paths), " ")),
            h("path.gmw-p", d=f"M{peak_x} 0V{_HEIGHT}"),
            h("path.gmw-v", d=reserved) if reserved else None,
            role="img",
            aria_label=f"{self.device.device} over the cell: peak {peak}; at the peak {names}",
            viewBox=f"0 0 {_WIDTH} {_HEIGHT}",
            preserveAspectRatio="none",
        )

    def _draw_peak(self) -> Html:
        """Return the peak's figure above its moment; near an edge it stands to the other side."""
        x = self._place_time(self.timeline.times_s[self.timeline.peak])
        anchor = "start" if x < 0.15 else "end" if x > 0.85 else "middle"
        peak = f"peak {format_bytes(self.timeline.allocated_bytes[self.timeline.peak])}"
        text = h("text", peak, x=f"{100 * x:.3g}%", y=12, text_anchor=anchor)
        return h("svg", text, width="100%", height=16, aria_hidden="true")

    def _draw_ticks(self) -> Html:
        texts = []
        for y, label in self._list_ticks():
            # No label may be cut at the chart's ends.
            shift = ".75em" if y < 0.04 else "0" if y > 0.97 else ".33em"
            place = f"{100 * y:.3g}%"
            texts.append(h("text", label, x="100%", y=place, dy=shift, text_anchor="end"))
        return h("svg", join_html(texts, " "), width="100%", height="100%", aria_hidden="true")

    def _render_legend(self) -> Html:
        items = []
        reserved = _list_reserved(self.timeline)
        if reserved:
            remark = h("em", "above the scale") if max(reserved) > self.high_bytes else None
            name = name_reserved(self.device.device)
            items.append(_render_key("gmw-sv", name, remark, max(reserved)))
        for band, n_bytes in self._list_shown():
            code = h("code", cut_words(band.text, _LEGEND_WIDTH)) if band.text else None
            items.append(_render_key(f"gmw-sq.gmw-k{band.key}", band.label, code, n_bytes))
        return h("ul.gmw-ul", *items)


def _describe_band(band: Band, at_peak_bytes: int, highest_bytes: int) -> str:
    text = f": {cut_words(band.text, _TOOLTIP_WIDTH)}" if band.text else ""
    at_peak, highest = format_bytes(at_peak_bytes), format_bytes(highest_bytes)
    return f"{band.label}{text} · at the peak {at_peak} · highest {highest}"


def _render_key(key: str, label: str, remark: Html | None, n_bytes: int) -> Html:
    name = h("span", label, " " if remark else None, remark)
    return h("li", h(f"i.{key}"), name, " ", h("strong", format_bytes(n_bytes)))
