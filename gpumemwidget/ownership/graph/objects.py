"""Read objects and classes without running a line of their code.

A class may have a metaclass whose ``==``, ``hash`` or ``__mro__`` is user code, and an object may
lie about its ``__class__``. Everything here goes by identity and by the descriptors of the
interpreter's own types: attributes, slots, local variables and closure cells are read where the
interpreter stores them, and no attribute of an object is ever looked up.
"""

from __future__ import annotations

import functools
import gc
import inspect
import itertools
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import CellType, FrameType, GetSetDescriptorType, MemberDescriptorType, ModuleType
from typing import Any, TypeGuard, TypeVar

_T = TypeVar("_T")

_read_mro: Any = type.__dict__["__mro__"].__get__
_read_dict: Any = type.__dict__["__dict__"].__get__
_read_qualname: Any = type.__dict__["__qualname__"].__get__
_read_namespace: Any = vars(ModuleType)["__dict__"].__get__


def list_bases(cls: type) -> tuple[type, ...]:
    """Return the class's method resolution order, whatever its metaclass would answer."""
    bases: tuple[type, ...] = _read_mro(cls)
    return bases


def read_type_dict(cls: type) -> dict[str, object]:
    """Return a copy of the class's own attributes, whatever its metaclass would answer."""
    return dict(_read_dict(cls))


def read_class_attribute(cls: type, name: str) -> object:
    """Return one of the class's own attributes, or ``None``; its metaclass is not asked."""
    return _read_dict(cls).get(name)


def is_one_of(cls: type, *classes: type) -> bool:
    """Return whether a class is one of these or derives from one, by identity alone."""
    # No generator: this is asked for every object of a walk.
    for base in _read_mro(cls):
        for wanted in classes:
            if base is wanted:
                return True
    return False


def is_a(target: object, cls: type[_T]) -> TypeGuard[_T]:
    """``isinstance`` by the object's type alone: the builtin asks it for its ``__class__`` too."""
    return is_one_of(type(target), cls)


def read_namespace(module: ModuleType) -> dict[str, object]:
    """Return a module's globals, whatever its class would answer."""
    namespace: dict[str, object] = _read_namespace(module)
    return namespace


def name_class(cls: type) -> str:
    """Return the class's qualified name; the notebook's and builtins without their module."""
    # A name may be of a class of the user's that derives from str: this makes it one.
    name = str.__str__(_read_qualname(cls))
    module = read_class_attribute(cls, "__module__")
    if type(module) is not str or module in {"builtins", "__main__"}:
        return name
    return f"{module}.{name}"


def is_library_class(cls: Any) -> bool:
    """Return whether a module has the class under its name, and so keeps it for good.

    A class written in the notebook does not; nor does one that a library makes for one object, as
    ``torch.nn.utils.parametrize`` does, whose properties may lead back to that object.
    """
    # Py_TPFLAGS_HEAPTYPE is not set for the classes of the interpreter's own C code.
    if not type.__dict__["__flags__"].__get__(cls) & 1 << 9:
        return True
    module = read_class_attribute(cls, "__module__")
    if type(module) is not str or module == "__main__":
        return False
    found: object = sys.modules.get(module)
    if not is_a(found, ModuleType):
        return False
    first, *others = str.split(_read_qualname(cls), ".")
    found = dict.get(read_namespace(found), first)
    for name in others:
        found = read_class_attribute(found, name) if is_one_of(type(found), type) else None  # type: ignore[arg-type]
    return found is cls


def iterate_frames() -> Iterator[tuple[int, FrameType]]:
    """Yield the frames that run now, on any thread, the innermost of a thread first.

    Drop the last one when done: a frame that is kept keeps all that its callers have.
    """
    frame: FrameType | None = None
    tops = list(sys._current_frames().items())  # noqa: SLF001 - the one way to see them
    try:
        while tops:
            ident, frame = tops.pop()
            while frame is not None:
                yield ident, frame
                frame = frame.f_back
    finally:
        del frame, tops


def is_running(frame: FrameType) -> bool:
    """Return whether some thread is in the frame now, so that its variables may change."""
    return any(running is frame for _, running in iterate_frames())


#: The class of the arguments of a dataclass's decorator.
_DATACLASS_PARAMS: Any = type(vars(dataclass(type("_", (), {})))["__dataclass_params__"])


def read_attributes(target: object) -> dict[str, object] | None:
    """Return an instance's own attributes, as stored; ``None`` if it has no dictionary."""
    descriptor = _find_dict_descriptor(type(target))
    if descriptor is None:
        return None
    attributes = descriptor.__get__(target)
    return attributes if is_a(attributes, dict) else None


def read_attribute(target: object, name: str) -> object:
    """Return one of an instance's own attributes as it is stored, or ``None``."""
    attributes = read_attributes(target)
    # The dictionary may be of a class of the user's, which would answer otherwise.
    return None if attributes is None else dict.get(attributes, name)


def is_fixed(target: object) -> bool:
    """Return whether an object can't let go of a part: a tuple, a frozen instance, a partial."""
    cls = type(target)
    if is_one_of(cls, tuple, frozenset, functools.partial):
        return True
    for base in list_bases(cls):
        params: Any = read_class_attribute(base, "__dataclass_params__")
        if params is not None:
            return type(params) is _DATACLASS_PARAMS and params.frozen is True
    return False


