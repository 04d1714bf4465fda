"""The code of a cell that failed: the line that asked for memory, and what the cell mentions."""

from __future__ import annotations

import linecache
import sysconfig
from collections.abc import Sequence
from typing import Any

import pytest

from gpumemwidget.model.devices import Frame
from gpumemwidget.oom.remedies import FailingLine, find_failing_line, list_mentions
from gpumemwidget.tracing.sources import find_cell_sources

PACKAGES = sysconfig.get_path("purelib")
CELL = "/tmp/ipykernel_1/123.py"
CELLS = {CELL: 7}
LINEAR = Frame(f"{PACKAGES}/torch/nn/modules/linear.py", 134, "Linear.forward")
CALL = Frame(f"{PACKAGES}/torch/nn/modules/module.py", 1790, "Module._call_impl")
KERNEL = Frame(f"{PACKAGES}/IPython/core/interactiveshell.py", 3500, "run_code")
TYPED = "def step(x):\n    y = model(x)\n    return y\nstep(x)\n"


def _compile(monkeypatch: pytest.MonkeyPatch, text: str, filename: str = CELL) -> None:
    """Have a cell's code stand where tracebacks find it."""
    lines = text.splitlines(keepends=True)
    monkeypatch.setitem(linecache.cache, filename, (len(text), None, lines, filename))


def _find(
    frames: Sequence[Frame], typed: str = TYPED, cells: dict[str, int] = CELLS
) -> FailingLine:
    return find_failing_line(frames, find_cell_sources(typed, 7, cells))


@pytest.fixture(autouse=True)
def cell(monkeypatch: pytest.MonkeyPatch) -> None:
    _compile(monkeypatch, TYPED)


def test_a_layer() -> None:
    """The innermost line of the cell, and the innermost function that has a public name."""
    frames = [LINEAR, CALL, Frame(CELL, 2, "step"), Frame(CELL, 4, "<module>"), KERNEL]

    line = _find(frames)

    function = "torch.nn.modules.linear.Linear.forward"
    assert line == FailingLine("In [7], line 2", "y = model(x)", function)


def test_backward() -> None:
    """What decorators and private helpers add is passed over."""
    frames = [
        Frame(f"{PACKAGES}/torch/autograd/graph.py", 979, "_engine_run_backward"),
        Frame(f"{PACKAGES}/torch/autograd/__init__.py", 350, "backward"),
        Frame(f"{PACKAGES}/torch/utils/_contextlib.py", 120, "wrap.<locals>.decorate"),
        Frame(f"{PACKAGES}/torch/_tensor.py", 600, "Tensor.backward"),
        Frame(CELL, 4, "<module>"),
    ]

    assert _find(frames).function == "torch.autograd.backward"
    assert _find(frames[2:]).function == "torch._tensor.Tensor.backward"


def test_a_file_of_the_users() -> None:
    """A module beside the notebook is the user's own, whatever the cell called."""
    line = _find([LINEAR, Frame("/home/me/train.py", 12, "fit"), KERNEL])

    assert (line.place, line.text) == ("train.py, line 12", "")


def test_libraries_alone() -> None:
    """A thread of a library's has no line of the user's."""
    function = "torch.nn.modules.linear.Linear.forward"
    assert _find([LINEAR, CALL]) == FailingLine(None, "", function)
    assert _find([]) == FailingLine(None, "", None)


def test_code_that_other_magics_compile(monkeypatch: pytest.MonkeyPatch) -> None:
    """The body of ``%%time``; of what ``%time`` was given, the line that did so."""
    timed = [Frame("<timed exec>", 1, "<module>"), KERNEL]
    _compile(monkeypatch, "get_ipython().run_line_magic('time', 'step(x)')\n")
    evaluated = [Frame("<timed eval>", 1, "<module>"), KERNEL, Frame(CELL, 1, "<module>")]

    body = _find(timed, "%%time\nx = 1\ny = 2")
    given = _find(evaluated, "%time step(x)")

    assert body == FailingLine("In [7], line 2", "x = 1", None)
    assert given == FailingLine("In [7], line 1", "%time step(x)", None)


