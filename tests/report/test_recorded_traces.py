"""Histories of a real GPU, as a person sees them: the rows add up, whatever the cell did."""

from __future__ import annotations

import json

import pytest

from gpumemwidget.model.traces import CellTrace
from gpumemwidget.report.trace import report_trace
from tests.report.examples import make_gpu_cell
from tests.report.pages import Page
from tests.tracing.recordings import CELLS, describe


def _trace(name: str) -> CellTrace:
    device, cell = describe(name)
    record = make_gpu_cell(
        execution_count=2,
        duration_s=device.timeline.times_s[-1],
        devices=(cell,),
        status="ok" if CELLS[name]["error"] is None else "error",
    )
    return CellTrace(record, (device,))


@pytest.mark.parametrize("name", CELLS)
def test_rows_add_up(name: str) -> None:
    """To what the counters said after the cell and at its peak, where the history is whole."""
    trace = _trace(name)

    report = report_trace(trace, [])

    lines = report.text.split("\n")
    total = [line for line in lines if line.endswith(" total")]
    assert len(total) == 1
    assert "do not add up" not in report.text
    assert max(map(len, lines)) <= 100
    assert Page(report.html).errors == []


@pytest.mark.parametrize("name", CELLS)
def test_what_is_saved_is_small(name: str) -> None:
    """All of what stands under the cell, in characters of the notebook's file."""
    report = report_trace(_trace(name), [])

    assert len(json.dumps([report.text, report.html])) < 90_000
