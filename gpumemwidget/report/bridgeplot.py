"""Whole devices and their segments as plotly's JSON, made without plotly.

``report.figures`` makes figures of it. They paint no background and write in a middle grey.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from typing import Any

from gpumemwidget.devices import Bridge, BridgePart, SegmentMap
from gpumemwidget.report.bridgebar import list_leaves, plot_bridge
from gpumemwidget.report.bridgetheme import PART_COLORS, SEGMENT_LOOKS
from gpumemwidget.report.bridgewords import find_look, name_part, name_process, tell_part
from gpumemwidget.report.escape import escape_html
from gpumemwidget.report.pieces import share_cell
from gpumemwidget.report.segmentchart import MapPiece, SegmentChart, name_look, plot_segments
from gpumemwidget.report.theme import NEUTRAL_COLOR
from gpumemwidget.report.ticks import choose_ticks, format_tick
from gpumemwidget.report.traceplot import place_title
from gpumemwidget.units import format_bytes

__all__ = ["draw_bridge", "draw_segments"]

_FREE = "rgba(128,128,128,0.10)"
_REST = "rgba(128,128,128,0.35)"
_LINE = "rgba(128,128,128,0.55)"
_GRID = "rgba(128,128,128,0.25)"
_HOVER_WIDTH = 64
_MOST_PROCESSES = 8
#: Areas of a map; one takes some 120 characters.
_MOST_PIECES = 2000
_KIND_OPACITY = 0.6
_ROW_PIXELS = 16
_PIXELS_OF_BAR = 200
_PIXELS_OF_RULER = 30
#: Of a row's height.
_FILL_PART = 0.86


def draw_bridge(bridge: Bridge) -> dict[str, Any]:
    """A device as a bar of its parts, and below it what others tell of it."""
    chart = plot_bridge(bridge)
    n_rows = len(chart.rulers)
    bars: list[dict[str, Any]] = [
        {
            "name": escape_html(name_part(part, bridge.device)),
            "y": [0],
            "x": [part.n_bytes],
            "width": [1],
            "marker": {"color": _find_color(find_look(part)), "line": {"color": _LINE, "width": 1}},
            "hovertemplate": _describe(bridge, part.n_bytes, _list_lines(bridge, part)),
        }
        for part in list_leaves(bridge.parts)
    ]
    bars += [
        {
            "name": escape_html(ruler.label),
            "y": [number + 0.3],
            "x": [ruler.n_bytes],
            "width": [0.16],
            "marker": {"color": NEUTRAL_COLOR, "line": {"width": 0}},
            "showlegend": False,
            "hovertemplate": _describe(
                bridge, ruler.n_bytes, [f"<b>{ruler.label}</b>", escape_html(ruler.teller)]
            ),
        }
        for number, ruler in enumerate(chart.rulers, 1)
    ]
    layout = _start_layout(
        f"{bridge.device} · {bridge.name} · {format_bytes(bridge.total_bytes)}",
        height=_PIXELS_OF_BAR + _PIXELS_OF_RULER * n_rows,
    )
    layout.update(
        barmode="stack",
        xaxis={
            **_list_ticks(bridge.total_bytes),
            "range": [0, bridge.total_bytes],
            "gridcolor": _GRID,
            "zeroline": False,
        },
        yaxis={"range": [n_rows + 0.6, -0.55], "visible": False},
        annotations=[
            {
                "text": f"{ruler.label} <b>{format_bytes(ruler.n_bytes)}</b> · "
                f"{escape_html(ruler.teller)}",
                "x": 0,
                "xanchor": "left",
                "y": number - 0.05,
                "yanchor": "middle",
                "showarrow": False,
                "font": {"size": 11},
            }
            for number, ruler in enumerate(chart.rulers, 1)
        ],
        shapes=[
            {
                "type": "line",
                "x0": mark.n_bytes,
                "x1": mark.n_bytes,
                "y0": -0.5,
                "y1": n_rows + 0.6,
                "line": {
                    "color": NEUTRAL_COLOR,
                    "width": 2,
                    "dash": "solid" if mark.label == "limit" else "dash",
                },
            }
            for mark in chart.marks
        ],
    )
    return {"data": [{"type": "bar", "orientation": "h", **bar} for bar in bars], "layout": layout}


def _list_ticks(top: int) -> dict[str, Any]:
    ticks = choose_ticks(top)
    return {
        "tickmode": "array",
        "tickvals": ticks,
        "ticktext": [format_tick(tick) for tick in ticks],
    }


def _list_lines(bridge: Bridge, part: BridgePart) -> list[str]:
    lines = [f"<b>{escape_html(name_part(part, bridge.device))}</b>"]
    lines += [
        f"{escape_html(name_process(each.process))} {format_bytes(each.n_bytes)}"
        for each in part.parts[:_MOST_PROCESSES]
        if each.process is not None
    ]
    lines += map(escape_html, textwrap.wrap(tell_part(part, bridge), _HOVER_WIDTH))
    return lines


def _describe(bridge: Bridge, n_bytes: int, lines: list[str]) -> str:
    amount = f"{format_bytes(n_bytes)}, {share_cell(n_bytes, bridge.total_bytes).text}"
    # Plotly would read a % with braces as a place to fill.
    text = "<br>".join((lines[0], escape_html(amount), *lines[1:]))
    return text.replace("%{", "% {") + "<extra></extra>"


def _find_color(look: str) -> str:
    return PART_COLORS.get(look, _FREE if look == "free" else _REST)


def draw_segments(found: SegmentMap) -> dict[str, Any]:
    """A device's segments row by row, each block in the colour of what it is."""
    chart = plot_segments(found, most=_MOST_PIECES)
    areas: dict[str, list[tuple[float, float, float, float, str]]] = {}
    for piece in chart.pieces:
        for look, area in _list_areas(piece, chart):
            areas.setdefault(look, []).append(area)
    sums = dict(chart.looks)
    data = [
        {
            "type": "bar",
            "orientation": "h",
            "name": f"{name_look(look)} {format_bytes(sums[look])}",
            "base": [area[0] for area in areas[look]],
            "x": [area[1] for area in areas[look]],
            "y": [area[2] for area in areas[look]],
            "width": [area[3] for area in areas[look]],
            "customdata": [area[4] for area in areas[look]],
            "hovertemplate": "%{customdata}<extra></extra>",
            "marker": {
                "color": PART_COLORS[look],
                "opacity": 1 if look in SEGMENT_LOOKS else _KIND_OPACITY,
                "line": {"width": 0},
            },
        }
        for look in PART_COLORS
        if look in areas
    ]
    number = len(found.segments)
    layout = _start_layout(
        f"{found.device} · {format_bytes(found.reserved_bytes)} in {number} "
        f"segment{'' if number == 1 else 's'} · largest free block "
        f"{format_bytes(found.largest_free_block_bytes)}",
        height=150 + _ROW_PIXELS * chart.n_rows,
    )
    step = max(chart.n_rows // 8, 1)
    layout.update(
        barmode="overlay",
        xaxis={
            **_list_ticks(chart.row_bytes),
            "range": [0, chart.row_bytes],
            "showgrid": False,
            "zeroline": False,
        },
        yaxis={
            "range": [chart.n_rows - 0.5, -0.5],
            "tickmode": "array",
            "tickvals": list(range(0, chart.n_rows, step)),
            "ticktext": [
                format_tick(row * chart.row_bytes) for row in range(0, chart.n_rows, step)
            ],
            "showgrid": False,
            "zeroline": False,
        },
        shapes=[
            {
                "type": "line",
                "x0": start % chart.row_bytes,
                "x1": start % chart.row_bytes,
                "y0": start // chart.row_bytes - _FILL_PART / 2,
                "y1": start // chart.row_bytes + _FILL_PART / 2,
                "line": {"color": NEUTRAL_COLOR, "width": 2},
            }
            for start in chart.starts
        ],
    )
    return {"data": data, "layout": layout}


def _list_areas(
    piece: MapPiece, chart: SegmentChart
) -> Iterator[tuple[str, tuple[float, float, float, float, str]]]:
    """Of each row that it is in: from where, how wide, at which height, how high, what it is."""
    told = escape_html(piece.told)
    low, total = 0.0, piece.end - piece.start
    for look, n_bytes in piece.looks:
        part = n_bytes / total
        at = piece.start
        while at < piece.end:
            row = at // chart.row_bytes
            end = min(piece.end, (row + 1) * chart.row_bytes)
            # The axis points down: what is in use stands at a row's foot.
            middle = row + _FILL_PART * (0.5 - low - part / 2)
            yield (
                look,
                (
                    at % chart.row_bytes,
                    end - at,
                    round(middle, 4),
                    round(_FILL_PART * part, 4),
                    told,
                ),
            )
            at = end
        low += part


def _start_layout(title: str, *, height: int) -> dict[str, Any]:
    return {
        "title": place_title(escape_html(title)),
        "font": {"color": NEUTRAL_COLOR, "size": 12},
        "paper_bgcolor": "rgba(0,0,0,0)",
        "plot_bgcolor": "rgba(0,0,0,0)",
        "height": height,
        "margin": {"l": 70, "r": 20, "t": 50, "b": 40},
        "bargap": 0,
        "legend": {
            "orientation": "h",
            "x": 0,
            "y": -0.12,
            "yanchor": "top",
            "traceorder": "normal",
        },
        "hovermode": "closest",
        "hoverlabel": {
            "align": "left",
            "bgcolor": "rgba(38,38,38,0.94)",
            "bordercolor": "rgba(128,128,128,0.6)",
            "font": {"color": "#f2f2f2", "size": 12},
        },
    }
