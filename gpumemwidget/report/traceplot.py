"""A traced cell over time as plotly's JSON, made without plotly.

plotly takes two seconds to import, which nobody should wait for at the end of a cell; its front
ends need no more than the JSON. ``report.figures`` makes a ``Figure`` of the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from gpumemwidget.report.bands import (
    Band,
    choose_points,
    choose_scale,
    choose_span,
    describe_device,
    list_bands,
)
from gpumemwidget.report.escape import escape_html
from gpumemwidget.report.theme import NEUTRAL_COLOR, PEAK_COLOR, RESERVED_COLOR
from gpumemwidget.report.ticks import choose_ticks, format_tick
from gpumemwidget.report.words import (
    cut_words,
    format_peak,
    name_counters,
    name_record,
    rank_device,
)
from gpumemwidget.traces import CellTrace, DeviceTrace, Timeline
from gpumemwidget.units import format_bytes, format_duration

__all__ = ["CONFIG", "PLOTLY_TYPE", "place_title", "plot_trace"]

#: What JupyterLab's, Notebook's and VS Code's renderers of plotly figures listen to.
PLOTLY_TYPE = "application/vnd.plotly.v1+json"

#: What the page shows beside the figure: no logo, no button that needs a server.
CONFIG = {
    "displaylogo": False,
    "responsive": True,
    "modeBarButtons": [["zoom2d", "pan2d", "resetScale2d", "toImage"]],
}

_HEIGHT_OF_ONE = 250
_HEIGHT_OF_REST = 60
_HEIGHT_OF_TITLE = 30
_GAP_PART = 0.12

#: Points that all bands of a figure may have together; one takes some 27 characters.
_MOST_POINTS = 4_800
#: Characters of a line's text under the pointer.
_MOST_TEXT = 32

#: With the digits that the eye can tell apart.
_UNITS = ((1024**3, 4), (1024**2, 2), (1024, 2), (1, 0))
#: The line under the pointer, which is white on dark otherwise.
_SPIKE = {"spikecolor": NEUTRAL_COLOR, "spikethickness": 1, "spikedash": "dot"}
_AXIS = {
    "gridcolor": "rgba(128,128,128,0.25)",
    "linecolor": "rgba(128,128,128,0.45)",
    "zerolinecolor": "rgba(128,128,128,0.45)",
}


def plot_trace(
    trace: CellTrace, device: str | None = None, *, has_title: bool = True
) -> dict[str, Any] | None:
    """The figure as data and layout; ``None`` where there is no timeline.

    Args:
        trace: the traced cell.
        device: the one to draw; ``None`` for all.
        has_title: whether it says which cell it is of.
    """
    drawn = [
        (each, each.timeline)
        for each in sorted(trace.devices, key=lambda one: rank_device(one.device))
        if device in (None, each.device) and each.timeline is not None and each.timeline.layers
    ]
    if not drawn:
        return None
    record = trace.record
    data: list[dict[str, Any]] = []
    annotations: list[dict[str, Any]] = []
    name = escape_html(name_record(record))
    title = f"{name} · {record.status} · {format_duration(record.duration_s)}"
    layout = _start_layout(title if has_title else None, len(drawn))
    for row, (each, timeline) in enumerate(drawn):
        number = "" if row == 0 else str(row + 1)
        span = choose_span(timeline, record.duration_s)
        most = _MOST_POINTS // len(drawn) // (len(timeline.layers) + 1)
        points = choose_points(timeline, span, most)
        data.extend(_draw_device(each, timeline, points, number))
        domain = _place_row(row, len(drawn))
        layout[f"xaxis{number}"] = {
            **_AXIS,
            **_SPIKE,
            "range": list(span),
            "domain": [0, 1],
            "anchor": f"y{number}",
            "hoverformat": ".4~f",
            "ticksuffix": " s",
        }
        layout[f"yaxis{number}"] = {
            **_AXIS,
            **_scale(timeline),
            "domain": domain,
            "anchor": f"x{number}",
        }
        layout[f"legend{number}"] = _place_legend(domain)
        annotations.append(_name_device(each, record.duration_s, domain))
    layout["annotations"] = annotations
    return {"data": data, "layout": layout}


# -- One device ------------------------------------------------------------------------------------


def _draw_device(
    device: DeviceTrace, timeline: Timeline, points: Sequence[tuple[float, int]], number: str
) -> list[dict[str, Any]]:
    times = [round(time_s, 6) for time_s, _ in points]
    unit, digits = _choose_unit(timeline)

    def draw(values: Sequence[int | None]) -> dict[str, Any]:
        picked = [values[index] for _, index in points]
        return {
            "y": [None if each is None else round(each / unit, digits) for each in picked],
            "customdata": [format_bytes(each) for each in picked],
        }

    common: dict[str, Any] = {
        "type": "scatter",
        "x": times,
        "mode": "lines",
        "xaxis": f"x{number}",
        "yaxis": f"y{number}",
        "legend": f"legend{number}",
    }
    traces = []
    for layer, band in zip(timeline.layers, list_bands(timeline), strict=True):
        if not any(layer.held_bytes):
            continue
        traces.append(
            {
                **common,
                **draw(layer.held_bytes),
                "name": escape_html(band.label),
                "stackgroup": device.device,
                "line": {"shape": "hv", "width": 0.5, "color": band.color},
                "fillcolor": _fade(band.color),
                "hovertemplate": f"%{{customdata}}{_describe(band)}",
            }
        )
    names = name_counters(device.device)
    if any(value is not None for value in timeline.reserved_bytes):
        traces.append(
            {
                **common,
                **draw(timeline.reserved_bytes),
                "name": names.reserved,
                "line": {"shape": "hv", "width": 1.5, "color": RESERVED_COLOR},
                "hovertemplate": "%{customdata}",
            }
        )
    traces.append(_mark_peak(device, timeline, common, unit))
    return traces


def _describe(band: Band) -> str:
    """The line's text for the pointer; plotly takes some HTML, so it is escaped."""
    if not band.text:
        return ""
    # A percent sign and a brace would begin a part of plotly's own.
    text = escape_html(cut_words(band.text, _MOST_TEXT)).replace("%{", "%&#123;")
    return f"  {text}"


