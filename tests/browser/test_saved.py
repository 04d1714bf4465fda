"""What a saved notebook shows when it is opened and its kernel is gone."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.browser.lab import BUSY, Lab, Notebook
from tools.pictures import HOST_CARD, LOAD_CARDS

pytestmark = [pytest.mark.browser, pytest.mark.timeout(300)]

_LOAD = "%load_ext gpumemwidget\nimport os, time"
_SNAPSHOT = "Snapshot of the dashboard"
_DEAD = "Error displaying widget"


def _save(notebook: Notebook, lab: Lab, text: str) -> Path:
    """Save the notebook, and wait until the file has this text."""
    path = lab.folder / notebook.name
    notebook.save()
    notebook.wait_until(lambda: text in path.read_text("utf-8"), f"{text!r} is saved")
    return path


def _count_visible(notebook: Notebook, text: str) -> int:
    return notebook.page.get_by_text(text).filter(visible=True).count()


def _dashboard_is_live(notebook: Notebook) -> None:
    notebook.page.locator(".gmd[data-drawn]").first.wait_for()


def _make_untrusted(path: Path) -> None:
    """Change the file as somebody else's machine would: what it shows is not trusted any more."""
    saved = json.loads(path.read_text("utf-8"))
    saved["cells"][0]["source"] += "\n# from elsewhere"
    path.write_text(json.dumps(saved), "utf-8")


def test_saved_dashboard_is_its_snapshot(lab: Lab) -> None:
    """Two dashboards: while the kernel lives each is live; without it the first is a snapshot.

    An untrusted notebook keeps no style sheet: there both are. The snapshot has the cells that ran
    after ``%memdash``.
    """
    with lab.open([_LOAD, "%memdash", "%memdash", "later = 1"]) as notebook:
        notebook.wait_for_kernel()
        for cell in range(3):
            notebook.run(cell, timeout_s=60)
        notebook.wait_until(lambda: notebook.dashboards().count() == 2, "both are shown")
        _dashboard_is_live(notebook)
        assert _count_visible(notebook, _SNAPSHOT) == 0
        notebook.run(3)
        notebook.wait_until(
            lambda: "later = 1" in (notebook.cell(1).locator(".gmw").last.text_content() or ""),
            "the copy has the cell",
        )
        path = _save(notebook, lab, "later = 1</code>")

        notebook.reopen()

        notebook.wait_until(lambda: _count_visible(notebook, _SNAPSHOT) == 1, "one is a snapshot")
        notebook.wait_until(
            lambda: notebook.page.get_by_text(_DEAD).count() == 2, "JupyterLab has given up"
        )
        assert _count_visible(notebook, _DEAD) == 0
        assert "later = 1" in notebook.output(1)

        _make_untrusted(path)
        notebook.reopen()

        notebook.wait_until(lambda: _count_visible(notebook, _SNAPSHOT) == 2, "both are snapshots")
        assert notebook.page.get_by_text(_DEAD).count() == 0
        page = subprocess.run(
            [sys.executable, "-m", "nbconvert", "--to", "html", "--stdout", str(path)],
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        assert page.count(_SNAPSHOT) == 2


def test_dashboard_comes_back_live_after_a_reload(lab: Lab) -> None:
    """The kernel lives: the copy makes room for the live view, in a clone of the output too."""
    with lab.open([_LOAD, "%memdash", "%unload_ext gpumemwidget"]) as notebook:
        notebook.wait_for_kernel()
        notebook.run(0, timeout_s=60)
        notebook.run(1)
        _dashboard_is_live(notebook)
        _save(notebook, lab, _SNAPSHOT)

        notebook.load()
        _dashboard_is_live(notebook)
        notebook.wait_until(lambda: _count_visible(notebook, _SNAPSHOT) == 0, "the copy is hidden")

        notebook.select(1)
        notebook.command("notebook:create-output-view")
        notebook.wait_until(lambda: notebook.dashboards().count() == 2, "the clone is live")
        assert _count_visible(notebook, _SNAPSHOT) == 0

        notebook.show()
        notebook.restart_kernel()
        notebook.page.locator(".gmd[data-over]").first.wait_for()
        assert _count_visible(notebook, _SNAPSHOT) == 0


def test_reports_stay_without_their_kernel(lab: Lab) -> None:
    """The card of an OOM is static HTML: it loses its buttons and nothing else.

    A traced cell in which the kernel died shows what was measured until then, on a narrow page too.
    """
    fail = "failing.append(card)\nfail()"
    trace = f"%%memtrace\nkept = bytearray(50_000_000)\n{BUSY}"
    with lab.open([LOAD_CARDS, HOST_CARD, fail, trace], width=400) as notebook:
        notebook.wait_for_kernel()
        for number in range(3):
            notebook.run(number, timeout_s=60)
        card = notebook.page.locator(".gmw-card")
        card.locator(".gmw-do").first.wait_for()
        n_rows = card.locator(".gmw-out tr").count()
        notebook.start(3)
        cut_off = notebook.cell(3).get_by_text("not finished")
        cut_off.wait_for()
        path = _save(notebook, lab, "not finished")
        saved = json.loads(path.read_text("utf-8"))
        error, shown = saved["cells"][2]["outputs"]
        assert (error["output_type"], set(shown["data"])) == ("error", {"text/plain", "text/html"})

        notebook.reopen()

        card.wait_for()
        assert card.locator(".gmw-out tr").count() == n_rows
        assert card.locator(".gmw-do").count() == 0
        assert notebook.page.get_by_text(_DEAD).count() == 0
        cut_off.wait_for()
        assert "resident" in notebook.output(3)
        table = notebook.cell(3).locator(".gmw-w")
        assert table.evaluate("table => table.scrollWidth <= table.clientWidth")
