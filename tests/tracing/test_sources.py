"""Which source a frame is of, and what its text tells."""

from __future__ import annotations

import sysconfig

import pytest

from gpumemwidget.model.devices import Frame
from gpumemwidget.tracing.sources import Source, Sources, align_typed, is_library

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


def make_sources(**texts: str) -> Sources:
    """A traced cell without a text, and files with those that are given."""
    known = {FILE: TEXT, **texts}
    return Sources(
        Source("In [7]", CELL, "cell", "a = 1\nb = 2\n"),
        cells={CELL: 7, "/tmp/ipykernel_7/1.py": 1},
        also={"<timed exec>": 1},
        read=lambda name: known.get(name, "").splitlines(keepends=True),
    )


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
    assert make_sources().qualify(Frame(FILE, line, function)) == name


def test_cells_and_files_are_sources_and_libraries_are_none() -> None:
    """Cells go by their numbers, files by their names."""
    sources = make_sources()

    assert sources.find(CELL) == Source("In [7]", CELL, "cell", "a = 1\nb = 2\n")
    assert sources.find("/tmp/ipykernel_7/1.py") == Source(
        "In [1]", "/tmp/ipykernel_7/1.py", "earlier cell", ""
    )
    assert sources.find(FILE) == Source("train.py", FILE, "file", TEXT)
    assert sources.find(sysconfig.get_path("stdlib") + "/contextlib.py") is None
    assert sources.find("") is None
    assert sources.find("<string>") is None


def test_parts_of_the_cell_compiled_elsewhere_have_its_lines() -> None:
    """The body of another cell magic is the cell's, so many lines further down."""
    sources = make_sources()

    assert sources.find("<timed exec>") is sources.traced
    assert sources.find_line(Frame("<timed exec>", 1, "<module>")) == 2
    assert sources.find_line(Frame(CELL, 1, "<module>")) == 1
    assert sources.find_line(Frame(FILE, 1, "<module>")) is None


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


@pytest.mark.parametrize(
    ("filename", "expected"),
    [
        ("/opt/venv/lib/python3.12/site-packages/torch/nn/functional.py", True),
        ("/usr/lib/python3.12/contextlib.py", True),
        (r"C:\venv\Lib\site-packages\torch\nn\functional.py", True),
        ("<frozen runpy>", True),
        ("/tmp/torchinductor_me/ab/cab.py", True),
        (FILE, False),
    ],
)
def test_libraries_are_known_by_where_they_lie(filename: str, expected: bool) -> None:
    """On the machine of a recording, too."""
    assert is_library(filename) is expected
