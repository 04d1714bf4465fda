"""The account of owners in the dashboard, as a person opens, sorts and filters it."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator

import pytest

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
    """A notebook whose cells have all run, with the variables in view."""
    with lab.open_dashboard(_LOAD, *cells, "x = 1") as notebook:
        for number in range(len(cells)):
            notebook.run(2 + number, timeout_s=60)
        notebook.page.locator("[data-tab=variables]").click()
        notebook.page.wait_for_selector(".gmd-variables tbody tr")
        yield notebook


def _list_names(notebook: Notebook) -> list[str]:
    """What stands in the first column, from the top."""
    return notebook.page.locator(".gmd-variables tbody .gmd-owner > :first-child").all_inner_texts()


def _row(notebook: Notebook, name: str) -> str:
    return f'.gmd-variables tr[data-key="h {name}"]'


def test_row_is_opened_and_the_whole_adds_up(lab: Lab) -> None:
    """The first click takes the account; below the names stands what is nobody's, and the sum."""
    with _open_variables(lab, _MODEL) as notebook:
        page = notebook.page
        assert _list_names(notebook) == ["optimizer", "batch", "model"]
        page.locator(f"{_row(notebook, 'model')} button.gmd-opener").click()

        page.locator(".gmd-variables .gmd-part").first.wait_for()
        assert _list_names(notebook)[:2] == ["batch", "optimizer"]
        assert _list_names(notebook)[-2:] == ["Python & libraries", "unattributed"]
        opener = page.locator(f"{_row(notebook, 'model')} button.gmd-opener")
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

        page.locator(f"{_row(notebook, 'batch')} input").check()
        notebook.wait_until(
            lambda: "releases 30.52 MiB on host" in page.locator(".gmd-sum").inner_text(),
            "the sum is told",
        )
        notebook.run(3)
        page.locator(".gmd-variables[data-old]").wait_for()
        assert re.search(r"owns is as of \d+:\d\d:\d\d", page.locator(_NOTE).inner_text())
        assert not page.locator(".gmd-variables tfoot tr").is_visible()


def test_filter_finds_what_is_not_open(lab: Lab) -> None:
    """By a piece of the path; a row with hundreds of parts is opened by the hundred."""
    with _open_variables(lab, _MODEL, _MANY) as notebook:
        page = notebook.page
        page.locator(".gmd-account").click()
        page.locator(".gmd-variables[data-account]").wait_for()

        page.locator(".gmd-search").fill("exp_avg_sq")
        notebook.wait_until(lambda: page.locator(".gmd-part").count() == 6, "the paths are listed")
        assert _list_names(notebook)[0] == "optimizer"
        assert all("exp_avg_sq" in text for text in _list_names(notebook)[1:])
        page.locator(".gmd-search").fill("nowhere at all")
        note = page.locator(_NOTE)
        notebook.wait_until(lambda: "nowhere at all" in note.inner_text(), "nothing is found")
        page.locator(".gmd-search").fill("")

        page.locator(f"{_row(notebook, 'history')} button.gmd-opener").click()
        more = page.get_by_role("button", name="… 150 more")
        more.click()
        page.get_by_role("button", name="… 50 more").wait_for()
        assert page.locator(".gmd-part").count() == 200


def test_names_are_text_whatever_they_are(lab: Lab) -> None:
    """Neither a name nor a key becomes an element, and a long one leaves the table its width."""
    with _open_variables(lab, _HOSTILE) as notebook:
        page = notebook.page
        page.locator(".gmd-account").click()
        page.locator(".gmd-variables[data-account]").wait_for()
        page.locator(".gmd-variables button.gmd-opener").first.click()
        page.locator(".gmd-part").first.wait_for()

        assert page.locator(".gmd-variables img").count() == 0
        assert page.evaluate("window.wasRun") is None
        assert "<img" in _list_names(notebook)[0]
        scroll = page.locator(".gmd-scroll").last
        assert scroll.evaluate("element => element.scrollWidth <= element.clientWidth")


def test_long_account_shows_that_it_is_at_work(lab: Lab) -> None:
    """A word of it soon, while the plot goes on; the button waits for its end."""
    with _open_variables(lab, _MODEL, _SLOW) as notebook:
        page = notebook.page
        page.locator(".gmd-account").click()

        progress = page.locator(".gmd-progress[data-state=running]")
        progress.wait_for()
        assert "Looking through all objects" in progress.inner_text()
        assert page.locator(".gmd-account").is_disabled()
        before = page.locator(".gmd").get_attribute("data-last-time")
        notebook.wait_until(
            lambda: page.locator(".gmd").get_attribute("data-last-time") != before,
            "the plot goes on",
        )
        (lab.folder / "go on").touch()
        page.locator(".gmd-variables[data-account]").wait_for()
        assert not progress.is_visible()
        assert page.locator(".gmd-account").is_enabled()
    (lab.folder / "go on").unlink()


def test_copies_are_offered_only_where_something_can_leave_a_gpu(lab: Lab) -> None:
    """On the host there is no box, the sum is what a release frees, and state is asked about."""
    with _open_variables(lab, _MODEL) as notebook:
        page = notebook.page

        for name in ("batch", "model"):
            page.locator(f"{_row(notebook, name)} input[type=checkbox]").check()
        page.locator(".gmd-sum strong").filter(has_text="MiB on host").wait_for()

        assert not page.locator(".gmd-keep").is_visible()
        page.locator(".gmd-release").click()
        assert "This loses training state." in page.locator(".gmd-confirm").inner_text()
