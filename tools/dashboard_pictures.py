"""Takes pictures of the dashboard, to be looked at: ``python -m tools.dashboard_pictures FOLDER``.

Light and dark, wide, narrow and as a side panel, empty, busy, over: what a person may meet. Scenes
with GPUs allocate on simulated ones. ``--readme`` takes the picture of the README, ``--side`` that
of the panel beside a notebook, ``--engines`` those of the engines' pages.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from tests.browser.lab import Lab, Notebook, start_browser, start_lab
from tests.browser.stage import write_load

__all__ = ["README_PICTURE", "SCENES", "take_pictures"]

ROOT = Path(__file__).parents[1]
_IMAGES = ROOT / "notebooks" / "images"
README_PICTURE = _IMAGES / "dashboard.png"
SIDE_PICTURE = _IMAGES / "side.png"
#: Width of the dashboard in a side panel.
_PANEL_PX = 320

_LOAD = "%load_ext gpumemwidget\nimport time, torch"
_GPUS = """
import time
from gpumemwidget.testing import simulate_gpus
gpus = simulate_gpus({n_devices})
def allocate(n_mib):
    shares = [1 - device / 20 for device in range({n_devices})]
    return [gpus.allocate(int(n_mib * share) << 20, n) for n, share in enumerate(shares)]
def free(handles):
    for handle in handles:
        gpus.free(handle)
    time.sleep(0.07)
def train(model, loader, seconds=4):
    end_s = time.monotonic() + seconds
    while time.monotonic() < end_s:
        activations = []
        for layer in range(8):
            activations.append(allocate(3600 + 200 * layer))
            time.sleep(0.07)
        for handles in reversed(activations):
            free(allocate(900))
            free(handles)
model, loader = [allocate(700) for _ in range(8)], None
%load_ext gpumemwidget
"""
_FILL = "for n in range({n}): stage.train(n, scale=1 - n / 10)"
_LAUNCH = """
for n in range(2):
    n_bytes = (2000 + 500 * n) * MIB
    stage.driver.set_process(2**30 + n, n_bytes, name=f"python rank.py {n}", relation="child")
time.sleep(8)
"""
_WATCH = """
import pathlib, sys, tempfile
sys.path.insert(0, {root!r})
from tests.ranks import write_ranks
folder = pathlib.Path(tempfile.mkdtemp()) / "runs"
ranks = write_ranks(folder)
%load_ext gpumemwidget
import gpumemwidget
watched = gpumemwidget.watch(folder)
"""
_WATCH_NOTHING = """
import tempfile
%load_ext gpumemwidget
import gpumemwidget
watched = gpumemwidget.watch(tempfile.mkdtemp(prefix="runs-"))
"""
_WORK = """
import time
def simulate(gpu):
    import sys
    from gpumemwidget.testing import simulate_gpus
    sys.simulated, sys.gpu = simulate_gpus(4), gpu
    sys.simulated.allocate(3 << 30, gpu)
def train(n_rows):
    import sys, time
    layers = []
    for _ in range(8):
        layers.append(sys.simulated.allocate((n_rows << 28) * (2 if sys.gpu == 3 else 1), sys.gpu))
        time.sleep(0.5)
    for layer in layers:
        sys.simulated.free(layer)
%load_ext gpumemwidget
import gpumemwidget
"""
_IPYPARALLEL = """
import ipyparallel
client = ipyparallel.Cluster(n=4).start_and_connect_sync()
for gpu, engine in enumerate(client):
    engine.apply_sync(simulate, gpu)
watched = gpumemwidget.watch_cluster(client)
def train_twice():
    for n_rows in (12, 10):
        client[:].apply_async(train, n_rows)
"""
_DASK = """
from distributed import Client, LocalCluster
client = Client(LocalCluster(n_workers=4, threads_per_worker=1, dashboard_address=None))
for gpu, worker in enumerate(client.scheduler_info()["workers"]):
    client.run(simulate, gpu, workers=[worker])
