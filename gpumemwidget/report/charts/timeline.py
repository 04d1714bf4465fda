"""A device over the time of a traced cell: a band for each line that held much at the peak.

The chart's ``viewBox`` is stretched to the room that there is, so its text stands beside it, or in
an SVG of its own that is not stretched. Memory changes in steps, and so do the bands. Each band is
drawn from the bottom to its upper edge, the highest first, so that the bands below cover it up to
their own: one edge for each in the file. *Reserved* is a line, the peak a dashed one at its moment.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from typing import ClassVar

from gpumemwidget.model.traces import DeviceTrace, Origin, Timeline
from gpumemwidget.recording.thinning import find_extremes
from gpumemwidget.report.render.document import Picture
from gpumemwidget.report.render.markup import Html, h, join_html
from gpumemwidget.report.render.palette import BAND_COLORS, N_LINE_BANDS
from gpumemwidget.report.wording.trace_notes import name_origin
from gpumemwidget.report.wording.words import cut_words, name_counters, say_peak
from gpumemwidget.units import format_bytes, format_duration

#: The ``viewBox``.
_WIDTH, _HEIGHT = 1000, 400
#: Number of stretches of time, of each of which a few moments are drawn.
_N_STRETCHES = 200
#: Maximum numbers of characters of a line's text.
_LEGEND_WIDTH, _TOOLTIP_WIDTH = 60, 200
#: Maximum number of ticks of a scale.
_N_TICKS = 5
#: A scale covers at least this part of its top, so that a rounding is not drawn as a drama.
_FINEST_PART = 200
#: Reserved memory may be this many times as high as the peak and still be on the scale.
_MAX_RESERVED_HEIGHT = 2
#: Share of the time that is drawn beyond its end if something changed so late: what the last line
#: left behind would have no width.
_END_SHARE = 0.03
#: Minimum length of a chart in seconds: no clock tells less apart.
_MIN_SPAN_S = 1e-9


# -- Scales ----------------------------------------------------------------------------------------


def choose_range(values: Iterable[int]) -> tuple[int, int]:
    """Return the bytes at the bottom and at the top of a chart.

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


@dataclass(frozen=True, slots=True)
class Scale:
    """The bytes at the bottom and at the top of a timeline."""

    low_bytes: int
    high_bytes: int
    #: All of the reserved line is on the scale.
    has_reserved: bool


def choose_scale(timeline: Timeline) -> Scale:
    """Return the scale of a timeline.

    What is reserved may be many times what is allocated; then it is off the scale, or the lines
    would be too thin to see.
    """
    low, high = choose_range(timeline.allocated_bytes)
    top = max([high, *(value for value in timeline.reserved_bytes if value is not None)])
    limit = low + _MAX_RESERVED_HEIGHT * (high - low)
    return Scale(low, min(top, limit), top <= limit)


def choose_span(timeline: Timeline, duration_s: float) -> tuple[float, float]:
    """Return the seconds at the left and at the right of a chart: the whole cell."""
    end_s = max([duration_s, *timeline.times_s[-1:], _MIN_SPAN_S])
    states = zip(timeline.allocated_bytes, timeline.reserved_bytes, strict=True)
    changes = pairwise(states)
    last_s = max(
        (time_s for time_s, (a, b) in zip(timeline.times_s[1:], changes, strict=True) if a != b),
        default=0.0,
    )
    return 0.0, end_s * (1 + _END_SHARE) if last_s > (1 - _END_SHARE) * end_s else end_s


def thin_moments(timeline: Timeline, n_stretches: int) -> list[int]:
    """Return the moments to draw, at most six for each stretch of time, and the peak."""
    times_s, columns = timeline.times_s, (timeline.allocated_bytes, timeline.reserved_bytes)
    step_s = max(times_s[-1] - times_s[0], _MIN_SPAN_S) / n_stretches
    kept = {0, timeline.peak}
    for _, group in groupby(
        range(len(times_s)), lambda place: int((times_s[place] - times_s[0]) / step_s)
    ):
        places = list(group)
        # The last one holds until the next stretch.
        kept.update((*thin_stretch(range(places[0], places[-1] + 1), columns), places[-1]))
    return sorted(kept)


def thin_stretch(stretch: range, columns: Sequence[Sequence[int | None]]) -> set[int]:
    """Return the places of the extremes of each column, and of its first unknown value."""
    kept = set(find_extremes(stretch, highest=columns, lowest=columns))
    for column in columns:
        kept.update([place for place in stretch if column[place] is None][:1])
    return kept