def read_locals(frame: FrameType) -> dict[str, object]:
    """Return the variables of a frame that is not running or on another thread.

    Before Python 3.13 the frame keeps the dictionary that it gives, and with it what was a variable
    then: a copy is taken and the frame's is emptied, unless somebody else has it or it is traced.
    """
    if not frame.f_code.co_flags & inspect.CO_OPTIMIZED:
        # The namespace of a module or a class body: it is no copy.
        return {}
    given = frame.f_locals
    variables = dict(given)
    # While a debugger traces the frame its dictionary is written back to the variables. It is also
    # what `locals()` gave to a function that may have kept it.
    # If only the frame has it there are three references: its own, this function's, and the call's.
    is_ours = frame.f_trace is None and sys.getrefcount(given) == 3
    if type(given) is dict and is_ours:
        given.clear()
    return variables


@dataclass(frozen=True, slots=True)
class ClassParts:
    """How to read the objects of a class; with the class, so that its id stays its own."""

    cls: type
    read_dict: Any | None
    slots: tuple[tuple[str, Any], ...]
    #: A named tuple's fields.
    fields: tuple[str, ...]
    #: A generator's or coroutine's frame.
    read_frame: Any | None


def describe_class(cls: type) -> ClassParts:
    """Return how to read the objects of a class."""
    attributes: dict[str, object] = {}
    slots: list[tuple[str, Any]] = []
    for base in list_bases(cls):
        for name, value in read_type_dict(base).items():
            attributes.setdefault(name, value)
            if type(value) is MemberDescriptorType:
                slots.append((name, value))
    found: Any = attributes.get("_fields")
    fields = found if type(found) is tuple and is_one_of(cls, tuple) else ()
    frames = (attributes.get(name) for name in ("gi_frame", "cr_frame", "ag_frame"))
    return ClassParts(
        cls=cls,
        read_dict=_find_dict_descriptor(cls),
        slots=tuple(slots),
        fields=tuple(field if type(field) is str else "…" for field in fields),
        read_frame=next((attribute for attribute in frames if _is_descriptor(attribute)), None),
    )


def _is_descriptor(target: object) -> bool:
    # By identity: a class of the user's may be anything.
    return type(target) is GetSetDescriptorType or type(target) is MemberDescriptorType


def _find_dict_descriptor(cls: type) -> Any | None:
    for base in list_bases(cls):
        found = read_class_attribute(base, "__dict__")
        if type(found) is GetSetDescriptorType:
            return found
    return None


def list_items(target: Mapping[Any, Any]) -> list[tuple[Any, Any]]:
    """Return a dictionary's items, whatever its class would answer, in one undisturbed step."""
    return list(dict.items(target)) if is_a(target, dict) else list(target.items())


def read_cell(cell: CellType) -> object:
    """Return the content of a closure's cell; ``None`` if the variable is not bound."""
    try:
        return cell.cell_contents
    except ValueError:
        # A variable that is not bound yet.
        return None


def list_referents(*targets: object) -> list[object]:
    """Return what the collector knows these objects to refer to; modules are not asked.

    The one place that calls ``gc.get_referents``. A module written in C answers from its own state:
    ``_asyncio`` of Python 3.12.0 to 3.12.5 lists objects that are already freed, which makes the
    next collection loop for ever (https://github.com/python/cpython/issues/122695). What a module
    holds in Python is in its namespace.
    """
    if True in map(issubclass, map(type, targets), itertools.repeat(ModuleType)):
        targets = tuple(target for target in targets if not is_a(target, ModuleType))
    return gc.get_referents(*targets)


def collect_living(
    select: Callable[[list[object]], Iterable[_T]], collect: Callable[[Iterable[_T]], None]
) -> None:
    """Collect what is selected from all objects that the collector tracks, in one call of C.

    While another thread runs, nobody may hold a tuple that it is still filling
    (https://github.com/python/cpython/issues/59313).

    Args:
        select: returns an iterator of C over the list that it is given, which is empty until then.
        collect: exhausts that iterator: the method ``extend`` or ``update`` of a collection.
    """
    living: list[object] = []
    fill = map(living.extend, itertools.starmap(gc.get_objects, [()]))
    empty = itertools.starmap(living.clear, [()])
    any(itertools.chain(fill, map(collect, [select(living)]), empty))


def list_referrers(targets: Sequence[object]) -> list[object]:
    """Return all that the collector knows to refer to any of these, in one pass over the process.

    The caller's own containers of the targets are among them.
    """
    found = gc.get_referrers(*targets)
    # Python 3.13 shows the tuple of the call's own arguments, which only this list holds now.
    counts = list(map(sys.getrefcount, found))
    alone = next(map(sys.getrefcount, [object()]))
    return [
        referrer
        for referrer, count in zip(found, counts, strict=True)
        if count > alone or type(referrer) is not tuple
    ]


@contextmanager
def paused_collector() -> Iterator[None]:
    """Pause the collector, which thousands of new lists would set off again and again."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
