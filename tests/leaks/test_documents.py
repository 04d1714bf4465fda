"""The examples of docs/leaks.md display what the page shows."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from IPython.core.interactiveshell import InteractiveShell
from IPython.utils.capture import capture_output

from tests.jupyter.conftest import make_machine, shell  # noqa: F401 - fixtures
from tests.leaks.conftest import list_shown
from tests.leaks.test_rebinds import Simulation, notebook  # noqa: F401 - a fixture

_PAGE = (Path(__file__).parents[2] / "docs" / "leaks.md").read_text(encoding="utf-8")
_BLOCK = re.compile(r"^```(ipython|python|text)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
#: Where the examples on a simulated GPU begin, and where they end.
_GPU, _GPU_END = "## A second model", "## What is not reported"


@pytest.mark.saved_tensors
def test_the_examples_display_what_the_page_shows(loaded: InteractiveShell) -> None:
    """Amounts aside; of the cell that grows from run to run it is the third run that displays."""
    examples: list[tuple[str, str]] = []
    for kind, text in _BLOCK.findall(_PAGE[: _PAGE.index(_GPU)] + _PAGE[_PAGE.index(_GPU_END) :]):
        examples.append((text, "") if kind == "ipython" else (examples.pop()[0], text))
    setup, grows, *others = examples
    runs = [setup, (grows[0], ""), (grows[0], ""), grows, *others]

    said = [_leave_amounts_out(_run(loaded, cell)) for cell, _ in runs]

    assert said == [_leave_amounts_out(shown) for _, shown in runs]


def test_the_examples_on_a_simulated_gpu_print_what_the_page_shows(
    notebook: Simulation,  # noqa: F811
) -> None:
    """The old model beside the new one, and the line that frees it."""
    examples = _PAGE[_PAGE.index(_GPU) : _PAGE.index(_GPU_END)]
    (_, setup), (_, again), (_, kept) = _BLOCK.findall(examples)

    *_, said, freed, then = notebook.run(
        "class Trainer:\n    def __init__(self, model): self.model = model",
        setup,
        again,
        re.findall(r"`(del \w.*?)` frees", kept)[0],
        again,
    )

    assert (said, freed, then) == (" ".join(kept.split()), "", "")


def _run(shell: InteractiveShell, source: str) -> str:  # noqa: F811
    """What a cell prints and displays, as text."""
    with capture_output() as captured:
        shell.run_cell(source, store_history=True)
    shown = list_shown(captured)
    return "".join([captured.stdout, captured.stderr, *shown])


def _leave_amounts_out(text: str) -> str:
    """Return a text as one line without what depends on the machine.

    That is amounts, how much is left, and how soon a loop was told of.
    """
    return re.sub(r"[\d,.]+ (MiB|steps|runs\.)", r"N \1", " ".join(text.split()))
