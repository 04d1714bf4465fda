"""A device over the time of a cell: its counters, or if it was traced a band for each line.

A chart's ``viewBox`` is stretched to the room that there is, so its text stands beside it, or in an
SVG of its own that is not stretched. Amounts change in steps: each holds until the next is known.

Counters are sampled, and what is unknown is a gap. Their peak is a dashed line over the whole
width: that it was reached is known, but not when.

Of what lines hold, each band is drawn from the bottom to its upper edge, the highest first, so that
the bands below cover it up to their own: one edge for each in the file. The peak is a dashed line
at its moment.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import cycle, groupby, starmap
from typing import TYPE_CHECKING, ClassVar

from gpumemwidget.model.devices import Sample, rank_device
from gpumemwidget.model.processes import DevicePeak
from gpumemwidget.model.traces import (
    MAX_LINE_LAYERS,
    CellTrace,
    DeviceTrace,
    Layer,
    Origin,
    Timeline,
)
from gpumemwidget.recording.history import find_extremes
from gpumemwidget.report.render.blocks import Picture
from gpumemwidget.report.render.markup import Html, escape, h, join_html
from gpumemwidget.report.render.palette import BAND_COLORS, COLORS
from gpumemwidget.report.render.text import LONG_WIDTH, SHORT_WIDTH, cut
from gpumemwidget.report.render.wording import (
    count,
    name_origin,
    name_reserved,
    name_traced,
    say_peak,
)
from gpumemwidget.units import format_bytes, format_duration

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

#: The ``viewBox`` of the counters, which are 56 pixels high, and of the bands.
_COUNTERS_WIDTH, _COUNTERS_HEIGHT = 600, 100
_WIDTH, _HEIGHT = 1000, 400
#: Number of stretches of time, of each of which a few moments are drawn.
_N_COUNTERS_STRETCHES, _N_STRETCHES = 30, 200
#: Maximum number of charts of counters in a report: each takes a part of the screen's height.
MOST_CHARTS = 16
#: Minimum length of a chart in seconds: no clock is finer.
_MIN_SPAN_S = 1e-9


# -- Scales ----------------------------------------------------------------------------------------


def choose_ticks(top: int) -> list[int]:
    """Return 0 and multiples of the smallest power of two that gives few of them up to the top."""
    step = 1
    while top // step >= 5:
        step *= 2
    return [*range(0, top + 1, step)]


def choose_top(timeline: Timeline) -> int:
    """Return the bytes at the top of a timeline, which begins at 0.

    What is reserved may be many times what is allocated; then it is off the scale, or the lines
    would be too thin to see.
    """
    high = max(timeline.allocated_bytes, default=0) or 1
    return min(max(high, *timeline.reserved_bytes), 2 * high)


def _find_place(value: float, top: float) -> float:
    """Return the share of a scale from 0 to its top at which a value stands, at most 1."""
    return min(max(value / top, 0.0), 1.0)


def _thin_moments(
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
    return sorted({timeline.peak, *_thin_moments(timeline.times_s, columns, n_stretches)})


def _draw_steps(points: Sequence[tuple[int, int | None]], end: int, base: int | None = None) -> str:
    """Return steps as an SVG path to ``end``, with a gap where a height is unknown.

    With ``base``, the bottom of an area, each piece is closed to it.
    """
    path, last = "", None
    for x, y in points:
        if last is None and y is not None:
            path += f"M{x} {y}" if base is None else f"M{x} {base}V{y}"
        elif last is not None and y is None:
            path += f"H{x}" if base is None else f"H{x}V{base}"
        elif y != last:
            path += f"H{x}V{y}"
        last = y
    if last is None:
        return path
    return f"{path}H{end}" if base is None else f"{path}H{end}V{base}"


# -- Counters --------------------------------------------------------------------------------------

#: Seconds since the first sample, allocated bytes, reserved bytes.
CounterPoint = tuple[float, int | None, int | None]


@dataclass(frozen=True, slots=True)
class CounterCharts(Picture):
    """The counters of several devices, side by side where there is room."""

    #: The peak of each device, and its points.
    devices: tuple[tuple[DevicePeak, tuple[CounterPoint, ...]], ...]

    sheet: ClassVar[str] = "counters"

    def to_html(self) -> Html:
        """Return the charts in one element."""
        return h("div.gmw-s.gmw-pic", *starmap(_draw_counters, self.devices))


def draw_counters(peaks: Iterable[DevicePeak], samples: Sequence[Sample]) -> list[CounterCharts]:
    """Return the charts of these devices as one picture, from the first to the last sample.

    A device without a sample between these two has no chart: the table says as much.
    """
    found = []
    for peak in peaks:
        points = tuple(
            (sample.time_s - samples[0].time_s, reading.allocated_bytes, reading.reserved_bytes)
            for sample in samples
            for reading in sample.readings
            if reading.device == peak.device
        )
        is_known = any(n_bytes is not None for _, *amounts in points for n_bytes in amounts)
        if len(points) > 2 and points[-1][0] > 0 and is_known:
            found.append((peak, points))
    return [CounterCharts(tuple(found))] if found else []


def _draw_counters(peak: DevicePeak, points: Sequence[CounterPoint]) -> Html:
    times_s, allocated, reserved = zip(*points, strict=True)
    peak_bytes, peak_label = peak.allocated_bytes, "peak"
    if peak_bytes is None:
        peak_bytes, peak_label = peak.reserved_bytes, f"peak {name_reserved(peak.device)}"
    peak_label += f" {say_peak(peak_bytes, peak.peak_is)}"
    high = max(n_bytes or 0 for n_bytes in (*allocated, *reserved, peak_bytes)) or 1
    kept = _thin_moments(times_s, (allocated, reserved), _N_COUNTERS_STRETCHES)
    xs = [round(times_s[place] / times_s[-1] * _COUNTERS_WIDTH) for place in kept]

    def find_height(n_bytes: int | None) -> int | None:
        if n_bytes is None:
            return None
        return round((1 - _find_place(n_bytes, high)) * _COUNTERS_HEIGHT)

    def draw(values: Sequence[int | None], base: int | None = None) -> str:
        heights = [find_height(values[place]) for place in kept]
        return _draw_steps(list(zip(xs, heights, strict=True)), _COUNTERS_WIDTH, base)

    peak_y = find_height(peak_bytes)
    gap = ".gmw-gap" if None in allocated else ""
    drawn = [
        (f"gmw-a{gap}", draw(allocated, base=_COUNTERS_HEIGHT), "allocated"),
        # The line around an area would fall to 0 at both sides of a gap.
        ("gmw-al", draw(allocated) if gap else "", ""),
        ("gmw-v", draw(reserved), name_reserved(peak.device)),
        ("gmw-p", "" if peak_y is None else f"M0 {peak_y}H{_COUNTERS_WIDTH}", peak_label),
    ]
    drawn = [(key, path, name) for key, path, name in drawn if path]
    span, bottom, top = format_duration(times_s[-1]), format_bytes(0), format_bytes(high)
    svg = h(
        "svg",
        *(h(f"path.{key}", d=path) for key, path, _ in drawn),
        role="img",
        aria_label=f"{peak.device} over {span}, from {bottom} to {top}",
        viewBox=f"0 0 {_COUNTERS_WIDTH} {_COUNTERS_HEIGHT}",
        preserveAspectRatio="none",
    )
    legend = [h("span", h(f"i.{key}"), name) for key, _, name in drawn if name]
    times = join_html([h("span", "0 s"), h("span", span)], " ")
    scale = join_html([h("span", top), h("span", bottom), ""], " ")
    return h(
        "figure.gmw-g",
        h("figcaption", join_html([h("strong", peak.device), *legend], " ")),
        h("div.gmw-b", svg, scale, h("div.gmw-x", times)),
    )


# -- Bands -----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Band:
    """A layer of a timeline, and its look."""

    #: Key of ``BAND_COLORS``; the band's class is ``gmw-k`` and this.
    key: str
    #: ``line 3``, or words for memory that is no line's.
    label: str
    layer: Layer
    #: Bytes that the layer held at the peak.
    at_peak_bytes: int


def list_bands(timeline: Timeline) -> tuple[Band, ...]:
    """Return the bands from the bottom up: colours for lines, greys for the rest."""
    colors = cycle(map(str, range(MAX_LINE_LAYERS)))
    greys = {Origin.BEFORE_CELL: "b", Origin.OTHER_LINES: "o"}
    return tuple(
        Band(
            greys.get(layer.origin, "n") if layer.line is None else next(colors),
            name_origin(layer.origin, layer.line, traced=name_traced(timeline)),
            layer,
            layer.held_bytes[timeline.peak],
        )
        for layer in timeline.layers
    )


def map_bands(timeline: Timeline) -> dict[int, str]:
    """Return the key of the colour of each line of the cell, by its number."""
    return {
        band.layer.line: band.key for band in list_bands(timeline) if band.layer.line is not None
    }


def _name_moment(timeline: Timeline, moment: float) -> str:
    if timeline.unit == "operators":
        return f"operator {round(moment):,}"
    return format_duration(moment) if moment else "0 s"


def describe_device(device: DeviceTrace, duration_s: float) -> tuple[str, str]:
    """Return the words above a device's timeline: its peak with its time, the number of events."""
    timeline = device.timeline
    peak_bytes = device.allocated.peak_bytes
    words = f"peak {say_peak(peak_bytes, device.peak_is)} allocated"
    if peak_bytes == timeline.allocated_bytes[timeline.peak]:
        after = _name_moment(timeline, timeline.times_s[timeline.peak])
        end = _name_moment(timeline, duration_s).removeprefix("operator ")
        words += f", at {after} of {end}"
    return words, count(device.n_events, "event")


