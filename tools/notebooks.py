"""Executes the notebooks, and saves them with static outputs: ``python -m tools.notebooks --save``.

What is saved must read the same without a kernel, on the web, and on another machine: widgets leave
only their static side, and nothing of the machine that executed it stays.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import sys
import tempfile
from pathlib import Path

import nbformat
from nbclient import NotebookClient
from nbformat import NotebookNode

from gpumemwidget.widgets.lab import SIDE_MIME

__all__ = ["FOLDER", "execute", "find_notebooks", "make_static"]

FOLDER = Path(__file__).parent.parent / "notebooks"
#: A notebook's outputs are read on the web and compared in reviews: this is plenty.
MOST_BYTES = 600_000
#: Forms of an output that need the kernel: a widget's view, and the note that it is beside the
#: notebook.
_LIVE_FORMS = ("application/vnd.jupyter.widget-view+json", SIDE_MIME)
#: Folders that only exist on the machine that executed the notebook.
_LOCAL_PATH = re.compile(r"/(?:home|root|tmp|Users|var/folders)/[\w.-]+")
_CELL_TIMEOUT_S = 300
#: What notebooks import and read from beside them.
_BESIDE = ("played.py", "story.py", "recordings")


def find_notebooks() -> list[Path]:
    """All notebooks that the repository shows."""
    return sorted(FOLDER.glob("*.ipynb"))


def execute(path: Path, folder: Path) -> NotebookNode:
    """Run all cells in a fresh kernel, in ``folder``, and return the notebook with its outputs.

    Raises:
        nbclient.exceptions.CellExecutionError: a cell failed that is not marked
            ``raises-exception``.
    """
    notebook = nbformat.read(path, as_version=4)
    for name in _BESIDE:
        if (path.parent / name).is_dir():
            shutil.copytree(path.parent / name, folder / name, dirs_exist_ok=True)
        elif (path.parent / name).is_file():
            shutil.copy(path.parent / name, folder / name)
    client = NotebookClient(
        notebook,
        timeout=_CELL_TIMEOUT_S,
        resources={"metadata": {"path": str(folder)}},
        record_timing=False,
    )
    # What is beside a notebook imports this package, which is not installed.
    paths = filter(None, (str(FOLDER.parent), os.environ.get("PYTHONPATH")))
    return client.execute(env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)})


def make_static(notebook: NotebookNode, folder: Path) -> NotebookNode:
    """Take out of an executed notebook what is dead without its kernel or tells of the machine.

    Args:
        notebook: as :func:`execute` gave it.
        folder: where it was executed; paths in it are left without it.

    Raises:
        ValueError: an output names a folder of this machine, or is a widget with no static side.
    """
    for cell in notebook.cells:
        cell.metadata.pop("execution", None)
        for output in cell.get("outputs", []):
            if "data" in output:
                for form in _LIVE_FORMS:
                    output.data.pop(form, None)
                if not output.data:
                    raise ValueError(f"no static output: {cell.source}")
        if "outputs" in cell:
            # A line of progress is emptied at its end; whether there was one is a matter of speed.
            cell.outputs = [each for each in cell.outputs if not _is_emptied(each)]
    notebook.metadata = NotebookNode(
        kernelspec={"name": "python3", "display_name": "Python 3", "language": "python"},
        language_info={"name": "python"},
    )
    text = nbformat.writes(notebook).replace(f"{folder}{os.sep}", "")
    local = _LOCAL_PATH.search(text)
    if local:
        raise ValueError(f"an output names {local[0]}, which only this machine has")
    return nbformat.reads(text, as_version=4)


def _is_emptied(output: NotebookNode) -> bool:
    return "data" in output and not any(output.data.values())


def main() -> int:
    """Execute every notebook; with ``--save`` keep what came out."""
    parser = argparse.ArgumentParser(prog="python -m tools.notebooks", description=__doc__)
    parser.add_argument("--save", action="store_true", help="write the outputs into the notebooks")
    parser.add_argument("names", nargs="*", help="which ones, such as quickstart (default: all)")
    options = parser.parse_args()
    for path in find_notebooks():
        if options.names and path.stem not in options.names:
            continue
        with tempfile.TemporaryDirectory() as folder:
            notebook = make_static(execute(path, Path(folder)), Path(folder))
        text = nbformat.writes(notebook) + "\n"
        if len(text) > MOST_BYTES:
            raise ValueError(f"{path.name} would take {len(text)} bytes")
        if options.save:
            path.write_text(text, encoding="utf-8")
        print(f"{path.name}: {len(notebook.cells)} cells, {len(text) / 1e3:.0f} KB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
