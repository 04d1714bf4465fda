"""The documents' pictures of reports: ``python -m tools.pictures [NAME ...]`` takes them anew.

A whole device is a moment of the notebook on nvidia-smi, as GPUs told it; the traced cell and the
card of an out-of-memory error were recorded on a real GPU (``tests/data``); the prediction is the
notebook's, which needs none.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import nbformat

from tests.browser.lab import Lab, start_browser, start_lab

__all__ = ["HOST_CARD", "LOAD_CARDS", "take_picture"]

_ROOT = Path(__file__).parents[1]
_NOTEBOOKS = _ROOT / "notebooks"
_DEVICE = f"""
import sys, torch
sys.path.insert(0, {str(_NOTEBOOKS)!r})
torch.cuda.device_count = lambda: 0
from played import Gpus
gpus = Gpus("why-nvidia-smi-disagrees")
%load_ext gpumemwidget
gpus.show("another process has come")
"""
#: Without the parts of the peak: the recording knows no names.
_TRACE = f"""
import dataclasses, sys
sys.path.insert(0, {str(_ROOT)!r})
from tests.tracing.recordings import describe
from tests.report.examples import make_gpu_cell
from gpumemwidget.report.trace import report_trace
from gpumemwidget.model.traces import CellTrace
device, cell = describe("training")
device = dataclasses.replace(device, peak=(), notes=())
seconds = device.timeline.times_s[-1]
record = make_gpu_cell(execution_count=2, duration_s=seconds, devices=(cell,))
report_trace(CellTrace(record, (device,)), [])
"""
#: ``failing`` is shown below the next cell that fails, as a card is below its traceback.
LOAD_CARDS = f"""
%load_ext gpumemwidget
import dataclasses, os, sys, time, torch
sys.path.insert(0, {str(_ROOT)!r})
from gpumemwidget.session.session import current_session
from gpumemwidget.jupyter.outputs import show_card
from gpumemwidget.model.ooms import OomCard, OomEvent, Remedy, RemedyKind
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
    Remedy(RemedyKind.LAST_EXCEPTION, 256 * MIB, "exact"),
    Remedy(RemedyKind.NAMES, 256 * MIB, "exact", names=("big",)),
    Remedy(RemedyKind.NAMES, 256 * MIB, "exact", names=("also_big",)),
    Remedy(RemedyKind.SMALLER_BATCH, 100 * MIB, "about"),
)
card = examples.make_host_card(ways=ways, place="In [2], line 9", text="fail()")
"""
_FAIL = "failing.append(examples.read_recorded_card())\n1 / 0"


def _read_code(name: str, n_cells: int) -> tuple[str, ...]:
    """The first cells of code of a notebook."""
    notebook = nbformat.read(_NOTEBOOKS / f"{name}.ipynb", as_version=4)
    code = [cell.source for cell in notebook.cells if cell.cell_type == "code"]
    return tuple(code[:n_cells])


_PREDICT = 'gpumemwidget.predict(train, words, on="7GiB")'
#: The cells of each picture, and what is taken of their outputs.
_PICTURES = {
    "device": ((_DEVICE, "%memstat --device cuda:0"), ".gmw"),
    "trace": ((_TRACE,), ".gmw"),
    "prediction": ((*_read_code("will-it-fit", 2), _PREDICT), ".gmw-card"),
    "oom-card": ((LOAD_CARDS, "batches = validation_losses = [1]\nbatches", _FAIL), ".gmw-card"),
}


def take_picture(lab: Lab, name: str) -> None:
    """Take one picture; a traced cell's with its busiest line opened."""
    cells, selector = _PICTURES[name]
    path = _NOTEBOOKS / "images" / f"{name}.png"
    with lab.open(cells, width=1080, height=1400) as notebook:
        notebook.wait_for_kernel()
        for number in range(len(cells)):
            notebook.run(number, timeout_s=60)
        report = notebook.page.locator(selector).first
        report.wait_for()
        if name == "trace":
            report.locator("summary").first.click()
        elif name == "device":
            notebook.page.add_style_tag(content=".gmw { padding: 12px; }")
        notebook.page.wait_for_timeout(500)
        report.screenshot(path=path)
        print(path.name, path.stat().st_size)


def main(names: list[str]) -> None:
    """Take the pictures of these names, or all of them."""
    with (
        tempfile.TemporaryDirectory() as folder,
        start_browser() as browser,
        start_lab(Path(folder), browser) as lab,
    ):
        for name in names or _PICTURES:
            take_picture(lab, name)


if __name__ == "__main__":
    main(sys.argv[1:])
