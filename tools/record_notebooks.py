"""Records what GPUs say while the notebooks run on them that are played elsewhere.

``python -m tools.record_notebooks FOLDER`` on a machine with an NVIDIA GPU, better two. Each
notebook becomes ``FOLDER/NAME.json.gz``, which belongs into ``notebooks/recordings``, and
``FOLDER/NAME.ipynb``, as that machine saw it. It takes half a minute for each.
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

import nbformat
import torch

from tools.notebooks import FOLDER, execute

__all__ = ["STORIES"]

#: The notebooks, with the GPUs that each needs.
STORIES = {"why-nvidia-smi-disagrees": 1, "two-gpus": 2}
_RECORD_TO = "GPUMEMWIDGET_RECORD_TO"


def main(folder: Path) -> None:
    """Record all for which there are enough GPUs."""
    folder.mkdir(parents=True, exist_ok=True)
    os.environ[_RECORD_TO] = str(folder.resolve())
    for name, n_gpus in STORIES.items():
        if torch.cuda.device_count() < n_gpus:
            print(f"{name}: needs {n_gpus} GPUs")
            continue
        with tempfile.TemporaryDirectory() as temporary:
            notebook = execute(FOLDER / f"{name}.ipynb", Path(temporary))
        (folder / f"{name}.ipynb").write_text(nbformat.writes(notebook), encoding="utf-8")
        print(f"{name}: {(folder / f'{name}.json.gz').stat().st_size} bytes")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
