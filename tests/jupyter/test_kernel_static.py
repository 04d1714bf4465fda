"""What is left when no kernel and no page is there: saved notebooks, HTML files, terminals."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import nbclient
import nbconvert
import nbformat
import pytest

from tests.jupyter.notebook import Notebook

pytestmark = [pytest.mark.kernel, pytest.mark.slow]

_VIEW = "application/vnd.jupyter.widget-view+json"
_CELLS = (
    "%load_ext gpumemwidget",
    "%%memtrace\nimport time\ntime.sleep(0.3)\nx = bytearray(10_000_000)\n42",
    "%memtrace on",
    "x = 1",
    "%memtrace off",
    "%memledger",
    "%unload_ext gpumemwidget",
)


@pytest.fixture(scope="module")
def executed(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A notebook that nbclient has run, as ``jupyter nbconvert --execute`` does."""
    notebook = nbformat.v4.new_notebook(
        cells=[nbformat.v4.new_code_cell(source) for source in _CELLS]
    )
    folder = tmp_path_factory.mktemp("executed")
    nbclient.NotebookClient(notebook, resources={"metadata": {"path": str(folder)}}).execute()
    return notebook


def test_an_executed_notebook_holds_static_reports(executed: Any) -> None:
    """Below what the cell displays; nothing that needs a kernel, and no script."""
    kinds = [[sorted(o.get("data", {"text": ""})) for o in cell.outputs] for cell in executed.cells]

    report = ["text/html", "text/plain"]
    # (What unloading says depends on the process's peaks.)
    assert kinds[:-1] == [
        [["text"]],
        [["text/plain"], report],
        [["text"]],
        [report],
        [["text"]],
        [report],
    ]
    shown = executed.cells[1].outputs
    assert [output["data"]["text/plain"] for output in shown[:-1]] == ["42"]
    assert shown[-1]["data"]["text/plain"].startswith("In [2] · ok · ")
    assert len(json.dumps(executed.metadata)) < 4_000
    assert len(json.dumps(executed.cells[1].outputs)) < 40_000


def test_an_executed_notebook_has_neither_plotly_nor_the_readings(tmp_path: Path) -> None:
    """With a dashboard nbclient saves less than 100 KB beside the outputs, after many cells too."""
    cells = [
        *("%load_ext gpumemwidget", "import gpumemwidget"),
        "for _ in range(3000): gpumemwidget.monitor().read_now()",
        *(f"value_{n} = 'a line of code that is long enough to be cut'" for n in range(100)),
        "%memdash",
        "y = bytearray(90_000_000)",
    ]
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])

    nbclient.NotebookClient(notebook, resources={"metadata": {"path": str(tmp_path)}}).execute()

    (shown,) = [cell.outputs for cell in notebook.cells if cell.source == "%memdash"]
    saved = notebook.metadata["widgets"]["application/vnd.jupyter.widget-state+json"]["state"]
    assert ["widget-view" in str(output["data"]) for output in shown] == [True, False]
    assert shown[0]["data"][_VIEW]["model_id"] in saved
    assert len(json.dumps(notebook.metadata)) < 100_000


def test_an_html_file_shows_the_reports(executed: Any) -> None:
    html, _resources = nbconvert.HTMLExporter().from_notebook_node(executed)

    assert "<strong>In [2]</strong>" in html
    # What the line that keeps the bytes has added.
    assert "9.54 MiB" in html
    assert "x = bytearray(10_000_000)" in html


def test_a_terminal_shows_the_reports_as_text(tmp_path: Path) -> None:
    """The real program, at whose prompt an empty line ends a cell."""
    typed = "%load_ext gpumemwidget\n%%memtrace\nx = 6 * 7\nx\n\n\n%memtrace --force\nexit\n"

    answer = subprocess.run(
        [
            *(sys.executable, "-m", "IPython", "--simple-prompt", "--no-banner"),
            *("--no-confirm-exit", "--colors=NoColor"),
        ],
        input=typed,
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "IPYTHONDIR": str(tmp_path)},
    )

    assert "Out[2]: 42\nIn [2] · ok · " in answer.stdout
    assert "host    allocated" in answer.stdout
    assert "other options go above a cell" in answer.stdout + answer.stderr


def test_the_dashboard_is_one_and_is_static_after_unload(notebook: Notebook) -> None:
    """Shown by the magic or by the function."""
    shown = notebook.run("%memdash")
    notebook.run("assert gpumemwidget.dashboard() is gpumemwidget.dashboard()")
    closing = notebook.start("%unload_ext gpumemwidget")
    updates = notebook.finish(closing).list_messages("update_display_data")
    notebook.run("%load_ext gpumemwidget")

    assert shown.status == "ok"
    assert any("widget-view" in kind for o in shown.outputs for kind in o["data"])
    copy, *live = [each["content"]["data"] for each in updates]
    assert copy["text/plain"].startswith("Snapshot of the dashboard, 20")
    assert "<table" in copy["text/html"]
    assert live
    assert all(each == {"text/html": "", "text/plain": ""} for each in live)
