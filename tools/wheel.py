"""Checks a built wheel as a stranger meets it: ``python -m tools.wheel FILE.whl``.

What is in the file, and then that it works: installed into a new environment, away from the
checkout, it loads into IPython, records a cell and leaves again; and its panel shows the dashboard
in that environment's own JupyterLab and Notebook, in Chromium.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import venv
import zipfile
from pathlib import Path

from tests.browser.lab import Lab, start_browser, start_lab

__all__ = ["check_behaviour", "check_contents", "main"]

_PANEL = Path(__file__).parent.parent / "labextension" / "prebuilt"
#: Where Jupyter looks for it in an environment.
_PANEL_PLACE = "share/jupyter/labextensions/gpumemwidget-lab"
_PACKAGE = Path(__file__).parent.parent / "gpumemwidget"
#: Whose words must travel with what we distribute.
_LICENSES = ("LICENSE", "gpumemwidget/widgets/static/PLOTLY-LICENSE")

#: Runs in the new environment, from an empty folder.
_PROBE = """
import pathlib, sys
from IPython.core.interactiveshell import InteractiveShell

shell = InteractiveShell.instance()

def run(cell):
    result = shell.run_cell(cell, store_history=True)
    result.raise_error()
    return result.result

run("%load_ext gpumemwidget")
import gpumemwidget
home = pathlib.Path(gpumemwidget.__file__).resolve()
assert home.is_relative_to(pathlib.Path(sys.prefix).resolve()), f"not the wheel's own: {home}"

run("import torch")
run("kept = torch.zeros(64 * 2**20, dtype=torch.uint8)")
record = gpumemwidget.monitor().ledger[-1]
assert record.first_line.startswith("kept ="), record
host = {device.device: device for device in record.devices}["host"]
change = host.allocated.change_bytes
assert 64 * 2**20 <= change < 65 * 2**20, change

run("%memstat")
run("%unload_ext gpumemwidget")
print("the installed wheel recorded a cell:", gpumemwidget.__version__)
"""


def check_contents(wheel: Path) -> None:
    """Hold the wheel's files to those of the checkout: each one, and none besides.

    Raises:
        AssertionError: a file is missing or differs, or one is there that has no business there.
    """
    expected = {
        path.relative_to(_PACKAGE.parent).as_posix(): path.read_bytes()
        for path in _PACKAGE.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    with zipfile.ZipFile(wheel) as archive:
        there = {name: archive.read(name) for name in archive.namelist()}
    [dist_info] = {name.partition("/")[0] for name in there if ".dist-info/" in name}
    licenses = {f"{dist_info}/licenses/{name}" for name in _LICENSES}
    data = dist_info.removesuffix(".dist-info") + ".data/data"
    expected |= {
        f"{data}/{_PANEL_PLACE}/{path.relative_to(_PANEL).as_posix()}": path.read_bytes()
        for path in _PANEL.rglob("*")
        if path.is_file()
    }
    missing = (expected.keys() | licenses) - there.keys()
    assert not missing, f"the wheel lacks {sorted(missing)}"
    changed = [name for name, content in expected.items() if there[name] != content]
    assert not changed, f"the wheel has other contents for {changed}"
    strangers = [name for name in there.keys() - expected.keys() if dist_info not in name]
    assert not strangers, f"the wheel installs what the checkout lacks: {strangers}"
    for suffix in (".js", ".css", "py.typed"):
        assert any(name.endswith(suffix) for name in expected), f"no {suffix} in the package"


def check_behaviour(wheel: Path) -> None:
    """Install the wheel into a new environment, record a cell there, and open the panel.

    Raises:
        subprocess.CalledProcessError: it did not install or did not work.
        AssertionError: the panel does not show the dashboard.
    """
    with tempfile.TemporaryDirectory(prefix="gpumemwidget-wheel-") as name:
        folder = Path(name)
        (folder / "jupyter").mkdir()
        venv.create(folder / "venv", with_pip=True)
        python = folder / "venv" / "bin" / "python"
        empty = folder / "empty"
        empty.mkdir()
        # PIP_CONSTRAINT, which the caller may have set, chooses torch's build.
        install = [python, "-m", "pip", "install", "--quiet", "torch==2.13.0", wheel.resolve()]
        subprocess.run(install, check=True, cwd=empty)
        subprocess.run([python, "-I", "-c", _PROBE], check=True, cwd=empty)
        front_ends = [python, "-m", "pip", "install", "--quiet", "jupyterlab>=4", "notebook>=7"]
        subprocess.run(front_ends, check=True, cwd=empty)
        with (
            start_browser() as browser,
            start_lab(folder / "jupyter", browser, python=python) as lab,
        ):
            _check_panel(lab)


def _check_panel(lab: Lab) -> None:
    """See that the panel comes up in JupyterLab and in Notebook 7."""
    for page in ("lab", "notebooks"):
        with lab.open(["%load_ext gpumemwidget", "%memdash --side"]) as notebook:
            if page == "notebooks":
                notebook.load_in_notebook_7()
            notebook.wait_for_kernel()
            notebook.run_here(0)
            notebook.run_here(1)
            notebook.page.locator(".gml-panel .gmd[data-drawn]").wait_for()
            notebook.page.locator(".gml-status button", has_text="Host").wait_for()
            assert "beside the notebook" in notebook.output(1)
        print(f"the installed wheel's panel shows the dashboard in /{page}", flush=True)


def main() -> int:
    """Check the wheel named on the command line."""
    [name] = sys.argv[1:]
    wheel = Path(name)
    check_contents(wheel)
    print(f"{wheel.name} holds what it should, {wheel.stat().st_size / 1e6:.1f} MB", flush=True)
    check_behaviour(wheel)
    return 0


if __name__ == "__main__":
    sys.exit(main())
