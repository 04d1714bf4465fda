"""The Device tab and many devices in the plot, in JupyterLab and Chromium, on simulated GPUs."""

from __future__ import annotations

import re
from contextlib import AbstractContextManager

import pytest
from playwright.sync_api import Locator, expect

from tests.browser.lab import BUSY, Lab, Notebook
from tests.browser.stage import write_load

pytestmark = [pytest.mark.browser, pytest.mark.timeout(300)]

_REPORT = ".gmd-panel[id$=panel-device] .gmd-report"
_TRAIN = "stage.train(0)"
#: A busy cell with a child that has memory on a GPU: until there is a file, and while there is one.
_CHILD = """
import pathlib
enough = pathlib.Path("enough")
stage.driver.set_process(2**30, 700 * MIB, name="python rank.py", relation="child")
while not enough.exists(): sum(range(100_000))
stage.driver.set_process(2**30, 0)
while enough.exists(): sum(range(100_000))
"""


def _open(
    lab: Lab, *cells: str, n_devices: int = 2, n_used: int | None = None
) -> AbstractContextManager[Notebook]:
    """A notebook on a stage, with the dashboard in its second cell, and more cells to run."""
    load = write_load(n_devices, n_used or n_devices)
    return lab.open_dashboard(load, *cells, height=2000)


def _show_device(notebook: Notebook) -> None:
    notebook.page.locator("[data-tab=device]").click()
    notebook.page.wait_for_selector(f"{_REPORT} table tbody tr")


def _device(notebook: Notebook, name: str) -> Locator:
    return notebook.page.locator(f'.gmd-chip[data-device="{name}"]')


def _wait_for_report(report: Locator, device: str) -> None:
    expect(report).to_have_text(re.compile(f"^{device}"), use_inner_text=True, timeout=60_000)


def _text(notebook: Notebook, selector: str) -> str:
    return notebook.page.locator(selector).first.inner_text()


def test_parts_wait_for_the_end_of_a_cell_and_children_do_not(lab: Lab) -> None:
    """Opened in mid-cell, the tab shows what is live and says what it waits for.

    A process that a cell starts stands there with its memory on the GPU, until it ends.
    """
    with _open(lab, _TRAIN, BUSY, _CHILD) as notebook:
        notebook.run(2)
        notebook.start(3)
        notebook.wait_until(lambda: notebook.is_running(3), "the cell runs")
        page = notebook.page

        page.locator("[data-tab=device]").click()
        page.locator(".gmd-wait:visible").wait_for()
        assert "when the running cell ends" in _text(notebook, ".gmd-wait:visible")
        notebook.finish(3)
        page.wait_for_selector(f"{_REPORT} table tbody tr")
        assert page.locator(".gmd-as-of[data-state='']").count() == 1

        # In the next cell they are of before it.
        children = page.locator(".gmd-children tbody tr")
        assert children.count() == 0
        notebook.start(4)
        as_of = page.locator(".gmd-as-of").first
        expect(as_of).to_contain_text("before the running cell", timeout=60_000)
        expect(children).to_have_count(1, timeout=60_000)
        expect(children).to_contain_text("700.00 MiB", timeout=60_000)
        words = children.inner_text()
        assert notebook.is_running(4)
        assert "python rank.py" in words
        assert "cuda:0" in words
        notebook.let_finish()
        expect(children).to_have_count(0, timeout=60_000)
        assert notebook.is_running(4)

        (lab.folder / "enough").unlink()
        notebook.wait_for_end(4)
        expect(as_of).to_have_text(re.compile("^As of"), use_inner_text=True, timeout=60_000)


def test_device_is_chosen_by_its_card(lab: Lab) -> None:
    """A click on a card shows that device's plot, its parts and its map; a second one all plots."""
    with _open(lab, _TRAIN + "\nstage.train(1, n_layers=3)") as notebook:
        notebook.run(2)
        _show_device(notebook)
        page = notebook.page
        report = page.locator(_REPORT).first
        expect(report).to_contain_text("parameters", timeout=60_000)
        assert "python serve.py" in report.inner_text()
        report.locator("summary", has_text="Map of segments").click()
        report.locator("details svg").wait_for()
        titles = report.locator("details svg title").all_text_contents()
        assert any("model.layers[" in title and "512.00 MiB" in title for title in titles)
        pressed = page.locator('.gmd-chip[aria-pressed="true"]')
        assert pressed.count() == 0, "all devices are in the plot"

        _device(notebook, "cuda:1").click()
        _wait_for_report(report, "cuda:1")
        assert "Map of segments" in report.inner_text()
        assert pressed.get_attribute("data-device") == "cuda:1"
        _device(notebook, "cuda:0").click()
        assert pressed.get_attribute("data-device") == "cuda:0"
        _wait_for_report(report, "cuda:0")
        _device(notebook, "host").click()
        _wait_for_report(report, "host")
        _device(notebook, "host").click()
        assert pressed.count() == 0, "a second click shows all of them again"


