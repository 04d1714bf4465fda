"""Cells in a real kernel: which are recorded, and as what."""

from __future__ import annotations

from typing import Any

import pytest

from tests.jupyter.notebook import Cell, Notebook

pytestmark = pytest.mark.kernel

_LEDGER = (
    "[(r.execution_count, r.cell_id, r.first_line, r.status)"
    " for r in __import__('gpumemwidget').monitor().ledger]"
)


def _list_records(notebook: Notebook) -> list[Any]:
    """The records but for the first, of the cell that loaded the extension."""
    records: list[Any] = notebook.evaluate(_LEDGER)
    return records[1:]


def test_a_cell_is_recorded_with_its_number_id_and_first_line(notebook: Notebook) -> None:
    cell = notebook.run("\n# what it is\nx = 1")

    ((count, cell_id, first_line, status),) = _list_records(notebook)
    assert count == cell.execution_count
    assert cell_id.startswith("cell-")
    assert (first_line, status) == ("# what it is", "ok")


@pytest.mark.parametrize(
    ("code", "status"),
    [
        ("1 / 0", "error"),
        ("x = = 1", "error"),
        ("  x = 1\n y = 2", "error"),
        ("import sys; sys.exit(3)", "error"),
        ("raise KeyboardInterrupt", "interrupted"),
        ("%memstat --nonsense", "error"),
        ("%%capture\n1 / 0", "error"),
        ("%%capture\nraise KeyboardInterrupt", "interrupted"),
        ("import asyncio\nawait asyncio.sleep(0)\n1 / 0", "error"),
        ("import asyncio\nawait asyncio.sleep(0)\n2", "ok"),
        ("get_ipython().run_cell('1')", "ok"),
        ("%%bash\ntrue", "ok"),
    ],
)
def test_a_cell_is_recorded_once_with_how_it_ended(
    notebook: Notebook, code: str, status: str
) -> None:
    """Whatever runs within the cell, and however it ends."""
    notebook.run(code)

    assert [record[3] for record in _list_records(notebook)] == [status]


@pytest.mark.parametrize(
    "code",
    [
        "import time\nprint('waiting')\ntime.sleep(60)",
        # ipykernel takes an interrupt up when its loop wakes: so this one wakes often.
        "import asyncio\nprint('waiting')\nfor _ in range(600): await asyncio.sleep(0.1)",
        "%%capture seen\nimport os, time\nos.write(2, b'')\nprint('waiting')\ntime.sleep(60)",
    ],
    ids=["busy", "await", "capture"],
)
def test_an_interrupt_from_outside_is_recorded_as_one(notebook: Notebook, code: str) -> None:
    msg_id = notebook.start(code)
    if "capture" in code:
        # What it prints is captured: its being busy is all that is seen from here.
        notebook.wait_until_busy(msg_id)
    else:
        notebook.wait_for_output(msg_id, "waiting")
    notebook.interrupt()
    cell = notebook.finish(msg_id)

    assert [record[3] for record in _list_records(notebook)] == ["interrupted"]
    assert cell.status == ("ok" if "capture" in code else "error")


def test_runs_that_are_no_cells_leave_no_record(notebook: Notebook) -> None:
    """Silent ones, ones that the front end keeps out of the history, and empty ones."""
    notebook.run("x = 1", silent=True)
    notebook.run("x = 1", store_history=False)
    notebook.run("1 / 0", store_history=False)
    notebook.run("")
    notebook.run("", store_history=False)

    assert _list_records(notebook) == []


def test_cells_of_a_subshell_are_not_recorded(notebook: Notebook) -> None:
    """A subshell's thread runs beside the cells."""
    subshell = notebook.create_subshell()
    if subshell is None:
        pytest.skip("this ipykernel has no subshells")

    notebook.run("beside = 1", subshell=subshell)
    notebook.delete_subshell(subshell)

    assert _list_records(notebook) == []
    assert notebook.evaluate("beside") == 1


# -- Out of memory ---------------------------------------------------------------------------------


def _list_cards(cell: Cell) -> list[int]:
    """The places of the cards among a cell's outputs."""
    return [
        number
        for number, output in enumerate(cell.outputs)
        if "Out of memory on the host" in output.get("data", {}).get("text/plain", "")
    ]


@pytest.mark.slow
def test_an_oom_in_a_cell_that_awaits_has_a_card(notebook: Notebook) -> None:
    """Of several tasks, in the group that they are raised in."""
    cell = notebook.run(
        "import asyncio\nasync def work():\n    bytearray(2**60)\n"
        "await asyncio.gather(work(), asyncio.sleep(0))"
    )

    assert len(_list_cards(cell)) == 1
