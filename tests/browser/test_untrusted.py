"""What a person sees of a saved notebook that is not trusted yet, in JupyterLab.

Everybody's first look at somebody else's notebook is of this kind: JupyterLab strips each style
sheet and each SVG from its outputs.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Locator

from tests.browser.lab import Lab, Notebook
from tests.report.every_report import GOLDEN
from tools.notebooks import FOLDER

pytestmark = [pytest.mark.browser, pytest.mark.timeout(300)]

_REPORTS = ("trace_host", "oom", "breakdown", "account", "cell_gpu")


@pytest.fixture(scope="module")
def quickstart(lab: Lab) -> Iterator[Notebook]:
    """The notebook that the README opens, as it lies in the repository."""
    shutil.copy(FOLDER / "quickstart.ipynb", lab.folder)
    with lab.open_file("quickstart.ipynb") as notebook:
        notebook.page.locator(".gmw-li").first.wait_for(state="attached")
        yield notebook


@pytest.fixture(scope="module")
def reports(lab: Lab) -> Iterator[Notebook]:
    """A notebook that shows a report under each cell."""
    _write_outputs(lab.folder / "reports.ipynb", _REPORTS)
    with lab.open_file("reports.ipynb") as notebook:
        notebook.page.locator(".gmw-card").first.wait_for(state="attached")
        yield notebook


def _write_outputs(path: Path, names: tuple[str, ...]) -> None:
    cells = [
        {
            "cell_type": "code",
            "id": name,
            "metadata": {},
            "execution_count": 1,
            "source": name,
            "outputs": [
                {
                    "output_type": "display_data",
                    "metadata": {},
                    "data": {"text/html": (GOLDEN / f"{name}.html").read_text(encoding="utf-8")},
                }
            ],
        }
        for name in names
    ]
    notebook = {"nbformat": 4, "nbformat_minor": 5, "metadata": {}, "cells": cells}
    path.write_text(json.dumps(notebook), encoding="utf-8")


def _read_style(element: Locator, name: str) -> str:
    return str(element.evaluate("(e, name) => getComputedStyle(e).getPropertyValue(name)", name))


def _find(notebook: Notebook, report: str, selector: str) -> Locator:
    return notebook.cell(_REPORTS.index(report)).locator(selector)


def test_the_notebook_is_not_trusted(quickstart: Notebook, reports: Notebook) -> None:
    """JupyterLab has stripped all style sheets and pictures, so the tests below mean something."""
    for notebook in (quickstart, reports):
        assert notebook.page.locator(".gmw").count() >= len(_REPORTS)
        assert notebook.page.locator(".gmw style, .gmw svg").count() == 0


def test_source_stands_to_the_left_with_its_indentation(quickstart: Notebook) -> None:
    """Lines of code keep their spaces, and amounts stay beside them, to the right, unbroken."""
    page = quickstart.page
    line = page.locator(".gmw-li tbody th.gmw-src", has=page.locator("code")).first
    amount = page.locator(".gmw-li tbody td.gmw-r", has_text="MiB").first

    assert _read_style(line, "text-align") == "left"
    assert _read_style(line.locator("code"), "white-space") in ("pre", "preserve nowrap")
    assert _read_style(amount, "text-align") == "right"
    assert _read_style(amount, "white-space") == "nowrap"


def test_words_stand_to_the_left_and_numbers_to_the_right(quickstart: Notebook) -> None:
    """In each table of each report, with its caption and its names."""
    wrong = quickstart.page.evaluate(
        """() => [...document.querySelectorAll(".gmw-t :is(th, td, caption)")].filter(e => {
            const right = e.matches(".gmw-r, .gmw-ix");
            return e.textContent && getComputedStyle(e).textAlign !== (right ? "right" : "left");
        }).map(e => e.outerHTML)"""
    )

    assert quickstart.page.locator(".gmw-t td").count() > 100
    assert wrong == []


def test_labels_and_amounts_are_not_broken(quickstart: Notebook) -> None:
    """``In [10]`` and ``239.6 ms`` stand on one line each."""
    broken = quickstart.page.evaluate(
        """() => [...document.querySelectorAll(".gmw-t :is(th, td)")].filter(e => {
            const wraps = e.matches(".gmw-f, .gmw-z, .gmw-wd");
            return e.textContent && !wraps && getComputedStyle(e).whiteSpace === "normal";
        }).map(e => e.outerHTML)"""
    )

    assert broken == []


def test_bars_have_their_width_and_colour(reports: Notebook) -> None:
    """A share is a bar of 48 pixels; a part of a device is as wide as it is of the whole."""
    share = _find(reports, "account", ".gmw-y").first
    assert _read_style(share, "width") == "48px"
    assert "rgb(59, 130, 214) 37.9%" in _read_style(share, "background-image")

    for report in ("oom", "breakdown"):
        bar = _find(reports, report, ".gmw-e").first
        parts = bar.locator("> i:not(.gmw-mk)")
        widths = parts.evaluate_all("all => all.map(e => e.getBoundingClientRect().width)")
        assert sum(widths) == pytest.approx(bar.evaluate("e => e.clientWidth"), abs=1)
        assert max(widths) > 100
        assert "rgba(0, 0, 0, 0)" not in _read_style(parts.first, "background-color")


def test_legend_of_a_bar_has_its_colours(reports: Notebook) -> None:
    """Each patch beside a part's name has the colour of that part in the bar."""
    patches = _find(reports, "oom", ".gmw-el .gmw-sq")
    read = "all => all.map(e => getComputedStyle(e).backgroundColor)"
    legend = patches.evaluate_all(read)
    bar = _find(reports, "oom", ".gmw-e > i:not(.gmw-mk)").evaluate_all(read)

    assert legend == bar
    assert len(set(legend)) > 5


def test_a_missing_chart_is_explained(reports: Notebook) -> None:
    """No words of the picture lie about, and a line says how to see it."""
    text = _find(reports, "cell_gpu", ".gmw").inner_text()

    assert "Trust this notebook to see the chart." in text
    assert "0 s" not in text
    assert not _find(reports, "cell_gpu", ".gmw-s").is_visible()
    assert "Trust" not in _find(reports, "account", ".gmw").inner_text()
