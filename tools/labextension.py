"""Builds JupyterLab's panel: ``python -m tools.labextension``.

The sources in ``labextension/`` are TypeScript. What is built goes into ``labextension/prebuilt``,
which is kept in the repository and travels in the wheel, so that nobody needs Node to install the
package. It takes Node and ``jupyter-builder``, which JupyterLab brings.
"""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
from pathlib import Path

__all__ = ["HASH_FILE", "hash_sources", "main"]

_FOLDER = Path(__file__).parent.parent / "labextension"
_SOURCES = ("package.json", "package-lock.json", "tsconfig.json", "src/*.ts", "style/*.css")
#: The hash of the sources that the panel was built of.
HASH_FILE = _FOLDER / "prebuilt" / "sources.sha256"


def hash_sources() -> str:
    """Return the hash of all sources, whatever their line endings."""
    found = hashlib.sha256()
    for path in sorted(path for pattern in _SOURCES for path in _FOLDER.glob(pattern)):
        text = path.read_text(encoding="utf-8")
        found.update(f"{path.relative_to(_FOLDER).as_posix()}\n{text}\n".encode())
    return found.hexdigest()


def main() -> int:
    """Install the tools, check the types, and build."""
    shutil.rmtree(_FOLDER / "lib", ignore_errors=True)
    builder = shutil.which("jupyter-builder", path=str(Path(sys.executable).parent))
    for command in (
        ["npm", "ci", "--silent", "--no-fund", "--no-audit"],
        ["npm", "run", "--silent", "types"],
        [builder or "jupyter-builder", "build", "."],
    ):
        subprocess.run(command, cwd=_FOLDER, check=True)
    HASH_FILE.write_text(f"{hash_sources()}\n", encoding="ascii")
    return 0


if __name__ == "__main__":
    sys.exit(main())
