"""The plotly figures: right numbers, readable on any page, plotly imported only when needed."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from gpumemwidget.report.figures import figure_cell, figure_ledger
from gpumemwidget.report.theme import ALLOCATED_COLOR, BAD_COLOR, WARN_COLOR
from tests.report.examples import (
    GIB,
    HOSTILE,
    MIB,
    make_budget_cell,
    make_gpu_cell,
    make_host_cell,
    make_samples,
    make_two_gpu_cell,
)


def test_cell_is_drawn_with_its_peak() -> None:
    """Reserved, allocated and the dashed peak of each device, from the cell's start to its end."""
    record = make_gpu_cell()
    samples = make_samples(record)

    figure = figure_cell(record, samples)

    names = [trace.name for trace in figure.data]
    assert names == ["reserved", "allocated", "peak", "resident", "allocated", "peak"]
    allocated = figure.data[1]
    assert (allocated.x[0], allocated.x[-1]) == (0.0, record.duration_s)
    assert (allocated.y[0], allocated.y[-1]) == (int(1.2 * GIB), int(1.7 * GIB))
    assert len(allocated.y) == len(samples) + 2
    assert set(figure.data[2].y) == {int(3.4 * GIB)}
    assert set(figure.data[5].y) == {1600 * MIB}


def test_ledger_is_drawn_as_bars_of_peaks() -> None:
    """A place for each cell, though two have one number; the host by what has a peak."""
    records = [make_gpu_cell(), make_gpu_cell(), make_two_gpu_cell()]

    figure = figure_ledger(records)

    bars = [trace for trace in figure.data if trace.type == "bar"]
    assert [tuple(bar.x) for bar in bars] == [(0, 1, 2), (2,), (0, 1, 2)]
    assert tuple(bars[1].y) == (int(78.5 * GIB),)
    assert tuple(bars[2].y) == (1600 * MIB,) * 3
    titles = [annotation.text for annotation in figure.layout.annotations]
    assert titles == ["cuda:0", "cuda:1", "host (resident)"]


def test_a_cell_beyond_its_budget_is_drawn_with_it() -> None:
    """Of the device on which it went beyond; one legend entry for all."""
    names = [trace.name for trace in figure_cell(make_budget_cell(), []).data]
    both = figure_cell(make_budget_cell(host_budget_bytes=GIB), [])

    assert names == ["reserved", "allocated", "peak", "budget", "resident", "allocated", "peak"]
    drawn = [trace for trace in both.data if trace.name == "budget"]
    assert [set(trace.y) for trace in drawn] == [{3 * GIB}, {GIB}]
    assert [trace.showlegend for trace in drawn] == [True, False]


def test_cells_beyond_their_budgets_stand_out_in_the_ledger() -> None:
    """By their colour, and by what the pointer shows; the budget is a line from cell to cell."""
    records = [
        make_gpu_cell(),
        make_budget_cell(),
        make_budget_cell(status="interrupted", stopped_at_bytes=int(3.2 * GIB)),
    ]

    figure = figure_ledger(records)

    bar, budget = figure.data[0], figure.data[3]
    assert tuple(bar.marker.color) == (ALLOCATED_COLOR, WARN_COLOR, BAD_COLOR)
    hovers = [hover.rpartition("<br>")[2] for hover in bar.customdata]
    assert hovers[1:] == [
        "beyond its budget of 3.00 GiB",
        "stopped at 3.20 GiB by its budget of 3.00 GiB",
    ]
    assert (budget.name, tuple(budget.y)) == ("budget", (None, 3 * GIB, 3 * GIB))
    assert [trace.name for trace in figure.data].count("budget") == 1


@pytest.mark.parametrize("records", [[], [make_gpu_cell(devices=())]])
def test_ledger_without_devices_is_an_empty_figure(records: list[object]) -> None:
    """Nothing to draw is no failure."""
    assert len(figure_ledger(records).data) == 0  # type: ignore[arg-type]


def test_scale_is_binary() -> None:
    """Ticks at round GiB: plotly's own would stand at multiples of ten."""
    figure = figure_cell(make_gpu_cell(), [])

    assert tuple(figure.layout.yaxis.ticktext) == ("0 B", "1 GiB", "2 GiB", "3 GiB", "4 GiB")
    assert tuple(figure.layout.yaxis.tickvals) == (0, GIB, 2 * GIB, 3 * GIB, 4 * GIB)


def test_page_shows_through() -> None:
    """No background of our own, so the figure reads on a light and on a dark page."""
    for figure in (figure_cell(make_host_cell(), []), figure_ledger([make_host_cell()])):
        assert figure.layout.paper_bgcolor == "rgba(0,0,0,0)"
        assert figure.layout.plot_bgcolor == "rgba(0,0,0,0)"


def test_colours_are_of_a_form_that_plotly_6_takes() -> None:
    """Which refuses the eight-digit colours that plotly 7 accepts."""
    json = str(figure_cell(make_gpu_cell(), []).to_json())

    assert "rgba(59,130,214,0.27)" in json
    assert not re.search(r'"#[0-9a-f]{8}"', json)


def test_hostile_first_line_stays_text() -> None:
    """Plotly takes a part of HTML in its labels: the user's text is none."""
    figure = figure_ledger([make_gpu_cell(first_line=HOSTILE)])

    json = figure.to_json()

    assert "<script" not in json
    assert "\\u001b" not in json
    assert "&lt;script&gt;" in json.replace("\\u003c", "<").replace("\\u0026", "&")


def test_reports_and_this_door_import_no_plotly() -> None:
    """It is loaded at the first figure, not with the extension."""
    program = (
        "import sys, gpumemwidget.report.report, gpumemwidget.report.figures\n"
        "print(sorted({'plotly', 'torch', 'IPython', 'numpy', 'pandas'} & set(sys.modules)))"
    )

    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )

    assert done.stdout.strip() == "[]"
