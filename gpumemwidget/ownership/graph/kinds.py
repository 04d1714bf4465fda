"""Decide by an object's class how a walk treats it."""

from __future__ import annotations

import builtins
import re
import types
from collections.abc import Iterable, Sequence
from enum import Enum
from itertools import compress, repeat
from types import CodeType, FrameType, FunctionType, ModuleType
from typing import Any

from gpumemwidget.ownership.graph.hidden_holders import HiddenHolders
from gpumemwidget.ownership.graph.objects import (
    collect_living,
    is_library_class,
    list_bases,
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
