"""Notebooks executed for the tests, and what stands under their cells."""

from __future__ import annotations

import pytest
from nbformat import NotebookNode

from tools.notebooks import FOLDER, execute, make_static

__all__ = ["find_cells", "read_text", "run_notebook"]


def run_notebook(name: str, folders: pytest.TempPathFactory) -> NotebookNode:
    """Execute a notebook now on this machine; nothing of it may go to stderr.

    Our failures and the libraries' warnings would be there.
    """
    folder = folders.mktemp(name, numbered=False)
    notebook = make_static(execute(FOLDER / f"{name}.ipynb", folder), folder)
    assert [
        (cell.source, output.text)
        for cell in notebook.cells
        for output in cell.get("outputs", [])
        if output.output_type == "stream" and output.name == "stderr"
    ] == []
    return notebook


def find_cells(notebook: NotebookNode, source: str) -> list[NotebookNode]:
    """The code cells whose source has this in it."""
    cells = [cell for cell in notebook.cells if cell.cell_type == "code" and source in cell.source]
    assert cells, source
    return cells


def read_text(notebook: NotebookNode, source: str) -> str:
    """All text under the cells whose source has this in it."""
    # A slow kernel sends what one call prints in pieces.
    return "".join(
        output.get("text") or f"{output.get('data', {}).get('text/plain', '')}\n"
        for cell in find_cells(notebook, source)
        for output in cell.outputs
    )
