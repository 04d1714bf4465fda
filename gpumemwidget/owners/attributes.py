"""What objects store, read without asking them: attributes, slots, variables, cells.

Whatever a class of the user's would answer, its objects lie in the interpreter's own structures,
and these have descriptors of their own. Nothing here looks up an attribute of an object.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from types import CellType, FrameType, GetSetDescriptorType, MemberDescriptorType
from typing import Any

from gpumemwidget.owners.kinds import is_a, is_one_of, list_bases, read_type_dict

__all__ = [
    "ClassParts",
    "describe_class",
    "is_fixed",
    "list_items",
    "read_attribute",
    "read_attributes",
    "read_cell",
    "read_locals",
]

#: References to the dictionary of a frame's variables that only the frame has: its own, that of the
#: function that looks, and that of the call that counts.
_FRAMES_OWN_REFS = 3
#: What a dataclass's decorator was told.
_DATACLASS_PARAMS: Any = type(vars(dataclass(type("_", (), {})))["__dataclass_params__"])
#: By identity: a class of the user's may be anything.
_DESCRIPTORS = (GetSetDescriptorType, MemberDescriptorType)
_GENERATOR_FRAMES = ("gi_frame", "cr_frame", "ag_frame")


def read_attributes(target: object) -> dict[str, object] | None:
    """An instance's own attributes, as they are stored; ``None`` where it has no dictionary."""
    descriptor = _find_dict_descriptor(type(target))
    if descriptor is None:
        return None
    attributes = descriptor.__get__(target)
    return attributes if is_a(attributes, dict) else None


def read_attribute(target: object, name: str) -> object:
    """One of an instance's own attributes as it is stored, or ``None``."""
    attributes = read_attributes(target)
    # Its dictionary may be of a class of the user's, which would answer otherwise.
    return None if attributes is None else dict.get(attributes, name)


def is_fixed(target: object) -> bool:
    """Whether nothing can be taken out of an object: a tuple, a frozen instance, a partial."""
    cls = type(target)
    if is_one_of(cls, tuple, frozenset, functools.partial):
        return True
    for base in list_bases(cls):
        params: Any = read_type_dict(base).get("__dataclass_params__")
        if params is not None:
            return type(params) is _DATACLASS_PARAMS and params.frozen is True
    return False


def read_locals(frame: FrameType) -> dict[str, object]:
    """A function's variables, of a frame that is not running or on another thread.

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
    is_ours = frame.f_trace is None and sys.getrefcount(given) == _FRAMES_OWN_REFS
    if type(given) is dict and is_ours:
        given.clear()
    return variables


@dataclass(frozen=True, slots=True)
class ClassParts:
    """What is known of a class; with the class, so that its id stays its own."""

    cls: type
    read_dict: Any | None
    slots: tuple[tuple[str, Any], ...]
    #: A named tuple's fields.
    fields: tuple[str, ...]
    #: A generator's or coroutine's frame.
    read_frame: Any | None


def describe_class(cls: type) -> ClassParts:
    """How to read the objects of a class."""
    attributes: dict[str, object] = {}
    slots: list[tuple[str, Any]] = []
    for base in list_bases(cls):
        for name, value in read_type_dict(base).items():
            attributes.setdefault(name, value)
            if type(value) is MemberDescriptorType:
                slots.append((name, value))
    fields: Any = attributes.get("_fields")
    is_named = type(fields) is tuple and is_one_of(cls, tuple)
    frames = (attributes.get(name) for name in _GENERATOR_FRAMES)
    return ClassParts(
        cls=cls,
        read_dict=_find_dict_descriptor(cls),
        slots=tuple(slots),
        fields=tuple(each if type(each) is str else "…" for each in fields) if is_named else (),
        read_frame=next(
            (each for each in frames if any(type(each) is one for one in _DESCRIPTORS)), None
        ),
    )


def _find_dict_descriptor(cls: type) -> Any | None:
    for base in list_bases(cls):
        found = read_type_dict(base).get("__dict__")
        if type(found) is GetSetDescriptorType:
            return found
    return None


def list_items(target: Mapping[Any, Any]) -> list[tuple[Any, Any]]:
    """A dictionary's items, whatever its class would answer, in one step that nothing disturbs."""
    return list(dict.items(target)) if is_a(target, dict) else list(target.items())


def read_cell(cell: CellType) -> object:
    """What a closure's cell holds; ``None`` where it is not bound."""
    try:
        return cell.cell_contents
    except ValueError:
        # A variable that is not bound yet.
        return None
