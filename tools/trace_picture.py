"""The documents' picture of a traced cell: ``python -m tools.trace_picture`` takes it anew.

What is shown is a training cell that was recorded on a real GPU (``tests/data/h100-traces``).
"""

from __future__ import annotations

import tempfile
from pathlib import Path

from tests.browser.lab import start_browser, start_lab

__all__ = ["PICTURE", "take_picture"]

_ROOT = Path(__file__).parents[1]
PICTURE = _ROOT / "notebooks" / "images" / "trace.png"
#: Without the parts of the peak: the recording knows no names.
_SHOW = f"""
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


def take_picture(path: Path) -> None:
    """The report, its busiest line opened."""
    with (
        tempfile.TemporaryDirectory() as folder,
        start_browser() as browser,
        start_lab(Path(folder), browser) as lab,
        lab.open([_SHOW], width=1080, height=1200) as notebook,
    ):
        notebook.wait_for_kernel()
        notebook.run(0, timeout_s=60)
        report = notebook.page.locator(".gmw").first
        report.wait_for()
        report.locator("summary").first.click()
        notebook.page.wait_for_timeout(500)
        report.screenshot(path=path)
        print(path.name, path.stat().st_size)


if __name__ == "__main__":
    take_picture(PICTURE)
