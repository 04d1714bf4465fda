"""What a cell mentions, in its own lines and in the functions that it calls."""

from __future__ import annotations

from typing import Any

import pytest

from gpumemwidget.oom.remedies import list_mentions


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
