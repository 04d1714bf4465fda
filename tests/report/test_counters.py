"""The chart's geometry: scale, thinning, gaps, and that it reaches the peak."""

from __future__ import annotations

import re

from hypothesis import given
from hypothesis import strategies as st

from gpumemwidget.model.cells import CellDevice, CellRecord, Span
from gpumemwidget.model.devices import Reading, Sample
from gpumemwidget.report.cell import draw_cell
from gpumemwidget.report.charts.timeline import CounterCharts
from tests.report.examples import GIB, make_gpu_cell

_amounts = st.integers(min_value=0, max_value=2**50)
_STILL = Span(GIB, GIB, GIB)


def _make_cell(allocated: Span, reserved: Span, duration_s: float = 10.0) -> CellRecord:
    device = CellDevice("cuda:0", allocated, reserved, "exact", 0, 0)
    return make_gpu_cell(devices=(device,), start_s=100.0, duration_s=duration_s)


def _draw(record: CellRecord, samples: list[Sample]) -> list[CounterCharts]:
    return draw_cell(record, record.devices, samples)


def _plot(record: CellRecord, *points: tuple[float, int | None, int | None]) -> str:
    samples = [
        Sample(100.0 + time_s, (Reading("cuda:0", allocated, reserved),))
        for time_s, allocated, reserved in points
    ]
    [chart] = _draw(record, samples)
    return chart.to_html()


def _find_path(html: str, key: str) -> str:
    """The path of *allocated* (``a``), of *reserved* (``v``) or of the peak (``p``)."""
    found = re.search(rf'<path class="gmw-{key}" d="([^"]*)"', html)
    return found[1] if found else ""


def _list_corners(path: str) -> list[tuple[int, int]]:
    """The corners that a path goes through, in the ``viewBox``'s units."""
    corners: list[tuple[int, int]] = []
    for letter, numbers in re.findall(r"([MLVHh])([\d ]*)", path):
        values = [int(number) for number in numbers.split()]
        if letter in "ML":
            corners.append((values[0], values[1]))
        else:
            x, y = corners[-1]
            moved = {"V": (x, values[0]), "H": (values[0], y), "h": (x + values[0], y)}
            corners.append(moved[letter])
    return corners


def test_a_missing_sample_is_a_gap_without_walls() -> None:
    """The line of *allocated* ends where it becomes unknown, and does not fall to 0."""
    record = _make_cell(Span(GIB, GIB, None), Span(2 * GIB, 2 * GIB, None))

    html = _plot(record, (2.0, GIB, 2 * GIB), (4.0, None, None), (6.0, GIB, 2 * GIB))

    assert _find_path(html, "al") == "M0 50H240M360 50H600"
    assert 'class="gmw-a gmw-gap"' in html


def test_counters_are_drawn_to_scale() -> None:
    """From its start, through a sample, to its end; the area stands on the bottom."""
    record = _make_cell(Span(GIB, 2 * GIB, 4 * GIB), Span(2 * GIB, 4 * GIB, 4 * GIB))

    html = _plot(record, (5.0, 3 * GIB, 4 * GIB))

    area = [(0, 100), (0, 75), (300, 75), (300, 25), (600, 25), (600, 50), (600, 50), (600, 100)]
    assert "from 0 B to 4.00 GiB" in html
    assert _list_corners(_find_path(html, "a")) == area
    assert _list_corners(_find_path(html, "v")) == [(0, 50), (300, 50), (300, 0), (600, 0)]


def test_exact_peak_is_drawn_where_no_sample_saw_it() -> None:
    """The dashed line stands at the peak itself, and the scale reaches it."""
    record = _make_cell(Span(GIB, GIB, 8 * GIB), Span(2 * GIB, 2 * GIB, 2 * GIB))

    html = _plot(record, (5.0, 4 * GIB, 2 * GIB))

    assert _find_path(html, "p") == "M0 0H600"
    assert "peak 8.00 GiB" in html
    assert min(y for _, y in _list_corners(_find_path(html, "a"))) == 50


def test_samples_outside_the_cell_and_of_other_devices_are_left_out() -> None:
    """Without one of its own there is no chart: the table says what it would."""
    record = _make_cell(_STILL, _STILL)
    other = Sample(105.0, (Reading("cuda:1", 9 * GIB, 9 * GIB),))
    outside = [Sample(when, (Reading("cuda:0", 9 * GIB, 9 * GIB),)) for when in (99.0, 111.0)]

    charts = _draw(record, [outside[0], other, outside[1]])

    assert charts == []


def test_device_of_which_nothing_is_known_has_no_chart() -> None:
    """An empty frame would say nothing; a counter that is never known has no line."""
    unknown = Span(None, None, None)
    record = _make_cell(unknown, unknown)
    nothing = Sample(105.0, (Reading("cuda:0", None, None),))

    half = _plot(_make_cell(unknown, _STILL), (5.0, None, GIB))

    assert _draw(record, [nothing]) == []
    assert _find_path(half, "a") == ""
    assert _find_path(half, "v") == "M0 0H600"


@given(st.lists(st.tuples(st.none() | _amounts, st.none() | _amounts), min_size=1, max_size=300))
def test_paths_stay_in_the_view_and_small(values: list[tuple[int | None, int | None]]) -> None:
    """However long the cell was, its chart is small, and lies in its ``viewBox``."""
    record = _make_cell(Span(GIB, GIB, None), Span(GIB, GIB, None))
    points = [(10 * (index + 1) / (len(values) + 2), *pair) for index, pair in enumerate(values)]

    html = _plot(record, *points)

    for path in (_find_path(html, "a"), _find_path(html, "v")):
        assert all(0 <= x <= 602 and 0 <= y <= 100 for x, y in _list_corners(path))
        assert len(path) < 3_500
