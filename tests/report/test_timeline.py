"""The timeline of a traced cell: exact where it can be seen, small, and readable by everybody."""

from __future__ import annotations

import dataclasses
import html
import json
import re

import pytest

from gpumemwidget.model.traces import CellTrace, Layer, Origin, Timeline
from gpumemwidget.report.charts.figures import figure_trace, plot_devices
from gpumemwidget.report.charts.timeline import (
    TimelineChart,
    choose_scale,
    choose_ticks,
    thin_timeline,
)
from gpumemwidget.report.render.palette import RESERVED_COLOR
from gpumemwidget.report.render.wording import name_origin
from tests.report.examples import GIB, HOSTILE, MIB
from tests.report.trace_examples import (
    make_lines_device,
    make_trace,
    make_two_gpu_trace,
)


def _make_timeline(
    layers: dict[str, list[int]], times: list[float] | None = None, **changes: object
) -> Timeline:
    drawn = []
    for label, held in layers.items():
        line = int(label[5:]) if label.startswith("line ") else None
        origin = Origin.LINE if line else Origin(label)
        drawn.append(Layer(origin, "", line, tuple(held)))
    allocated = tuple(map(sum, zip(*(layer.held_bytes for layer in drawn), strict=True)))
    n = len(allocated)
    times_s = tuple(times or map(float, range(n)))
    peak = max(range(n), key=allocated.__getitem__)
    timeline = Timeline(times_s, allocated, allocated, tuple(drawn), peak)
    return dataclasses.replace(timeline, **changes)  # type: ignore[arg-type]


def _plot(timeline: Timeline, duration_s: float) -> TimelineChart:
    return TimelineChart(make_lines_device([("x", None)], timeline=timeline), duration_s)


def _list_paths(html: str) -> list[str]:
    """The paths of the bands, from the top down."""
    return re.findall(r'<path class="gmw-k\w" d="([^"]*)"', html)


def test_bands_are_steps_on_top_of_each_other() -> None:
    """Each is drawn to its upper edge, the highest first, and holds until the next moment."""
    timeline = _make_timeline({"before the cell": [100, 100, 100], "line 2": [0, 300, 100]})

    html = _plot(timeline, 4.0).to_html()

    assert _list_paths(html) == ["M0 400V300H243V0H485V200H1000V400", "M0 400V300H1000V400"]
    assert "<title>line 2</title>" in html
    assert '<path class="gmw-p" d="M243 0V400"/>' in html


def test_reserved_is_a_line() -> None:
    """In steps, too."""
    timeline = _make_timeline({"line 1": [100, 200, 400]}, reserved_bytes=(400, 400, 800))

    assert 'class="gmw-v" d="M0 200H485V0H1000"' in _plot(timeline, 4.0).to_html()


def test_reserved_far_above_is_off_the_scale_and_says_so() -> None:
    """Else the lines would be too thin to be told apart."""
    timeline = _make_timeline({"line 1": [0, 100 * MIB]}, reserved_bytes=(9 * GIB, 9 * GIB))

    chart = _plot(timeline, 1.0)

    assert choose_scale(timeline) == (0, 200 * MIB)
    assert "<em>above the scale</em>" in chart.to_html()


@pytest.mark.parametrize(
    ("low", "top", "ticks"),
    [
        (0, 1, [0, 1]),
        (0, 4 * GIB, [0, GIB, 2 * GIB, 3 * GIB, 4 * GIB]),
        (743 * MIB, 1986 * MIB, [n * 256 * MIB for n in range(3, 8)]),
        (1000, 1001, [1000, 1001]),
        (5, 5, [5, 5]),
    ],
)
def test_ticks_are_few_and_round(low: int, top: int, ticks: list[int]) -> None:
    """Wherever the scale begins."""
    assert choose_ticks(top, low) == ticks


def test_time_is_drawn_from_the_start_to_a_little_beyond_the_end() -> None:
    """A step at the very end has a width, in the chart and in the figure; the end is the cell's."""
    timeline = _make_timeline({"before the cell": [8, 8, 8], "line 1": [0, 0, 8]}, [0.0, 2.0, 4.0])
    trace = make_trace(make_lines_device([("x", None)], timeline=timeline))

    html = _plot(timeline, 4.0).to_html()
    figure = figure_trace(trace)

    assert _list_paths(html)[0] == "M0 400V200H971V0H1000V400"
    assert "<span>0 s</span> <span>4.00 s</span></div>" in html
    assert figure.layout.xaxis.range[0] == 0
    assert figure.data[1].x[-1] == pytest.approx(figure.layout.xaxis.range[1])
    assert figure.data[1].y[-1] == 8


def test_thinning_keeps_extremes_and_what_stands_after() -> None:
    """Of ten thousand moments the peak, the lowest, and the level of each plateau."""
    n = 10_000
    held = [(i * 7919) % 1000 for i in range(n)]
    held[1234], held[5678], held[-1] = 5000, -1, 40
    timeline = _make_timeline({"line 1": held})

    kept = thin_timeline(timeline, 100)

    assert len(kept) <= 100 * 5 + 3
    assert {0, 1234, 5678, n - 1} <= set(kept)
    for stretch in range(100):
        inside = range(stretch * 100, stretch * 100 + 100)
        shown = [timeline.allocated_bytes[i] for i in kept if i in inside]
        known = [timeline.allocated_bytes[i] for i in inside]
        assert (min(shown), max(shown), shown[-1]) == (min(known), max(known), known[-1])


