"""A traced cell over time as plotly's figure.

It is made as JSON without plotly, which takes two seconds to import: nobody should wait for that at
the end of a cell, and front ends need no more than the JSON. The figure paints no background and
writes in a middle grey, so it can be read on a light and on a dark page.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from gpumemwidget.model.devices import rank_device
from gpumemwidget.model.traces import CellTrace, DeviceTrace, Timeline
from gpumemwidget.report.charts.timeline import (
    Band,
    choose_scale,
    choose_ticks,
    describe_device,
    find_end,
    format_tick,
    list_bands,
    thin_timeline,
)
from gpumemwidget.report.render.markup import escape
from gpumemwidget.report.render.palette import (
    BAND_COLORS,
    NEUTRAL_COLOR,
    PEAK_COLOR,
    RESERVED_COLOR,
)
from gpumemwidget.report.render.wording import cut_words, name_reserved
from gpumemwidget.units import format_bytes

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

_CLEAR = "rgba(0,0,0,0)"
_AXIS = {
    "gridcolor": "rgba(128,128,128,0.25)",
    "linecolor": "rgba(128,128,128,0.45)",
    "zerolinecolor": "rgba(128,128,128,0.45)",
}

_DEVICE_PIXELS, _MARGIN_PIXELS = 250, 60
#: Share of a figure's height between the charts of two devices.
_GAP = 0.12
#: Maximum number of points of all bands of a figure; one takes some 32 characters.
_MAX_POINTS = 4_000
#: Maximum number of stretches of time, and number of points at equal distances.
_MAX_STRETCHES, _N_GRID = 500, 100
#: Maximum numbers of characters of a line's code: under the pointer, and in the legend.
_HOVER_CODE, _LEGEND_CODE = 32, 22


def figure_trace(trace: CellTrace, device: str | None = None) -> Figure:
    """Return a traced cell over time: what its lines held, stacked, what was reserved, the peak.

    Memory changes in steps, and so does the figure. The pointer shows all lines of a moment.

    Args:
        trace: the traced cell.
        device: the one to draw; ``None`` for all.

    Returns:
        a chart for each device that has a timeline; an empty figure if none has.
    """
    import plotly.graph_objects as go  # noqa: PLC0415 - at the first figure

    drawn = plot_trace(trace, device)
    return go.Figure(drawn if drawn is not None else {"layout": {"template": "none"}})


def plot_trace(trace: CellTrace, device: str | None = None) -> dict[str, Any] | None:
    """Return the figure of a traced cell as JSON; ``None`` if there is no timeline."""
    drawn = [
        (each, each.timeline)
        for each in sorted(trace.devices, key=lambda one: rank_device(one.device))
        if device in (None, each.device) and each.timeline is not None and each.timeline.layers
    ]
    if not drawn:
        return None
    layout: dict[str, Any] = {
        "font": {"color": NEUTRAL_COLOR, "size": 12},
        "paper_bgcolor": _CLEAR,
        "plot_bgcolor": _CLEAR,
        # Light text on a dark box, on every page.
        "hoverlabel": {
            "align": "left",
            "bgcolor": "rgba(38,38,38,0.94)",
            "bordercolor": "rgba(128,128,128,0.6)",
            "font": {"color": "#f2f2f2", "size": 12},
        },
        "height": _MARGIN_PIXELS + _DEVICE_PIXELS * len(drawn),
        "margin": {"l": 70, "r": 10, "t": 28, "b": 32},
        "modebar": {
            "bgcolor": _CLEAR,
            "color": "rgba(128,128,128,0.7)",
            "activecolor": NEUTRAL_COLOR,
        },
        "hovermode": "x unified",
        "dragmode": "zoom",
        "showlegend": True,
        "annotations": [],
    }
    data: list[dict[str, Any]] = []
    height = (1 - _GAP * (len(drawn) - 1)) / len(drawn)
    for row, (each, timeline) in enumerate(drawn):
        number = "" if row == 0 else str(row + 1)
        top = round(1 - row * (height + _GAP), 4)
        end_s = find_end(timeline, trace.record.duration_s)
        max_points = _MAX_POINTS // len(drawn) // (len(timeline.layers) + 1)
        points = _choose_points(timeline, end_s, max_points)
        data.extend(_draw_device(each, timeline, points, number))
        layout[f"xaxis{number}"] = {
            **_AXIS,
            "range": [0, end_s],
            "anchor": f"y{number}",
            "hoverformat": ".4~f",
            "ticksuffix": " s",
            # plotly's own line under the pointer is white on dark.
            "spikecolor": NEUTRAL_COLOR,
            "spikethickness": 1,
            "spikedash": "dot",
        }
        low_bytes, high_bytes = choose_scale(timeline)
        # Round binary amounts: plotly's own ticks would be decimal.
        ticks = choose_ticks(high_bytes, low_bytes)
        layout[f"yaxis{number}"] = {
            **_AXIS,
            "tickmode": "array",
            "tickvals": ticks,
            "ticktext": [format_tick(tick) for tick in ticks],
            # The peak's figure stands above its point.
            "range": [low_bytes, high_bytes + 0.12 * (high_bytes - low_bytes)],
            "domain": [max(round(top - height, 4), 0), top],
            "anchor": f"x{number}",
        }
        layout[f"legend{number}"] = {
            "x": 1.01,
            "y": top,
            "yanchor": "top",
            "traceorder": "reversed",
            "bgcolor": _CLEAR,
        }
        words = (f"<b>{escape(each.device)}</b>", *describe_device(each, trace.record.duration_s))
        layout["annotations"].append(
            {
                "text": " · ".join(words),
                "x": 0,
                "xref": "paper",
                "xanchor": "left",
                "y": top,
                "yref": "paper",
                "yanchor": "bottom",
                "showarrow": False,
            }
        )
    return {"data": data, "layout": layout}


def _choose_points(timeline: Timeline, end_s: float, max_points: int) -> list[tuple[float, int]]:
    """Return the seconds of each point, and the moment whose amounts it has.

    The pointer tells of the nearest point. So there are points at equal distances too, with the
    amounts that held then, and not those that came later.
    """
    n_stretches = _MAX_STRETCHES
    kept = thin_timeline(timeline, n_stretches)
    while len(kept) > max_points - _N_GRID and n_stretches >= 10:
        n_stretches = n_stretches * 3 // 4
        kept = thin_timeline(timeline, n_stretches)
    times_s = [timeline.times_s[place] for place in kept]
    grid_s = [end_s * step / _N_GRID for step in range(1, _N_GRID + 1)]
    between = [
        (time_s, kept[bisect_right(times_s, time_s) - 1])
        for time_s in grid_s
        if time_s >= times_s[0]
    ]
    return sorted([*zip(times_s, kept, strict=True), *between])


def _draw_device(
    device: DeviceTrace, timeline: Timeline, points: Sequence[tuple[float, int]], number: str
) -> list[dict[str, Any]]:
    common: dict[str, Any] = {
        "type": "scatter",
        "x": [round(time_s, 6) for time_s, _ in points],
        "mode": "lines",
        "xaxis": f"x{number}",
        "yaxis": f"y{number}",
        "legend": f"legend{number}",
    }

    def draw(values: Sequence[int | None], width: float, color: str) -> dict[str, Any]:
        picked = [values[place] for _, place in points]
        return {
            **common,
            "y": picked,
            "customdata": [format_bytes(each) for each in picked],
            "line": {"shape": "hv", "width": width, "color": color},
        }

    traces = [
        {
            **draw(layer.held_bytes, 0.5, BAND_COLORS[band.key]),
            **_name_band(band, layer.held_bytes[timeline.peak]),
            "stackgroup": device.device,
            # Opacity of 0.8.
            "fillcolor": f"{BAND_COLORS[band.key]}cc",
        }
        for layer, band in zip(timeline.layers, list_bands(timeline), strict=True)
        if any(layer.held_bytes)
    ]
    if any(value is not None for value in timeline.reserved_bytes):
        traces.append(
            {
                **draw(timeline.reserved_bytes, 1.5, RESERVED_COLOR),
                "name": name_reserved(device.device),
                "hovertemplate": "%{customdata}",
            }
        )
    return [*traces, {**common, **_mark_peak(device, timeline)}]


def _name_band(band: Band, at_peak_bytes: int) -> dict[str, str]:
    """Return the legend's entry (the line, its bytes at the peak, its code) and the tooltip."""
    label = escape(band.label)
    name, told = f"{label} · {format_bytes(at_peak_bytes)}", f"{label}: %{{customdata}}"
    if band.text:
        name += f"<br><i>{_escape_code(band.text, _LEGEND_CODE)}</i>"
        told += f"  {_escape_code(band.text, _HOVER_CODE)}"
    return {"name": name, "hovertemplate": f"{told}<extra></extra>"}


def _escape_code(text: str, max_length: int) -> str:
    """Return the beginning of a line of code without what plotly would take for its own."""
    # plotly shows `&quot;` as it is.
    words = escape(cut_words(text, max_length)).replace("&quot;", '"')
    return words.replace("%{", "%&#123;")


def _mark_peak(device: DeviceTrace, timeline: Timeline) -> dict[str, Any]:
    peak_bytes = timeline.allocated_bytes[timeline.peak]
    is_late = timeline.times_s[timeline.peak] > 0.8 * timeline.times_s[-1]
    words = f"peak {format_bytes(peak_bytes)}"
    if device.allocated.peak_bytes not in (None, peak_bytes):
        words = f"{words} of what is known"
    return {
        "x": [round(timeline.times_s[timeline.peak], 6)],
        "y": [peak_bytes],
        "name": "peak",
        "mode": "markers+text",
        "text": [words],
        "textposition": "top left" if is_late else "top right",
        "textfont": {"color": PEAK_COLOR},
        "marker": {"color": PEAK_COLOR, "size": 8, "symbol": "diamond"},
        "hoverinfo": "skip",
        "showlegend": False,
    }
