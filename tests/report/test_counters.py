"""The chart's geometry: scale, thinning, gaps, and that it reaches the peak."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpumemwidget.model.cells import CellDevice, CellRecord, Span
from gpumemwidget.model.devices import Reading, Sample
from gpumemwidget.report.charts.counters import CounterChart, plot_device
from gpumemwidget.report.charts.timeline import choose_range
from tests.report.examples import GIB, MIB, make_gpu_cell

_amounts = st.integers(min_value=0, max_value=2**50)


def _make_cell(allocated: Span, reserved: Span, duration_s: float = 10.0) -> CellRecord:
    device = CellDevice("cuda:0", allocated, reserved, "exact", 0, 0)
    return make_gpu_cell(devices=(device,), start_s=100.0, duration_s=duration_s)


def _plot(record: CellRecord, *points: tuple[float, int | None, int | None]) -> CounterChart | None:
    samples = [
        Sample(100.0 + time_s, (Reading("cuda:0", allocated, reserved),))
        for time_s, allocated, reserved in points
    ]
    return plot_device(record, record.devices[0], samples)


def _list_corners(path: str) -> list[tuple[int, int]]:
    """The corners that a path goes through, in the ``viewBox``'s units."""
    corners: list[tuple[int, int]] = []
    for letter, numbers in re.findall(r"([MVlhv])([-\d ]*)", path):
        values = [int(number) for number in re.findall(r"-?\d+", numbers)]
        if letter == "M":
            corners.append((values[0], values[1]))
            continue
        x, y = corners[-1]
        first, last = values[0], values[-1]
        moved = {
            "V": (x, first),
            "h": (x + first, y),
            "v": (x, y + first),
            "l": (x + first, y + last),
        }
        corners.append(moved[letter])
    return corners


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([], (0, 1)),
        ([0, 0], (0, 1)),
        ([100, 100], (0, 100)),
        ([10, 100], (0, 100)),
        ([50, 100], (0, 100)),
        ([60, 100], (52, 100)),
        ([1000 * MIB - 1, 1000 * MIB], (994 * MIB, 1000 * MIB)),
    ],
)
def test_scale_starts_at_zero_unless_all_is_in_the_upper_half(
    values: list[int], expected: tuple[int, int]
) -> None:
    """A scale off zero leaves the area a body, and is never finer than 1/200 of its top."""
    assert choose_range(values) == expected


@given(st.lists(_amounts, max_size=20))
def test_scale_holds_every_value(values: list[int]) -> None:
    """Nothing is drawn outside, and the scale is never empty."""
    low, high = choose_range(values)

    assert 0 <= low < high
    assert all(low <= value <= high for value in values)


def test_counters_are_drawn_to_scale() -> None:
    """From its start, through a sample, to its end; the area stands on the bottom."""
    record = _make_cell(Span(GIB, 2 * GIB, 4 * GIB), Span(2 * GIB, 4 * GIB, 4 * GIB))

    chart = _plot(record, (5.0, 3 * GIB, 4 * GIB))

    assert chart is not None
    assert (chart.low_bytes, chart.high_bytes) == (0, 4 * GIB)
    assert _list_corners(chart.allocated_path) == [
        (0, 100),
        (0, 75),
        (300, 25),
        (600, 50),
        (600, 100),
    ]
    assert _list_corners(chart.reserved_path) == [(0, 50), (300, 0), (600, 0)]
    assert chart.n_samples == 1


def test_exact_peak_is_drawn_where_no_sample_saw_it() -> None:
    """The dashed line stands at the peak itself, and the scale reaches it."""
    record = _make_cell(Span(GIB, GIB, 8 * GIB), Span(2 * GIB, 2 * GIB, 2 * GIB))

    chart = _plot(record, (5.0, 4 * GIB, 2 * GIB))

    assert chart is not None
    assert chart.high_bytes == 8 * GIB
    assert chart.peak_y == 0
    assert chart.peak_label == "peak 8.00 GiB"
    assert min(y for _, y in _list_corners(chart.allocated_path)) == 50