def test_below_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    """IPython runs what is below ``%%capture`` as a cell of the next number; the lines tell."""
    inner = "/tmp/ipykernel_1/456.py"
    _compile(monkeypatch, "get_ipython().run_cell_magic('capture', '', '…')\n")
    _compile(monkeypatch, "x = 1\nget_ipython().run_line_magic('pwd', '')\nstep(x)\n", inner)
    frames = [Frame(inner, 3, "<module>"), KERNEL]

    line = _find(frames, "%%capture\n\nx = 1\n%pwd\nstep(x)\n", {**CELLS, inner: 8})

    assert line == FailingLine("In [7], line 5", "step(x)", None)


# -- What a cell mentions --------------------------------------------------------------------------


def make(source: str) -> dict[str, Any]:
    """A notebook's namespace after a cell."""
    namespace: dict[str, Any] = {"__name__": "__main__"}
    exec(source, namespace)
    return namespace


def test_the_cells_own_lines() -> None:
    """Names and attributes, read and bound; words in strings too, but none of comments."""
    words = list_mentions("loss = model(x).mean()  # data\nprint('batch 3')", {})

    assert words >= {"loss", "model", "x", "mean", "print", "batch"}
    assert "data" not in words


@pytest.mark.parametrize("source", ["%%time\nmodel(x)", "await (", "!ls $folder"])
def test_what_is_no_python(source: str) -> None:
    """Then every word counts."""
    assert list_mentions(source, {}) & {"model", "await", "folder"}


def test_functions_of_the_notebook() -> None:
    """What they mention the cell needs, and so on down."""
    namespace = make(
        "def outer():\n    return inner()\n"
        "def inner():\n    return [model(each) for each in data]\n"
        "def other():\n    return unused\n"
    )

    words = list_mentions("outer()", namespace)

    assert words >= {"inner", "model", "data"}
    assert "unused" not in words


def test_what_wraps_them() -> None:
    """Methods, properties, decorators, closures and partials."""
    namespace = make(
        "import functools\n"
        "class Base:\n    def fit(self):\n        return base_data\n"
        "class Trainer(Base):\n"
        "    @property\n    def size(self):\n        return size_data\n"
        "    @staticmethod\n    def count():\n        return static_data\n"
        "trainer = Trainer()\n"
        "bound = trainer.fit\n"
        "def plain(a):\n    return plain_data\n"
        "part = functools.partial(plain, 1)\n"
        "def wrap(function):\n"
        "    @functools.wraps(function)\n    def call():\n        return function()\n"
        "    return call\n"
        "@wrap\ndef decorated():\n    return decorated_data\n"
    )

    assert list_mentions("trainer", namespace) >= {"base_data", "size_data", "static_data"}
    assert "base_data" in list_mentions("bound()", namespace)
    assert "plain_data" in list_mentions("part()", namespace)
    assert "decorated_data" in list_mentions("decorated()", namespace)


def test_classes_that_lie() -> None:
    """Nothing of an object's or a class's is asked."""
    asked: list[str] = []

    class Meta(type):
        def __eq__(cls, other: object) -> bool:
            asked.append("==")
            raise RuntimeError("asked")

        def __getattribute__(cls, name: str) -> Any:
            asked.append(name)
            raise RuntimeError("asked")

        __hash__ = None  # type: ignore[assignment]

    class Liar(metaclass=Meta):
        def __getattribute__(self, name: str) -> Any:
            asked.append(name)
            raise RuntimeError("asked")

    liar = object.__new__(Liar)
    asked.clear()

    assert "liar" in list_mentions("liar", {"__name__": "__main__", "liar": liar, "cls": Liar})
    assert asked == []
