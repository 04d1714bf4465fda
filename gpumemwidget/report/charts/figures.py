"""A traced cell over time as plotly's figure.

It is made as JSON without plotly, which takes two seconds to import: nobody should wait for that at
the end of a cell, and front ends need no more than the JSON. The figure paints no background and
writes in a middle grey, so it can be read on a light and on a dark page.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from gpumemwidget.model.devices import rank_device
from gpumemwidget.model.predictions import PredictionRecord
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
from gpumemwidget.report.render.text import cut
from gpumemwidget.report.render.wording import name_reserved
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
#: Number of stretches of time of which a few moments are drawn, and of points at equal distances;
#: several devices share them.
_N_STRETCHES, _N_GRID = 32, 100
#: Maximum numbers of characters of a line's code: under the pointer, and in the legend.
_HOVER_CODE, _LEGEND_CODE = 32, 22


def figure_trace(trace: CellTrace) -> Figure:
    """Return a traced cell over time: what its lines held, stacked, what was reserved, the peak.

    Memory changes in steps, and so does the figure. The pointer shows all lines of a moment.

    Returns:
        A chart for each device.
    """
    import plotly.graph_objects as go  # noqa: PLC0415 - at the first figure

    devices = sorted(trace.devices, key=lambda each: rank_device(each.device))
    return go.Figure(plot_devices(devices, trace.record.duration_s))


def figure_prediction(record: PredictionRecord) -> Figure:
    """Return the predicted run of a step with the peak, operator by operator."""
    import plotly.graph_objects as go  # noqa: PLC0415 - at the first figure

    trace = record.trace
    return go.Figure(plot_devices([trace], trace.timeline.times_s[-1]))


def plot_devices(devices: Sequence[DeviceTrace], duration_s: float) -> dict[str, Any]:
    """Return the figure of some devices over a cell as JSON, a chart for each, from the top."""
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
        "height": _MARGIN_PIXELS + _DEVICE_PIXELS * len(devices),
        "margin": {"l": 70, "r": 10, "t": 28, "b": 32},
        "modebar": {"bgcolor": _CLEAR, "color": NEUTRAL_COLOR},
        "hovermode": "x unified",
        "dragmode": "zoom",
        "showlegend": True,
        "annotations": [],
    }
    data: list[dict[str, Any]] = []
    height = (1 - _GAP * (len(devices) - 1)) / len(devices)
    for row, device in enumerate(devices):
        timeline = device.timeline
        number = "" if row == 0 else str(row + 1)
        top = round(1 - row * (height + _GAP), 4)
        end_s = find_end(timeline, duration_s)
        data.extend(_draw_device(device, _choose_points(timeline, end_s, len(devices)), number))
        layout[f"xaxis{number}"] = {
            **_AXIS,
            "range": [0, end_s],
            "anchor": f"y{number}",
            "hoverformat": ".4~f",
            "ticksuffix": " s" if timeline.unit == "seconds" else "",
            # plotly's own line under the pointer is white on dark.
            "spikecolor": NEUTRAL_COLOR,
            "spikethickness": 1,
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
        words = (f"<b>{escape(device.device)}</b>", *describe_device(device, duration_s))
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


def _choose_points(timeline: Timeline, end_s: float, n_devices: int) -> list[tuple[float, int]]:
    """Return the seconds of each point, and the moment whose amounts it has.

    The pointer tells of the nearest point. So there are points at equal distances too, with the
    amounts that held then, and not those that came later.
    """
    kept = thin_timeline(timeline, max(_N_STRETCHES // n_devices, 1))
    times_s = [timeline.times_s[place] for place in kept]
    n_grid = _N_GRID // n_devices + 1
    grid_s = [end_s * step / n_grid for step in range(1, n_grid + 1)]
    between = [
        (time_s, kept[bisect_right(times_s, time_s) - 1])
        for time_s in grid_s
        if time_s >= times_s[0]
    ]
    return sorted([*zip(times_s, kept, strict=True), *between])


def _draw_device(
    device: DeviceTrace, points: Sequence[tuple[float, int]], number: str
) -> Iterator[dict[str, Any]]:
    """Yield the bands of a device, what was reserved, and the peak."""
    timeline = device.timeline
    common: dict[str, Any] = {
        "type": "scatter",
        "x": [round(time_s, 6) for time_s, _ in points],
        "mode": "lines",
        "xaxis": f"x{number}",
        "yaxis": f"y{number}",
        "legend": f"legend{number}",
    }

    def draw(values: Sequence[int], width: float, color: str) -> dict[str, Any]:
        picked = [values[place] for _, place in points]
        return {
            **common,
            "y": picked,
            "customdata": [format_bytes(each) for each in picked],
            "line": {"shape": "hv", "width": width, "color": color},
        }

    for band in list_bands(timeline):
        color = BAND_COLORS[band.key]
        yield {
            **draw(band.layer.held_bytes, 0.5, color),
            **_name_band(band),
            "stackgroup": device.device,
            "fillcolor": _make_translucent(color),
        }
    yield {
        **draw(timeline.reserved_bytes, 1.5, RESERVED_COLOR),
        "name": name_reserved(device.device),
        "hovertemplate": "%{customdata}",
    }
    peak_bytes = timeline.allocated_bytes[timeline.peak]
    is_late = timeline.times_s[timeline.peak] > 0.8 * timeline.times_s[-1]
    yield {
        **common,
        "x": [round(timeline.times_s[timeline.peak], 6)],
        "y": [peak_bytes],
        "name": "peak",
        "mode": "markers+text",
        "text": [f"peak {format_bytes(peak_bytes)}"],
        "textposition": "top left" if is_late else "top right",
        "textfont": {"color": PEAK_COLOR},
        "marker": {"color": PEAK_COLOR, "size": 8, "symbol": "diamond"},
        "hoverinfo": "skip",
        "showlegend": False,
    }


def _make_translucent(color: str) -> str:
    """Return ``#rrggbb`` with an opacity of 0.8, in a form that plotly 5 accepts too."""
    red, green, blue = bytes.fromhex(color.removeprefix("#"))
    return f"rgba({red},{green},{blue},0.8)"


def _name_band(band: Band) -> dict[str, str]:
    """Return the legend's entry (the line, its bytes at the peak, its code) and the tooltip."""
    label, text = escape(band.label), band.layer.text
    name, told = f"{label} · {format_bytes(band.at_peak_bytes)}", f"{label}: %{{customdata}}"
    if text:
        name += f"<br><i>{_escape_code(text, _LEGEND_CODE)}</i>"
        told += f"  {_escape_code(text, _HOVER_CODE)}"
    return {"name": name, "hovertemplate": f"{told}<extra></extra>"}


def _escape_code(text: str, max_length: int) -> str:
    """Return the beginning of a line of code without what plotly would take for its own."""
    # plotly shows `&quot;` as it is.
    words = escape(cut(text, max_length)).replace("&quot;", '"')
    return words.replace("%{", "%&#123;")
