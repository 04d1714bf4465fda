"""Read the name of a pickled function without making anything of the pickle.

An engine unpickles what it was sent by itself, once: code of the user's would run twice otherwise,
and a closure's data would be there twice. Here each class and function that a pickle names is
replaced by a stand-in that keeps its arguments and its state.
"""

from __future__ import annotations

import io
import pickle
from typing import Any

#: Maximum size of a pickle that is read, in bytes: a bigger one has data with the function.
_MAX_BYTES = 256 * 1024
#: Where ipyparallel's and cloudpickle's pickles of a function have the function within.
_PARTS = ("code", "func", "f", "obj")
_MAX_DEPTH = 8


class _StandIn:
    """Stands for an object of a pickle.

    Attributes:
        module: where its class or its function is, with the name there.
        args: what it would have been made of.
    """

    module = ""
    name = ""
    args: tuple[Any, ...] = ()
    state: Any = None

    def __new__(cls, *args: Any, **_: Any) -> _StandIn:
        self = object.__new__(cls)
        self.args = args
        return self

    def __call__(self, *args: Any, **_: Any) -> _StandIn:
        return _StandIn(*args)

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def append(self, _value: object) -> None:
        """Take an item of a list."""

    def extend(self, _values: object) -> None:
        """Take items of a list."""

    def __setitem__(self, _key: object, _value: object) -> None:
        pass


class _Unpickler(pickle.Unpickler):
    """Makes stand-ins, and the plain values of pickles: numbers, text, lists."""

    def find_class(self, module: str, name: str) -> Any:
        return type(name, (_StandIn,), {"module": module, "name": name})


def read_function_name(data: bytes | memoryview) -> tuple[str, str]:
    """Return the module and the qualified name of a pickled function; ``("", "")``: not found."""
    if len(data) > _MAX_BYTES:
        return "", ""
    try:
        return _name(_Unpickler(io.BytesIO(data)).load(), 0)
    except Exception:  # noqa: BLE001 - a pickle may hold anything
        return "", ""


def _name(value: Any, depth: int) -> tuple[str, str]:
    if isinstance(value, type) and issubclass(value, _StandIn):
        return value.module, value.name
    if not isinstance(value, _StandIn) or depth > _MAX_DEPTH:
        return "", ""
    state = value.state if isinstance(value.state, dict) else {}
    for part in _PARTS:
        if isinstance(state.get(part), _StandIn):
            module, name = _name(state[part], depth + 1)
            return str(state.get("module", module)), name
    return _name_made(value, state, depth)


def _name_made(value: _StandIn, state: dict[str, Any], depth: int) -> tuple[str, str]:
    args = value.args
    if value.name == "getattr" and len(args) == 2:  # A bound method.
        module, name = _name(args[0], depth + 1)
        return module, f"{name}.{args[1]}"
    # A code object is made of its file, its name and, since Python 3.11, its qualified name.
    texts = [arg for arg in args if type(arg) is str]
    if len(args) > 10 and len(texts) >= 2:
        return "", texts[-1]
    if args and isinstance(args[0], (_StandIn, type)):
        return _name(args[0], depth + 1)
    # An object that can be called, or a class by value.
    return value.module, str(state.get("name", value.name))
