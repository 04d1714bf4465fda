"""A device over the time of a traced cell as SVG: a band for each line that held much at the peak.

The rules:

- The chart's ``viewBox`` is ``0 0 TIMELINE_WIDTH TIMELINE_HEIGHT``, stretched to the room that it
  has. Text stands beside it, or in an SVG of its own that is not stretched.
- Memory moves in steps, and so do the bands. Each is drawn from the bottom to its upper edge, the
  highest first, so that the ones below cover it up to their own: one edge for each in the file.
- *Reserved* is a line, the peak a dashed one across at its moment.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gpumemwidget.report.bands import Band, choose_scale, choose_span, list_bands, thin_moments
from gpumemwidget.report.escape import escape_html
from gpumemwidget.report.ticks import choose_ticks, format_tick
from gpumemwidget.report.tracetheme import TIMELINE_HEIGHT, TIMELINE_WIDTH
from gpumemwidget.report.words import cut_words, name_counters
from gpumemwidget.traces import DeviceTrace, Timeline
from gpumemwidget.units import format_bytes, format_duration

__all__ = ["TimelineChart", "plot_timeline", "render_timeline"]

#: Stretches of time, of each of which a few moments are drawn.
_N_STRETCHES = 200
#: Characters of a line's text in the legend and in a tooltip.
_LEGEND_TEXT = 60
_TOOLTIP_TEXT = 200


@dataclass(frozen=True, slots=True)
class DrawnBand:
    """A band with what is said of it."""

    band: Band
    path: str
    #: What it held at the peak.
    at_peak_bytes: int
    highest_bytes: int


@dataclass(frozen=True, slots=True)
class TimelineChart:
    """What is drawn of one device."""

    device: str
    #: From the top down.
    bands: tuple[DrawnBand, ...]
    reserved_path: str
    reserved_name: str
    reserved_bytes: int | None
    #: Whether all of the reserved line is on the scale.
    has_reserved: bool
    #: Parts of the width and of the height, from the left and from above.
    peak_x: float
    peak_y: float
    peak_bytes: int
    #: The part of the width from where on nothing is missing; ``None`` where nothing is.
    complete_x: float | None
    #: Parts of the height from above, with what stands there.
    ticks: tuple[tuple[float, str], ...]
    start_s: float
    end_s: float
    duration_s: float


def plot_timeline(device: DeviceTrace, duration_s: float) -> TimelineChart | None:
    """The chart of one device; ``None`` where it has no timeline.

    Args:
        device: what was traced.
        duration_s: how long the cell took.
    """
    timeline = device.timeline
    if timeline is None or not timeline.times_s or not timeline.layers:
        return None
    span = choose_span(timeline, duration_s)
    scale = choose_scale(timeline)
    kept = thin_moments(timeline, span, _N_STRETCHES)
    xs = [round(TIMELINE_WIDTH * _place(timeline.times_s[i], span)) for i in kept]
    height = scale.high_bytes - scale.low_bytes

    def place_bytes(n_bytes: float) -> float:
        return 1 - min(max((n_bytes - scale.low_bytes) / height, 0.0), 1.0)

    drawn = []
    tops = [0] * len(kept)
    for layer, band in zip(timeline.layers, list_bands(timeline), strict=True):
        held = layer.held_bytes
        tops = [top + held[i] for top, i in zip(tops, kept, strict=True)]
        ys = [round(TIMELINE_HEIGHT * place_bytes(top)) for top in tops]
        path = _draw_steps(xs, ys, base=TIMELINE_HEIGHT)
        drawn.append(DrawnBand(band, path, held[timeline.peak], max(held)))
    reserved = [timeline.reserved_bytes[i] for i in kept]
    ticks = choose_ticks(scale.high_bytes, scale.low_bytes)
    complete_s = device.complete_since_s
    return TimelineChart(
        device=device.device,
        bands=tuple(each for each in reversed(drawn) if each.highest_bytes),
        reserved_path=_draw_reserved(
            xs,
            [None if n is None else round(TIMELINE_HEIGHT * place_bytes(n)) for n in reserved],
        ),
        reserved_name=name_counters(device.device).reserved,
        reserved_bytes=_find_highest(timeline),
        has_reserved=scale.has_reserved,
        peak_x=_place(timeline.times_s[timeline.peak], span),
        peak_y=place_bytes(timeline.allocated_bytes[timeline.peak]),
        peak_bytes=timeline.allocated_bytes[timeline.peak],
        complete_x=None if complete_s is None else _place(complete_s, span),
        ticks=tuple((place_bytes(tick), format_tick(tick)) for tick in ticks),
        start_s=span[0],
        end_s=span[1],
        duration_s=duration_s,
    )


def _find_highest(timeline: Timeline) -> int | None:
    return max((value for value in timeline.reserved_bytes if value is not None), default=None)


def _place(time_s: float, span: tuple[float, float]) -> float:
    start_s, end_s = span
    return min(max((time_s - start_s) / (end_s - start_s), 0.0), 1.0)


def _draw_steps(xs: Sequence[int], ys: Sequence[int], *, base: int | None) -> str:
    """A path that holds each height until the next; closed at ``base``, or open at the bottom."""
    x, y = xs[0], ys[0]
    parts = [f"M{x} {y}" if base is None else f"M{x} {base}V{y}"]
    for next_x, next_y in zip(xs[1:], ys[1:], strict=True):
        if next_y != y:
            if next_x != x:
                parts.append(f"h{next_x - x}")
            parts.append(f"v{next_y - y}")
            x, y = next_x, next_y
    end = f"H{TIMELINE_WIDTH}"
    return "".join([*parts, end, "" if base is None else f"V{base}z"])


def _draw_reserved(xs: Sequence[int], ys: Sequence[int | None]) -> str:
    """The line of what is reserved; where it is not known it begins anew."""
    pieces: list[str] = []
    run: list[tuple[int, int]] = []
    for x, y in (*zip(xs, ys, strict=True), (TIMELINE_WIDTH, None)):
        if y is not None:
            run.append((x, y))
        elif run:
            path = _draw_steps([each[0] for each in run], [each[1] for each in run], base=None)
            pieces.append(path.removesuffix(f"H{TIMELINE_WIDTH}") + f"H{x}")
            run = []
    return "".join(pieces)


# -- As HTML ---------------------------------------------------------------------------------------


def render_timeline(chart: TimelineChart) -> str:
    """One ``<figure>``: the chart with its scale, its time span below, what the bands are beside.

    Where SVG is stripped, the names of the bands and what they held at the peak remain.
    """
    # Where a page strips SVG and keeps its text, the words stand apart.
    bands = " ".join(
        f'<path class="gmw-k{each.band.key}" d="{each.path}">'
        f"<title>{_describe(each)}</title></path>"
        for each in chart.bands
    )
    lines = "".join(
        f'<path class="gmw-ti" d="M0 {round(TIMELINE_HEIGHT * y)}H{TIMELINE_WIDTH}"/>'
        for y, _ in chart.ticks
        if y < 1
    )
    peak_x = round(TIMELINE_WIDTH * chart.peak_x)
    marks = f'<path class="gmw-p" d="M{peak_x} 0V{TIMELINE_HEIGHT}"/>'
    if chart.reserved_path:
        marks += f'<path class="gmw-v" d="{chart.reserved_path}"/>'
    if chart.complete_x is not None:
        x = round(TIMELINE_WIDTH * chart.complete_x)
        marks += f'<path class="gmw-co" d="M0 0H{x}V{TIMELINE_HEIGHT}H0z"/>'
    names = ", ".join(
        f"{each.band.label} {format_bytes(each.at_peak_bytes)}" for each in chart.bands
    )
    described = escape_html(
        f"{chart.device} over the cell: peak {format_bytes(chart.peak_bytes)}; at the peak {names}"
    )
    return (
        f'<figure class="gmw-tl"><div class="gmw-tp">{_render_peak(chart)}</div>'
        f'<div class="gmw-ty">{_render_ticks(chart)}</div>'
        f'<svg role="img" aria-label="{described}" viewBox="0 0 {TIMELINE_WIDTH} {TIMELINE_HEIGHT}"'
        f' preserveAspectRatio="none">{lines}<g>{bands}</g>{marks}</svg>'
        f'<div class="gmw-tx">{_render_span(chart)}</div>{_render_legend(chart)}</figure>'
    )


def _render_peak(chart: TimelineChart) -> str:
    """The peak's figure above its moment; near an edge it stands to the other side."""
    anchor = "start" if chart.peak_x < 0.15 else "end" if chart.peak_x > 0.85 else "middle"
    x = f"{100 * chart.peak_x:.3g}%"
    return (
        '<svg width="100%" height="16" aria-hidden="true">'
        f'<text x="{x}" y="12" text-anchor="{anchor}">peak {format_bytes(chart.peak_bytes)}</text>'
        "</svg>"
    )


