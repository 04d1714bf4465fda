"""Find objects that hold tensors where the garbage collector can't see it, and what they hold.

A column of a data frame may hold tensors, and gradient checkpointing keeps what it will need in
``SavedTensor`` objects. ``x.max(0)``, ``x.topk(5)`` and their like return a tuple made in C that
the collector does not know. A scripted module has its parameters in C++, and a future its value.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

from gpumemwidget.ownership.graph.objects import is_one_of


class HiddenHolders:
    """Recognises hidden holders, and lists what they hold; NumPy is not imported for it."""

    def __init__(self, torch: Any) -> None:
        self._torch = torch
        numpy, c10d = sys.modules.get("numpy"), sys.modules.get("torch._C._distributed_c10d")
        found = vars(torch._C)  # noqa: SLF001
        self._array: Any = None if numpy is None else vars(numpy).get("ndarray")
        self._saved: Any = getattr(torch._C._autograd, "SavedTensor", None)  # noqa: SLF001
        self._script_module: Any = found.get("ScriptModule")
        self._future: Any = found.get("Future")
        opaque = (
            self._script_module,
            *(found.get(name) for name in ("ScriptFunction", "ScriptObject", "_CUDAGraph")),
            None if c10d is None else vars(c10d).get("Work"),
        )
        #: Classes whose contents are not all told: TorchScript's modules, functions and objects,
        #: CUDA graphs, whose pools have more than tensors, and collectives under way.
        self._opaque: tuple[type, ...] = tuple(each for each in opaque if each is not None)
        holders = (self._array, self._saved, self._future, *self._opaque)
        #: The classes of such objects; subclasses of the array are among them too.
        self.classes = tuple(each for each in holders if each is not None)
        #: The classes of such results, each by itself: they have no base but ``tuple``.
        self.results = _list_results(torch)
        self._result_ids = frozenset(map(id, self.results))
        self._ids = self._result_ids.union(map(id, self.classes))

    def is_array(self, cls: type) -> bool:
        """Return whether a class's objects have numbered parts: arrays, results of operations."""
        return _is_of(cls, self._array) or self.is_result(cls)

    def is_result(self, cls: type) -> bool:
        """Return whether a class is that of several tensors that an operation returns."""
        return id(cls) in self._result_ids

    def are_any(self, targets: Iterable[object]) -> bool:
        """Return whether any of these objects is a hidden holder."""
        # By the ids of classes, at the speed of C: this is asked for every object of a walk.
        return not self._ids.isdisjoint(map(id, map(type, targets)))

    def list_held(self, target: Any) -> list[object]:
        """Return what a hidden holder holds: an array's parts, a saved tensor and its hook."""
        cls = type(target)
        if self.is_result(cls):
            return list(tuple.__iter__(target))
        if cls is self._saved:
            held = (getattr(target, "data", None), getattr(target, "unpack_hook", None))
            return [each for each in held if each is not None]
        if self.is_script(cls):
            # A submodule is an object of its own, which has a wrapper of its own in Python.
            tables = (self._torch._C.ParameterDict, self._torch._C.BufferDict)  # noqa: SLF001
            return [each for table in tables for _, each in table(target).items()]
        if _is_of(cls, self._future):
            return self._list_value(target)
        is_of_objects = _is_of(cls, self._array) and self._array.dtype.__get__(target).hasobject
        return list(self._array.flat.__get__(target)) if is_of_objects else []

    def _list_value(self, future: Any) -> list[object]:
        try:
            return [self._future.value(future)] if self._future.done(future) else []
        except Exception:  # noqa: BLE001 - the error that it holds, of whatever class
            return []

    def holds_in_cpp(self, cls: type) -> bool:
        """Return whether objects of a class hold tensors by references of C++ alone."""
        return cls is self._saved or self.is_script(cls)

    def is_opaque(self, target: Any) -> bool:
        """Return whether a hidden holder may hold more than can be listed."""
        cls = type(target)
        if _is_of(cls, self._future):
            return not self._future.done(target)
        if cls is self._saved:
            return not hasattr(cls, "data")
        return any(is_one_of(cls, each) for each in self._opaque)

    def is_script(self, cls: type) -> bool:
        """Return whether a class is that of TorchScript's modules, which their methods hold."""
        return _is_of(cls, self._script_module)


def _is_of(cls: type, known: Any) -> bool:
    """Return whether a class is or derives from one that this release of torch may lack."""
    return known is not None and is_one_of(cls, known)


def _list_results(torch: Any) -> tuple[type, ...]:
    """The classes in ``torch.return_types``."""
    found = vars(getattr(torch, "return_types", object)).values()
    return tuple(each for each in found if is_one_of(type(each), type) and is_one_of(each, tuple))
