"""Decide how a walk treats an object: by its class, whether it leads to memory, what it hides."""

# ruff: noqa: SLF001 - what torch says of these things it says in private attributes.
from __future__ import annotations

import builtins
import gc
import re
import sys
import types
from collections.abc import Iterable, Sequence
from enum import Enum
from itertools import compress, repeat
from types import CodeType, FrameType, FunctionType, ModuleType
from typing import Any

from gpumemwidget.ownership.graph.objects import (
    collect_living,
    is_library_class,
    is_one_of,
    list_bases,
    list_referents,
    name_class,
    read_class_attribute,
)
from gpumemwidget.ownership.graph.torch_reader import TorchReader

#: Machinery that reaches the whole process and owns no user's memory.
_FOREIGN_MODULES = re.compile(
    r"(ipykernel|zmq|tornado|jupyter_client|gpumemwidget|_pytest|pluggy|xdist|execnet)(\..*)?|uvloop"
    r"|asyncio\.(\w*events|runners)"
)

#: Python's own classes, which most objects of a process are of.
_COMMON_CLASSES = tuple(
    cls for cls in (*vars(builtins).values(), *vars(types).values()) if type(cls) is type
)


class Kind(Enum):
    """How the walk treats an object."""

    SKIP = "skip"
    PLAIN = "plain"
    CLASS = "class"
    FUNCTION = "function"
    FRAME = "frame"
    TENSOR = "tensor"
    STORAGE = "storage"
    NODE = "node"
    #: Holds others out of the collector's sight.
    HIDDEN = "hidden"
    #: A module under ``DistributedDataParallel``, whose reducer holds tensors in C++.
    WRAPPER = "wrapper"


class KindFinder:
    """Finds and remembers, for one walk, how objects of a class are treated."""

    def __init__(self, reader: TorchReader, hidden: HiddenHolders) -> None:
        self._reader = reader
        parallel = vars(reader.torch.nn).get("parallel")
        wrapper = getattr(parallel, "DistributedDataParallel", None)
        known: tuple[tuple[type | None, Kind], ...] = (
            (wrapper, Kind.WRAPPER),
            *((cls, Kind.HIDDEN) for cls in (*hidden.classes, *hidden.results)),
            (FrameType, Kind.FRAME),
            (FunctionType, Kind.FUNCTION),
            (type, Kind.CLASS),
            (CodeType, Kind.SKIP),
            (ModuleType, Kind.SKIP),
            (reader.storage_type, Kind.STORAGE),
            (reader.tensor_type, Kind.TENSOR),
        )
        #: The kinds of these classes and of those that derive from them, by id: none of them goes.
        self._kinds = {id(cls): kind for cls, kind in known}
        #: The kinds of the classes that were met, by their ids; the reader holds the classes.
        self._kinds_met: dict[int, Kind] = {}
        #: The ids of those classes whose objects have no kind of their own.
        self._plain_ids: set[int] = set()
        self._is_library_class: dict[int, bool] = {}

    def find(self, cls: type) -> Kind:
        """Return how objects of a class are treated."""
        kind = self._kinds_met.get(id(cls))
        if kind is None:
            kind = self._kinds_met[self._reader.hold_class(cls)] = self._classify(cls)
            if kind is Kind.PLAIN:
                self._plain_ids.add(id(cls))
        return kind

    def are_known_plain(self, targets: Iterable[object]) -> bool:
        """Return whether all objects are of classes known as plain, at the speed of C."""
        return self._plain_ids.issuperset(map(id, map(type, targets)))

    def are_plain(self, targets: Sequence[object]) -> bool:
        """Return whether all objects are plain."""
        return self.are_known_plain(targets) or all(
            self.find(type(target)) is Kind.PLAIN for target in targets
        )

    def list_plain(self, targets: Sequence[object]) -> list[object]:
        """Return the plain ones of these objects."""
        if not all(map(self._kinds_met.__contains__, map(id, map(type, targets)))):
            for target in targets:
                self.find(type(target))
        is_plain = map(self._plain_ids.__contains__, map(id, map(type, targets)))
        return list(compress(targets, is_plain))

    def is_library_class(self, cls: Any) -> bool:
        """Return what ``objects.is_library_class`` says of a class, which is remembered."""
        known = self._is_library_class.get(id(cls))
        if known is None:
            known = self._is_library_class[self._reader.hold_class(cls)] = is_library_class(cls)
        return known

    def list_living(self, *kinds: Kind) -> list[object]:
        """Return all objects of these kinds that the collector knows, outside of the walk too.

        Some 200 ns for each object of the process: once a question, never in a loop.
        """
        for cls in _COMMON_CLASSES:
            self.find(cls)
        is_wanted = {key: kind in kinds for key, kind in self._kinds_met.items()}
        rest: list[object] = []
        # By the ids of classes, at the speed of C. Classes that were not met are looked at below.
        collect_living(
            lambda living: compress(
                living, map(is_wanted.get, map(id, map(type, living)), repeat(True))
            ),
            rest.extend,
        )
        found = [target for target in rest if self.find(type(target)) in kinds]
        rest.clear()  # What filled the list is in it.
        return found

    def _classify(self, cls: type) -> Kind:
        for base in list_bases(cls):
            kind = self._kinds.get(id(base))
            if kind is not None:
                return kind
        module = read_class_attribute(cls, "__module__")
        if type(module) is str and _FOREIGN_MODULES.fullmatch(module):
            return Kind.SKIP
        # From one logger to all others; a handler may hold what was logged.
        loggers = ("logging.Manager", "logging.RootLogger", "logging.PlaceHolder")
        if module == "logging" and name_class(cls) in loggers:
            return Kind.SKIP
        return Kind.NODE if self._reader.is_graph_type(cls) else Kind.PLAIN


class DeadEnds:
    """Finds containers that end in numbers and text, and so lead to no memory."""

    def __init__(self, kind_finder: KindFinder, hidden: HiddenHolders) -> None:
        self._kind_finder = kind_finder
        self._hidden = hidden
        # Most containers end in these.
        for cls in (int, str, float, bool, bytes, type(None)):
            kind_finder.find(cls)

    def find(self, targets: Sequence[object]) -> set[int]:
        """Return the ids of those plain objects that surely lead to no memory."""
        found: set[int] = set()
        # Asked about together, as most lots lead nowhere; the others are looked at one by one.
        n_lot = 32
        for start in range(0, len(targets), n_lot):
            lot = targets[start : start + n_lot]
            if self._lead_nowhere(lot):
                found.update(map(id, lot))
            elif len(lot) > 1:
                # Most of what a module has is empty: its tables of hooks.
                found.update(
                    id(target)
                    for target in lot
                    if not list_referents(target) or self._lead_nowhere((target,))
                )
        return found

    def _lead_nowhere(self, level: Sequence[object]) -> bool:
        """Return whether containers within containers end in numbers and text."""
        finder = self._kind_finder
        # Deeper and wider ones are walked as all other objects: this is to save time alone.
        for _ in range(6):
            parts = list_referents(*level)
            level = list(filter(gc.is_tracked, parts))
            if not finder.are_known_plain(parts) and (
                not finder.are_plain(level) or self._hidden.are_any(parts)
            ):
                return False
            if not level:
                return True
            if len(level) > 1024:
                return False
        return False


# -- Objects that hide what they hold --------------------------------------------------------------


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
