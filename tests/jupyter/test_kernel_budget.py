"""Budgets that stop cells in a real kernel: whom the interrupt meets, and whom it never does."""

from __future__ import annotations

import time

import pytest

from tests.jupyter.notebook import Cell, Notebook

pytestmark = pytest.mark.kernel

#: Resident at once, and given back when it is deleted.
_RISE = "data = b'x' * (200 << 20)\n"

_STOPPED = (
    "[(r.status, r.devices[-1].stopped_at_bytes is not None)"
    " for r in __import__('gpumemwidget').monitor().ledger]"
)


def _set_budget(notebook: Notebook, n_mib: int = 100) -> None:
    """A budget so much above what is resident, which is the counter of a machine without a GPU."""
    notebook.run(
        "data = None\n"
        "resident = gpumemwidget.stat()[-1].reading.reserved_bytes\n"
        f"_ = gpumemwidget.budget(resident + ({n_mib} << 20), device='host', stop=True)"
    )


def _list_stopped(notebook: Notebook) -> list[tuple[str, bool]]:
    """Of the cells after those two that load and set: how they ended, and whether by the budget."""
    stopped: list[tuple[str, bool]] = notebook.evaluate(_STOPPED)
    return stopped[2:]


def _run_timed(notebook: Notebook, code: str) -> tuple[Cell, float]:
    started_s = time.monotonic()
    return notebook.run(code), time.monotonic() - started_s


@pytest.mark.parametrize(
    "body",
    [
        "import time\ntime.sleep(60)",
        "while True: pass",
        "import threading\nthreading.Event().wait(60)",
        # Its loop sleeps on after ipykernel's own handler: the budget wakes it.
        "import asyncio\nawait asyncio.sleep(60)",
        "import asyncio\nasync def spin():\n    while True: await asyncio.sleep(0)\nawait spin()",
        # Its loop never has its turn to cancel it.
        "import asyncio\nawait asyncio.sleep(0)\nwhile True: pass",
        "!sleep 60",
        "%%time\nimport time\ntime.sleep(60)",
    ],
    ids=["sleep", "loop", "lock", "await", "spin", "computes", "shell", "magic"],
)
def test_the_cell_that_crosses_it_ends(notebook: Notebook, body: str) -> None:
    """Soon, as by a person's interrupt, with a line that tells; the cell after it is not met."""
    _set_budget(notebook)
    if body.startswith("%%"):
        magic, _, rest = body.partition("\n")
        code = f"{magic}\n{_RISE}{rest}"
    else:
        code = f"{_RISE}{body}"

    cell, took_s = _run_timed(notebook, code)
    after = notebook.run("import time\ntime.sleep(0.1)")

    assert took_s < 20
    assert "%membudget interrupted this cell: host had " in " ".join(cell.text.split())
    assert after.status == "ok"
    (first, second) = _list_stopped(notebook)
    assert (first[1], second) == (True, ("ok", False))
    # IPython itself catches an interrupt while a shell command runs, and ends the command.
    if not body.startswith("!"):
        assert (cell.status, first[0]) == ("error", "interrupted")


def test_the_cell_that_catches_it_goes_on(notebook: Notebook) -> None:
    _set_budget(notebook)

    cell = notebook.run(
        f"import time\ntry:\n    {_RISE}    time.sleep(60)\nexcept KeyboardInterrupt:\n"
        "    print('caught')\ntime.sleep(0.2)\nprint('end')"
    )

    assert cell.status == "ok"
    assert "caught\nend" in cell.text
    assert "The cell caught that and went on" in " ".join(cell.text.split())


def test_memory_of_a_worker_thread_ends_the_cell(notebook: Notebook) -> None:
    _set_budget(notebook)

    cell, took_s = _run_timed(
        notebook,
        "import threading, time\n"
        "def work():\n    global data\n    data = b'x' * (200 << 20)\n"
        "threading.Thread(target=work).start()\ntime.sleep(60)",
    )

    assert took_s < 20
    assert cell.status == "error"
    assert _list_stopped(notebook) == [("interrupted", True)]


@pytest.mark.parametrize("first", ["", "import asyncio; await asyncio.sleep(0)\n"])
def test_cells_that_end_just_then_leave_the_next_ones_alone(notebook: Notebook, first: str) -> None:
    """Whichever comes first, the signal or the cell's end: the next cell runs to its own."""
    _set_budget(notebook)

    for number in range(25):
        pause = f"time.sleep({0.002 * number})"
        if first:
            pause = f"await asyncio.sleep({0.002 * number})"
        notebook.run(f"import time\n{first}{_RISE}{pause}\ndel data")
        after = notebook.run(f"{first}time.sleep(0.03)\n'reached'")

        assert after.status == "ok", after.text
        assert after.text == "'reached'"

    told = _list_stopped(notebook)
    assert [each for each in told[1::2] if each != ("ok", False)] == []
    assert all(stopped for status, stopped in told[::2] if status == "interrupted")


def test_an_idle_kernel_is_left_alone(notebook: Notebook) -> None:
    """Whatever its threads take while no cell runs."""
    _set_budget(notebook)
    notebook.run(
        "import threading, time\n"
        "def work():\n    global data\n    time.sleep(0.3)\n    data = b'x' * (200 << 20)\n"
        "threading.Thread(target=work).start()"
    )

    time.sleep(1.0)
    after = notebook.run("import time\ntime.sleep(0.1)\n'alive'")

    assert (after.status, after.text) == ("ok", "'alive'")
    assert _list_stopped(notebook) == [("ok", False), ("ok", False)]


def test_a_persons_interrupt_is_passed_on_while_a_budget_watches(notebook: Notebook) -> None:
    _set_budget(notebook, 4000)

    msg_id = notebook.start("import time\nprint('waiting')\ntime.sleep(60)")
    notebook.wait_for_output(msg_id, "waiting")
    notebook.interrupt()
    cell = notebook.finish(msg_id)

    assert cell.status == "error"
    assert _list_stopped(notebook) == [("interrupted", False)]


def test_unloading_leaves_nothing(notebook: Notebook) -> None:
    _set_budget(notebook)
    notebook.run("%unload_ext gpumemwidget")

    cell = notebook.run(
        f"import signal, threading\n{_RISE}"
        "(signal.getsignal(signal.SIGINT) is signal.default_int_handler,"
        " [each.name for each in threading.enumerate() if each.name.startswith('gpumem')])"
    )

    assert (cell.status, cell.text) == ("ok", "(True, [])")
    notebook.run("data = None\n%load_ext gpumemwidget")
