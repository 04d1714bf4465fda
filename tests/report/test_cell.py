"""The report under a cell: what it shows of each kind of cell, and what it leaves out."""

from __future__ import annotations

import dataclasses

from gpumemwidget.model.cells import CellDevice, Span
from gpumemwidget.report.cell import report_cell, report_cell_line
from tests.report.examples import GIB, MIB, make_gpu_cell
from tests.report.pages import list_charts

_STILL = Span(GIB, GIB, GIB)


def _make_still(device: str) -> CellDevice:
    return CellDevice(device, _STILL, _STILL, "exact", 0, 0)


def test_devices_stand_in_their_order() -> None:
    """GPUs by number, 10 after 2, the host last, however the record has them."""
    names = ("host", "cuda:10", "cuda:2", "cuda:0")
    record = make_gpu_cell(devices=tuple(_make_still(name) for name in names))

    lines = report_cell(record, []).text.splitlines()

    firsts = [line.split()[0] for line in lines[3:] if line and not line.startswith(" ")]
    assert firsts == ["cuda:0", "cuda:2", "cuda:10", "host"]


def test_host_with_a_silent_malloc_says_so() -> None:
    """Elsewhere than on glibc there is no figure at all."""
    host = CellDevice(
        "host", Span(None, None, None), Span(GIB, GIB, 2 * GIB), "sampled", None, None
    )

    text = report_cell(make_gpu_cell(devices=(host,)), []).text

    assert text.endswith("host allocated: this system's malloc gives no figure.")


def test_charts_are_drawn_of_devices_that_moved() -> None:
    """The first device has one in any case; the others' standing still is told by the table."""
    moved = make_gpu_cell().devices[0]
    devices = (
        _make_still("cuda:0"),
        _make_still("cuda:1"),
        dataclasses.replace(moved, device="cuda:2"),
    )

    charts = list_charts(report_cell(make_gpu_cell(devices=devices), []).html)

    assert len(charts) == 2
    assert 'aria-label="cuda:0 over' in charts[0]
    assert 'aria-label="cuda:2 over' in charts[1]


def test_line_counts_gpus_that_stood_still() -> None:
    """Eight GPUs, one at work: one is described."""
    devices = (
        make_gpu_cell().devices[0],
        *(_make_still(f"cuda:{index}") for index in range(1, 8)),
    )

    assert report_cell_line(make_gpu_cell(devices=devices)).text == (
        "In [7]  4.56 s  cuda:0 allocated 1.70 GiB (+512.00 MiB), peak 3.40 GiB · reserved "
        "4.00 GiB (+2.00 GiB)  7 more GPUs unchanged"
    )


def test_line_leaves_out_a_peak_that_the_end_tells() -> None:
    """A cell that only grew has its peak at its end."""
    host = CellDevice(
        "host", Span(GIB, GIB + MIB, None), Span(GIB, 2 * GIB, 2 * GIB), "exact", None, None
    )

    assert report_cell_line(make_gpu_cell(devices=(host,))).text == (
        "In [7]  4.56 s  host allocated 1.00 GiB (+1.00 MiB) · resident 2.00 GiB (+1.00 GiB)"
    )
