"""Decide how a walk treats an object: by its class, whether it can lead to memory, and its limits.

The limit is on autograd nodes. To look at one makes a Python object for it, and since torch 2.10
that object stays as long as the node. When a chain of such nodes goes, each one's end is called
from within that of the one before it: at some 45,000 in a row (torch 2.13, a stack of 8 MiB) the
process crashes, which a chain never seen from Python would survive. ``total_loss += loss`` makes
such chains. So there is a limit on how many nodes of the process have a Python object because of
us.
"""

from __future__ import annotations

import gc
import operator
import re
import weakref
from collections.abc import Collection, Iterable, Sequence
from enum import Enum
from itertools import compress
from types import CodeType, FrameType, FunctionType, ModuleType

from gpumemwidget.ownership.graph.objects import (
    is_library_class,
    list_bases,
    name_class,
    read_class_attribute,
)
from gpumemwidget.ownership.graph.torch_reader import HiddenHolders, TorchReader

#: Machinery that reaches the whole process and owns no user's memory.
_FOREIGN_MODULES = re.compile(
    r"(ipykernel|zmq|tornado|jupyter_client|gpumemwidget|_pytest|pluggy|xdist|execnet)(\..*)?|uvloop"
    r"|asyncio\.(\w*events|runners)"
)

#: Classes of logging that lead from one logger to all others; a handler may hold what was logged.
_FOREIGN_CLASSES = frozenset({"logging.Manager", "logging.RootLogger", "logging.PlaceHolder"})


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


#: The kinds of the classes that any walk has met, by id; a class that goes takes its entry along.
_classes: dict[int, tuple[weakref.ref[type], Kind]] = {}

#: The ids of those classes whose objects have no kind of their own.
_plain_ids: set[int] = set()


def _note_class(cls: type, kind: Kind) -> None:
    key = id(cls)

    def forget(_: weakref.ref[type]) -> None:
        _classes.pop(key, None)
        _plain_ids.discard(key)

    _classes[key] = (weakref.ref(cls, forget), kind)
    if kind is Kind.PLAIN:
        _plain_ids.add(key)


class KindFinder:
    """Finds and remembers how objects of a class are treated."""

    def __init__(self, reader: TorchReader, hidden: HiddenHolders) -> None:
        self._reader = reader
        parallel = vars(reader.torch.nn).get("parallel")
        wrapper = getattr(parallel, "DistributedDataParallel", None)
        self._kinds: tuple[tuple[type, Kind], ...] = (
            (reader.tensor_type, Kind.TENSOR),
            (reader.storage_type, Kind.STORAGE),
            (ModuleType, Kind.SKIP),
            (CodeType, Kind.SKIP),
            (type, Kind.CLASS),
            (FunctionType, Kind.FUNCTION),
            (FrameType, Kind.FRAME),
            *((cls, Kind.HIDDEN) for cls in (*hidden.classes, *hidden.results)),
            *(() if wrapper is None else ((wrapper, Kind.WRAPPER),)),
        )
        self._library_classes: dict[int, tuple[object, bool]] = {}

    def find(self, cls: type) -> Kind:
        """Return how objects of a class are treated."""
        noted = _classes.get(id(cls))
        if noted is not None:
            return noted[1]
        kind = self._classify(cls)
        _note_class(cls, kind)
        return kind

    def are_known_plain(self, targets: Iterable[object]) -> bool:
        """Return whether all objects are of classes known as plain, at the speed of C."""
        return _plain_ids.issuperset(map(id, map(type, targets)))

    def are_plain(self, targets: Sequence[object]) -> bool:
        """Return whether all objects are plain."""
        return self.are_known_plain(targets) or all(
            self.find(type(each)) is Kind.PLAIN for each in targets
        )

    def list_plain(self, targets: Sequence[object]) -> list[object]:
        """Return the plain ones of these objects."""
        if not all(map(_classes.__contains__, map(id, map(type, targets)))):
            for each in targets:
                self.find(type(each))
        is_plain = map(_plain_ids.__contains__, map(id, map(type, targets)))
        return list(compress(targets, is_plain))

    def is_library_class(self, cls: object) -> bool:
        """Return what ``objects.is_library_class`` says of a class, which is remembered."""
        noted = self._library_classes.get(id(cls))
        if noted is None:
            noted = self._library_classes[id(cls)] = (cls, is_library_class(cls))
        return noted[1]

    def list_living(self, *kinds: Kind) -> list[object]:
        """Return all objects of these kinds that the collector knows, outside of the walk too.

        Some 100 ns for each object of the process: once a question, never in a loop.
        """
        # Once they are listed none of their classes can go, and leave its id to another.
        living = gc.get_objects()
        others = {key for key, (_, kind) in list(_classes.items()) if kind not in kinds}
        # By the ids of classes, at the speed of C.
        is_other = map(others.__contains__, map(id, map(type, living)))
        rest = compress(living, map(operator.not_, is_other))
        return [each for each in rest if self.find(type(each)) in kinds]

    def count_own_refs(self, cls: object) -> int:
        """Count the references to a class that the notes here and in the reader hold."""
        return (id(cls) in self._library_classes) + self._reader.count_own_refs(cls)

    def _classify(self, cls: type) -> Kind:
        for base in list_bases(cls):
            for known, kind in self._kinds:
                if base is known:
                    return kind
        module = read_class_attribute(cls, "__module__")
        if type(module) is str and _FOREIGN_MODULES.fullmatch(module):
            return Kind.SKIP
        if name_class(cls) in _FOREIGN_CLASSES:
            return Kind.SKIP
        return Kind.NODE if self._reader.is_graph_type(cls) else Kind.PLAIN


