"""Tells classes of objects apart without asking them.

A class may have a metaclass whose ``==``, ``hash`` or ``__mro__`` is user code, and an object may
lie about its ``__class__``. Everything here goes by identity and by the slots of ``type`` itself.
"""

from __future__ import annotations

import gc
import re
import sys
import weakref
from collections.abc import Iterable, Sequence
from enum import Enum
from itertools import compress
from types import CodeType, FrameType, FunctionType, ModuleType
from typing import TYPE_CHECKING, Any, TypeGuard, TypeVar

if TYPE_CHECKING:
    from gpumemwidget.owners.storages import TorchReader

__all__ = [
    "Kind",
    "KindFinder",
    "is_a",
    "is_library_class",
    "is_one_of",
    "is_running",
    "list_bases",
    "name_class",
    "read_namespace",
    "read_type_dict",
]

#: Machinery that reaches the whole process and owns no user's memory.
_FOREIGN_MODULES = re.compile(
    r"(ipykernel|zmq|tornado|jupyter_client|gpumemwidget)(\..*)?|uvloop"
    r"|asyncio\.(\w*events|runners)"
)
#: Of logging, what leads from one logger to all others; a handler may hold what was logged.
_FOREIGN_CLASSES = frozenset({"logging.Manager", "logging.RootLogger", "logging.PlaceHolder"})
_T = TypeVar("_T")
_READ_MRO: Any = type.__dict__["__mro__"].__get__
_TYPE_DICT: Any = type.__dict__["__dict__"]
_QUALNAME: Any = type.__dict__["__qualname__"]
_FLAGS: Any = type.__dict__["__flags__"]
_READ_NAMESPACE: Any = vars(ModuleType)["__dict__"].__get__
#: Set for classes made while the process runs, and not for those of its own C code.
_HEAP_TYPE = 1 << 9


def list_bases(cls: type) -> tuple[type, ...]:
    """The class's method resolution order, whatever its metaclass would answer."""
    bases: tuple[type, ...] = _READ_MRO(cls)
    return bases


def read_type_dict(cls: type) -> dict[str, object]:
    """A copy of the class's own attributes, whatever its metaclass would answer."""
    return dict(_TYPE_DICT.__get__(cls))


def is_one_of(cls: type, *classes: type) -> bool:
    """Whether a class is one of these or derives from one, by identity alone."""
    # No generator: this is asked for every object of a walk.
    for base in _READ_MRO(cls):
        for each in classes:
            if base is each:
                return True
    return False


def is_a(target: object, cls: type[_T]) -> TypeGuard[_T]:
    """``isinstance`` by the object's type alone: the builtin asks it for its ``__class__`` too."""
    return is_one_of(type(target), cls)


def read_namespace(module: ModuleType) -> dict[str, object]:
    """A module's globals, whatever its class would answer."""
    namespace: dict[str, object] = _READ_NAMESPACE(module)
    return namespace


def name_class(cls: type) -> str:
    """The class's qualified name; the notebook's own and the builtins' without their module."""
    # A name may be of a class of the user's that derives from str: this makes it one.
    name = str.__str__(_QUALNAME.__get__(cls))
    module = read_type_dict(cls).get("__module__")
    if type(module) is not str or module in {"builtins", "__main__"}:
        return name
    return f"{module}.{name}"


def is_library_class(cls: Any) -> bool:
    """Whether a module has the class under its name, so that it outlives all of the user's names.

    A class written in the notebook does not; nor does one that a library makes for one object, as
    ``torch.nn.utils.parametrize`` does, whose properties may lead back to that object.
    """
    if not _FLAGS.__get__(cls) & _HEAP_TYPE:
        return True
    module = read_type_dict(cls).get("__module__")
    if type(module) is not str or module == "__main__":
        return False
    found: object = sys.modules.get(module)
    if not is_a(found, ModuleType):
        return False
    first, *others = str.split(_QUALNAME.__get__(cls), ".")
    found = dict.get(read_namespace(found), first)
    for name in others:
        found = read_type_dict(found).get(name) if is_one_of(type(found), type) else None  # type: ignore[arg-type]
    return found is cls


def is_running(frame: FrameType) -> bool:
    """Whether some thread is in the frame now, so that what it holds is not settled."""
    each: FrameType | None = None
    tops = list(sys._current_frames().values())  # noqa: SLF001 - the one way to see them
    try:
        while tops:
            each = tops.pop()
            while each is not None:
                if each is frame:
                    return True
                each = each.f_back
        return False
    finally:
        # A frame that holds itself lives on until the next collection, with all its callers.
        del each, tops


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


