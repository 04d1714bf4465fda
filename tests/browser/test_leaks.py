"""Memory that grows, in JupyterLab and Chromium: the card under the cell, and the dashboard."""

from __future__ import annotations

import re

import pytest

from tests.browser.lab import Lab, Notebook

pytestmark = [pytest.mark.browser, pytest.mark.timeout(300)]

_LOAD = """
%load_ext gpumemwidget
import pathlib, torch
model = torch.nn.Linear(512, 512)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
history, outputs, kept = [], [], []
"""
_GROWS = """\
x = torch.randn(2048, 512)
history.append({"loss": model(x).square().mean()})
kept.append(model(x).tanh())"""
_LOOP = """\
import time
while not pathlib.Path("enough").exists():
    optimizer.step()
    outputs.append(model(torch.randn(512, 512)).tanh())
    time.sleep(0.1)"""


def _row(notebook: Notebook, number: int) -> str:
    """The words of a cell's row in the dashboard."""
    row = notebook.page.locator(".gmd-cells tr", has_text=f"In [{number}]")
    return " ".join(row.inner_text().split())


def test_leak_is_in_the_cells_row_and_its_card_releases_it(lab: Lab) -> None:
    """From the third run on; with the whole sentence behind the words of the row."""
    with lab.open_dashboard(_LOAD, _GROWS) as notebook:
        page, card = notebook.page, notebook.cell(2).locator(".gmw-card")
        for _ in range(3):
            notebook.run(2)
        row = card.locator(".gmw-out tr", has_text="%memrelease kept history")
        row.get_by_role("button", name="Release").click()
        row.locator("button[data-state=done]").wait_for()
        notebook.wait_until(lambda: "no longer hold it" in card.inner_text(), "the card is grey")
        notebook.wait_until(lambda: "MiB a run" in _row(notebook, 5), "the row says it")

        assert re.search(r" \+\d+\.\d\d MiB a run ", _row(notebook, 5))
        assert "a run" not in _row(notebook, 4)
        sentence = page.locator(".gmd-flag").get_attribute("title")
        assert sentence is not None
        assert "in each of the last 3 runs of this cell: " in sentence
        assert "held by kept[…]'s graph (" in sentence
        assert """and history[…]["loss"]'s graph (""" in sentence
        assert re.search(r"Released.*Freed \d+\.\d\d MiB on host", row.inner_text(), re.DOTALL)
        assert card.locator("button").count() == 1
        assert notebook.ask("history") == "None"


def test_loop_that_grows_is_told_while_it_runs(lab: Lab) -> None:
    """In the plot, in its row, and under it; at its end the plot is quiet again."""
    with lab.open_dashboard(_LOAD, _LOOP) as notebook:
        note = notebook.page.locator(".gmd-growth")
        notebook.start(2)
        note.filter(has_text="grows").wait_for()
        notebook.cell(2).locator(".gmw-card").wait_for()

        assert notebook.is_running(2)
        assert re.fullmatch(
            r"host memory grows \d\.\d\d MiB a step since step \d+, from line 4", note.inner_text()
        )
        assert re.search(r"running, so far \+\d\.\d\d MiB a step", _row(notebook, 3))

        notebook.finish(2)
        note.wait_for(state="hidden")
        assert re.search(r"ok \+\d\.\d\d MiB a step", _row(notebook, 3))
