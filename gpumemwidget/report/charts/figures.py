"""A traced cell over time as plotly's figure, to zoom into and to save."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from gpumemwidget.model.devices import rank_device
from gpumemwidget.model.traces import CellTrace, DeviceTrace
from gpumemwidget.report.charts.timeline import (
    choose_ticks,
    choose_top,
    describe_device,
    list_bands,
    thin_timeline,
)
from gpumemwidget.report.render.markup import escape
from gpumemwidget.report.render.palette import BAND_COLORS, PEAK_COLOR, RESERVED_COLOR
from gpumemwidget.report.render.text import cut
from gpumemwidget.report.render.wording import name_reserved
from gpumemwidget.units import format_bytes

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

_DEVICE_PIXELS = 280
#: Number of stretches of time, of each of which a few moments are drawn.
_N_STRETCHES = 100
#: Maximum number of characters of a line's code in the legend.
_MAX_CODE = 32


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
        height=60 + _DEVICE_PIXELS * len(devices),
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
    kept = thin_timeline(timeline, _N_STRETCHES)
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
        code = escape(cut(band.layer.text or "", _MAX_CODE)).replace("&quot;", '"')
        name = f"{escape(band.label)} · {format_bytes(band.at_peak_bytes)}"
        name += f"<br><i>{code.replace('%{', '%&#123;')}</i>" if code else ""
        add(name, band.layer.held_bytes, BAND_COLORS[band.key], device.device)
    add(name_reserved(device.device), timeline.reserved_bytes, RESERVED_COLOR)
    peak_bytes = timeline.allocated_bytes[timeline.peak]
    figure.add_scatter(
        x=[timeline.times_s[timeline.peak]],
        y=[peak_bytes],
        mode="markers+text",
        text=f"peak {format_bytes(peak_bytes)}",
        textposition="top center",
        marker={"color": PEAK_COLOR, "size": 8, "symbol": "diamond"},
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