#: Maximum number of autograd nodes with a Python object because of us: a fifth of what an ordinary
#: stack bears; the graph of one step of a large model has some 5,000.
MOST_NODES = 10_000

#: The ids of the autograd nodes that have a Python object because of a walk of this process; some
#: may be gone: they are looked up anew when there are many.
_made: set[int] = set()

#: The ids of nodes that were read: to read them again makes no new objects.
_read: set[int] = set()


class AutogradNodeLimit:
    """Decides which autograd nodes one walk may read."""

    def __init__(self, reader: TorchReader, kind_finder: KindFinder) -> None:
        self._is_needed = reader.cpp_holds_node
        self._kind_finder = kind_finder
        self._is_counted = False
        self._is_closed = False
        #: True once a node was refused.
        self.is_spent = False

    def close(self) -> None:
        """Allow no node at all: their graphs may change while they are read."""
        self._is_closed = True

    def may_read(self, node: object) -> bool:
        """Return whether a node's neighbours may be asked for."""
        may = not self._is_closed and (not self._is_needed or self._has_room_for(node))
        self.is_spent = self.is_spent or not may
        return may

    def _has_room_for(self, node: object) -> bool:
        if len(_made) >= MOST_NODES and not self._is_counted:
            self._is_counted = True
            living = set(map(id, self._kind_finder.list_living(Kind.NODE)))
            _made.intersection_update(living)
            _read.intersection_update(living)
        return len(_made) < MOST_NODES or id(node) in _read

    def note(self, node: object, following: Collection[object]) -> None:
        """Remember that a node was read, and the objects that this may have made."""
        if self._is_needed:
            _read.add(id(node))
            _made.add(id(node))
            _made.update(map(id, following))


#: Number of objects in one question; maximum depth, and number of objects on each level.
_LOT = 32

_MOST_LEVELS, _MOST_ON_LEVEL = 6, 1024

#: Classes in which most containers end.
_SIMPLE = (int, str, float, bool, bytes, type(None))


class DeadEnds:
    """Finds containers that end in numbers and text, and so lead to no memory."""

    def __init__(self, kind_finder: KindFinder, hidden: HiddenHolders) -> None:
        self._kind_finder = kind_finder
        self._hidden = hidden
        for cls in _SIMPLE:
            kind_finder.find(cls)

    def find(self, targets: Sequence[object]) -> set[int]:
        """Return the ids of those plain objects that surely lead to no memory."""
        found: set[int] = set()
        for start in range(0, len(targets), _LOT):
            lot = targets[start : start + _LOT]
            if self._lead_nowhere(lot):
                found.update(map(id, lot))
            elif len(lot) > 1:
                # Most of what a module has is empty: its tables of hooks.
                found.update(
                    id(each)
                    for each in lot
                    if not gc.get_referents(each) or self._lead_nowhere((each,))
                )
        return found

    def _lead_nowhere(self, level: Sequence[object]) -> bool:
        """Return whether containers within containers end in numbers and text."""
        finder = self._kind_finder
        for _ in range(_MOST_LEVELS):
            parts = gc.get_referents(*level)
            level = list(filter(gc.is_tracked, parts))
            if not finder.are_known_plain(parts) and (
                not finder.are_plain(level) or self._hidden.are_any(parts)
            ):
                return False
            if not level:
                return True
            if len(level) > _MOST_ON_LEVEL:
                return False
        return False
