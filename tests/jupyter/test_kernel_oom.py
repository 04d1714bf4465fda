"""The card of an OOM in a real kernel: below the traceback, and with the cell's outputs."""

from __future__ import annotations

import pytest

from tests.jupyter.notebook import Cell, Notebook

pytestmark = [pytest.mark.kernel, pytest.mark.slow]

FAIL = "import numpy\nnumpy.ones((2**22, 2**22), dtype='uint8')"


def list_cards(cell: Cell) -> list[int]:
    """The places of the cards among a cell's outputs."""
    return [
        number
        for number, output in enumerate(cell.outputs)
        if "Out of memory on the host" in output.get("data", {}).get("text/plain", "")
    ]


def test_below_the_traceback(notebook: Notebook) -> None:
    """One error, then one card that is there without a kernel; the reply is the error's."""
    cell = notebook.run(FAIL)

    assert cell.status == "error"
    errors = [n for n, output in enumerate(cell.outputs) if output["output_type"] == "error"]
    (card,) = list_cards(cell)
    assert len(errors) == 1
    assert card == errors[0] + 1
    assert "16.00 TiB requested" in cell.outputs[card]["data"]["text/html"]


def test_not_where_it_is_caught(notebook: Notebook) -> None:
    """A cell that ends well is as it was."""
    cell = notebook.run("try:\n    bytearray(2**60)\nexcept MemoryError:\n    x = 5")

    assert (cell.status, cell.outputs) == ("ok", [])


def test_in_a_cell_that_awaits(notebook: Notebook) -> None:
    """Of several tasks, in the group that they are raised in."""
    cell = notebook.run(
        "import asyncio\nasync def work():\n    bytearray(2**60)\n"
        "await asyncio.gather(work(), asyncio.sleep(0))"
    )

    assert len(list_cards(cell)) == 1


def test_under_memtrace(notebook: Notebook) -> None:
    """Both: the card and the report."""
    cell = notebook.run(f"%%memtrace --no-live\n{FAIL}")

    assert len(list_cards(cell)) == 1
    assert "allocated" in cell.text.rpartition("Out of memory on the host")[2]