watched = gpumemwidget.watch_cluster(client)
answers = []
def train_twice():
    for n_rows in (12, 10):
        answers.append(client.map(train, [n_rows] * 4, pure=False))
"""
_RAY = """
import ray
_ = ray.init(runtime_env=gpumemwidget.ray_env(), num_cpus=4, log_to_driver=False)
watched = gpumemwidget.watch_cluster()
@ray.remote
class Trainer:
    def __init__(self, gpu):
        simulate(gpu)
    def train(self, n_rows):
        with gpumemwidget.span("Trainer.train"):
            train(n_rows)
    def evaluate(self, n_rows):
        with gpumemwidget.span("Trainer.evaluate"):
            train(n_rows)
trainers = [Trainer.options(name=f"trainer {gpu}").remote(gpu) for gpu in range(4)]
_ = ray.get([trainer.train.remote(1) for trainer in trainers])
def train_twice():
    for trainer in trainers:
        trainer.train.remote(12)
        trainer.evaluate.remote(10)
"""
_RUN = """
import time
for _ in range(70):
    for rank in ranks: rank.sample(0.1)
    time.sleep(0.1)
"""
_BOUNDS = "%memlimit 48GiB\n%membudget 30GiB"
_CROSS = """
for n in range(6):
    stage.take(1500, "tensor", f"batch[{n}]")
    time.sleep(0.25)
"""
_TRACED = (
    "%%memtrace\n"
    + """
losses = []
for step in range(4):
    outputs = model(inputs)
    loss = outputs.square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(outputs.detach())
"""
)
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


def _released(notebook: Notebook) -> None:
    _variables(notebook)
    notebook.page.locator(".gmd-release").click()
    notebook.page.locator(".gmd-answer[data-state=done]").wait_for()
    notebook.page.wait_for_timeout(700)


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


def _compact(notebook: Notebook) -> None:
    _gpus(notebook)
    notebook.page.get_by_role("button", name="Compact").click()
    notebook.page.wait_for_timeout(300)


def _hover(notebook: Notebook) -> None:
    _gpus(notebook)
    box = notebook.page.locator(".gmd-canvas").bounding_box()
    assert box is not None
    notebook.page.mouse.move(box["x"] + box["width"] * 0.6, box["y"] + box["height"] * 0.4)
    notebook.page.wait_for_timeout(300)


def _device(notebook: Notebook) -> None:
    _open(notebook)
    notebook.run(2)
    notebook.page.locator("[data-tab=device]").click()
    notebook.page.wait_for_timeout(2000)


def _device_busy(notebook: Notebook) -> None:
    _device(notebook)
    notebook.start(3)
    notebook.page.wait_for_timeout(3500)
    notebook.page.locator(".gmd-report summary", has_text="Map of segments").click()
    notebook.page.wait_for_timeout(300)


def _processes(notebook: Notebook) -> None:
    _open(notebook)
    notebook.page.locator("[data-tab=processes]").click()
    notebook.page.locator(".gmd-process").first.wait_for()
    notebook.start(2)
    notebook.page.wait_for_timeout(4000)


def _engine(notebook: Notebook) -> None:
    _open(notebook)
    notebook.run(2, timeout_s=90)
    notebook.page.locator("[data-tab=processes]").click()
    notebook.page.locator(".gmd-process").nth(3).wait_for()
    notebook.run(3)
    notebook.page.wait_for_timeout(7500)


def _process(notebook: Notebook) -> None:
    _processes(notebook)
    notebook.page.locator(".gmd-pick", has_text="rank 5").click()
    notebook.page.locator(".gmd-process-report table").first.wait_for()
    notebook.page.wait_for_timeout(300)


def _no_processes(notebook: Notebook) -> None:
    _open(notebook)
    notebook.page.locator("[data-tab=processes]").click()
    notebook.page.wait_for_timeout(1500)


def _bounds(notebook: Notebook) -> None:
    _open(notebook)
    for cell in (2, 3, 4, 5):
        notebook.run(cell)
    notebook.page.wait_for_timeout(1500)


def _traced(notebook: Notebook) -> None:
    notebook.run(0, timeout_s=60)
    notebook.run(1)
    notebook.run(2, timeout_s=90)
    notebook.page.wait_for_timeout(700)


@dataclass(frozen=True)
class Scene:
    """What is shown: a notebook's cells, what is done with them, and what is taken of it."""

    cells: tuple[str, ...]
    act: Callable[[Notebook], None]
    selector: str = ".gmd"