@dataclass(frozen=True, slots=True)
class TimelineChart(Picture):
    """The chart of one device over a cell of some duration."""

    device: DeviceTrace
    duration_s: float

    sheet: ClassVar[str] = "timeline"

    def to_html(self) -> Html:
        """Return the chart with its scale, its time span below and its bands' names beside it.

        Where SVG is stripped, the names of the bands and what they held at the peak remain.
        """
        timeline = self.device.timeline
        high = choose_top(timeline)
        ticks = [
            (1 - _find_place(tick, high), format_bytes(tick).replace(".00", ""))
            for tick in choose_ticks(high)
        ]
        # What comes after the cell's end is left out: the trace ends a little later.
        end_s = max(self.duration_s, timeline.times_s[timeline.peak], _MIN_SPAN_S)
        # A little beyond the end: what the last line left behind would have no width.
        end_s *= 1.03
        peak_x = _find_place(timeline.times_s[timeline.peak], end_s)
        peak = f"peak {format_bytes(timeline.allocated_bytes[timeline.peak])}"
        # Near an edge the figure stands to the other side of its moment.
        anchor = "start" if peak_x < 0.15 else "end" if peak_x > 0.85 else "middle"
        words = h("text", peak, x=f"{100 * peak_x:.3g}%", y=12, text_anchor=anchor)
        start, end = (h("span", _name_moment(timeline, at)) for at in (0.0, self.duration_s))
        return h(
            "figure.gmw-tl",
            h("div.gmw-tp.gmw-pic", h("svg", words, width="100%", height=16, aria_hidden="true")),
            h("div.gmw-ty.gmw-pic", _draw_ticks(ticks)),
            h(
                "div.gmw-tv.gmw-pic",
                h(
                    "svg",
                    *(h("path.gmw-ti", d=f"M0 {round(_HEIGHT * y)}H{_WIDTH}") for y, _ in ticks),
                    *self._draw_bands(high, end_s),
                    h("path.gmw-p", d=f"M{round(_WIDTH * peak_x)} 0V{_HEIGHT}"),
                    role="img",
                    aria_label=f"{self.device.device} over the {name_traced(timeline)}: {peak}",
                    viewBox=f"0 0 {_WIDTH} {_HEIGHT}",
                    preserveAspectRatio="none",
                ),
            ),
            h("div.gmw-tx.gmw-pic", start, " ", end),
            self._render_legend(high),
        )

    def _draw_bands(self, high: int, end_s: float) -> Iterator[Html]:
        timeline = self.device.timeline
        kept = thin_timeline(timeline, _N_STRETCHES)
        xs = [round(_WIDTH * _find_place(timeline.times_s[place], end_s)) for place in kept]

        def draw(values: Iterable[int], base: int | None = None) -> str:
            ys = [round(_HEIGHT * (1 - _find_place(n_bytes, high))) for n_bytes in values]
            return _draw_steps(list(zip(xs, ys, strict=True)), _WIDTH, base)

        paths = []
        tops = [0] * len(kept)
        for band in list_bands(timeline):
            held = band.layer.held_bytes
            tops = [top + held[place] for top, place in zip(tops, kept, strict=True)]
            text = f"{band.label} {cut(band.layer.text, LONG_WIDTH)}".rstrip()
            paths.append(h(f"path.gmw-k{band.key}", h("title", text), d=draw(tops, _HEIGHT)))
        # Some pages strip SVG and keep its text: the words stand apart.
        yield h("g", join_html(reversed(paths), " "))
        yield h("path.gmw-v", d=draw(timeline.reserved_bytes[place] for place in kept))

    def _render_legend(self, high: int) -> Html:
        reserved_bytes = max(self.device.timeline.reserved_bytes)
        remark = h("em", "above the scale") if reserved_bytes > high else None
        name = name_reserved(self.device.device)
        items = [_render_key("gmw-sv", name, remark, reserved_bytes)]
        for band in reversed(list_bands(self.device.timeline)):
            text = cut(band.layer.text, SHORT_WIDTH)
            code = h("code", text) if text else None
            items.append(
                _render_key(f"gmw-sq.gmw-k{band.key}", band.label, code, band.at_peak_bytes)
            )
        return h("ul.gmw-ul", *items)