def test_a_colour_has_its_line_in_the_legend_and_under_the_pointer() -> None:
    """Also where the page strips SVG, the names and the sizes remain; what is no line's is grey."""
    names = ("before the cell", "other lines", "outside the lines", "line 12", "line 7")
    timeline = _make_timeline({name: [MIB, 2 * MIB] for name in names})
    layers = (*timeline.layers[:4], dataclasses.replace(timeline.layers[4], text="x = 1"))

    html = _plot(dataclasses.replace(timeline, layers=layers), 4.0).to_html()

    assert "<title>line 7 x = 1</title>" in html
    without = re.sub(r"<svg.*?</svg>", "", html)
    assert "line 7 <code>x = 1</code></span> <strong>2.00 MiB" in without
    assert re.findall(r"gmw-sq gmw-k(\w)", without) == ["1", "0", "n", "o", "b"]
    assert "peak 10.00 MiB</text>" in html


# -- As plotly's figure ----------------------------------------------------------------------------


def test_figure_stacks_the_lines_and_marks_the_peak() -> None:
    """In steps, with what the pointer tells; reserved is a line, the peak a point with its size."""
    trace = make_trace()
    timeline = trace.devices[0].timeline

    figure = figure_trace(trace)

    stacked = [each for each in figure.data if each.stackgroup]
    assert [html.unescape(each.name).partition(" · ")[0] for each in stacked] == [
        name_origin(layer.origin, layer.line) for layer in timeline.layers
    ]
    assert {each.line.shape for each in stacked} == {"hv"}
    two = next(each for each in stacked if each.name.startswith("line 2 · "))
    assert two.name == "line 2 · 77.05 MiB<br><i>step(data, target)</i>"
    assert "step(data, target)" in two.hovertemplate
    place = list(two.x).index(round(timeline.times_s[timeline.peak], 6))
    assert two.customdata[place] == "77.05 MiB"
    reserved, peak = figure.data[-2:]
    assert (reserved.name, reserved.line.color) == ("reserved", RESERVED_COLOR)
    assert (tuple(peak.text), tuple(peak.y)) == (
        ("peak 95.19 MiB",),
        (timeline.allocated_bytes[timeline.peak],),
    )


def _make_trace_of(timeline: Timeline, duration_s: float) -> CellTrace:
    trace = make_trace(make_lines_device([("x", None)], timeline=timeline))
    return dataclasses.replace(
        trace, record=dataclasses.replace(trace.record, duration_s=duration_s)
    )


def test_pointer_tells_what_stood_and_not_what_came() -> None:
    """It takes the next point: on a level line that is one of the line, however long it is."""
    timeline = _make_timeline({"line 1": [0, 5, 2]}, [0.0, 6.0, 6.5])
    trace = _make_trace_of(timeline, 7.0)

    figure = figure_trace(trace)

    times, values = figure.data[0].x, figure.data[0].y
    assert len(times) <= 110
    assert list(times) == sorted(times)
    for wanted_s, n_bytes in ((0.1, 0), (3.0, 0), (5.9, 0), (6.1, 5), (6.4, 5), (6.6, 2)):
        nearest = min(range(len(times)), key=lambda i: abs(times[i] - wanted_s))
        assert values[nearest] == n_bytes, wanted_s


def test_axis_ends_where_the_cell_ends() -> None:
    """The trace ends a little later: what is freed then is no part of the cell."""
    timeline = _make_timeline({"line 1": [0, 5, 2]}, [0.0, 3.0, 9.0])
    trace = _make_trace_of(timeline, 4.0)

    _, end_s = figure_trace(trace).layout.xaxis.range

    assert end_s == pytest.approx(4.0, rel=0.05)


def test_figure_has_a_chart_for_each_device() -> None:
    """With its peak above."""
    both = figure_trace(make_two_gpu_trace())

    titles = [each.text for each in both.layout.annotations]
    assert titles == [
        "<b>cuda:0</b> · peak 95.19 MiB allocated, at 312.4 ms of 312.6 ms · 795 events",
        "<b>cuda:1</b> · peak at least 578.00 MiB allocated, at 208.4 ms of 312.6 ms · 12 events",
    ]
    assert {each.stackgroup for each in both.data} == {"cuda:0", "cuda:1", None}
    assert {each.yaxis for each in both.data} == {"y", "y2"}


def test_figure_is_small_and_shows_the_page() -> None:
    """It is saved with the notebook; it has no background, and ticks at round binary amounts."""
    busy = _make_timeline(
        {f"line {n}": [(i * n * 7919) % (3 * GIB) for i in range(20_000)] for n in range(1, 11)}
    )
    trace = make_trace(make_lines_device([("x", None)], timeline=busy))

    json_text = json.dumps(plot_devices(trace.devices, 1.0))
    figure = figure_trace(make_trace())

    assert len(json_text) < 150_000
    assert figure.layout.paper_bgcolor == figure.layout.plot_bgcolor == "rgba(0,0,0,0)"
    assert figure.layout.yaxis.ticktext == ("0 B", "32 MiB", "64 MiB", "96 MiB")


def test_figure_takes_no_markup_from_a_line() -> None:
    """Plotly reads some HTML, and ``%{...}`` as its own."""
    text = HOSTILE + " %{y} %{customdata}"
    timeline = _make_timeline({"line 1": [1, 2]})
    layer = dataclasses.replace(timeline.layers[0], text="'%{y}' " + text)
    timeline = dataclasses.replace(timeline, layers=(layer,))

    drawn = json.dumps(plot_devices([make_lines_device([("x", None)], timeline=timeline)], 1.0))

    assert "<script" not in drawn
    assert "\\u001b" not in drawn
    assert "%{y}" not in drawn
