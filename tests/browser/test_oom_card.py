"""The card of an OOM in JupyterLab: static where it is saved, with buttons while a kernel lives."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from pathlib import Path

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_notebook
from playwright.sync_api import Locator, expect

from tests.browser.lab import Lab, Notebook
from tools.notebooks import execute
from tools.pictures import HOST_CARD
from tools.pictures import LOAD_CARDS as LOAD

pytestmark = [pytest.mark.browser, pytest.mark.timeout(300)]

_FAIL = "failing.append(card)\nfail()"
_HIDE_BUTTONS = ".gmw-do, .gmw-said { display: none !important }"
_BIG_BYTES = 64 * 1024 * 1024 * 4


@contextlib.contextmanager
def _open_card(lab: Lab, *cells: str) -> Iterator[Notebook]:
    """A notebook whose third cell has failed, with the card below its traceback; more to run."""
    with lab.open([LOAD, HOST_CARD, _FAIL, *cells]) as notebook:
        notebook.wait_for_kernel()
        notebook.run(0, timeout_s=60)
        notebook.run(1)
        notebook.run(2)
        _way(notebook, "last exception").wait_for()
        yield notebook
        assert notebook.problems == []


def _card(notebook: Notebook, which: int = 0) -> Locator:
    return notebook.page.locator(".gmw-card").nth(which)


def _row(notebook: Notebook, text: str, which: int = 0) -> Locator:
    return _card(notebook, which).locator(".gmw-out tr").filter(has_text=text)


def _way(notebook: Notebook, text: str, which: int = 0) -> Locator:
    """The button beside a way out."""
    return _row(notebook, text, which).locator("button")


def _said(notebook: Notebook, text: str, which: int = 0) -> str:
    return _row(notebook, text, which).locator(".gmw-said").inner_text()


def _wait_for(notebook: Notebook, text: str, state: str, which: int = 0) -> str:
    """Wait until a way is so far; what is said of it."""
    _row(notebook, text, which).locator(f"button[data-state={state}]").wait_for()
    return _said(notebook, text, which)


@pytest.mark.story
def test_click_releases_what_was_promised(lab: Lab) -> None:
    """The names go and then the exception; each says what was freed, and the system sees it.

    The card stands below the user's own error; its buttons are where we can do it, and nothing
    moves for them.
    """
    with _open_card(lab) as notebook:
        text = notebook.output(2)
        assert text.index("ValueError: made to fail") < text.index("Out of memory on the host")
        assert _card(notebook).locator("button").count() == 4
        assert _row(notebook, "Halve the batch").locator("button").count() == 0
        with_buttons = _card(notebook).bounding_box()
        notebook.page.add_style_tag(content=_HIDE_BUTTONS).evaluate("e => (window.added = e)")
        assert _card(notebook).bounding_box() == with_buttons
        notebook.page.evaluate("() => window.added.remove()")

        before = notebook.read_resident_bytes()
        _way(notebook, "%memrelease big").dblclick()
        said = _wait_for(notebook, "%memrelease big", "done")
        between = notebook.read_resident_bytes()
        _way(notebook, "last exception").click()
        _wait_for(notebook, "last exception", "done")
        after = notebook.read_resident_bytes()

        assert re.match(r"Freed 25[56]\.\d\d MiB on host \(predicted: 256\.00 MiB\)\. Now ", said)
        assert before - between > 0.95 * _BIG_BYTES
        assert between - after > 0.95 * _BIG_BYTES
        assert notebook.ask("big") == "None"
        assert notebook.ask("also_big is None") == "False"
        assert _way(notebook, "%memrelease big").is_disabled()
        assert _way(notebook, "%memrelease big").inner_text() == "Released"
        assert _way(notebook, "also_big").is_enabled()


def test_what_is_not_there_any_more_cannot_be_clicked(lab: Lab) -> None:
    """Not a name that is gone or new, which a click tells; nor an exception before the last one."""
    cells = ("del big\nalso_big = torch.ones(5)", "1 / 0")
    with _open_card(lab, *cells) as notebook:
        notebook.run(3)
        _way(notebook, "%memrelease big").click()
        big = _wait_for(notebook, "%memrelease big", "gone")
        _way(notebook, "also_big").click()
        also_big = _wait_for(notebook, "also_big", "gone")
        assert _way(notebook, "last exception").is_enabled()
        notebook.run(4)
        _way(notebook, "last exception").click()
        exception = _wait_for(notebook, "last exception", "gone")

        assert big == also_big == exception
        assert big.startswith("This is not what it was at the error")
        _way(notebook, "%memsave").click()
        saved = _wait_for(notebook, "%memsave", "done")
        assert _card(notebook).locator("button:enabled").count() == 0
        assert re.fullmatch(r"Written to /\S+/oom\.html\.", saved)
        assert notebook.ask("len(also_big)") == "5"


def test_real_oom_of_the_host_gets_its_card(lab: Lab) -> None:
    """The failed step is freed by the first button, as the system sees it."""
    step = (
        "def step():\n"
        "    activations = torch.ones(64, 1024, 1024)\n"
        "    return activations + torch.empty(2**55)\n"
        "step()"
    )
    with lab.open([LOAD, step]) as notebook:
        notebook.wait_for_kernel()
        notebook.run(0, timeout_s=60)
        notebook.run(1)
        _way(notebook, "%memrelease --exceptions").wait_for()
        before = notebook.read_resident_bytes()
        _way(notebook, "%memrelease --exceptions").click()
        said = _wait_for(notebook, "%memrelease --exceptions", "done")

        assert "Out of memory on the host" in notebook.output(1)
        assert before - notebook.read_resident_bytes() > 0.95 * _BIG_BYTES
        assert re.match(r"Freed 25[56]\.\d\d MiB", said)
        assert notebook.problems == []


def test_reloaded_page_has_its_buttons_again(lab: Lab) -> None:
    """What was done is told again; what was not can be done, until the extension is unloaded."""
    with _open_card(lab, "%unload_ext gpumemwidget") as notebook:
        _way(notebook, "%memrelease big").click()
        said = _wait_for(notebook, "%memrelease big", "done")
        notebook.save()

        notebook.load()
        notebook.wait_for_kernel()

        assert _wait_for(notebook, "%memrelease big", "done") == said
        _way(notebook, "also_big").click()
        _wait_for(notebook, "also_big", "done")
        assert notebook.ask("also_big") == "None"

        notebook.run(3)
        expect(_card(notebook).locator("button")).to_have_count(0, timeout=60_000)
        assert "%memrelease big" in _card(notebook).inner_text()


def test_widgets_of_a_saved_notebook_make_no_buttons(lab: Lab, tmp_path: Path) -> None:
    """Whoever executes notebooks saves the state of widgets with them; no kernel answers those."""
    source = new_notebook(cells=[new_code_cell(each) for each in (LOAD, HOST_CARD, _FAIL)])
    source.cells[2].metadata["tags"] = ["raises-exception"]
    nbformat.write(source, tmp_path / "source.ipynb")
    executed = execute(tmp_path / "source.ipynb", tmp_path)
    models = executed.metadata["widgets"]["application/vnd.jupyter.widget-state+json"]["state"]
    assert [model for model in models.values() if "gmw-do" in model["state"].get("_esm", "")]
    with lab.open(["x = 1"]) as notebook:
        notebook.wait_for_kernel()
        nbformat.write(executed, lab.folder / notebook.name)
        notebook.load()
        notebook.wait_for_kernel()
        _card(notebook).wait_for()
        notebook.page.wait_for_timeout(3000)

        assert _card(notebook).locator("button").count() == 0
        assert "%memrelease big" in _card(notebook).inner_text()
        assert notebook.problems == []
