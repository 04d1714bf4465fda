"""The line that asked for memory, and the library's function that it called."""

from __future__ import annotations

import linecache
import sysconfig

import pytest

from gpumemwidget.model.segments import Frame
from gpumemwidget.ownership.source_lines import Place, find_place

PACKAGES = sysconfig.get_path("purelib")
CELL = "/tmp/ipykernel_1/123.py"
CELLS = {CELL: 7}
LINEAR = Frame(f"{PACKAGES}/torch/nn/modules/linear.py", 134, "Linear.forward")
CALL = Frame(f"{PACKAGES}/torch/nn/modules/module.py", 1790, "Module._call_impl")
KERNEL = Frame(f"{PACKAGES}/IPython/core/interactiveshell.py", 3500, "run_code")


@pytest.fixture(autouse=True)
def cell(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = ["def step(x):\n", "    y = model(x)\n", "    return y\n", "step(x)\n"]
    monkeypatch.setitem(linecache.cache, CELL, (60, None, lines, CELL))


def test_a_layer() -> None:
    """The innermost line of the cell, and the innermost function that has a public name."""
    frames = [LINEAR, CALL, Frame(CELL, 2, "step"), Frame(CELL, 4, "<module>"), KERNEL]

    place = find_place(frames, CELLS)

    assert place == Place("In[7], line 2", "y = model(x)", "torch.nn.modules.linear.Linear.forward")


def test_a_function_of_c() -> None:
    """Where the line calls C at once there is no function to name."""
    assert find_place([Frame(CELL, 4, "<module>"), KERNEL], CELLS) == Place(
        "In[7], line 4", "step(x)", None
    )


def test_backward() -> None:
    """What decorators and private helpers add is passed over."""
    frames = [
        Frame(f"{PACKAGES}/torch/autograd/graph.py", 979, "_engine_run_backward"),
        Frame(f"{PACKAGES}/torch/autograd/__init__.py", 350, "backward"),
        Frame(f"{PACKAGES}/torch/utils/_contextlib.py", 120, "wrap.<locals>.decorate"),
        Frame(f"{PACKAGES}/torch/_tensor.py", 600, "Tensor.backward"),
        Frame(CELL, 4, "<module>"),
    ]

    assert find_place(frames, CELLS).function == "torch.autograd.backward"
    assert find_place(frames[2:], CELLS).function == "torch._tensor.Tensor.backward"


def test_a_file_of_the_users() -> None:
    """A module beside the notebook is the user's own, whatever the cell called."""
    place = find_place([LINEAR, Frame("/home/me/train.py", 12, "fit"), KERNEL], CELLS)

    assert (place.place, place.text) == ("train.py, line 12", "")


def test_libraries_alone() -> None:
    """A thread of a library's has no line of the user's."""
    assert find_place([LINEAR, CALL], CELLS) == Place(
        None, "", "torch.nn.modules.linear.Linear.forward"
    )
    assert find_place([], CELLS) == Place(None, "", None)


def test_below_time() -> None:
    """``%%time`` compiles the lines below its own anew."""
    frames = [Frame("<timed exec>", 1, "<module>"), KERNEL]

    timed = find_place(frames, CELLS, source="%%time\nx = 1\ny = 2", number=7)

    assert timed == Place("In[7], line 2", "x = 1", None)


def test_what_stands_nowhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of code that ``%time`` or ``exec`` was given, the line of the cell that did so."""
    lines = ["get_ipython().run_line_magic('time', 'step(x)')\n"]
    monkeypatch.setitem(linecache.cache, CELL, (60, None, lines, CELL))
    timed = [Frame("<timed eval>", 1, "<module>"), KERNEL, Frame(CELL, 1, "<module>")]

    inner = find_place(timed, CELLS, source="%time step(x)", number=7)
    below = find_place(timed[:1], CELLS, source="%%memtrace\n# why\n%time step(x)", number=7)
    compiled = find_place(timed, CELLS)
    alone = find_place(timed[:1], CELLS)

    assert inner == Place("In[7], line 1", "%time step(x)", None)
    magic = find_place(timed, CELLS, source="%%timeit -r1\nstep(x)", number=7)
    assert magic == Place("In[7], line 1", "%%timeit -r1", None)
    assert below.place == "<timed eval>, line 1"
    assert compiled.text == lines[0].strip()
    assert alone == Place("<timed eval>, line 1", "", None)


def test_below_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    """IPython runs what is below ``%%capture`` as a cell of the next number; the lines tell."""
    inner = "/tmp/ipykernel_1/456.py"
    lines = ["x = 1\n", "get_ipython().run_line_magic('pwd', '')\n", "step(x)\n"]
    monkeypatch.setitem(linecache.cache, inner, (60, None, lines, inner))
    cells = {**CELLS, inner: 8}
    frames = [Frame(inner, 3, "<module>"), KERNEL]

    below = find_place(frames, cells, source="%%capture\n\nx = 1\n%pwd\nstep(x)\n", number=7)
    other = find_place(frames, cells, source="%%capture\nx = 2\n%pwd\nstep(x)", number=7)

    assert below == Place("In[7], line 5", "step(x)", None)
    assert other == Place("In[8], line 3", "step(x)", None)
