"""The names of pickled functions, and that nothing of a pickle runs."""

from __future__ import annotations

import functools
import pickle
from typing import Any

import pytest

from gpumemwidget.remote.engines.function_names import read_function_name


class Model:
    """Has a method, and can be called."""

    def fit(self) -> None: ...

    def __call__(self) -> None: ...


class Trap:
    """Tells when it is unpickled, as code of a user's may."""

    sprung = 0

    def __reduce__(self) -> Any:
        return _spring, ()


def _spring() -> Trap:
    Trap.sprung += 1
    return Trap()


def train(n: int = 1) -> int:
    return n


FUNCTIONS = {
    "a function": (train, "train"),
    "a lambda": (lambda: None, "<lambda>"),
    "a built-in function": (len, "len"),
    "a partial": (functools.partial(train, 3), "train"),
    "a bound method": (Model().fit, "Model.fit"),
    "a class": (Model, "Model"),
    "an object": (Model(), "Model"),
}


@pytest.mark.parametrize("what", FUNCTIONS)
def test_ipyparallels_pickles_name_the_function(what: str) -> None:
    """Whatever can be applied has the name that a person gave it."""
    serialize = pytest.importorskip("ipyparallel.serialize")
    function, name = FUNCTIONS[what]

    assert read_function_name(serialize.pack_apply_message(function, (), {})[0])[1] == name


def test_cloudpickles_pickles_name_the_function() -> None:
    """A function that is pickled by value has its name too."""
    cloudpickle = pytest.importorskip("cloudpickle")

    def step() -> None: ...

    name = read_function_name(cloudpickle.dumps(step))[1]
    assert name.rpartition(".")[2] == "step"


def test_nothing_of_the_pickle_runs() -> None:
    """The data of a closure is not made, and none of its code is called."""
    data = pickle.dumps(functools.partial(train, Trap()))

    read_function_name(data)

    assert Trap.sprung == 0


@pytest.mark.parametrize("data", [b"", b"no pickle", b"\x80\x05N.", pickle.dumps("a" * 300_000)])
def test_what_names_no_function_has_no_name(data: bytes) -> None:
    """Other bytes, and pickles with much data, are left alone."""
    assert read_function_name(data) == ("", "")
