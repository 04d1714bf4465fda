"""Run the kernel tests on several versions of ipykernel: ``python -m tools.kernels 6.31.0 7.4.0``.

Each version gets an environment of its own that holds ipykernel alone and sees everything else of
the one that runs this, so that nothing large is installed twice. ipykernel 6 gets IPython 8 beside
it, the pair that it was made for.

Options after ``--`` go to pytest: ``python -m tools.kernels 6.31.0 -- -x``.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import sysconfig
import tempfile
import venv
from collections.abc import Sequence
from pathlib import Path

#: Where the environments stay, for the next run.
_FOLDER = Path(tempfile.gettempdir()) / f"gpumemwidget-kernels-{os.getuid()}"


def main(arguments: Sequence[str]) -> int:
    """Run the tests on each version; the number of versions on which they failed."""
    split = arguments.index("--") if "--" in arguments else len(arguments)
    versions, options = arguments[:split], arguments[split + 1 :]
    if not versions:
        print("name the versions: python -m tools.kernels 6.31.0 7.3.0 7.4.0", file=sys.stderr)
        return 2
    n_failed = 0
    for version in versions:
        python = _make_environment(version)
        print(f"== ipykernel {version}", flush=True)
        command = [python, "-m", "pytest", "-m", "kernel", "-p", "no:cacheprovider"]
        command += ["tests/jupyter", *options]
        # What stands beside the packages (nbconvert's templates) is looked for beside the Python.
        shared = os.pathsep.join([str(Path(sys.prefix, "share", "jupyter")), *_list_jupyter_path()])
        environment = {**os.environ, "JUPYTER_PATH": shared}
        n_failed += subprocess.run(command, check=False, env=environment).returncode != 0
    return n_failed


def _list_jupyter_path() -> list[str]:
    path = os.environ.get("JUPYTER_PATH", "")
    return path.split(os.pathsep) if path else []


def _make_environment(version: str) -> Path:
    """An interpreter with this ipykernel; made once."""
    base = sysconfig.get_path("purelib")
    # One for each environment that it stands on: two checkouts may be tested at once.
    key = hashlib.sha256(base.encode()).hexdigest()[:8]
    name = f"{version}-py{sys.version_info.major}{sys.version_info.minor}-{key}"
    folder = _FOLDER / name
    python = folder / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
    marker = folder / "complete"
    if marker.exists() and marker.read_text() == base:
        return python
    print(f"== making an environment with ipykernel {version}", flush=True)
    venv.create(folder, clear=True)
    paths = {"base": str(folder), "platbase": str(folder)}
    packages = Path(sysconfig.get_path("purelib", vars=paths))
    wanted = [f"ipykernel=={version}"]
    if version.startswith("6."):
        # What IPython 8 needs and IPython 9 no longer brings.
        wanted += ["ipython>=8.20,<9", "decorator"]
    for requirement in wanted:
        subprocess.run(
            [
                *(sys.executable, "-m", "pip", "install", "--quiet", "--no-deps"),
                *("--disable-pip-version-check", "--target", str(packages), requirement),
            ],
            check=True,
        )
    # Not the plain path: this also follows what an editable install has put there.
    (packages / "base.pth").write_text(f"import site; site.addsitedir({base!r})\n")
    marker.write_text(base)
    return python


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
