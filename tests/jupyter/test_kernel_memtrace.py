"""``%%memtrace`` in a real kernel: the cell stays what it is, and its report comes."""

from __future__ import annotations

import re
from typing import Any

import pytest

from tests.jupyter.notebook import Cell, Notebook

pytestmark = pytest.mark.kernel

_WIDGET = "application/vnd.jupyter.widget-view+json"


def _find_report(cell: Cell) -> dict[str, Any]:
    """The one report among a cell's outputs, as a saved notebook would have it."""
    reports = _list_reports(cell)
    assert len(reports) == 1, cell.text
    assert _WIDGET not in reports[0]
    return reports[0]


def _list_reports(cell: Cell) -> list[dict[str, Any]]:
    return [
        output["data"]
        for output in cell.outputs
        if re.search(r"^In \[", output.get("data", {}).get("text/plain", ""))
    ]


def _list_others(cell: Cell) -> list[str]:
    """The text of all outputs but the report, whose places may be empty."""
    return [
        text
        for output in cell.outputs
        if "gmw" not in output.get("data", {}).get("text/html", "")
        for text in (output.get("text") or output.get("data", {}).get("text/plain") or "",)
        if text
    ]


# -- The cell's own semantics ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("body", "value"),
    [
        ("6 * 7", "42"),
        ("import asyncio\nawait asyncio.sleep(0, result=42)", "42"),
        ("    x = 42\n    x", "42"),
        ("%%time\n6 * 7", "42"),
        ("%%capture seen\nprint(42)", None),
        ("", None),
    ],
)
def test_the_last_value_is_the_cells_own(notebook: Notebook, body: str, value: str | None) -> None:
    cell = notebook.run(f"%%memtrace\n{body}\n")

    assert cell.status == "ok"
    assert "ok" in _find_report(cell)["text/plain"]
    values = [o["data"]["text/plain"] for o in cell.outputs if o["output_type"] == "execute_result"]
    assert values == ([] if value is None else [value])
    assert notebook.evaluate("Out.get(In.__len__() - 1)") == (None if value is None else 42)


def test_what_a_cell_captures_has_no_report_of_ours(notebook: Notebook) -> None:
    """Also if the cell runs so long that it shows a report meanwhile."""
    cell = notebook.run("%%memtrace\n%%capture seen\nimport time\nprint(1)\ntime.sleep(1.5)")

    assert cell.status == "ok", cell.text
    assert notebook.evaluate("len(seen.outputs)") == 0
    assert notebook.evaluate("seen.stdout") == "1\n"


def test_a_traceback_names_the_notebooks_lines(notebook: Notebook) -> None:
    """The line of the magic counts, as the notebook shows it."""
    cell = notebook.run("%%memtrace\nx = 1\ny = 2\n1 / 0")

    (error,) = cell.list_messages("error")
    plain = re.sub(r"\x1b\[[\d;]*m", "", "\n".join(error["content"]["traceback"]))
    assert "----> 4 1 / 0" in plain


@pytest.mark.parametrize(
    ("body", "error"),
    [
        ("1 / 0", "ZeroDivisionError"),
        ("x = = 1", "SyntaxError"),
        ("import sys; sys.exit(1)", "SystemExit"),
    ],
)
def test_an_error_stays_the_cells_error(notebook: Notebook, body: str, error: str) -> None:
    """Its status is what stops "Run All"; what did not run at all has no report."""
    # So that both are there before the first of them runs, as under "Run All".
    before = notebook.start("import time; time.sleep(0.5)")
    failing = notebook.start(f"%%memtrace\n{body}")
    following = notebook.start("reached = True")

    notebook.finish(before)
    cell = notebook.finish(failing)
    behind = notebook.finish_aborted(following)

    assert (cell.status, cell.reply["ename"]) == ("error", error)
    if error == "SyntaxError":
        assert not _list_reports(cell)
    else:
        assert "error" in _find_report(cell)["text/plain"].splitlines()[0]
    assert behind == "aborted"
    assert notebook.evaluate("'reached' in globals()") is False


@pytest.mark.parametrize(
    "body",
    [
        "import time\nprint('waiting')\ntime.sleep(60)",
        "import asyncio\nprint('waiting')\nfor _ in range(600): await asyncio.sleep(0.1)",
    ],
    ids=["busy", "await"],
)
def test_an_interrupt_ends_the_cell_with_its_report(notebook: Notebook, body: str) -> None:
    msg_id = notebook.start(f"%%memtrace\n{body}")
    notebook.wait_for_output(msg_id, "waiting")
    notebook.interrupt()
    cell = notebook.finish(msg_id)

    assert cell.status == "error"
    assert "interrupted" in _find_report(cell)["text/plain"].splitlines()[0]


@pytest.mark.parametrize(
    ("code", "complete"),
    [("%%memtrace\nx = 1", "incomplete"), ("%%memtrace\nx = 1\n\n", "complete")],
)
def test_a_console_waits_for_the_cells_end(notebook: Notebook, code: str, complete: str) -> None:
    """As with every cell magic, an empty line ends the cell."""
    assert notebook.is_complete(code) == complete


# -- The outputs -----------------------------------------------------------------------------------


def test_a_running_cell_shows_its_report_and_the_last_one_comes_below(notebook: Notebook) -> None:
    """From its first second on, in mid-cell; in the end its place is empty."""
    cell = notebook.run("%%memtrace\nimport time\nprint('first')\ntime.sleep(1.6)\nprint('last')")

    shown = cell.list_messages("display_data")[0]["content"]["data"]
    assert re.match(r"In \[\d+\] · not finished · as of 1\.\d+ s", shown["text/plain"])
    assert "<svg" in shown["text/html"] or "gmw-t" in shown["text/html"]
    *_, last = cell.list_messages("update_display_data")
    assert set(last["content"]["data"].values()) == {""}
    assert cell.kinds[:4] == ["stream", "display_data", "stream", "display_data"]
    assert len(_find_report(cell)["text/html"]) < 20_000
    assert not cell.list_messages("comm_open")
    assert notebook.evaluate("gpumemwidget.monitor().is_sampling") is False


def test_a_short_cell_shows_its_report_alone(notebook: Notebook) -> None:
    """Nothing was shown while it ran."""
    run = notebook.run("%%memtrace\nprint('first')\n42")

    assert run.kinds == ["stream", "execute_result", "display_data"]
    assert _find_report(run)


@pytest.mark.parametrize(
    ("body", "others"),
    [
        ("print(1)\nclear_output()\nprint(2)", ["2\n"]),
        # What waits for the next output is cleared by the report.
        ("print(1)\nclear_output(wait=True)", []),
    ],
)
def test_the_report_survives_the_users_clear_output(
    notebook: Notebook, body: str, others: list[str]
) -> None:
    """It is there once, whatever was cleared."""
    cell = notebook.run(f"%%memtrace\nfrom IPython.display import clear_output\n{body}")

    assert _find_report(cell)
    assert _list_others(cell) == others


def test_unloading_in_a_traced_cell_is_said(notebook: Notebook) -> None:
    cell = notebook.run("%%memtrace\n%unload_ext gpumemwidget")
    notebook.run("%load_ext gpumemwidget")

    assert "was not recorded to its end" in cell.text
