"""Memory that ipywidgets' registry keeps, in a real kernel: what is recommended frees it."""

from __future__ import annotations

import re

import ipywidgets
import pytest

from tests.jupyter.notebook import Notebook

pytestmark = pytest.mark.kernel


@pytest.mark.skipif(
    ipywidgets.__version__.startswith("7."),
    reason="ipywidgets 7: each path has its fix, and no line frees all",
)
@pytest.mark.parametrize(
    ("cell", "name", "command"),
    [
        (
            "slider = w.IntSlider(); slider.data = torch.ones(1 << 20)\nr = refer(slider.data)",
            "slider",
            "slider.close(); del slider; import gc; gc.collect()",
        ),
        (
            "out = torch.ones(1 << 20); b = w.Button(); b.on_click(lambda b, kept=out: None)\n"
            "r = refer(out); del b",
            "out",
            "import ipywidgets; ipywidgets.Widget.close_all(); del out; import gc; gc.collect()",
        ),
    ],
    ids=["a widget with a name", "a widget without one"],
)
def test_a_widget_that_holds_memory_is_closed(
    notebook: Notebook, cell: str, name: str, command: str
) -> None:
    """By its own method where it has a name, else with all of them; and then the memory goes."""
    notebook.run("import gc, torch, ipywidgets as w\nfrom weakref import ref as refer")
    notebook.run(cell)

    said = " ".join(notebook.run(f"%memwhy {name}").text.split())
    (found,) = re.findall(r"To free it: (.*) \(4.00 MiB on host\)", said)
    notebook.run(found)

    assert found == command
    assert notebook.evaluate("r() is None")
