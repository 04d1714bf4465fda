"""Checks a built wheel as a stranger meets it: ``python -m tools.wheel FILE.whl``.

What is in the file, and then that it works: installed into a new environment, away from the
checkout, it loads into IPython, records a cell and leaves again; and its panel shows the dashboard
in that environment's own JupyterLab and Notebook, in Chromium, and in a JupyterLab of another
environment, which has no PyTorch.
"""

from __future__ import annotations

import email
import json
import re
import subprocess
import sys
import tempfile
import venv
import zipfile
from pathlib import Path

from playwright.sync_api import Browser

from tests.browser.lab import Lab, start_browser, start_lab

__all__ = ["check_behaviour", "check_contents", "check_metadata", "check_two_environments", "main"]

_PANEL = Path(__file__).parent.parent / "labextension" / "prebuilt"
#: Names the Python package to JupyterLab's extension manager.
_INSTALL = _PANEL.parent / "install.json"
#: What JupyterLab's extension manager finds extensions by.
_CLASSIFIERS = {
    f"Framework :: Jupyter{rest}"
    for rest in (
        " :: JupyterLab",
        " :: JupyterLab :: 4",
        " :: JupyterLab :: Extensions",
        " :: JupyterLab :: Extensions :: Prebuilt",
    )
}
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
    expected[f"{data}/{_PANEL_PLACE}/install.json"] = _INSTALL.read_bytes()
    missing = (expected.keys() | licenses) - there.keys()
    assert not missing, f"the wheel lacks {sorted(missing)}"
    changed = [name for name, content in expected.items() if there[name] != content]
    assert not changed, f"the wheel has other contents for {changed}"
    strangers = [name for name in there.keys() - expected.keys() if dist_info not in name]
    assert not strangers, f"the wheel installs what the checkout lacks: {strangers}"
    for suffix in (".js", ".css", "py.typed"):
        assert any(name.endswith(suffix) for name in expected), f"no {suffix} in the package"


def check_metadata(wheel: Path) -> None:
    """Check what a package index and JupyterLab's extension manager read.

    Raises:
        AssertionError: something is missing, or the description has a link that is broken there.
    """
    with zipfile.ZipFile(wheel) as archive:
        names = {Path(name).name: name for name in archive.namelist() if ".dist-info/" in name}
        metadata = email.message_from_bytes(archive.read(names["METADATA"]))
        scripts = archive.read(names["entry_points.txt"]).decode()
    missing = _CLASSIFIERS - set(metadata.get_all("Classifier", []))
    assert not missing, f"the metadata lack the classifiers {sorted(missing)}"
    assert "gpumemwidget = gpumemwidget.__main__:main" in scripts, "no console script"
    assert json.loads(_INSTALL.read_text(encoding="utf-8"))["packageName"] == metadata["Name"]
    description = str(metadata.get_payload())
    assert description.strip(), "the description is empty"
    broken = re.findall(r"\]\((?!https?:)[^)]*\)", description)
    assert not broken, f"on a package index these lead nowhere: {broken}"


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
        subprocess.run([python.parent / "gpumemwidget", "--help"], check=True, cwd=empty)
        front_ends = [python, "-m", "pip", "install", "--quiet", "jupyterlab>=4", "notebook>=7"]
        subprocess.run(front_ends, check=True, cwd=empty)
        with start_browser() as browser:
            with start_lab(folder / "jupyter", browser, python=python) as lab:
                _check_panel(lab)
            server = _make_server(folder, wheel)
            check_two_environments(folder / "apart", browser, server=server, kernel=python)


def _make_server(folder: Path, wheel: Path) -> Path:
    """Return the Python of an environment with JupyterLab, the panel, and no PyTorch."""
    venv.create(folder / "server", with_pip=True)
    python = folder / "server" / "bin" / "python"
    install = [python, "-m", "pip", "install", "--quiet"]
    subprocess.run([*install, "jupyterlab>=4", "notebook>=7"], check=True, cwd=folder)
    # The parts of these that run in the page are all that a server needs.
    pages = [wheel.resolve(), "anywidget", "jupyterlab_widgets"]
    subprocess.run([*install, "--no-deps", *pages], check=True, cwd=folder)
    return python


def check_two_environments(folder: Path, browser: Browser, *, server: Path, kernel: Path) -> None:
    """Open the panel of a JupyterLab whose kernels run in another environment.

    Args:
        folder: a new folder for the server.
        browser: opens the pages.
        server: the Python of the server's environment, which has no PyTorch.
        kernel: the Python of the kernels' environment, which has all that the package needs.

    Raises:
        AssertionError: the panel does not show the dashboard.
    """
    folder.mkdir()
    with start_lab(folder, browser, python=server) as lab:
        # The server's own kernel can't record: the panel says where the package is missing.
        with lab.open(["1 + 1"]) as notebook:
            notebook.wait_for_kernel()
            notebook.page.locator('[data-id="gpumemwidget-panel"]').click()
            message = notebook.page.locator(".gml-message")
            message.get_by_role("button", name="Load gpumemwidget").click()
            message.filter(has_text="Install gpumemwidget in the kernel's environment").wait_for()
        spec = folder / "data" / "kernels" / "python3" / "kernel.json"
        spec.parent.mkdir(parents=True)
        command = [str(kernel), "-m", "ipykernel_launcher", "-f", "{connection_file}"]
        spec.write_text(json.dumps({"argv": command, "display_name": "x", "language": "python"}))
        _check_panel(lab)
    print("the panel works in another environment than the kernel", flush=True)


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
    check_metadata(wheel)
    print(f"{wheel.name} holds what it should, {wheel.stat().st_size / 1e6:.1f} MB", flush=True)
    check_behaviour(wheel)
    return 0


if __name__ == "__main__":
    sys.exit(main())
