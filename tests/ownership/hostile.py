"""Objects whose code must never run: each method of theirs notes its name and raises."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import pytest

#: The methods that were called, though they must not be.
called: list[str] = []


def boom(name: str) -> Any:
    """Return a function that notes ``name`` and raises."""

    def call(*args: object, **kwargs: object) -> object:
        called.append(name)
        raise SystemExit(name)

    return call


SPECIAL = (
    *("__eq__", "__ne__", "__lt__", "__bool__", "__len__", "__iter__", "__next__", "__hash__"),
    *("__getattr__", "__getattribute__", "__repr__", "__str__", "__contains__", "__getitem__"),
    *("__call__", "__sizeof__", "__dir__", "__format__", "__reduce__", "__copy__", "__index__"),
)
#: A property that does not even tell an object's class.
LIE = property(boom("__class__"))
Hostile: Any = type(
    "Hostile",
    (),
    {
        **{name: boom(name) for name in SPECIAL},
        "__class__": LIE,
        "__module__": "__main__",
        "late": LIE,
    },
)


class HostileMeta(type):
    """A metaclass that notes and raises whatever a class is asked."""

    __eq__ = boom("meta __eq__")
    __hash__ = boom("meta __hash__")
    __getattribute__ = boom("meta __getattribute__")
    __instancecheck__ = boom("meta __instancecheck__")
    __subclasscheck__ = boom("meta __subclasscheck__")
    __repr__ = boom("meta __repr__")


@pytest.fixture
def nothing_is_called() -> Iterator[None]:
    """Fail a test in which one of these objects ran, or something warned."""
    called.clear()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield
    assert called == []