def _mark_peak(
    device: DeviceTrace, timeline: Timeline, common: dict[str, Any], unit: int
) -> dict[str, Any]:
    peak_bytes = timeline.allocated_bytes[timeline.peak]
    is_late = timeline.times_s[timeline.peak] > 0.8 * timeline.times_s[-1]
    words = format_peak(peak_bytes, None)
    if device.allocated.peak_bytes is not None and device.allocated.peak_bytes != peak_bytes:
        words = f"{words} of what is known"
    return {
        **common,
        "x": [round(timeline.times_s[timeline.peak], 6)],
        "y": [peak_bytes / unit],
        "name": "peak",
        "mode": "markers+text",
        "text": [f"peak {words}"],
        "textposition": "top left" if is_late else "top right",
        "textfont": {"color": PEAK_COLOR, "size": 12},
        "marker": {"color": PEAK_COLOR, "size": 8, "symbol": "diamond"},
        "hoverinfo": "skip",
        "showlegend": False,
    }


def _choose_unit(timeline: Timeline) -> tuple[int, int]:
    """What the numbers are in, which makes them short."""
    top = max(timeline.allocated_bytes)
    return next((each for each in _UNITS if top >= 2 * each[0]), _UNITS[-1])


def _scale(timeline: Timeline) -> dict[str, Any]:
    unit, _ = _choose_unit(timeline)
    scale = choose_scale(timeline)
    room = (scale.high_bytes - scale.low_bytes) * 0.12
    ticks = choose_ticks(scale.high_bytes, scale.low_bytes)
    return {
        "range": [scale.low_bytes / unit, (scale.high_bytes + room) / unit],
        "tickmode": "array",
        "tickvals": [tick / unit for tick in ticks],
        "ticktext": [format_tick(tick) for tick in ticks],
    }


def _fade(color: str) -> str:
    red, green, blue = (int(color[start : start + 2], 16) for start in (1, 3, 5))
    return f"rgba({red},{green},{blue},0.8)"


# -- The page --------------------------------------------------------------------------------------


def place_title(text: str) -> dict[str, Any]:
    """A figure's title, at its upper left corner."""
    return {
        "text": text,
        "font": {"size": 14},
        "x": 0,
        "xref": "paper",
        "xanchor": "left",
        "y": 1,
        "yref": "container",
        "yanchor": "top",
        "pad": {"t": 10},
    }


def _start_layout(title: str | None, n_devices: int) -> dict[str, Any]:
    height = _HEIGHT_OF_REST + _HEIGHT_OF_ONE * n_devices
    layout: dict[str, Any] = {}
    if title is not None:
        height += _HEIGHT_OF_TITLE
        layout["title"] = place_title(title)
    return {
        **layout,
        "font": {"color": NEUTRAL_COLOR, "size": 12},
        "paper_bgcolor": "rgba(0,0,0,0)",
        "plot_bgcolor": "rgba(0,0,0,0)",
        "height": height,
        "margin": {"l": 70, "r": 10, "t": 28 if title is None else 28 + _HEIGHT_OF_TITLE, "b": 32},
        "modebar": {
            "bgcolor": "rgba(0,0,0,0)",
            "color": "rgba(128,128,128,0.7)",
            "activecolor": NEUTRAL_COLOR,
        },
        "hovermode": "x unified",
        # Dark under light text, on whatever page.
        "hoverlabel": {
            "bgcolor": "rgba(38,38,38,0.94)",
            "bordercolor": "rgba(128,128,128,0.6)",
            "font": {"color": "#f2f2f2", "size": 12},
        },
        "dragmode": "zoom",
        "showlegend": True,
    }


def _place_row(row: int, n_rows: int) -> list[float]:
    """From which part of the height to which a device's chart stands, the first on top."""
    gap = _GAP_PART if n_rows > 1 else 0.0
    height = (1 - gap * (n_rows - 1)) / n_rows
    top = 1 - row * (height + gap)
    return [round(max(top - height, 0), 4), round(top, 4)]


def _place_legend(domain: Sequence[float]) -> dict[str, Any]:
    return {
        "x": 1.01,
        "xanchor": "left",
        "y": domain[1],
        "yanchor": "top",
        "traceorder": "reversed",
        "bgcolor": "rgba(0,0,0,0)",
    }


def _name_device(device: DeviceTrace, duration_s: float, domain: Sequence[float]) -> dict[str, Any]:
    words = (f"<b>{escape_html(device.device)}</b>", *describe_device(device, duration_s))
    return {
        "text": " · ".join(words),
        "x": 0,
        "xref": "paper",
        "xanchor": "left",
        "y": domain[1],
        "yref": "paper",
        "yanchor": "bottom",
        "showarrow": False,
        "font": {"size": 12, "color": NEUTRAL_COLOR},
    }