def _render_ticks(chart: TimelineChart) -> str:
    texts = " ".join(
        f'<text x="100%" y="{100 * y:.3g}%" dy="{_shift(y)}" text-anchor="end">{label}</text>'
        for y, label in chart.ticks
    )
    return f'<svg width="100%" height="100%" aria-hidden="true">{texts}</svg>'


def _shift(y: float) -> str:
    """So that no label is cut at the chart's ends."""
    return ".75em" if y < 0.04 else "0" if y > 0.97 else ".33em"


def _render_span(chart: TimelineChart) -> str:
    start = format_duration(chart.start_s)
    end = format_duration(min(chart.end_s, chart.duration_s) or chart.end_s)
    start = "0 s" if not chart.start_s else start
    middle = ""
    if chart.complete_x is not None and chart.complete_x > 0:
        middle = "<span>shaded: what came before is lost</span> "
    elif chart.end_s - chart.start_s < 0.999 * chart.duration_s:
        middle = (
            f"<span>of {format_duration(chart.duration_s)}, in which nothing else moved</span> "
        )
    return f"<span>{start}</span> {middle}<span>{end}</span>"


def _render_legend(chart: TimelineChart) -> str:
    items = [
        _render_key(
            f"gmw-sw gmw-k{each.band.key}", each.band.label, each.band.text, each.at_peak_bytes
        )
        for each in chart.bands
    ]
    if chart.reserved_path:
        remark = "" if chart.has_reserved else "above the scale"
        items.insert(
            0, _render_key("gmw-sv", chart.reserved_name, remark, chart.reserved_bytes, code=False)
        )
    return f"<ul>{''.join(items)}</ul>"


def _render_key(key: str, label: str, text: str, n_bytes: int | None, *, code: bool = True) -> str:
    words = escape_html(cut_words(text, _LEGEND_TEXT))
    if words:
        words = f" <code>{words}</code>" if code else f" <em>{words}</em>"
    return (
        f'<li><i class="{key}"></i><span>{escape_html(label)}{words}</span> '
        f"<strong>{format_bytes(n_bytes)}</strong></li>"
    )


def _describe(drawn: DrawnBand) -> str:
    text = cut_words(drawn.band.text, _TOOLTIP_TEXT)
    words = [drawn.band.label + (f": {text}" if text else "")]
    words.append(f"at the peak {format_bytes(drawn.at_peak_bytes)}")
    words.append(f"highest {format_bytes(drawn.highest_bytes)}")
    return " · ".join(map(escape_html, words))