def _draw_ticks(ticks: Iterable[tuple[float, str]]) -> Html:
    """Return the labels beside a chart, from the shares of its height at which they stand."""
    texts = []
    for y, label in ticks:
        # No label may be cut at the chart's ends.
        shift = ".75em" if y < 0.04 else "0" if y > 0.97 else ".33em"
        place = f"{100 * y:.3g}%"
        texts.append(h("text", label, x="100%", y=place, dy=shift, text_anchor="end"))
    return h("svg", join_html(texts, " "), width="100%", height="100%", aria_hidden="true")


def _render_key(key: str, label: str, remark: Html | None, n_bytes: int) -> Html:
    name = h("span", label, " " if remark else None, remark)
    return h("li", h(f"i.{key}"), name, " ", h("strong", format_bytes(n_bytes)))


# -- plotly's figure, to zoom into and to save -----------------------------------------------------


def figure_trace(trace: CellTrace) -> Figure:
    """Return a traced cell over time, a chart for each device.

    The bands are what its lines held; the pointer shows all of them at a moment.
    """
    from plotly.subplots import make_subplots  # noqa: PLC0415 - takes two seconds

    devices = sorted(trace.devices, key=lambda device: rank_device(device.device))
    duration_s = trace.record.duration_s
    titles = [
        " · ".join((f"<b>{escape(device.device)}</b>", *describe_device(device, duration_s)))
        for device in devices
    ]
    figure = make_subplots(rows=len(devices), cols=1, subplot_titles=titles)
    for row, device in enumerate(devices, 1):
        _add_device(figure, device, row)
    figure.update_layout(
        height=60 + 280 * len(devices),
        hovermode="x unified",
        # Without a background it can be read on a light and on a dark page.
        paper_bgcolor="rgba(0,0,0,0)",
        plot_bgcolor="rgba(0,0,0,0)",
        font_color="#808080",
        legend_traceorder="reversed",
    )
    return figure