def draw_curve(
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
        if y is not None and x is not None:
            if run and end_x is not None:
                run.append((x, run[-1][1]))
            run.append((x, y))
        elif run:
            if end_x is not None and x is not None:
                run.append((x, run[-1][1]))
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


# -- Bands -----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Band:
    """The look of one layer."""

    #: Key of ``BAND_COLORS``; the band's class is ``gmw-k`` and this.
    key: str
    color: str
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
        label = name_origin(layer.origin, layer.line)
        bands.append(Band(key, BAND_COLORS[key], label, layer.text.strip()))
    return tuple(bands)


def map_bands(timeline: Timeline | None) -> dict[tuple[str | None, int], str]:
    """Return the key of each line's colour, by the line's unit and number."""
    if timeline is None:
        return {}
    return {
        (layer.unit, layer.line): band.key
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
    return (*words, f"{device.n_events:,} event{'' if device.n_events == 1 else 's'}")


# -- The chart -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class DrawnBand:
    """A band with its path and its amounts."""

    band: Band
    path: str
    at_peak_bytes: int
    highest_bytes: int

    @property
    def tooltip(self) -> str:
        """Words that the pointer shows."""
        text = cut_words(self.band.text, _TOOLTIP_WIDTH)
        name = self.band.label + (f": {text}" if text else "")
        return (
            f"{name} · at the peak {format_bytes(self.at_peak_bytes)} · "
            f"highest {format_bytes(self.highest_bytes)}"
        )


@dataclass(frozen=True, slots=True)
class TimelineChart(Picture):
    """The chart of one device."""

    device: str
    #: From the top down.
    bands: tuple[DrawnBand, ...]
    reserved_path: str
    reserved_name: str
    reserved_bytes: int | None
    #: All of the reserved line is on the scale.
    has_reserved: bool
    #: Shares of the width and of the height, from the left and from above.
    peak_x: float
    peak_y: float
    peak_bytes: int
    #: Share of the width from where on nothing is missing; ``None`` if all is known.
    complete_x: float | None
    #: Shares of the height from above, with their labels.
    ticks: tuple[tuple[float, str], ...]
    duration_s: float

    sheet: ClassVar[str] = "timeline"

    def to_html(self) -> Html:
        """Return the chart with its scale, its time span below and its bands' names beside it.

        Where SVG is stripped, the names of the bands and what they held at the peak remain.
        """
        middle = None
        if self.complete_x:
            middle = join_html([h("span", "shaded: what came before is lost"), ""], " ")
        return h(
            "figure.gmw-tl",
            h("div.gmw-tp.gmw-pic", self._draw_peak()),
            h("div.gmw-ty.gmw-pic", self._draw_ticks()),
            h("div.gmw-tv.gmw-pic", self._draw_bands()),
            h(
                "div.gmw-tx.gmw-pic",
                h("span", "0 s"),
                " ",
                middle,
                h("span", format_duration(self.duration_s)),
            ),
            self._render_legend(),
        )

    def _draw_bands(self) -> Html:
        # Some pages strip SVG and keep its text: the words stand apart.
        bands = join_html(
            (
                h(f"path.gmw-k{each.band.key}", h("title", each.tooltip), d=each.path)
                for each in self.bands
            ),
            " ",
        )
        lines = [h("path.gmw-ti", d=f"M0 {_scale(y)}H{_WIDTH}") for y, _ in self.ticks if y < 1]
        names = ", ".join(
            f"{each.band.label} {format_bytes(each.at_peak_bytes)}" for each in self.bands
        )
        lost = None
        if self.complete_x is not None:
            lost = h("path.gmw-co", d=f"M0 0H{round(_WIDTH * self.complete_x)}V{_HEIGHT}H0z")
        return h(
            "svg",
            *lines,
            h("g", bands),
            h("path.gmw-p", d=f"M{round(_WIDTH * self.peak_x)} 0V{_HEIGHT}"),
            h("path.gmw-v", d=self.reserved_path) if self.reserved_path else None,
            lost,
            role="img",
            aria_label=(
                f"{self.device} over the cell: peak {format_bytes(self.peak_bytes)}; "
                f"at the peak {names}"
            ),
            viewBox=f"0 0 {_WIDTH} {_HEIGHT}",
            preserveAspectRatio="none",
        )

    def _draw_peak(self) -> Html:
        """Return the peak's figure above its moment; near an edge it stands to the other side."""
        anchor = "start" if self.peak_x < 0.15 else "end" if self.peak_x > 0.85 else "middle"
        text = h(
            "text",
            f"peak {format_bytes(self.peak_bytes)}",
            x=f"{100 * self.peak_x:.3g}%",
            y=12,
            text_anchor=anchor,
        )
        return h("svg", text, width="100%", height=16, aria_hidden="true")

    def _draw_ticks(self) -> Html:
        texts = []
        for y, label in self.ticks:
            # No label may be cut at the chart's ends.
            shift = ".75em" if y < 0.04 else "0" if y > 0.97 else ".33em"
            place = f"{100 * y:.3g}%"
            texts.append(h("text", label, x="100%", y=place, dy=shift, text_anchor="end"))
        return h("svg", join_html(texts, " "), width="100%", height="100%", aria_hidden="true")

    def _render_legend(self) -> Html:
        items = []
        if self.reserved_path:
            remark = None if self.has_reserved else h("em", "above the scale")
            items.append(_render_key("gmw-sv", self.reserved_name, remark, self.reserved_bytes))
        for each in self.bands:
            band = each.band
            text = cut_words(band.text, _LEGEND_WIDTH)
            code = h("code", text) if text else None
            key = f"gmw-sq.gmw-k{band.key}"
            items.append(_render_key(key, band.label, code, each.at_peak_bytes))
        return h("ul.gmw-ul", *items)


def _render_key(key: str, label: str, remark: Html | None, n_bytes: int | None) -> Html:
    name = h("span", label, " " if remark else None, remark)
    return h("li", h(f"i.{key}"), name, " ", h("strong", format_bytes(n_bytes)))


def _scale(y: float) -> int:
    return round(_HEIGHT * y)


def plot_timeline(device: DeviceTrace, duration_s: float) -> TimelineChart | None:
    """Return the chart of one device; ``None`` if it has no timeline."""
    timeline = device.timeline
    if timeline is None or not timeline.times_s or not timeline.layers:
        return None
    span = choose_span(timeline, duration_s)
    scale = choose_scale(timeline)
    kept = thin_moments(timeline, _N_STRETCHES)
    xs = [round(_WIDTH * _place(timeline.times_s[index], span)) for index in kept]
    height = scale.high_bytes - scale.low_bytes

    def place_bytes(n_bytes: float) -> float:
        return 1 - min(max((n_bytes - scale.low_bytes) / height, 0.0), 1.0)

    drawn = []
    tops = [0] * len(kept)
    for layer, band in zip(timeline.layers, list_bands(timeline), strict=True):
        held = layer.held_bytes
        tops = [top + held[index] for top, index in zip(tops, kept, strict=True)]
        ys = [_scale(place_bytes(top)) for top in tops]
        path = draw_curve(xs, ys, base=_HEIGHT, end_x=_WIDTH)
        drawn.append(DrawnBand(band, path, held[timeline.peak], max(held)))
    reserved = [timeline.reserved_bytes[index] for index in kept]
    reserved_ys = [None if n is None else _scale(place_bytes(n)) for n in reserved]
    known = [value for value in timeline.reserved_bytes if value is not None]
    ticks = choose_ticks(scale.high_bytes, scale.low_bytes)
    complete_s = device.complete_since_s
    return TimelineChart(
        device=device.device,
        bands=tuple(each for each in reversed(drawn) if each.highest_bytes),
        reserved_path=draw_curve(xs, reserved_ys, end_x=_WIDTH),
        reserved_name=name_counters(device.device).reserved,
        reserved_bytes=max(known, default=None),
        has_reserved=scale.has_reserved,
        peak_x=_place(timeline.times_s[timeline.peak], span),
        peak_y=place_bytes(timeline.allocated_bytes[timeline.peak]),
        peak_bytes=timeline.allocated_bytes[timeline.peak],
        complete_x=None if complete_s is None else _place(complete_s, span),
        ticks=tuple((place_bytes(tick), format_tick(tick)) for tick in ticks),
        duration_s=duration_s or span[1],
    )


def _place(time_s: float, span: tuple[float, float]) -> float:
    start_s, end_s = span
    return min(max((time_s - start_s) / (end_s - start_s), 0.0), 1.0)