#: The kinds of the classes that any walk has met, by id; a class that goes takes its entry along.
_classes: dict[int, tuple[weakref.ref[type], Kind]] = {}


def _note_class(cls: type, kind: Kind) -> None:
    key = id(cls)
    _classes[key] = (weakref.ref(cls, lambda _: _classes.pop(key, None)), kind)


class _Flags(dict[int, bool]):
    """Whether objects are wanted, by their class's id; where nobody knows they are."""

    has_met_others = False

    def __missing__(self, key: int) -> bool:
        self.has_met_others = True
        return True


class KindFinder:
    """Finds and remembers how objects of a class are treated.

    Args:
        reader: tells torch's classes.
        hidden: classes of holders that the collector does not know.
    """

    def __init__(self, reader: TorchReader, hidden: Iterable[type] = ()) -> None:
        self._reader = reader
        self._kinds: tuple[tuple[type, Kind], ...] = (
            (reader.tensor_type, Kind.TENSOR),
            (reader.storage_type, Kind.STORAGE),
            (ModuleType, Kind.SKIP),
            (CodeType, Kind.SKIP),
            (type, Kind.CLASS),
            (FunctionType, Kind.FUNCTION),
            (FrameType, Kind.FRAME),
            *((cls, Kind.HIDDEN) for cls in hidden),
        )
        #: By the class's id; the class is kept beside its kind, so that the id stays its own.
        self.known: dict[int, tuple[type, Kind]] = {}
        #: The ids of those classes whose objects have no kind of their own.
        self._plain_ids: set[int] = set()
        self._library_classes: dict[int, tuple[object, bool]] = {}

    def find(self, cls: type) -> Kind:
        """How objects of a class are treated."""
        noted = self.known.get(id(cls))
        if noted is None:
            shared = _classes.get(id(cls))
            kind = shared[1] if shared is not None else self._classify(cls)
            if shared is None:
                _note_class(cls, kind)
            noted = self.known[id(cls)] = (cls, kind)
            if noted[1] is Kind.PLAIN:
                self._plain_ids.add(id(cls))
        return noted[1]

    def are_known_plain(self, targets: Iterable[object]) -> bool:
        """Whether all of these are of classes that were met and are plain: at the speed of C."""
        return self._plain_ids.issuperset(map(id, map(type, targets)))

    def are_plain(self, targets: Sequence[object]) -> bool:
        """Whether all of these are plain objects."""
        return self.are_known_plain(targets) or all(
            self.find(type(each)) is Kind.PLAIN for each in targets
        )

    def list_plain(self, targets: Sequence[object]) -> list[object]:
        """The plain ones of these objects."""
        if not all(map(self.known.__contains__, map(id, map(type, targets)))):
            for each in targets:
                self.find(type(each))
        is_plain = map(self._plain_ids.__contains__, map(id, map(type, targets)))
        return list(compress(targets, is_plain))

    def is_library_class(self, cls: object) -> bool:
        """Whether a class outlives all of the user's names; see the function of this name."""
        noted = self._library_classes.get(id(cls))
        if noted is None:
            noted = self._library_classes[id(cls)] = (cls, is_library_class(cls))
        return noted[1]

    def list_living(self, *kinds: Kind) -> list[object]:
        """All objects of these kinds that the collector knows, outside of the walk too.

        Some 100 ns for each object of the process: once a question, never in a loop.
        """
        # Once they are listed none of their classes can go, and leave its id to another.
        living = gc.get_objects()
        flags = _Flags({key: kind in kinds for key, (_, kind) in list(_classes.items())})
        # No list of ids: they take more time to be kept than to be made.
        found = list(compress(living, map(flags.__getitem__, map(id, map(type, living)))))
        if flags.has_met_others:
            found = [each for each in found if self.find(type(each)) in kinds]
        return found

    def count_own_refs(self, cls: object) -> int:
        """How often the notes on classes, here and in the reader, hold a class."""
        own = (id(cls) in self.known) + (id(cls) in self._library_classes)
        return own + self._reader.count_own_refs(cls)

    def _classify(self, cls: type) -> Kind:
        for base in list_bases(cls):
            for known, kind in self._kinds:
                if base is known:
                    return kind
        module = read_type_dict(cls).get("__module__")
        if type(module) is str and _FOREIGN_MODULES.fullmatch(module):
            return Kind.SKIP
        if name_class(cls) in _FOREIGN_CLASSES:
            return Kind.SKIP
        return Kind.NODE if self._reader.is_graph_type(cls) else Kind.PLAIN
