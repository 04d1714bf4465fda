"""The account of owners in the dashboard, as a person opens, sorts and filters it."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator

import pytest
from playwright.sync_api import expect

from tests.browser.lab import Lab, Notebook

pytestmark = [pytest.mark.browser, pytest.mark.timeout(300)]

_NOTE = ".gmd-panel[id$=panel-variables] .gmd-note"
_LOAD = "%load_ext gpumemwidget\nimport pathlib, time, torch"
_MODEL = """\
model = torch.nn.Sequential(*[torch.nn.Linear(1000, 1000) for _ in range(3)])
optimizer = torch.optim.Adam(model.parameters())
model(torch.ones(2, 1000)).sum().backward()
optimizer.step()
batch = torch.ones(8, 1000, 1000)
"""
_MANY = "history = {chr(97 + n // 26) + chr(97 + n % 26): torch.ones(1000) for n in range(250)}"
_HOSTILE = """\
name = "<img src=x onerror='window.wasRun = true'>" + "long " * 60
globals()[name] = {name: [torch.ones(1000, 1000), torch.ones(1000, 1000)]}
"""
#: The account waits for a file, as it would take its time on a heap of millions of objects.
_SLOW = """\
import gpumemwidget.ownership.account as entries
take = entries.take_memory_account
def take_slowly(*args):
    while not pathlib.Path("go on").exists():
        time.sleep(0.01)
    return take(*args)
entries.take_memory_account = take_slowly
"""


@contextlib.contextmanager
def _open_variables(lab: Lab, *cells: str) -> Iterator[Notebook]:
    """A notebook whose cells have run, with the variables in view; two more cells to run."""
    with lab.open_dashboard(_LOAD, *cells, "x = 1", _SLOW) as notebook:
        for number in range(len(cells)):
            notebook.run(2 + number, timeout_s=60)
        notebook.page.locator("[data-tab=variables]").click()
        notebook.page.wait_for_selector(".gmd-variables tbody tr")
        yield notebook


def _list_names(notebook: Notebook) -> list[str]:
    """What stands in the first column, from the top."""
    return notebook.page.locator(".gmd-variables tbody .gmd-owner > :first-child").all_inner_texts()


def _row(name: str) -> str:
    return f'.gmd-variables tr[data-key="h {name}"]'


def test_row_is_opened_and_the_whole_adds_up(lab: Lab) -> None:
    """The first click takes the account; below the names stands what is nobody's, and the sum.

    On the host no copies are offered, the sum is what a release frees, and state is asked about. An
    account that takes long shows that it is at work, while the plot goes on.
    """
    with _open_variables(lab, _MODEL) as notebook:
        page = notebook.page
        assert _list_names(notebook) == ["optimizer", "batch", "model"]
        page.locator(f"{_row('model')} button.gmd-opener").click()

        page.locator(".gmd-variables .gmd-part").first.wait_for()
        assert _list_names(notebook)[:2] == ["batch", "optimizer"]
        assert _list_names(notebook)[-2:] == ["Python & libraries", "unattributed"]
        opener = page.locator(f"{_row('model')} button.gmd-opener")
        assert opener.get_attribute("aria-expanded") == "true"
        parts = page.locator(".gmd-part").all_inner_texts()
        assert "[0…2] × 3" in parts[0]
        assert "shared with optimizer" in parts[0]
        foot = page.locator(".gmd-variables tfoot").inner_text()
        assert "Sum: all that is allocated on host" in foot

        page.locator(".gmd-account").click()
        page.locator(".gmd-account:enabled").wait_for()
        page.locator(".gmd-variables .gmd-part").first.wait_for()
        assert page.locator(".gmd-part").all_inner_texts() == parts

        page.locator("[data-sort=name] button").click()
        names = [name for name in _list_names(notebook) if name in {"batch", "model", "optimizer"}]
        assert names == ["batch", "model", "optimizer"]
        opener.focus()
        page.keyboard.press("ArrowLeft")
        assert page.locator(".gmd-part").count() == 0
        assert opener.evaluate("element => element === document.activeElement")

        page.locator(f"{_row('batch')} input").check()
        expect(page.locator(".gmd-sum")).to_contain_text(
            "releases 30.52 MiB on host", timeout=60_000
        )
        notebook.run(3)
        page.locator(".gmd-variables[data-old]").wait_for()
        assert re.search(r"owns is as of \d+:\d\d:\d\d", page.locator(_NOTE).inner_text())
        assert not page.locator(".gmd-variables tfoot tr").is_visible()

        page.locator(f"{_row('model')} input[type=checkbox]").check()
        page.locator(".gmd-sum strong").filter(has_text="MiB on host").wait_for()
        assert not page.locator(".gmd-keep").is_visible()
        page.locator(".gmd-release").click()
        assert "This loses training state." in page.locator(".gmd-confirm").inner_text()
        page.locator(".gmd-cancel").click()

        notebook.run(4)
        page.locator(".gmd-account").click()
        progress = page.locator(".gmd-progress[data-state=running]")
        progress.wait_for()
        assert "Looking through all objects" in progress.inner_text()
        assert page.locator(".gmd-account").is_disabled()
        before = page.locator(".gmd").get_attribute("data-last-time")
        expect(page.locator(".gmd")).not_to_have_attribute(
            "data-last-time", str(before), timeout=60_000
        )
        (lab.folder / "go on").touch()
        expect(page.locator(".gmd-account")).to_be_enabled(timeout=60_000)
        assert not progress.is_visible()
    (lab.folder / "go on").unlink()


def test_filter_finds_what_is_not_open_and_names_are_text(lab: Lab) -> None:
    """By a piece of the path; a row with hundreds of parts is opened by the hundred.

    Neither a name nor a key becomes an element, and a long one leaves the table its width.
    """
    with _open_variables(lab, _MODEL, _MANY, _HOSTILE) as notebook:
        page = notebook.page
        page.locator(".gmd-account").click()
        page.locator(".gmd-variables[data-account]").wait_for()
        parts = page.locator(".gmd-part")

        page.locator(".gmd-search").fill("exp_avg_sq")
        expect(parts).to_have_count(6, timeout=60_000)
        assert _list_names(notebook)[0] == "optimizer"
        assert all("exp_avg_sq" in text for text in _list_names(notebook)[1:])
        page.locator(".gmd-search").fill("nowhere at all")
        expect(page.locator(_NOTE)).to_contain_text("nowhere at all", timeout=60_000)
        page.locator(".gmd-search").fill("")

        opener = page.locator(f"{_row('history')} button.gmd-opener")
        opener.click()
        page.get_by_role("button", name="… 150 more").click()
        page.get_by_role("button", name="… 50 more").wait_for()
        assert parts.count() == 200
        opener.click()
        expect(parts).to_have_count(0, timeout=60_000)

        page.locator(".gmd-variables tr", has_text="<img").locator("button.gmd-opener").click()
        parts.first.wait_for()
        assert page.locator(".gmd-variables img").count() == 0
        assert page.evaluate("window.wasRun") is None
        assert "<img" in "".join(_list_names(notebook))
        scroll = page.locator(".gmd-scroll").last
        assert scroll.evaluate("element => element.scrollWidth <= element.clientWidth")
