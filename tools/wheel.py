"""Checks a built wheel as a stranger meets it: ``python -m tools.wheel FILE.whl``.

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
    missing = (expected.keys() | licenses) - there.keys()
    assert not missing, f"the wheel lacks {sorted(missing)}"
    changed = [name for name, content in expected.items() if there[name] != content]
    assert not changed, f"the wheel has other contents for {changed}"
    strangers = [name for name in there.keys() - expected.keys() if dist_info not in name]
    assert not strangers, f"the wheel installs what the checkout lacks: {strangers}"
    for suffix in (".js", ".css", "py.typed"):
        assert any(name.endswith(suffix) for name in expected), f"no {suffix} in the package"


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