def _add_device(figure: Figure, device: DeviceTrace, row: int) -> None:
    """Add the bands of a device, what was reserved, and the peak."""
    timeline = device.timeline
    kept = thin_timeline(timeline, 100)
    times_s = [timeline.times_s[place] for place in kept]

    def add(name: str, values: Sequence[int], color: str, stack: str | None = None) -> None:
        picked = [values[place] for place in kept]
        figure.add_scatter(
            x=times_s,
            y=picked,
            name=name,
            stackgroup=stack,
            line={"shape": "hv", "width": 0.5 if stack else 1.5, "color": color},
            customdata=[format_bytes(n_bytes) for n_bytes in picked],
            hovertemplate="%{customdata}",
            row=row,
            col=1,
        )

    for band in list_bands(timeline):
        # plotly would take `%{` for its own, and shows `&quot;` as it is.
        code = escape(cut(band.layer.text or "", 32)).replace("&quot;", '"')
        name = f"{escape(band.label)} · {format_bytes(band.at_peak_bytes)}"
        name += f"<br><i>{code.replace('%{', '%&#123;')}</i>" if code else ""
        add(name, band.layer.held_bytes, BAND_COLORS[band.key], device.device)
    add(name_reserved(device.device), timeline.reserved_bytes, COLORS["reserved"])
    peak_bytes = timeline.allocated_bytes[timeline.peak]
    figure.add_scatter(
        x=[timeline.times_s[timeline.peak]],
        y=[peak_bytes],
        mode="markers+text",
        text=f"peak {format_bytes(peak_bytes)}",
        textposition="top center",
        marker={"color": COLORS["peak"], "size": 8, "symbol": "diamond"},
        hoverinfo="skip",
        showlegend=False,
        row=row,
        col=1,
    )
    top = choose_top(timeline)
    # Round binary amounts: plotly's own ticks would be decimal.
    ticks = choose_ticks(top)
    figure.update_yaxes(
        tickvals=ticks,
        ticktext=[format_bytes(tick) for tick in ticks],
        range=[0, 1.12 * top],
        row=row,
        col=1,
    )
    figure.update_xaxes(ticksuffix=" s", row=row, col=1)
