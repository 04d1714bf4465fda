"""The documents' picture of a whole device: ``python -m tools.device_picture`` takes it anew.

What is shown is a moment of the notebook on nvidia-smi, as GPUs told it (``notebooks/recordings``).
"""

from __future__ import annotations

import tempfile
from pathlib import Path

from tests.browser.lab import start_browser, start_lab

__all__ = ["PICTURE", "take_picture"]

_NOTEBOOKS = Path(__file__).parents[1] / "notebooks"
PICTURE = _NOTEBOOKS / "images" / "device.png"
_PLAY = f"""
import sys, torch
sys.path.insert(0, {str(_NOTEBOOKS)!r})
torch.cuda.device_count = lambda: 0
from played import Gpus
gpus = Gpus("why-nvidia-smi-disagrees")
%load_ext gpumemwidget
gpus.show("another process has come")
"""


def take_picture(path: Path) -> None:
    """The bar with the table of its parts."""
    with (
        tempfile.TemporaryDirectory() as folder,
        start_browser() as browser,
        start_lab(Path(folder), browser) as lab,
        lab.open([_PLAY, "%memstat --device cuda:0"], width=1080, height=1400) as notebook,
    ):
        notebook.wait_for_kernel()
        notebook.run(0, timeout_s=60)
        notebook.run(1, timeout_s=60)
        report = notebook.page.locator(".gmw").first
        report.wait_for()
        notebook.page.add_style_tag(content=".gmw { padding: 12px; }")
        notebook.page.wait_for_timeout(500)
        report.screenshot(path=path)
        print(path.name, path.stat().st_size)


if __name__ == "__main__":
    take_picture(PICTURE)
