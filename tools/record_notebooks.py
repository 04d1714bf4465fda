"""Records what GPUs say while the notebooks run on them that are played elsewhere.

``python -m tools.record_notebooks FOLDER`` on a machine with an NVIDIA GPU, better two. Each
notebook becomes ``FOLDER/NAME.json.gz``, which belongs into ``notebooks/recordings``, and
``FOLDER/NAME.ipynb``, as that machine saw it. It takes half a minute for each.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import nbformat
import torch

from tests.gpu.notebook import execute, list_troubles, print_texts
from tools.notebooks import FOLDER

__all__ = ["STORIES"]

#: The notebooks, with the GPUs that each needs.
STORIES = {"why-nvidia-smi-disagrees": 1, "two-gpus": 2}
_RECORD_TO = "GPUMEMWIDGET_RECORD_TO"


def main(folder: Path) -> int:
    """Record all for which there are enough GPUs; how many had troubles."""
    folder.mkdir(parents=True, exist_ok=True)
    os.environ[_RECORD_TO] = str(folder.resolve())
    n_failed = 0
    for name, n_gpus in STORIES.items():
        if torch.cuda.device_count() < n_gpus:
            print(f"{name}: needs {n_gpus} GPUs")
            continue
        start_s = time.perf_counter()
        notebook = nbformat.read(FOLDER / f"{name}.ipynb", as_version=4)
        cause = execute(notebook, FOLDER)
        (folder / f"{name}.ipynb").write_text(nbformat.writes(notebook), encoding="utf-8")
        print_texts(notebook)
        troubles = [*([cause] if cause else []), *list_troubles(notebook)]
        n_failed += bool(troubles)
        recorded = folder / f"{name}.json.gz"
        size = recorded.stat().st_size if recorded.exists() else 0
        print(
            f"\n{name}: {time.perf_counter() - start_s:.0f} s, {size} bytes, troubles: {troubles}"
        )
    return n_failed


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
