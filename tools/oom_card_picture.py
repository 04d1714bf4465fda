"""Cells that show cards of OOMs in a kernel, for their tests and for the notebook's picture.

``python -m tools.oom_card_picture`` takes that picture anew.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

from tests.browser.lab import Lab, start_browser, start_lab

__all__ = ["HOST_CARD", "LOAD", "PICTURE", "take_picture"]

_ROOT = Path(__file__).parents[1]
PICTURE = _ROOT / "notebooks" / "images" / "oom-card.png"
_FAIL = "failing.append(examples.read_recorded_card())\n1 / 0"
#: ``failing`` is shown below the next cell that fails, as a card is below its traceback.
LOAD = f"""
%load_ext gpumemwidget
import dataclasses, os, sys, time, torch
sys.path.insert(0, {str(_ROOT)!r})
from gpumemwidget.session.session import current_session
from gpumemwidget.jupyter.oom import show_card
from gpumemwidget.model.ooms import OomCard, OomEvent, Remedy
import tests.report.oom_examples as examples
failing = []
def show_failing(result):
    if result.error_in_exec is not None and failing:
        show_card(failing.pop(), current_session())
get_ipython().events.register("post_run_cell", show_failing)
print("pid", os.getpid())
"""
#: 256 MiB under two names, 256 MiB in a list, and a function that keeps as much when it fails.
HOST_CARD = """
big = torch.ones(64, 1024, 1024)
also_big = torch.ones(64, 1024, 1024)
kept = [torch.ones(64, 1024, 1024)]
def fail():
    activations = torch.ones(64, 1024, 1024)
    raise ValueError("made to fail")
MIB = 1024**2
ways = (
    Remedy("last exception", 256 * MIB, "exact"),
    Remedy("names", 256 * MIB, "exact", names=("big",)),
    Remedy("names", 256 * MIB, "exact", names=("also_big",)),
    Remedy("smaller batch", 100 * MIB, "about"),
)
card = examples.make_host_card(ways=ways, place="In[2], line 9", text="fail()")
"""


def take_picture(lab: Lab, path: Path) -> None:
    """The card that was recorded on a GPU, below the traceback of a cell."""
    cells = [LOAD, "batches = validation_losses = [1]\nbatches", _FAIL]
    with lab.open(cells, width=1080, height=1400) as notebook:
        notebook.wait_for_kernel()
        for number in range(3):
            notebook.run(number, timeout_s=60)
        notebook.page.locator(".gmw-card button").first.wait_for()
        notebook.page.wait_for_timeout(500)
        notebook.page.locator(".gmw-card").screenshot(path=path)
        print(path, path.stat().st_size)


def main() -> None:
    """Take the picture of the notebook."""
    with (
        tempfile.TemporaryDirectory() as folder,
        start_browser() as browser,
        start_lab(Path(folder), browser) as lab,
    ):
        take_picture(lab, PICTURE)


if __name__ == "__main__":
    main()
