"""Checks a built wheel as a stranger meets it: ``python -m tests.wheel FILE.whl``.

What is in the file, and then that it works: installed into a new environment, away from the
checkout, it loads into IPython, records a cell and leaves again.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import venv
import zipfile
from pathlib import Path

__all__ = ["check_behaviour", "check_contents", "main"]

_STATIC = "gpumemwidget/jupyter/static"
#: Without these the wheel is broken, or breaks a licence.
_REQUIRED = (
    "gpumemwidget/__init__.py",
    "gpumemwidget/py.typed",
    f"{_STATIC}/dashboard.js",
    f"{_STATIC}/dashboard.css",
    f"{_STATIC}/plotly-basic.min.js",
    f"{_STATIC}/PLOTLY-LICENSE",
)
_LICENSES = ("LICENSE", f"{_STATIC}/PLOTLY-LICENSE")

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
    """Hold the wheel's list of files to what it must and must not hold.

    Raises:
        AssertionError: a file is missing, or one is there that has no business there.
    """
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        small = {name for name in names if not archive.getinfo(name).file_size}
    [dist_info] = {name.partition("/")[0] for name in names if ".dist-info/" in name}
    missing = [name for name in _REQUIRED if name not in names]
    missing += [name for name in _LICENSES if f"{dist_info}/licenses/{name}" not in names]
    assert not missing, f"the wheel lacks {missing}"
    empty = [name for name in _REQUIRED if name in small and not name.endswith("py.typed")]
    assert not empty, f"empty in the wheel: {empty}"
    strangers = [name for name in names if not name.startswith(("gpumemwidget/", dist_info))]
    assert not strangers, f"the wheel installs outside its package: {strangers}"


def check_behaviour(wheel: Path) -> None:
    """Install the wheel into a new environment and record a cell there.

    Raises:
        subprocess.CalledProcessError: it did not install or did not work.
    """
    with tempfile.TemporaryDirectory(prefix="gpumemwidget-wheel-") as name:
        folder = Path(name)
        venv.create(folder / "venv", with_pip=True)
        python = folder / "venv" / "bin" / "python"
        empty = folder / "empty"
        empty.mkdir()
        # PIP_CONSTRAINT, which the caller may have set, chooses torch's build.
        install = [python, "-m", "pip", "install", "--quiet", "torch==2.13.0", wheel.resolve()]
        subprocess.run(install, check=True, cwd=empty)
        subprocess.run([python, "-I", "-c", _PROBE], check=True, cwd=empty)


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
