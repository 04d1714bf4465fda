"""The timeline of a traced cell: exact where it can be seen, small, and readable by everybody."""

from __future__ import annotations

import dataclasses

import pytest

from gpumemwidget.model.traces import Layer, Origin, Timeline
from gpumemwidget.report.charts.timeline import (
    TimelineChart,
    choose_ticks,
    choose_top,
    figure_trace,
    thin_timeline,
)
from tests.report.examples import GIB, MIB
from tests.report.trace_examples import make_lines_device, make_trace, make_two_gpu_trace


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


def test_reserved_far_above_is_off_the_scale_and_says_so() -> None:
    """Else the lines would be too thin to be told apart."""
    timeline = _make_timeline({"line 1": [0, 100 * MIB]}, reserved_bytes=(9 * GIB, 9 * GIB))

    chart = _plot(timeline, 1.0)

    assert choose_top(timeline) == 200 * MIB
    assert "<em>above the scale</em>" in chart.to_html()


@pytest.mark.parametrize(
    ("top", "ticks"),
    [
        (1, [0, 1]),
        (1000, [0, 256, 512, 768]),
        (4 * GIB, [0, GIB, 2 * GIB, 3 * GIB, 4 * GIB]),
        (1986 * MIB, [0, 512 * MIB, 1024 * MIB, 1536 * MIB]),
    ],
)
def test_ticks_are_few_and_round(top: int, ticks: list[int]) -> None:
    """The scale begins at 0."""
    assert choose_ticks(top) == ticks


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


# -- As plotly's figure ----------------------------------------------------------------------------


def test_figure_has_a_chart_for_each_device() -> None:
    """The lines are stacked, above them stand what was reserved and the peak."""
    figure = figure_trace(make_two_gpu_trace())

    stacked = {line.stackgroup for line in figure.data if line.stackgroup}
    peaks = [line.text for line in figure.data if line.mode == "markers+text"]
    assert stacked == {"cuda:0", "cuda:1"}
    assert sum(line.name == "reserved" for line in figure.data) == 2
    assert all(text.startswith("peak ") for text in peaks)
    assert len(peaks) == 2


def test_figure_takes_no_markup_from_a_line() -> None:
    """Code may have anything in it, what plotly takes for a field as well."""
    device, *_ = make_trace().devices
    layers = tuple(
        dataclasses.replace(layer, text="x = '%{y}<b>'") for layer in device.timeline.layers
    )
    timeline = dataclasses.replace(device.timeline, layers=layers)
    hostile = dataclasses.replace(
        make_trace(), devices=(dataclasses.replace(device, timeline=timeline),)
    )

    names = " ".join(line.name or "" for line in figure_trace(hostile).data)

    assert "<b>" not in names
    assert "%{" not in names
    assert "&lt;b&gt;" in names