def _stage(n_devices: int, n_used: int, *cells: str) -> tuple[str, ...]:
    return (write_load(n_devices, n_used), "%memdash", *cells)


_HOST_CELLS = (_LOAD, "%memdash", _MODEL, _TRAIN.format(n_steps=10), _FAIL, _SHOW)
_GPU_CELLS = (
    "%memdash",
    "train(model, loader)",
    "train(model, loader, seconds=6)",
    "train(model, loader, seconds=20)",
)
SCENES: dict[str, Scene] = {
    "empty": Scene(_HOST_CELLS, _empty),
    "variables": Scene(_HOST_CELLS, _variables),
    "account": Scene(_HOST_CELLS, _account),
    "released": Scene(_HOST_CELLS, _released),
    "one-gpu": Scene((_GPUS.format(n_devices=1), *_GPU_CELLS), _one_gpu),
    "two-gpus": Scene((_GPUS.format(n_devices=2), *_GPU_CELLS), _hover),
    "compact": Scene((_GPUS.format(n_devices=2), *_GPU_CELLS), _compact),
    "eight-gpus": Scene((_GPUS.format(n_devices=8), *_GPU_CELLS), _gpus),
    "bounds": Scene(_stage(1, 1, _BOUNDS, _FILL.format(n=1), _CROSS, "1 / 0"), _bounds),
    "device": Scene(_stage(1, 1, _FILL.format(n=1)), _device),
    "device-busy": Scene(_stage(1, 1, _FILL.format(n=1), _LAUNCH), _device_busy),
    "device-eight": Scene(_stage(8, 6, f"{_FILL.format(n=6)}\nstage.driver.lose(6)"), _device),
    "processes": Scene((_WATCH.format(root=str(ROOT)), "%memdash", _RUN), _processes),
    "process": Scene((_WATCH.format(root=str(ROOT)), "%memdash", _RUN), _process),
    "no-processes": Scene((_WATCH_NOTHING, "%memdash"), _no_processes),
    "ipyparallel": Scene((_WORK, "%memdash", _IPYPARALLEL, "train_twice()"), _engine),
    "dask": Scene((_WORK, "%memdash", _DASK, "train_twice()"), _engine),
    "ray": Scene((_WORK, "%memdash", _RAY, "train_twice()"), _engine),
    "traced": Scene((_LOAD, _MODEL, _TRACED), _traced, ".jp-OutputArea:has(.gmw)"),
}


def take_readme_picture(lab: Lab) -> None:
    """The README's picture: two GPUs in mid-cell."""
    with lab.open(SCENES["two-gpus"].cells, width=1180, height=1400) as notebook:
        notebook.wait_for_kernel()
        _gpus(notebook)
        README_PICTURE.parent.mkdir(exist_ok=True)
        notebook.dashboards().first.screenshot(path=README_PICTURE)
        print(README_PICTURE, README_PICTURE.stat().st_size)


