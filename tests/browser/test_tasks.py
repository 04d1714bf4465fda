"""What a person wants to know of memory, by the shortest way: the steps to each answer.

A step is a click, or a line that is typed and run. The dashboard is open beside the notebook.
"""

from __future__ import annotations

import re
from typing import Any

import pytest

from tests.browser.lab import Lab, Notebook
from tests.browser.stage import write_load

pytestmark = [pytest.mark.browser, pytest.mark.timeout(300)]

_LOAD = write_load(1, 1)
_HELD = "import torch\nhistory = []\nbig = torch.ones(64 << 20)\nhistory.append(big)\ndel big"
_HELD += "\nmodel = torch.nn.Linear(512, 512)\nx, y = torch.randn(8, 512), torch.randn(8, 512)"
_FITS = """\
%%memfit --on T4 --batch x,y=64
torch.nn.functional.mse_loss(model(x), y).backward()"""


class Person:
    """Does what a person does in a page, and counts it."""

    def __init__(self, notebook: Notebook) -> None:
        self._notebook = notebook
        self.panel: Any = notebook.page.locator(".gml-panel")
        self.n_steps = 0

    def click(self, locator: Any) -> None:
        """Click something."""
        self.n_steps += 1
        locator.click()

    def type(self, number: int) -> str:
        """Type the line of a cell and run it; what it says."""
        self.n_steps += 1
        return self._notebook.run(number, timeout_s=60)


def test_steps_to_each_answer(side_lab: Lab) -> None:
    """Which cell took most, and which notebook has the GPU, are shown before anything is done.

    Two clicks say what holds memory, and two more free it. One line above a step says whether a
    batch of 64 fits on a T4, in one sentence before all else.
    """
    with side_lab.open([_LOAD, "%memdash --side", "stage.train(0)", _HELD, _FITS]) as notebook:
        notebook.wait_for_kernel()
        for number in range(4):
            notebook.run(number, timeout_s=60)
        person = Person(notebook)
        panel = person.panel
        panel.locator(".gmd[data-drawn]").wait_for()

        panel.locator(".gmd-most", has_text="Kept most: In [3] +26.44 GiB").wait_for()
        has_gpu = re.compile(r"GPU: \S+ \d+\.\d\d GiB")
        panel.locator(".gml-kernels summary", has_text=has_gpu).wait_for()
        assert person.n_steps == 0

        row = panel.locator(".gmd-variables tr", has_text="history")
        answer = panel.locator(".gmd-answer")
        person.click(panel.get_by_role("tab", name="Variables"))
        person.click(row.get_by_role("button", name="Why"))
        answer.filter(has_text="Reaches 256.00 MiB on host").wait_for()
        assert person.n_steps == 2
        person.click(row.locator("input[value=history]"))
        person.click(panel.locator(".gmd-release"))
        answer.filter(has_text="256.00 MiB").and_(panel.locator("[data-state=done]")).wait_for()
        assert person.n_steps == 4

        said = person.type(4)
        assert said.strip().startswith("A batch of 64 fits on T4")
        assert person.n_steps == 5
