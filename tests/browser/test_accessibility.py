"""Names, roles and contrast of all that a person sees, as axe-core judges them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.browser.lab import Lab, Notebook
from tests.browser.stage import write_load

pytestmark = [pytest.mark.browser, pytest.mark.slow, pytest.mark.timeout(300)]

_AXE = Path(__file__).parent / "manager" / "node_modules" / "axe-core" / "axe.min.js"
_JUDGE = """
async (selector) => {
  const { violations, passes } = await axe.run(selector, { resultTypes: ["violations"] });
  const worst = violations.filter(({ impact }) => ["serious", "critical"].includes(impact));
  return [passes.length, worst.map(({ id, nodes }) => `${id}: ${nodes[0].html}`)];
}
"""
_CELLS = [
    write_load(1, 1),
    "%memdash --side",
    "stage.train(0)",
    "import torch\nmodel = torch.nn.Linear(64, 64)\ny = model(torch.randn(8, 64))",
    "%memdash",
    "%memstat --device",
    "%memvars",
    "%memwhy model",
    "%%memtrace\nx = torch.ones(1 << 20)",
    "%memrelease x",
    "%memledger",
    "%memhelp",
    "torch.empty(1 << 50)",
]


def _judge(notebook: Notebook, selector: str) -> list[str]:
    n_passed, worst = notebook.page.evaluate(_JUDGE, selector)
    assert n_passed
    return [f"{selector}: {each}" for each in worst]


def test_nothing_serious_is_found(side_lab: Lab) -> None:
    """In the dashboard's tabs, the panel, the status bar's item and the reports, in both themes."""
    with side_lab.open(_CELLS) as notebook:
        notebook.wait_for_kernel()
        for number in range(len(_CELLS)):
            notebook.run(number, timeout_s=60)
        page: Any = notebook.page
        page.evaluate(_AXE.read_text("utf-8"))
        tabs = page.locator(".jp-Notebook .gmd [role=tab]:visible")
        assert tabs.count() >= 3

        found = []
        for theme in ("JupyterLab Light", "JupyterLab Dark"):
            notebook.set_theme(theme)
            for tab in tabs.all():
                tab.click()
                page.locator(".jp-Notebook .gmd [role=tabpanel]:visible").wait_for()
                found += _judge(notebook, ".jp-Notebook .gmd")
            for selector in (".gml-panel", ".gml-status", ".gmw"):
                found += _judge(notebook, selector)

        assert found == []
