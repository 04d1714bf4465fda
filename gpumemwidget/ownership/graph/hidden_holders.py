"""Read what some objects hold out of the garbage collector's sight."""

# ruff: noqa: SLF001 - what torch says of these things it says in private attributes.
from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

from gpumemwidget.ownership.graph.objects import is_one_of


class _Absent:
    """Placeholder for a class that this release of torch lacks, or that is not imported."""


class HiddenHolders:
    """Recognises objects that hold tensors out of the collector's sight, and lists what they hold.

    A column of a data frame may hold tensors, ``x.numpy()`` holds ``x``, and gradient checkpointing
    keeps what it will need in ``SavedTensor`` objects. ``x.max(0)``, ``x.topk(5)`` and their like
    return a tuple made in C that the collector does not know. A scripted module has its parameters
    in C++. NumPy is not imported for it.
    """

    def __init__(self, torch: Any) -> None:
        self._torch = torch
        self._array: Any = _read_module_variable("numpy", "ndarray") or _Absent
        self._saved: Any = getattr(torch._C._autograd, "SavedTensor", _Absent)
        self._script_module: Any = getattr(torch._C, "ScriptModule", _Absent)
        #: Classes whose contents are not all shown: TorchScript's modules, functions and objects,
        #: CUDA graphs, whose pools have more than tensors, and collectives under way.
        self._opaque: tuple[Any, ...] = (
            self._script_module,
            getattr(torch._C, "ScriptFunction", _Absent),
            getattr(torch._C, "ScriptObject", _Absent),
            getattr(torch._C, "_CUDAGraph", _Absent),
            _read_module_variable("torch._C._distributed_c10d", "Work") or _Absent,
        )
        #: The classes of such objects; subclasses of the array are among them too.
        self.classes: tuple[Any, ...] = (self._array, self._saved, *self._opaque)
        #: The classes of such results, each by itself: they have no base but ``tuple``.
        self.results = _list_results(torch)
        self._result_ids = frozenset(map(id, self.results))
        self._ids = self._result_ids.union(map(id, self.classes))

    def is_array(self, cls: type) -> bool:
        """Return whether a class's objects have numbered parts: arrays, results of operations."""
        return is_one_of(cls, self._array) or self.is_result(cls)

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
            return [part for part in held if part is not None]
        if self.is_script(cls):
            # A submodule is an object of its own, which has a wrapper of its own in Python.
            tables = (self._torch._C.ParameterDict, self._torch._C.BufferDict)
            return [tensor for table in tables for _, tensor in table(target).items()]
        if not is_one_of(cls, self._array):
            return []
        is_of_objects = self._array.dtype.__get__(target).hasobject
        parts = list(self._array.flat.__get__(target)) if is_of_objects else []
        base = self.find_base(target)
        return parts if base is None else [*parts, base]

    def find_base(self, target: object) -> object | None:
        """Return the tensor or the array whose memory an array shows; ``None`` for any other."""
        if not is_one_of(type(target), self._array):
            return None
        base: object = self._array.base.__get__(target)
        is_known = is_one_of(type(base), self._array, self._torch._C.TensorBase)
        return base if is_known else None

    def holds_in_cpp(self, cls: type) -> bool:
        """Return whether objects of a class hold tensors by references of C++ alone."""
        return cls is self._saved or self.is_script(cls)

    def is_opaque(self, target: Any) -> bool:
        """Return whether a hidden holder may hold more than can be listed."""
        cls = type(target)
        if cls is self._saved:
            return not hasattr(cls, "data")
        return is_one_of(cls, *self._opaque)

    def is_script(self, cls: type) -> bool:
        """Return whether a class is that of TorchScript's modules, which their methods hold."""
        return is_one_of(cls, self._script_module)


def _list_results(torch: Any) -> tuple[type, ...]:
    """The classes in ``torch.return_types``."""
    found = vars(getattr(torch, "return_types", object)).values()
    classes = (value for value in found if is_one_of(type(value), type))
    return tuple(cls for cls in classes if is_one_of(cls, tuple))


def _read_module_variable(module: str, name: str) -> object:
    found = sys.modules.get(module)
    return None if found is None else vars(found).get(name)