def test_limit_and_budget_are_lines_and_the_cell_over_it_is_marked(lab: Lab) -> None:
    """In the plot with their amounts, on the bar as marks; the cell in the lane and in the list."""
    take = "stage.take(9000, 'tensor', 'batch')"
    with _open(
        lab, "%memlimit 40GiB\n%membudget 6GiB", take, "stage.drop('batch')", n_devices=1
    ) as notebook:
        for cell in (2, 3, 4):
            notebook.run(cell)
        page = notebook.page

        lines = page.locator(".gmd-canvas .annotation-text")
        notebook.wait_until(
            lambda: {"limit 40.00 GiB", "budget 6.00 GiB"} <= set(lines.all_text_contents()),
            "both lines have their names",
        )
        flagged = page.locator(".gmd-cells tr", has=page.locator(".gmd-flag"))
        assert flagged.count() == 1
        assert "'batch')" in flagged.inner_text()
        assert "stage.take" in flagged.inner_text()
        assert page.locator(".gmd-band[data-crossed]").count() == 1
        page.locator(".gmd-pause").click()  # The bands move with the time.
        page.locator(".gmd-band[data-crossed]").hover()
        assert "over the budget of 6.00 GiB" in _text(notebook, ".gmd-lane ~ .gmd-tip")
        _show_device(notebook)
        report = _text(notebook, _REPORT)
        assert "40.00 GiB" in report
        assert "6.00 GiB" in report


def _check_inside(notebook: Notebook, parts: str) -> None:
    """Check that the dashboard cuts none of these off at its left or right."""
    assert notebook.page.locator(parts).count()
    # In one go: a row may be drawn anew between two questions.
    outside = notebook.page.evaluate(
        """parts => {
            const box = document.querySelector(".gmd").getBoundingClientRect();
            return [...document.querySelectorAll(parts)]
                .filter(part => part.getClientRects().length)
                .filter(part => {
                    const inner = part.getBoundingClientRect();
                    return inner.left < box.left - 1 || inner.right > box.right + 1;
                })
                .map(part => part.outerHTML.slice(0, 200));
        }""",
        parts,
    )
    assert outside == []


def test_eight_devices_are_readable(lab: Lab) -> None:
    """Each has its plot and its bar, untouched and lost ones too, and nothing stands out."""
    fill = "for n in range(6): stage.train(n, n_layers=4)\nstage.driver.lose(7)"
    with _open(lab, fill, n_devices=8, n_used=6) as notebook:
        notebook.run(2)
        page = notebook.page
        code = page.locator(".gmd-cells td code").first
        for width in (1280, 400):
            page.set_viewport_size({"width": width, "height": 2000})
            page.wait_for_function(f"({_PLOT_WIDTH}) < {width}")
            page.locator("[data-tab=cells]").click()
            _check_inside(notebook, ".gmd-cells td, .gmd-cells td div")
            assert code.evaluate("code => code.parentElement.clientWidth") >= 100
            _show_device(notebook)
            expect(_device(notebook, "cuda:6")).to_contain_text("0 of 80 GiB", timeout=60_000)

            cards = page.locator(".gmd-chip").all()
            names = [card.get_attribute("data-device") for card in cards]
            assert names == [*(f"cuda:{n}" for n in range(8)), "host"]
            titles = page.locator(".gmd-canvas .annotation-text").all_text_contents()
            assert [f"cuda:{n}" for n in range(6)] == [text for text in titles if "cuda:" in text]
            parts = f".gmd-chip, .gmd-chip > *, .gmd-canvas, {_REPORT}"
            _check_inside(notebook, parts)

        state = page.locator(".gmd-parts-part").first
        _device(notebook, "cuda:6").click()
        expect(state).to_contain_text("has not used it", timeout=60_000)
        _device(notebook, "cuda:7").click()
        expect(state).to_contain_text("GPU is lost", timeout=60_000)
        assert notebook.ask("stage.gpu.list_touched()") == str(tuple(range(6)))


_PLOT_WIDTH = 'document.querySelector(".gmd-canvas").layout.width'
