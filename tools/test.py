"""Install what the tests need into ``.venv`` and run them: ``python3 -m tools.test``.

Arguments go to pytest: ``python3 -m tools.test -m slow`` runs the slow tests. The tests drive
JupyterLab in Chromium; where the machine has none, one is fetched. Set ``PIP_CONSTRAINT`` to choose
another torch than the one that is named here.
"""

from __future__ import annotations

import os
import subprocess
import sys
import venv
from pathlib import Path

_ROOT = Path(__file__).parent.parent
_FOLDER = _ROOT / ".venv"
#: One torch for everybody, so that pip reuses a build that the machine has.
_TORCH = "torch==2.13.0"


def main() -> int:
    """Install and run, and return pytest's exit status."""
    python = _FOLDER / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
    if not python.exists():
        venv.create(_FOLDER, with_pip=True)
    pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    tests = [str(python), "-m", "pytest", "-n", "2", "--dist", "loadgroup", *sys.argv[1:]]
    for command in (
        # Dependency groups came with pip 25.1.
        [*pip, "--upgrade", "pip"],
        [*pip, _TORCH, "-e", ".", "--group", "test"],
        [str(python), "-m", "tools.chromium"],
    ):
        subprocess.run(command, cwd=_ROOT, check=True)
    return subprocess.run(tests, cwd=_ROOT, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
