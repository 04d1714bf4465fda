"""Takes pictures of the dashboard, to be looked at: ``python -m tests.browser.screens FOLDER``.

Light and dark, wide and narrow, empty, busy, over: what a person may meet. Scenes with GPUs play a
script on simulated devices. ``--readme`` takes the picture of the README.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

from tests.browser.lab import Lab, Notebook, start_browser, start_lab

__all__ = ["README_PICTURE", "SCENES", "take_pictures"]

README_PICTURE = Path(__file__).parents[2] / "notebooks" / "images" / "dashboard.png"

_LOAD = "%load_ext gpumemwidget\nimport time, torch"
_GPUS = """
import time
import gpumemwidget.jupyter.extension as extension
from gpumemwidget.backends.hardware import Hardware
from gpumemwidget.backends.host import HostBackend
from gpumemwidget.backends.replay import ReplayBackend, ReplayMonitor
from gpumemwidget.backends.script import demo_script
gpus = ReplayBackend.from_script(
    demo_script({n_devices}, step_s=1.2), clock=time.monotonic, loop=True)
extension.detect_hardware = lambda: Hardware([gpus, HostBackend()], ReplayMonitor(gpus.playback))
def train(model, loader, seconds=4):
    time.sleep(seconds)
model = loader = None
%load_ext gpumemwidget
"""
_MODEL = """
model = torch.nn.Sequential(*[torch.nn.Linear(1500, 1500) for _ in range(4)])
optimizer = torch.optim.Adam(model.parameters())
inputs = torch.randn(512, 1500)
first_rows = inputs[:128]
"""
_TRAIN = """
history = []
for step in range({n_steps}):
    loss = model(inputs).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    history.append(model(inputs).detach().repeat(8, 1))
"""
_FAIL = "model(torch.randn(64, 1000))"
_SHOW = "inputs[:, :750] @ torch.randn(750, 1500)"


def _empty(notebook: Notebook) -> None:
    _open(notebook)


def _busy(notebook: Notebook) -> None:
    _open(notebook)
    notebook.run(2)
    notebook.run(3, timeout_s=90)
    notebook.start(3)
    notebook.page.wait_for_timeout(3000)


def _variables(notebook: Notebook) -> None:
    _open(notebook)
    for cell in (2, 3, 4, 5):
        notebook.run(cell, timeout_s=90)
    notebook.page.locator("[data-tab=variables]").click()
    for name in ("history", "inputs", "first_rows"):
        notebook.page.locator(f".gmd-variables input[value={name}]").check()
    notebook.page.wait_for_timeout(700)


def _account(notebook: Notebook) -> None:
    _variables(notebook)
    page = notebook.page
    page.locator(".gmd-account").click()
    page.locator(".gmd-variables[data-account]").wait_for()
    for name in ("optimizer", "model"):
        page.locator(f'.gmd-variables tr[data-key="h {name}"] button.gmd-opener').click()
    page.locator(".gmd-variables .gmd-part button.gmd-opener").first.click()
    page.mouse.move(0, 0)
    page.wait_for_timeout(700)


def _filtered(notebook: Notebook) -> None:
    _account(notebook)
    notebook.page.locator(".gmd-search").fill("weight")
    notebook.page.wait_for_timeout(900)


def _released(notebook: Notebook) -> None:
    _variables(notebook)
    notebook.page.locator(".gmd-release").click()
    notebook.page.locator(".gmd-answer[data-state=done]").wait_for()
    notebook.page.wait_for_timeout(700)


def _restarted(notebook: Notebook) -> None:
    _open(notebook)
    notebook.run(2)
    notebook.restart_kernel()
    notebook.page.locator(".gmd[data-over]").wait_for()


def _gpus(notebook: Notebook) -> None:
    _open(notebook)
    for cell in (2, 3):
        notebook.run(cell, timeout_s=60)
    notebook.start(4)
    notebook.page.wait_for_timeout(5000)


def _one_gpu(notebook: Notebook) -> None:
    _gpus(notebook)
    notebook.page.locator('[data-device="cuda:0"]').click()
    notebook.page.wait_for_timeout(300)


def _tip(notebook: Notebook) -> None:
    _one_gpu(notebook)
    notebook.page.locator(".gmd-band").nth(-2).hover()
    notebook.page.wait_for_timeout(200)


def _hover(notebook: Notebook) -> None:
    _gpus(notebook)
    box = notebook.page.locator(".gmd-canvas").bounding_box()
    assert box is not None
    notebook.page.mouse.move(box["x"] + box["width"] * 0.6, box["y"] + box["height"] * 0.4)
    notebook.page.wait_for_timeout(300)


_HOST_CELLS = (_LOAD, "%memdash", _MODEL, _TRAIN.format(n_steps=10), _FAIL, _SHOW)
_GPU_CELLS = (
    "%memdash",
    "train(model, loader)",
    "train(model, loader, seconds=6)",
    "train(model, loader, seconds=20)",
)
#: What is shown: the notebook's cells, and what is done with them.
SCENES: dict[str, tuple[tuple[str, ...], Callable[[Notebook], None]]] = {
    "empty": (_HOST_CELLS, _empty),
    "busy": (_HOST_CELLS, _busy),
    "variables": (_HOST_CELLS, _variables),
    "account": (_HOST_CELLS, _account),
    "filtered": (_HOST_CELLS, _filtered),
    "released": (_HOST_CELLS, _released),
    "restarted": (_HOST_CELLS, _restarted),
    "one-gpu": ((_GPUS.format(n_devices=1), *_GPU_CELLS), _one_gpu),
    "tip": ((_GPUS.format(n_devices=1), *_GPU_CELLS), _tip),
    "two-gpus": ((_GPUS.format(n_devices=2), *_GPU_CELLS), _hover),
    "eight-gpus": ((_GPUS.format(n_devices=8), *_GPU_CELLS), _gpus),
}


def take_readme_picture(lab: Lab) -> None:
    """The README's picture: two GPUs in mid-cell."""
    cells, _ = SCENES["two-gpus"]
    with lab.open(cells, width=1180, height=1400) as notebook:
        notebook.wait_for_kernel()
        _gpus(notebook)
        README_PICTURE.parent.mkdir(exist_ok=True)
        notebook.dashboards().first.screenshot(path=README_PICTURE)
        print(README_PICTURE, README_PICTURE.stat().st_size)


