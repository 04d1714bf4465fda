"""The directive ``notebook-cell``: a cell of one of the notebooks, with the output saved in it.

    :::{notebook-cell} quickstart cell-06
    :::

The first argument is the notebook's name, the second one the cell's id. The option ``output`` is
``all`` (the default), ``none``, or the number of the one output that is shown.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import nbformat
from docutils import nodes
from docutils.parsers.rst import directives
from nbformat import NotebookNode
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

FOLDER = Path(__file__).parents[2] / "notebooks"


def setup(app: Sphinx) -> dict[str, Any]:
    """Register the directive."""
    app.add_directive("notebook-cell", NotebookCell)
    return {"parallel_read_safe": True}


class NotebookCell(SphinxDirective):
    """Shows a cell's source, and below it the outputs that the notebook was saved with."""

    required_arguments = 2
    option_spec = {"output": directives.unchanged}  # noqa: RUF012 - docutils' own protocol

    def run(self) -> list[nodes.Node]:
        """Return the source as a block of code, and each output as HTML or as text."""
        name, cell_id = self.arguments
        path = FOLDER / f"{name}.ipynb"
        self.env.note_dependency(str(path))
        cell = _find_cell(path, cell_id)
        if cell is None:
            raise self.error(f"{path.name} has no cell {cell_id!r}")
        source = nodes.literal_block(cell.source, cell.source, language="ipython3")
        source["classes"].append("notebook-source")
        outputs = list(cell.get("outputs", []))
        chosen = self.options.get("output", "all")
        if chosen == "none":
            outputs = []
        elif chosen != "all":
            if int(chosen) > len(outputs):
                raise self.error(f"cell {cell_id!r} of {path.name} has no output {chosen}")
            outputs = [outputs[int(chosen) - 1]]
        return [source, *(_show_output(output) for output in outputs)]


def _find_cell(path: Path, cell_id: str) -> NotebookNode | None:
    notebook = nbformat.read(path, as_version=4)
    return next((cell for cell in notebook.cells if cell.id == cell_id), None)


def _show_output(output: NotebookNode) -> nodes.Node:
    data = output.get("data", {})
    if "text/html" in data:
        html = f'<div class="notebook-output">{data["text/html"]}</div>'
        return nodes.raw("", html, format="html")
    text = output.get("text") or data.get("text/plain") or "\n".join(output.get("traceback", []))
    block = nodes.literal_block(text, text, language="text")
    block["classes"].append("notebook-output")
    return block
