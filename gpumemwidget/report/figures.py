"""The plotly figures: a cell over time, traced or not, the ledger as bars, whole devices.

plotly is imported at the first figure: it takes longer to import than all the rest of us. The
figures paint no background and write in a middle grey, so they read on a light and on a dark page.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from gpumemwidget.devices import Bridge, SegmentMap
from gpumemwidget.records import CellDevice, CellRecord, Sample, Span
from gpumemwidget.report.bridgeplot import draw_bridge, draw_segments
from gpumemwidget.report.escape import escape_html
from gpumemwidget.report.pieces import sort_devices
from gpumemwidget.report.sparkline import list_points
from gpumemwidget.report.theme import (
    ALLOCATED_COLOR,
    BAD_COLOR,
    NEUTRAL_COLOR,
    PEAK_COLOR,
    RESERVED_COLOR,
    WARN_COLOR,
)
from gpumemwidget.report.ticks import choose_ticks, format_tick
from gpumemwidget.report.traceplot import place_title, plot_trace
from gpumemwidget.report.words import format_peak, name_cell, name_counters, rank_device
from gpumemwidget.traces import CellTrace
from gpumemwidget.units import UNKNOWN, format_bytes, format_change, format_duration

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

__all__ = ["figure_bridge", "figure_cell", "figure_ledger", "figure_segments", "figure_trace"]

_HEIGHT_OF_ONE = 190
_HEIGHT_OF_REST = 90


def figure_cell(record: CellRecord, samples: Sequence[Sample]) -> Figure:
    """One cell over time: allocated and reserved of each device, the peak as a dashed line.

    Args:
        record: the cell.
        samples: readings taken while it ran; others are left out. All are drawn.
    """
    devices = sort_devices(record.devices)
    figure = _make_figure([device.device for device in devices], shared_x=True)
    for row, device in enumerate(devices, 1):
        _draw_cell_device(figure, record, device, samples, row)
    title = f"{name_cell(record.execution_count)} · {record.status}"
    _finish(figure, f"{title} · {format_duration(record.duration_s)}", len(devices))
    if devices:
        figure.update_xaxes(title_text="seconds since the cell's start", row=len(devices), col=1)
    return figure


def figure_trace(trace: CellTrace, device: str | None = None) -> Figure:
    """A traced cell over time: what its lines held, stacked, what was reserved, and the peak.

    Memory moves in steps, and so does the figure. The pointer shows all lines of a moment.

    Args:
        trace: the traced cell.
        device: the one to draw; ``None`` for all.

    Returns:
        a chart for each device that has a timeline; an empty figure where none has.
    """
    import plotly.graph_objects as go  # noqa: PLC0415 - at the first figure

    drawn = plot_trace(trace, device)
    return go.Figure(drawn if drawn is not None else {"layout": {"template": "none"}})


def figure_bridge(bridge: Bridge) -> Figure:
    """A device as a bar of its parts, and what PyTorch and ``nvidia-smi`` tell of it.

    The pointer shows what a part is, and what can be done about it.
    """
    import plotly.graph_objects as go  # noqa: PLC0415 - at the first figure

    return go.Figure(draw_bridge(bridge))


def figure_segments(found: SegmentMap) -> Figure:
    """A device's blocks where they lie; the pointer shows size, owner and line."""
    import plotly.graph_objects as go  # noqa: PLC0415 - at the first figure

    return go.Figure(draw_segments(found))


def _draw_cell_device(
    figure: Figure, record: CellRecord, device: CellDevice, samples: Sequence[Sample], row: int
) -> None:
    import plotly.graph_objects as go  # noqa: PLC0415 - at the first figure

    names = name_counters(device.device)
    allocated, reserved = list_points(record, device, samples)
    values = [value for _, value in (*allocated, *reserved) if value is not None]
    for name, points, color, fill in (
        (names.reserved, reserved, RESERVED_COLOR, None),
        (names.allocated, allocated, ALLOCATED_COLOR, "tozeroy"),
    ):
        figure.add_trace(
            go.Scatter(
                x=[time_s for time_s, _ in points],
                y=[value for _, value in points],
                customdata=[format_bytes(value) for _, value in points],
                name=name,
                legendgroup=name,
                showlegend=row == 1 or name == "resident",
                mode="lines",
                line={"color": color, "width": 1.5},
                fill=fill,
                fillcolor=_fade(color),
                hovertemplate="%{customdata}",
            ),
            row=row,
            col=1,
        )
    peak_bytes, peak_of = device.allocated.peak_bytes, names.allocated
    if peak_bytes is None:
        peak_bytes, peak_of = device.reserved.peak_bytes, names.reserved
    if peak_bytes is not None:
        values.append(peak_bytes)
        peak = f"peak {peak_of} {format_peak(peak_bytes, device.peak_is)}"
        figure.add_trace(
            go.Scatter(
                x=[0, record.duration_s],
                y=[peak_bytes, peak_bytes],
                name="peak",
                legendgroup="peak",
                showlegend=row == 1,
                mode="lines",
                line={"color": PEAK_COLOR, "width": 1.5, "dash": "dash"},
                hovertemplate=f"{peak}<extra></extra>",
            ),
            row=row,
            col=1,
        )
    if device.is_over_budget and device.budget_bytes is not None:
        values.append(device.budget_bytes)
        _draw_budget(figure, [0, record.duration_s], [device.budget_bytes] * 2, row)
    _scale(figure, values, row)