def take_pictures(
    lab: Lab, folder: Path, *, scenes: list[str], width: int, theme: str, suffix: str
) -> None:
    """One picture of the dashboard for each scene."""
    for name in scenes:
        cells, act = SCENES[name]
        with lab.open(cells, width=width, height=1400, theme=theme) as notebook:
            notebook.wait_for_kernel()
            act(notebook)
            path = folder / f"{name}{suffix}.png"
            notebook.dashboards().first.screenshot(path=path)
            print(path, *notebook.problems)


def _open(notebook: Notebook) -> None:
    notebook.run(0, timeout_s=60)
    notebook.run(1)
    notebook.page.wait_for_selector(".gmd[data-drawn]")
    notebook.page.wait_for_timeout(500)


def main() -> int:
    """Take the pictures that were asked for."""
    parser = argparse.ArgumentParser(prog="python -m tests.browser.screens", description=__doc__)
    parser.add_argument("folder", type=Path, nargs="?", help="where the pictures go")
    parser.add_argument("--readme", action="store_true", help="take the README's picture instead")
    parser.add_argument("--scene", action="append", choices=SCENES, help="only this one")
    parser.add_argument("--look", action="append", choices=("wide", "dark", "narrow"))
    options = parser.parse_args()
    if options.folder is None and not options.readme:
        parser.error("name a folder, or --readme")
    scenes = options.scene or list(SCENES)
    with ExitStack() as stack:
        browser = stack.enter_context(start_browser())
        temporary = stack.enter_context(tempfile.TemporaryDirectory())
        lab = stack.enter_context(start_lab(Path(temporary), browser))
        if options.readme:
            take_readme_picture(lab)
            return 0
        options.folder.mkdir(parents=True, exist_ok=True)
        light, dark = "JupyterLab Light", "JupyterLab Dark"
        looks = {
            "wide": (1280, light, ""),
            "dark": (1280, dark, "-dark"),
            "narrow": (560, light, "-narrow"),
        }
        for look in options.look or looks:
            width, theme, suffix = looks[look]
            take_pictures(
                lab, options.folder, scenes=scenes, width=width, theme=theme, suffix=suffix
            )
    return 0


if __name__ == "__main__":
    sys.exit(main())
