"""What of a timeline is drawn, and how: the colours of its bands, its scale, its moments.

The SVG and plotly's figure share it, so that a line has one colour in both and beside its source.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from gpumemwidget.report.sparkline import choose_range
from gpumemwidget.report.tracetheme import BAND_COLORS, QUIET_BAND_COLORS
from gpumemwidget.report.words import say_peak
from gpumemwidget.traces import DeviceTrace, Timeline
from gpumemwidget.units import format_duration

__all__ = [
    "Band",
    "Scale",
    "choose_points",
    "choose_scale",
    "choose_span",
    "describe_device",
    "list_bands",
    "map_bands",
    "thin_moments",
]

#: Reserved may stand so many times as high as the peak and still be on the scale.
_MOST_ABOVE = 2

#: Where less than this part of a cell's time holds all that happened, the rest is left out.
_SHORT_PART = 0.1
_MARGIN_PART = 0.15
#: No clock tells less apart.
_SHORTEST_S = 1e-9
#: Where something moved in the last part of the time, as much is drawn beyond its end.
_END_PART = 0.03


#: Of a figure: stretches at most, and points at most between moments that are far apart.
_MOST_STRETCHES = 500
_N_BETWEEN = 100


@dataclass(frozen=True, slots=True)
class Band:
    """One layer's look."""

    #: Its class is ``gmw-k`` and this.
    key: str
    color: str
    label: str
    text: str


@dataclass(frozen=True, slots=True)
class Scale:
    """The bytes at the bottom and at the top."""

    low_bytes: int
    high_bytes: int
    #: Whether all that is reserved is on it.
    has_reserved: bool


def describe_device(device: DeviceTrace, duration_s: float) -> tuple[str, ...]:
    """What stands above a device's timeline: its peak, when that was, how many events there are."""
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
            words.append(f"after {format_duration(after_s)} of {format_duration(duration_s)}")
    what = "event" if device.source == "history" else "reading"
    return (*words, f"{device.n_events:,} {what}{'' if device.n_events == 1 else 's'}")


def list_bands(timeline: Timeline) -> tuple[Band, ...]:
    """The look of each layer, from the bottom up: colours for lines, greys for the rest."""
    bands = []
    n_lines = 0
    for layer in timeline.layers:
        if layer.line is None:
            key = {"before the cell": "b", "other lines": "o"}.get(layer.label, "n")
            color = QUIET_BAND_COLORS[key]
        else:
            key = str(n_lines % len(BAND_COLORS))
            color = BAND_COLORS[int(key)]
            n_lines += 1
        bands.append(Band(key, color, layer.label, layer.text.strip()))
    return tuple(bands)


def map_bands(timeline: Timeline | None) -> dict[tuple[str | None, int], str]:
    """The key of each line's colour, by its unit and number."""
    if timeline is None:
        return {}
    return {
        (layer.unit, layer.line): band.key
        for layer, band in zip(timeline.layers, list_bands(timeline), strict=True)
        if layer.line is not None
    }


def choose_scale(timeline: Timeline) -> Scale:
    """From 0, or from below what stood all the time where that is most of it.

    What is reserved may be many times what is allocated; then it is off the scale, or the lines
    would be too thin to see.
    """
    allocated = timeline.allocated_bytes
    reserved = [value for value in timeline.reserved_bytes if value is not None]
    low, high = choose_range(allocated)
    top = max([high, *reserved])
    limit = low + _MOST_ABOVE * (high - low)
    return Scale(low, min(top, limit), top <= limit)


def choose_span(timeline: Timeline, duration_s: float) -> tuple[float, float]:
    """The seconds at the left and at the right: of the whole cell, or of what happened in it."""
    times = timeline.times_s
    end_s = max([duration_s, *times[-1:]])
    if end_s < _SHORTEST_S:
        return 0.0, _SHORTEST_S
    moved = [
        index
        for index in range(1, len(times))
        if timeline.allocated_bytes[index] != timeline.allocated_bytes[index - 1]
        or timeline.reserved_bytes[index] != timeline.reserved_bytes[index - 1]
    ]
    if moved:
        first_s, last_s = times[moved[0]], times[moved[-1]]
        if _SHORTEST_S < last_s - first_s < _SHORT_PART * end_s:
            margin_s = _MARGIN_PART * (last_s - first_s)
            return max(0.0, first_s - margin_s), last_s + margin_s
        if last_s > (1 - _END_PART) * end_s:
            # What the last line left behind would have no width.
            end_s = max(end_s, last_s) + _END_PART * end_s
    return 0.0, end_s


def thin_moments(timeline: Timeline, span: tuple[float, float], n_stretches: int) -> list[int]:
    """The moments to draw, at most four for each stretch of time, and the peak.

    Of each stretch the highest and the lowest are kept, the highest of what is reserved, and the
    last, which is what stands until the next stretch.
    """
    start_s, end_s = span
    if end_s <= start_s or not timeline.times_s:
        return list(range(len(timeline.times_s)))
    stretches: dict[int, list[int]] = {}
    for index, time_s in enumerate(timeline.times_s):
        inside_s = min(max(time_s, start_s), end_s) - start_s
        stretches.setdefault(int(inside_s * n_stretches / (end_s - start_s)), []).append(index)
    kept = {0, len(timeline.times_s) - 1, timeline.peak}
    for indices in stretches.values():
        kept.add(indices[-1])
        kept.update(_find_extremes(timeline.allocated_bytes, indices))
        kept.add(max(indices, key=lambda index: timeline.reserved_bytes[index] or 0))
    return sorted(index for index in kept if 0 <= index < len(timeline.times_s))


def choose_points(
    timeline: Timeline, span: tuple[float, float], most: int
) -> list[tuple[float, int]]:
    """The seconds of each point of a figure, and the moment whose amounts it has.

    A pointer tells of the point that is next to it. So there are points between moments that are
    far apart, with the amounts that stood there, and not with those that came later.

    Args:
        timeline: what is drawn.
        span: the seconds at both ends.
        most: how many points there may be.
    """
    n_stretches = _MOST_STRETCHES
    while True:
        kept = thin_moments(timeline, span, n_stretches)
        if len(kept) <= most - _N_BETWEEN or n_stretches < 10:
            break
        n_stretches = n_stretches * 3 // 4
    points = [(timeline.times_s[index], index) for index in kept]
    step_s = (span[1] - span[0]) / _N_BETWEEN
    between = []
    for (time_s, index), (next_s, _) in pairwise((*points, (span[1], 0))):
        begin_s = max(time_s, span[0])
        steps = range(1, int((next_s - begin_s) / step_s) + 1)
        between += [(begin_s + step * step_s, index) for step in steps]
    ends = [(span[1], points[-1][1])] if points and points[-1][0] < span[1] else []
    return sorted((*points, *(point for point in between if point[0] < span[1]), *ends))


def _find_extremes(values: Sequence[int], indices: Sequence[int]) -> tuple[int, int]:
    return min(indices, key=values.__getitem__), max(indices, key=values.__getitem__)