def _draw_budget(figure: Figure, x: Sequence[float], y: Sequence[int | None], row: int) -> None:
    """What cells were allowed, in steps."""
    import plotly.graph_objects as go  # noqa: PLC0415 - at the first figure

    figure.add_trace(
        go.Scatter(
            x=x,
            y=y,
            customdata=[format_bytes(value) for value in y],
            name="budget",
            legendgroup="budget",
            showlegend=not any(trace.name == "budget" for trace in figure.data),
            mode="lines+markers",
            line={"color": WARN_COLOR, "width": 1.5, "dash": "dot", "shape": "hvh"},
            marker={"symbol": "line-ew", "size": 1},
            hovertemplate="budget %{customdata}<extra></extra>",
        ),
        row=row,
        col=1,
    )


def _fade(color: str) -> str:
    """A colour, mostly transparent; plotly 6 takes no ``#rrggbbaa``."""
    red, green, blue = (int(color[start : start + 2], 16) for start in (1, 3, 5))
    return f"rgba({red},{green},{blue},0.27)"


def figure_ledger(records: Sequence[CellRecord]) -> Figure:
    """The ledger as bars: for each device and cell the peak, and where it stood before and after.

    Args:
        records: in the order in which the cells ran. Where *allocated* has no peak (the host),
            *resident* is drawn.
    """
    names = {device.device for record in records for device in record.devices}
    devices = sorted(names, key=rank_device)
    figure = _make_figure(devices, shared_x=True)
    for row, device in enumerate(devices, 1):
        _draw_ledger_device(figure, records, device, row)
    n_cells = f"{len(records)} cell{'' if len(records) == 1 else 's'}"
    _finish(figure, f"{n_cells}: before, after and peak", len(devices))
    if not devices:
        figure.update_xaxes(visible=False)
        figure.update_yaxes(visible=False)
        return figure
    # Two runs of one cell, or two sessions, may have the same number: the place is what counts.
    figure.update_xaxes(
        tickmode="array",
        tickvals=_pick(list(range(len(records)))),
        ticktext=_pick([name_cell(record.execution_count) for record in records]),
        showgrid=False,
        zeroline=False,
    )
    return figure


def _draw_ledger_device(figure: Figure, records: Sequence[CellRecord], name: str, row: int) -> None:
    import plotly.graph_objects as go  # noqa: PLC0415 - at the first figure

    found = [
        (index, record, device)
        for index, record in enumerate(records)
        for device in record.devices
        if device.device == name
    ]
    use_reserved = all(device.allocated.peak_bytes is None for _, _, device in found)

    def choose(device: CellDevice) -> Span:
        return device.reserved if use_reserved else device.allocated

    places = [index for index, _, _ in found]
    spans = [choose(device) for _, _, device in found]
    hovers = [_describe_hover(record, device, choose(device)) for _, record, device in found]
    figure.add_trace(
        go.Bar(
            x=places,
            y=[span.peak_bytes for span in spans],
            customdata=hovers,
            name="peak",
            legendgroup="peak",
            showlegend=row == 1,
            marker={
                "color": [_choose_color(device) for _, _, device in found],
                "opacity": 0.4,
            },
            hovertemplate="%{customdata}<extra></extra>",
        ),
        row=row,
        col=1,
    )
    for what, values, symbol, color in (
        ("before", [span.before_bytes for span in spans], "circle-open", NEUTRAL_COLOR),
        ("after", [span.after_bytes for span in spans], "line-ew", ALLOCATED_COLOR),
    ):
        figure.add_trace(
            go.Scatter(
                x=places,
                y=values,
                name=what,
                legendgroup=what,
                showlegend=row == 1,
                mode="markers",
                marker={
                    "symbol": symbol,
                    "size": 7,
                    "color": color,
                    "line": {"width": 2, "color": color},
                },
                hoverinfo="skip",
            ),
            row=row,
            col=1,
        )
    drawn = [
        value
        for span in spans
        for value in (span.before_bytes, span.after_bytes, span.peak_bytes)
        if value is not None
    ]
    # Where no cell went beyond it, it says nothing that the bars are to shrink for.
    if any(device.is_over_budget for _, _, device in found):
        budgets = [device.budget_bytes for _, _, device in found]
        drawn += [value for value in budgets if value is not None]
        _draw_budget(figure, places, budgets, row)
    _scale(figure, drawn, row)
    if use_reserved:
        names = name_counters(name)
        figure.layout.annotations[row - 1].text = f"{escape_html(name)} ({names.reserved})"


