"""Test in other environments than the one of the developer: ``python -m tools.legs colab newer``.

``colab`` installs the package beside the versions in Colab's image and checks that pip changes none
of them; then the tests that start a kernel and those of the quickstart run there. ``newer`` runs
what depends on Python's version, lines and loops, on the machine's newest Python. A version of
ipykernel, such as ``ipykernel==6.31.0``, runs the tests that start a kernel with it, and with
everything else as it is here.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import venv
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

_ROOT = Path(__file__).parent.parent
_COLAB = _ROOT / ".ci" / "colab.txt"
_TEST_TOOLS = ("pytest>=8,<9.2", "pytest-timeout>=2.3", "hypothesis>=6.100", "numpy>=1.26")
#: Tests that do something else from Python 3.12 on.
_BY_PYTHON = (
    "tests/leaks",
    "tests/tracing",
    "tests/backends/test_module_calls.py",
    "tests/ownership/test_hostile.py",
)


def main(names: Sequence[str]) -> int:
    """Run the legs that are named; the number of those that failed."""
    legs: dict[str, Callable[[Path], bool]] = {"colab": _test_colab, "newer": _test_newer}
    for name in names:
        if name.startswith("ipykernel=="):
            legs[name] = partial(_test_ipykernel, name)
    unknown = [name for name in names if name not in legs]
    if unknown or not names:
        print(f"name legs: {', '.join(legs)} ({unknown} is none)", file=sys.stderr)
        return 2
    n_failed = 0
    for name in names:
        # Tests tell the package's own files by its name.
        with tempfile.TemporaryDirectory(prefix=f"{name}-leg-") as folder:
            print(f"== {name}", flush=True)
            n_failed += not legs[name](Path(folder))
    return n_failed


def _test_colab(folder: Path) -> bool:
    """Install beside Colab's versions, which must stay, and run kernels and the quickstart."""
    python = _make_environment(sys.executable, folder, "-r", str(_COLAB), *_TEST_TOOLS)
    _install(python, "nbclient>=0.10", "pandas>=2")
    before = _freeze(python)
    _install(python, str(_ROOT))
    changed = [line for line in before if line not in _freeze(python)]
    if changed:
        print(f"pip changed what was there: {changed}", file=sys.stderr)
        return False
    print(f"pip changed none of the {len(before)} packages that were there", flush=True)
    kernel = _run_tests(python, "-m", "kernel", "tests/jupyter")
    notebook = _run_tests(python, "-m", "notebook", "-k", "quickstart", "tests/test_notebooks.py")
    return kernel and notebook


def _test_newer(folder: Path) -> bool:
    """Run what differs by version on the newest Python from 3.12 on; True where there is none."""
    newest = _find_newest_python()
    if newest is None:
        print("skipped: this machine has no Python of 3.12 or later that works")
        return True
    python = _make_environment(newest, folder, *_TEST_TOOLS, "ipykernel", "nbclient")
    _install(python, str(_ROOT))
    return _run_tests(python, "-m", "not slow and not browser", *_BY_PYTHON)


def _test_ipykernel(requirement: str, folder: Path) -> bool:
    """Run the kernel tests in an environment that holds this ipykernel and sees all else here."""
    base = sysconfig.get_path("purelib")
    venv.create(folder / "venv")
    paths = {"base": str(folder / "venv"), "platbase": str(folder / "venv")}
    packages = Path(sysconfig.get_path("purelib", vars=paths))
    wanted = [requirement]
    if requirement.startswith("ipykernel==6."):
        # The IPython that it was made for, and what that needs and IPython 9 no longer brings.
        wanted += ["ipython>=8.20,<9", "decorator"]
    _install(sys.executable, "--no-deps", "--target", str(packages), *wanted)
    # Not the plain path: this also follows what an editable install has put there.
    (packages / "base.pth").write_text(f"import site; site.addsitedir({base!r})\n")
    # What stands beside the packages (nbconvert's templates) is looked for beside the Python.
    shared = [str(Path(sys.prefix, "share", "jupyter")), os.environ.get("JUPYTER_PATH", "")]
    os.environ["JUPYTER_PATH"] = os.pathsep.join(filter(None, shared))
    return _run_tests(_find_python(folder), "-m", "kernel", "tests/jupyter")


def _find_newest_python() -> str | None:
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"), "versions")
    for minor in range(19, 11, -1):
        found = [shutil.which(f"python3.{minor}"), *pyenv.glob(f"3.{minor}.*/bin/python3.{minor}")]
        for python in filter(None, found):
            # A shim of pyenv's is there also for a version that is not chosen.
            command = [python, "-c", "import ensurepip, sys; print(sys.version)"]
            answer = subprocess.run(command, check=False, capture_output=True, text=True)
            if answer.returncode == 0:
                print(f"{python}: Python {answer.stdout.strip()}", flush=True)
                return str(python)
    return None


def _make_environment(python: str, folder: Path, *requirements: str) -> str:
    """Return the interpreter of a new environment with torch and these requirements."""
    subprocess.run([python, "-m", "venv", str(folder / "venv")], check=True)
    made = _find_python(folder)
    _install(made, "--upgrade", "pip")
    _install(made, "torch==2.13.0", *requirements)
    return made


def _find_python(folder: Path) -> str:
    return str(folder / "venv" / ("Scripts/python.exe" if os.name == "nt" else "bin/python"))


def _install(python: str, *arguments: str) -> None:
    command = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*command, *arguments], check=True)


def _freeze(python: str) -> list[str]:
    command = [python, "-m", "pip", "freeze", "--disable-pip-version-check"]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()


def _run_tests(python: str, *arguments: str) -> bool:
    # The checkout's own package comes first: it is what was installed.
    command = [python, "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments]
    return subprocess.run(command, check=False, cwd=_ROOT).returncode == 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
