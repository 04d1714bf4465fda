"""The ledger, the present and the releases: what each says beside its numbers."""

from __future__ import annotations

import dataclasses

from gpumemwidget.model.cells import CellDevice, Span
from gpumemwidget.model.ownership import DeviceBytes, JointRelease
from gpumemwidget.model.releases import (
    Reason,
    ReasonKind,
    ReleaseMove,
    ReleaseStep,
    ReleaseStepKind,
    StepResult,
)
from gpumemwidget.report.cell import N_SHOWN, report_ledger
from gpumemwidget.report.release import N_MOVES_SHOWN, report_plan, report_release
from gpumemwidget.report.render.blocks import Cell, Column, Table
from gpumemwidget.report.render.text import render_table
from tests.report.examples import (
    GIB,
    MIB,
    make_gpu_cell,
    make_host_cell,
    make_plan,
    make_release,
)


def test_long_ledger_is_shown_by_its_end() -> None:
    """The last cells, and how many came before them."""
    records = [make_host_cell(execution_count=number) for number in range(1, N_SHOWN + 11)]

    text = report_ledger(records, dropped=4).text

    assert text.splitlines()[0].startswith("64 cells recorded")
    assert "The last 50 are shown; 14 came before, of which the oldest 4 are no longer" in text
    assert "In [10]" not in text
    assert text.index("In [11]") < text.index("In [60]")
    assert text.count("In [") == N_SHOWN


def test_ledger_leaves_out_devices_that_stood_still() -> None:
    """Of eight GPUs those that worked, and a note that the others did not."""
    still = Span(GIB, GIB, GIB)
    devices = (*make_gpu_cell().devices, CellDevice("cuda:1", still, still, "exact", 0, 0))

    text = report_ledger([make_gpu_cell(devices=devices)]).text

    assert "cuda:0" in text
    assert "cuda:1" not in text
    assert text.endswith("Devices that a cell did not change are left out.")


def test_wide_letters_keep_the_columns() -> None:
    """A name in Chinese takes two columns a letter, one with a joined accent no more than one."""
    rows = tuple((Cell(name), Cell("1")) for name in ("模型", "n\u0303", "batch"))
    table = Table("names", (Column("name", "code"), Column("n")), (rows,))

    assert render_table(table).splitlines()[1:] == ["模型   1", "n\u0303      1", "batch  1"]


def test_plan_with_kept_names_says_that_they_stay() -> None:
    """``--keep`` sets no name to ``None``."""
    text = report_plan(make_plan(keep=True)).text

    assert "2. Set to None: not done: model and optimizer will name the copies on the CPU" in text


def test_long_plan_is_cut_with_its_count() -> None:
    """An optimizer's hundreds of tensors do not push the rest out of sight."""
    move = ReleaseMove("optimizer.state[0]", "tensor", "cuda:0", MIB, Reason(ReasonKind.KEPT))

    text = report_plan(make_plan(moves=(move,) * 400)).text

    assert text.count("optimizer.state[0]") == N_MOVES_SHOWN
    assert f"{400 - N_MOVES_SHOWN} more" in text


def test_a_plan_that_frees_nothing_has_the_command_that_does() -> None:
    """As it is typed; behind the release only what is left of it."""
    names = ("x", "model", "Out[7]", "last exception")
    joint = JointRelease(names, DeviceBytes((("cuda:0", 66 * MIB),), is_at_least=True))
    plan = make_plan(names=("x",), frees_bytes=DeviceBytes(), joint=joint)
    odd = JointRelease(("x", "--out"), DeviceBytes())

    text = " ".join(report_plan(plan).text.split())
    done = " ".join(report_release(dataclasses.replace(make_release(), plan=plan)).text.split())

    command = (
        'To free it: %memrelease {}model Out[7] "last exception" (at least 66.00 MiB on cuda:0)'
    )
    assert command.format("x ") in text
    assert command.format("") in done
    assert "To free it" not in report_plan(make_plan(joint=odd)).text


def test_release_leaves_out_noise() -> None:
    """Of what was not planned, less than 1 KiB is our own: it is 0, and no rise."""
    noise = (("host", -352),)
    few = DeviceBytes((("host", 40),))
    kinds, done = ReleaseStepKind, StepResult()
    unbind = ReleaseStep(kinds.UNBIND, "done", done, few.by_device, planned_bytes=few)
    collect = ReleaseStep(kinds.COLLECT, "done", done, (*noise, ("cuda:0", -2048)), (("host", 96),))
    quiet = make_release(steps=(), allocated_freed_bytes=noise, reserved_freed_bytes=())

    text = report_release(dataclasses.replace(quiet, steps=(unbind, collect))).text

    assert "352 B" not in text
    assert "96 B" not in text
    assert "40 B" in text
    assert "-2.00 KiB" in text
    assert "A negative value" in text
    assert "A negative value" not in report_release(quiet).text