def _choose_color(device: CellDevice) -> str:
    if device.stopped_at_bytes is not None:
        return BAD_COLOR
    return WARN_COLOR if device.is_over_budget else ALLOCATED_COLOR


def _describe_hover(record: CellRecord, device: CellDevice, span: Span) -> str:
    """What the pointer shows of one bar; plotly reads some HTML, so the user's text is escaped."""
    peak = UNKNOWN
    if span.peak_bytes is not None:
        peak = format_peak(span.peak_bytes, device.peak_is)
    return "<br>".join(
        (
            f"<b>{name_cell(record.execution_count)}</b> {record.status}, "
            f"{format_duration(record.duration_s)}",
            escape_html(record.first_line),
            f"peak {peak}",
            f"before {format_bytes(span.before_bytes)}, after {format_bytes(span.after_bytes)} "
            f"({format_change(span.change_bytes)})",
            *_describe_budget(device),
        )
    )


def _describe_budget(device: CellDevice) -> list[str]:
    budget = format_bytes(device.budget_bytes)
    if device.stopped_at_bytes is not None:
        return [f"stopped at {format_bytes(device.stopped_at_bytes)} by its budget of {budget}"]
    return [f"beyond its budget of {budget}"] if device.is_over_budget else []


def _make_figure(devices: Sequence[str], *, shared_x: bool) -> Figure:
    from plotly.subplots import make_subplots  # noqa: PLC0415 - at the first figure

    n_rows = max(len(devices), 1)
    return make_subplots(
        rows=n_rows,
        cols=1,
        shared_xaxes=shared_x,
        vertical_spacing=min(0.15, 0.3 / n_rows),
        subplot_titles=[escape_html(device) for device in devices] or None,
    )


def _finish(figure: Figure, title: str, n_devices: int) -> None:
    axis: dict[str, Any] = {
        "gridcolor": "rgba(128,128,128,0.25)",
        "linecolor": "rgba(128,128,128,0.45)",
        "zerolinecolor": "rgba(128,128,128,0.45)",
    }
    figure.update_xaxes(**axis)
    figure.update_yaxes(**axis)
    figure.update_layout(
        template="none",
        title=place_title(title),
        font={"color": NEUTRAL_COLOR, "size": 12},
        paper_bgcolor="rgba(0,0,0,0)",
        plot_bgcolor="rgba(0,0,0,0)",
        height=_HEIGHT_OF_REST + _HEIGHT_OF_ONE * max(n_devices, 1),
        margin={"l": 80, "r": 20, "t": 65, "b": 45},
        legend={
            "orientation": "h",
            "x": 1,
            "xanchor": "right",
            "y": 1,
            "yref": "container",
            "yanchor": "top",
        },
        hovermode="closest",
        bargap=0.25,
    )
    figure.update_annotations(x=0, xanchor="left", font={"size": 12, "color": NEUTRAL_COLOR})


def _scale(figure: Figure, values: Iterable[int], row: int) -> None:
    """A scale from 0 with ticks at round binary amounts: plotly's own would be decimal."""
    top = max([1, *values])
    ticks = choose_ticks(top)
    figure.update_yaxes(
        range=[0, top * 1.06],
        tickmode="array",
        tickvals=ticks,
        ticktext=[format_tick(tick) for tick in ticks],
        row=row,
        col=1,
    )


def _pick(items: list[Any]) -> list[Any]:
    """Few enough of the items to stand side by side."""
    step = max(1, -(-len(items) // 12))
    return items[::step]
