"""Which source a frame is of, and what its text tells."""

from __future__ import annotations

import pytest

from gpumemwidget.model.devices import Frame
from gpumemwidget.tracing.sources import Source, Sources, align_typed

CELL = "/tmp/ipykernel_7/cell.py"
FILE = "/home/me/train.py"
TEXT = """import torch

class Net:
    @torch.no_grad()
    def forward(self, x):
        def inner(y):
            return y
        if x:
            x = run(
        x,
            )
        return [each for each in x]

    class Deep:
        def go(self): return 1

async def wait():
    await later()
"""


@pytest.mark.parametrize(
    ("line", "function", "name"),
    [
        (5, "forward", "Net.forward"),
        (7, "inner", "Net.forward.inner"),
        (8, "forward", "Net.forward"),
        (12, "forward", "Net.forward"),
        (15, "go", "Net.Deep.go"),
        (18, "wait", "wait"),
        (1, "<module>", "<module>"),
        (18, "another", "another"),
    ],
)
def test_text_tells_what_a_function_belongs_to(line: int, function: str, name: str) -> None:
    """The classes and functions around it; where the text does not know it, its name alone."""
    sources = Sources(
        Source("In [7]", CELL, "cell", ""), read=lambda _: TEXT.splitlines(keepends=True)
    )

    assert sources.qualify(Frame(FILE, line, function)) == name


@pytest.mark.parametrize(
    ("typed", "compiled", "text"),
    [
        # The magic's line is an empty one of what is compiled.
        ("%%memtrace\nx = 1\n", "\nx = 1\n", "%%memtrace\nx = 1"),
        # Blank lines above are taken away by IPython.
        ("\n \n%%memtrace\nx = 1", "\nx = 1\n", "%%memtrace\nx = 1"),
        ("%%memtrace\n%time x = 1\n\n", "\nget_ipython()\n", "%%memtrace\n%time x = 1"),
        # A magic over two lines became one: then the typed lines would be the wrong ones.
        ("%%memtrace\n%time \\\n  f()\nx", "\nget_ipython()\nx\n", "\nget_ipython()\nx\n"),
    ],
)
def test_typed_text_is_shown_where_its_lines_are_the_compiled_ones(
    typed: str, compiled: str, text: str
) -> None:
    """As the person typed it, if the numbers are right; else as it was compiled."""
    assert align_typed(typed, compiled) == text