def test_peak_of_reserved_stands_in_where_allocated_has_none() -> None:
    """Then its label says so."""
    record = _make_cell(Span(GIB, GIB, None), Span(2 * GIB, 2 * GIB, 3 * GIB))

    chart = _plot(record)

    assert chart is not None
    assert chart.peak_label == "peak reserved 3.00 GiB"


def test_unknown_peak_is_not_drawn() -> None:
    """No line and no label for what nobody measured."""
    chart = _plot(_make_cell(Span(GIB, GIB, None), Span(GIB, GIB, None)))

    assert chart is not None
    assert chart.peak_y is None
    assert chart.peak_label == ""


def test_gap_splits_the_line() -> None:
    """Nothing is drawn across a time in which nothing is known."""
    record = _make_cell(Span(GIB, GIB, GIB), Span(2 * GIB, 2 * GIB, 2 * GIB))

    chart = _plot(record, (2.0, GIB, 2 * GIB), (5.0, None, None), (8.0, GIB, 2 * GIB))

    assert chart is not None
    assert chart.reserved_path.count("M") == 2
    assert _list_corners(chart.reserved_path) == [(0, 0), (120, 0), (480, 0), (600, 0)]


def test_counter_that_is_never_known_has_no_line() -> None:
    """As *allocated* on a system whose malloc tells nothing."""
    chart = _plot(_make_cell(Span(None, None, None), Span(GIB, GIB, GIB)))

    assert chart is not None
    assert chart.allocated_path == ""
    assert chart.reserved_path != ""


def test_device_of_which_nothing_is_known_has_no_chart() -> None:
    """An empty frame would say nothing."""
    assert _plot(_make_cell(Span(None, None, None), Span(None, None, None))) is None


def test_samples_outside_the_cell_and_of_other_devices_are_left_out() -> None:
    """The chart is of this cell and this device alone."""
    record = _make_cell(Span(GIB, GIB, GIB), Span(GIB, GIB, GIB))
    other = Sample(105.0, (Reading("cuda:1", 9 * GIB, 9 * GIB),))
    outside = [Sample(when, (Reading("cuda:0", 9 * GIB, 9 * GIB),)) for when in (99.0, 111.0)]

    chart = plot_device(record, record.devices[0], [outside[0], other, outside[1]])

    assert chart is not None
    assert chart.high_bytes == GIB
    assert chart.n_samples == 0


def test_level_line_is_two_points() -> None:
    """What changes nothing is not saved with the notebook."""
    record = _make_cell(Span(GIB, GIB, GIB), Span(GIB, GIB, GIB))

    chart = _plot(record, *[(float(second), GIB, GIB) for second in range(1, 10)])

    assert chart is not None
    assert chart.reserved_path == "M0 0h600"
    assert chart.n_samples == 9


def test_point_alone_is_seen() -> None:
    """A single known reading is a short dash, not an invisible dot."""
    record = _make_cell(Span(None, None, None), Span(None, None, GIB))

    chart = _plot(record, (5.0, None, GIB))

    assert chart is not None
    assert _list_corners(chart.reserved_path) == [(300, 0), (302, 0)]


def test_cell_that_took_no_time_is_drawn() -> None:
    """A clock too coarse to see the cell is no failure."""
    chart = _plot(_make_cell(Span(0, GIB, GIB), Span(0, GIB, GIB), duration_s=0.0))

    assert chart is not None
    assert _list_corners(chart.reserved_path) == [(600, 100), (600, 0)]


@given(st.lists(st.tuples(st.none() | _amounts, st.none() | _amounts), max_size=300))
def test_paths_stay_in_the_view_and_small(values: list[tuple[int | None, int | None]]) -> None:
    """However long the cell was, its chart is small, and lies in its ``viewBox``."""
    record = _make_cell(Span(GIB, GIB, None), Span(GIB, GIB, None))
    points = [(10 * (index + 1) / (len(values) + 2), *pair) for index, pair in enumerate(values)]

    chart = _plot(record, *points)

    assert chart is not None
    for path in (chart.allocated_path, chart.reserved_path):
        assert all(0 <= x <= 602 and 0 <= y <= 100 for x, y in _list_corners(path))
        assert len(path) < 3_000