def take_side_picture(lab: Lab) -> None:
    """The panel beside a notebook in mid-cell, with another notebook's kernel in its list."""
    setup, load = _GPUS.format(n_devices=1).strip().rsplit("\n", 1)
    names = []
    for name, cells in {
        "evaluate": (setup, load, "outputs = allocate(9000)"),
        "fine-tune": (
            *(setup, load, "%memdash --side", "train(model, loader)"),
            "train(model, loader, seconds=30)",
        ),
    }.items():
        path = lab.folder / lab.write(cells)
        names.append(path.rename(path.with_stem(name)).name)
    with lab.open_file(names[0], width=1240, height=1000) as notebook:
        for name in names:
            notebook.command("docmanager:open", {"path": name})
            notebook.wait_until(lambda path=name: notebook.path == path, f"{name} is open")
            notebook.run_here(0)
            notebook.command("notebook:delete-cell")
            for cell in (0, 1):
                notebook.run_here(cell)
        notebook.page.locator(".gml-panel .gmd[data-drawn]").wait_for()
        notebook.page.get_by_role("button", name="30 s").click()
        notebook.run_here(2)
        notebook.start(3)
        notebook.page.wait_for_timeout(9_000)
        notebook.page.screenshot(path=SIDE_PICTURE)
        print(SIDE_PICTURE, SIDE_PICTURE.stat().st_size)


def take_engine_pictures(lab: Lab) -> None:
    """The pictures of the engines' pages: what four of their processes tell."""
    for name in ("ipyparallel", "dask", "ray"):
        with lab.open(SCENES[name].cells, width=1180, height=1400) as notebook:
            notebook.wait_for_kernel()
            SCENES[name].act(notebook)
            path = _IMAGES / f"{name}.png"
            notebook.page.locator(".gmd [role=tabpanel]:visible").first.screenshot(path=path)
            print(path, path.stat().st_size)


def take_pictures(
    lab: Lab, folder: Path, *, scenes: list[str], width: int, theme: str, suffix: str
) -> None:
    """One picture for each scene."""
    for name in scenes:
        scene = SCENES[name]
        with lab.open(scene.cells, width=width, height=2600, theme=theme) as notebook:
            notebook.wait_for_kernel()
            if suffix == "-panel":
                notebook.page.add_style_tag(content=f".gmd {{ width: {_PANEL_PX}px }}")
            scene.act(notebook)
            path = folder / f"{name}{suffix}.png"
            notebook.page.locator(scene.selector).first.screenshot(path=path)
            print(path, *notebook.problems)


def _open(notebook: Notebook) -> None:
    notebook.run(0, timeout_s=60)
    notebook.run(1)
    notebook.page.wait_for_selector(".gmd[data-drawn]")
    notebook.page.wait_for_timeout(500)


def main() -> int:
    """Take the pictures that were asked for."""
    parser = argparse.ArgumentParser(prog="python -m tools.dashboard_pictures", description=__doc__)
    parser.add_argument("folder", type=Path, nargs="?", help="where the pictures go")
    parser.add_argument("--readme", action="store_true", help="take the README's picture instead")
    parser.add_argument("--side", action="store_true", help="take the one of the panel instead")
    parser.add_argument("--engines", action="store_true", help="take those of the engines' pages")
    parser.add_argument("--scene", action="append", choices=SCENES, help="only this one")
    parser.add_argument("--look", action="append", choices=("wide", "dark", "narrow", "panel"))
    options = parser.parse_args()
    if options.folder is None and not (options.readme or options.side or options.engines):
        parser.error("name a folder, --readme, --side or --engines")
    scenes = options.scene or list(SCENES)
    with ExitStack() as stack:
        browser = stack.enter_context(start_browser())
        temporary = stack.enter_context(tempfile.TemporaryDirectory())
        lab = stack.enter_context(start_lab(Path(temporary), browser, has_panel=options.side))
        if options.readme:
            take_readme_picture(lab)
        if options.side:
            take_side_picture(lab)
        if options.engines:
            take_engine_pictures(lab)
        if options.folder is None:
            return 0
        options.folder.mkdir(parents=True, exist_ok=True)
        light, dark = "JupyterLab Light", "JupyterLab Dark"
        looks = {
            "wide": (1280, light, ""),
            "dark": (1280, dark, "-dark"),
            "narrow": (560, light, "-narrow"),
            "panel": (560, dark, "-panel"),
        }
        for look in options.look or looks:
            width, theme, suffix = looks[look]
            take_pictures(
                lab, options.folder, scenes=scenes, width=width, theme=theme, suffix=suffix
            )
    return 0


if __name__ == "__main__":
    sys.exit(main())
