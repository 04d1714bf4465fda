"""Find objects that hold tensors where the garbage collector can't see it, and what they hold.

A column of a data frame may hold tensors, and gradient checkpointing keeps what it will need in
``SavedTensor`` objects. ``x.max(0)``, ``x.topk(5)`` and their like return a tuple made in C that
the collector does not know. A scripted module has its parameters in C++.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from itertools import chain
from typing import Any

from gpumemwidget.ownership.graph.objects import is_a, is_one_of

#: In a container of more than that nobody keeps such objects one by one.
_MOST_PARTS = 64

#: Classes of torch's C part whose objects hold more than can be listed: all of TorchScript's but
#: modules' parameters, values of futures, CUDA graphs, whose pools have more than tensors.
_OPAQUE = (
    "ScriptModule",
    "ScriptFunction",
    "ScriptMethod",
    "ScriptObject",
    "Future",
    "_CUDAGraph",
)


class HiddenHolders:
    """Recognises hidden holders, and lists what they hold; NumPy is not imported for it.

    Args:
        torch: torch itself.
    """

    def __init__(self, torch: Any) -> None:
        numpy = sys.modules.get("numpy")
        self._torch = torch
        self._array: Any = None if numpy is None else vars(numpy).get("ndarray")
        found = vars(torch._C)  # noqa: SLF001
        self._saved: Any = torch._C._autograd.SavedTensor  # noqa: SLF001
        self._script_module: Any = found.get("ScriptModule")
        c10d = sys.modules.get("torch._C._distributed_c10d")
        opaque = (*map(found.get, _OPAQUE), None if c10d is None else vars(c10d).get("Work"))
        self._opaque: tuple[type, ...] = tuple(each for each in opaque if each is not None)
        arrays = () if self._array is None else (self._array,)
        #: The classes of such objects; subclasses of the array are among them too.
        self.classes: tuple[type, ...] = (*arrays, self._saved, *self._opaque)
        #: The classes in ``torch.return_types``, each by itself: they have no base but ``tuple``.
        self.results: tuple[type, ...] = tuple(
            each
            for each in vars(torch.return_types).values()
            if is_a(each, type) and is_one_of(each, tuple)
        )
        self._result_ids = frozenset(map(id, self.results))
        self._ids = self._result_ids.union(map(id, self.classes))

    def is_array(self, cls: type) -> bool:
        """Return whether a class's objects have numbered parts: arrays, results of operations."""
        is_array = self._array is not None and is_one_of(cls, self._array)
        return is_array or self.is_result(cls)

    def is_result(self, cls: type) -> bool:
        """Return whether a class is that of several tensors that an operation returns."""
        return id(cls) in self._result_ids

    def are_among(self, targets: Sequence[object]) -> bool:
        """Return whether a small object's parts include a hidden holder."""
        return 0 < len(targets) <= _MOST_PARTS and self.are_any(targets)

    def are_within(self, lots: Iterable[Sequence[object]]) -> bool:
        """Return whether the parts of many small objects include a hidden holder."""
        small = [each for each in lots if len(each) <= _MOST_PARTS]
        return self.are_any(chain.from_iterable(small))

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
            # Before torch 2.8 it does not tell the hook.
            held = (target.data, getattr(target, "unpack_hook", None))
            return [each for each in held if each is not None]
        if self.is_script_module(cls):
            # A submodule is an object of its own, which has a wrapper of its own in Python.
            tables = (self._torch._C.ParameterDict, self._torch._C.BufferDict)  # noqa: SLF001
            return [each for table in tables for _, each in table(target).items()]
        if not self.is_array(cls) or not self._array.dtype.__get__(target).hasobject:
            return []
        return list(self._array.flat.__get__(target))

    def is_script_module(self, cls: type) -> bool:
        """Return whether a class is that of TorchScript's modules."""
        return self._script_module is not None and is_one_of(cls, self._script_module)

    def is_opaque(self, target: object) -> bool:
        """Return whether a hidden holder may hold more than can be listed."""
        return is_one_of(type(target), *self._opaque)


def find_wrapper_class(torch: Any) -> type | None:
    """Return ``DistributedDataParallel``, whose reducer holds the parameters in C++."""
    parallel = vars(torch.nn).get("parallel")
    found = None if parallel is None else vars(parallel).get("DistributedDataParallel")
    return found if is_a(found, type) else None
