"""What one object calls another: the pieces of which a path such as ``history[17]["logits"]`` is.

The collector says that an object refers to another, and not by what name. That is looked up here,
only for the objects along a path, in the slots of the interpreter's own types: an instance's
dictionary and slots, a container's places, a closure's variables, a frame's locals. No attribute is
asked for in a way that could run code of the user's.

What an object's dictionary means depends on whose it is, so a path is read from its root on, and
each object on it gets a part to play, its ``Role``.
"""

from __future__ import annotations

import functools
import re
from collections import deque
from collections.abc import Iterable
from types import (
    BuiltinMethodType,
    CellType,
    FrameType,
    MethodType,
    TracebackType,
)
from typing import Any, NamedTuple

from gpumemwidget.owners.attributes import (
    ClassParts,
    describe_class,
    list_items,
    read_attributes,
    read_cell,
    read_locals,
)
from gpumemwidget.owners.kinds import Kind, is_a, is_one_of, name_class, read_type_dict
from gpumemwidget.owners.walk import Graph

__all__ = ["Labels", "Role"]

_MOST_KEY_LENGTH = 40
#: Keys that are numbers of more bits, and tuples of more parts or within so many others, are not
#: told: Python refuses to write out a number of some thousand digits.
_MOST_KEY_BITS, _MOST_KEY_PARTS, _MOST_KEY_LEVELS = 128, 4, 2
_CACHE_TYPE = type(functools.lru_cache(lambda: None))
#: Where a place in a container can't be named.
_SOME = "[…]"
_MODULE_TABLES = ("_parameters", "_buffers", "_modules")
_EXCEPTION_PARTS = ("__traceback__", "__cause__", "__context__", "args")


class Role(NamedTuple):
    """What an object on a path is to the one before it."""

    # A tuple, since names are looked up by it: a dataclass's hash takes ten times as long.
    #: ``""``; ``attributes`` of an instance or class; ``table`` of a module; ``state`` of an
    #: optimizer; ``variables`` of a closure, ``defaults``; ``transparent``: its parts are named as
    #: if they were its owner's.
    name: str = ""
    #: Of variables and defaults, by their place.
    names: tuple[str, ...] = ()
    #: Whose attributes they are: ``module`` (``module list``, ``module dict``), ``context``.
    of: str = ""


_PLAIN = Role()
#: What an object calls its parts, by their id: the piece of path, and the part's role.
_Names = dict[int, tuple[str, Role]]


class Labels:
    """Names the edges of a graph.

    Args:
        graph: what was walked.
    """

    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        #: What to call tensors that are keys: an optimizer's state stands under the parameters.
        self.key_names: dict[int, str] = {}
        self._known: dict[tuple[int, Role], _Names] = {}
        #: Steps to what stands under a text: a record's keys are those of a thousand others.
        self._key_steps: dict[str, tuple[str, Role]] = {}
        self._classes: dict[int, ClassParts] = {}

    def name_edge(self, parent: int, role: Role, child: int) -> tuple[str, Role]:
        """What an object calls a part of it, and the part's role.

        Args:
            parent: the object's place in the graph.
            role: its own role.
            child: the part's place.
        """
        graph = self._graph
        if graph.kinds[child] is Kind.STORAGE:
            return "", _PLAIN
        names = self._known.get((parent, role))
        if names is None:
            names = self._known[parent, role] = self._list_names(parent, role)
        target = graph.objects[child]
        found = names.get(id(target))
        if found is None and is_a(target, CellType):
            # A frame tells the content of a cell, and refers to the cell.
            found = names.get(id(read_cell(target)))
        return self._name_unlisted(parent, child) if found is None else found

    # -- by the kind of object ---------------------------------------------------------------------

    def _list_names(self, place: int, role: Role) -> _Names:
        target, kind = self._graph.objects[place], self._graph.kinds[place]
        cls = type(target)
        names: _Names = {}
        # Most are one of these two, and have nothing else.
        if cls is dict:
            self._name_items(target, role, names)
            return names
        if cls is list:
            self._name_elements(target, role, names, ())
            return names
        if kind is Kind.FRAME:
            own = read_locals(target).items()  # type: ignore[arg-type]  # by its kind
            _add(names, ((f": {name}", each) for name, each in own))
            return names
        if kind is Kind.TENSOR:
            self._name_tensor_parts(target, names)
        elif kind is Kind.NODE:
            self._name_node_parts(target, names)
        elif kind is Kind.FUNCTION:
            self._name_function_parts(target, names)
        elif kind is Kind.HIDDEN:
            held = self._graph.hidden.list_held(target)
            is_array = self._graph.hidden.is_array(cls)
            _add(names, ((f"[{n}]" if is_array else "", each) for n, each in enumerate(held)))
        else:
            self._name_plain_parts(target, role, names)
        self._name_attributes(target, role, names)
        return names

    def _name_plain_parts(self, target: Any, role: Role, names: _Names) -> None:
        cls = type(target)
        if is_one_of(cls, BaseException):
            _name_exception_parts(target, names)
        elif cls is TracebackType:
            _add(names, [("", target.tb_next)])
            _add(names, [(_describe_frame(target.tb_frame, target.tb_lineno), target.tb_frame)])
        elif is_one_of(cls, dict):
            self._name_items(target, role, names)
        elif is_one_of(cls, list, tuple, deque):
            self._name_elements(target, role, names, self._describe_class(cls).fields)
        elif cls is CellType:
            _add(names, [("", read_cell(target))])
        else:
            _name_callable_parts(target, names)
            self._name_generator_parts(target, names)

    def _describe_class(self, cls: type) -> ClassParts:
        known = self._classes.get(id(cls))
        if known is None:
            known = self._classes[id(cls)] = describe_class(cls)
        return known

    def _name_unlisted(self, parent: int, child: int) -> tuple[str, Role]:
        kinds = self._graph.kinds
        target: Any = self._graph.objects[child]
        word, role = _SOME, _PLAIN
        if kinds[parent] is Kind.NODE:
            node = _name_node(type(self._graph.objects[parent]))
            word = "" if kinds[child] is Kind.NODE else f": saved by {node}"
        elif kinds[child] is Kind.CLASS:
            word = ".__class__"
        elif kinds[parent] is Kind.CLASS and type(target) is dict:
            # The real one; what could be asked for is a proxy.
            word, role = "", Role("attributes")
        elif kinds[child] is Kind.FRAME:
            word = _describe_frame(target, target.f_lineno)
        elif kinds[parent] is Kind.FRAME:
            # The variables as somebody has seen them: a debugger, the traceback's formatting.
            word, role = "", Role("locals")
        elif type(self._graph.objects[parent]) is _CACHE_TYPE:
            word = "'s cache"
        return word, role

    def _name_tensor_parts(self, target: Any, names: _Names) -> None:
        with self._graph.reader.quiet():
            parts = self._graph.reader.read_tensor(target)
        _add(names, [(".grad", parts.grad)])
        _add(names, (("._base", each) for each in parts.tensors))
        if parts.grad_fn is not None:
            _add(names, [("'s graph", parts.grad_fn)])

    def _name_node_parts(self, target: Any, names: _Names) -> None:
        if not self._graph.allowance.may_read(target):
            return
        with self._graph.reader.quiet():
            following, saved, is_python = self._graph.reader.read_node(target)
        _add(names, (("", each) for each in following))
        word = _name_node(type(target))
        _add(names, ((f": saved by {word}", each) for each in saved))
        if is_python:
            _add(names, [("", read_attributes(target))], Role("attributes", of="context"))

    def _name_function_parts(self, target: Any, names: _Names) -> None:
        code = target.__code__
        closure = target.__closure__
        if closure is not None:
            role = Role("variables", code.co_freevars)
            _add(names, [("'s closure: ", closure)], role)
        arguments = code.co_varnames[: code.co_argcount]
        defaults = target.__defaults__
        if defaults is not None:
            role = Role("defaults", arguments[len(arguments) - len(defaults) :])
            _add(names, [("'s default: ", defaults)], role)
        _add(names, [("'s default: ", target.__kwdefaults__)], Role("defaults"))

    def _name_items(self, target: Any, role: Role, names: _Names) -> None:
        for key, value in list_items(target):
            if role.name == "attributes":
                self._name_attribute(key, value, role.of, names)
            elif role.name == "table":
                step = _SOME
                if role.of == "dict":
                    step = f"[{_describe_plain(key)}]"
                elif type(key) is str:
                    step = f"[{key}]" if _is_number(key) else f".{key}"
                _add(names, [(step, value)])
            elif role.name == "locals":
                _add(names, [(f": {key}" if type(key) is str else _SOME, value)])
            elif role.name == "defaults":
                _add(names, [(str(key) if type(key) is str else _SOME, value)])
            elif type(key) is str:
                known = self._key_steps.get(key)
                if known is None:
                    known = self._key_steps[key] = (f"[{_describe_plain(key)}]", _PLAIN)
                if value is not None:
                    names.setdefault(id(value), known)
            else:
                words = self._describe(key)
                _add(names, [(f"[{words}]", value)])
                # A key that holds memory is held by the table too.
                if words == "…":
                    _add(names, [("'s key", key)])

    def _name_elements(
        self, target: Any, role: Role, names: _Names, fields: tuple[str, ...]
    ) -> None:
        base: Any = next(each for each in (tuple, list, deque) if is_one_of(type(target), each))
        # One step of C each: no other thread changes the container meanwhile.
        elements: list[object] = [*base.__iter__(target)]
        is_named = role.name in {"variables", "defaults"}
        # Of a million numbers none is asked for.
        for number in self._graph.list_met(elements):
            word = f"[{number}]"
            if is_named:
                word = role.names[number] if number < len(role.names) else _SOME
            elif number < len(fields):
                word = f".{fields[number]}"
            names.setdefault(id(elements[number]), (word, _PLAIN))

    def _name_attribute(self, key: object, value: object, of: str, names: _Names) -> None:
        if of.startswith("module") and type(key) is str and key in _MODULE_TABLES:
            _add(names, [("", value)], Role("table", of=of.removeprefix("module").strip()))
        else:
            word = f".{key}" if type(key) is str else _SOME
            _add(names, [(f": ctx{word}" if of == "context" else word, value)])

    def _name_attributes(self, target: object, role: Role, names: _Names) -> None:
        """What stands in an instance's dictionary and slots."""
        cls = type(target)
        if role.name == "attributes" and is_one_of(cls, dict):
            return
        attributes: object = None
        parts = self._describe_class(cls)
        if is_one_of(cls, type):
            attributes = read_type_dict(target)  # type: ignore[arg-type]  # a class, by its type
        elif parts.read_dict is not None:
            attributes = parts.read_dict.__get__(target)
        of = self._find_owner_word(cls)
        if is_a(attributes, dict):
            # Where the instance has a dictionary of its own, that is what it refers to; where its
            # values lie in the instance itself (Python 3.11), it refers to these.
            _add(names, [("", attributes)], Role("attributes", of=of))
            for key, value in list_items(attributes):
                self._name_attribute(key, value, of, names)
        for name, slot in parts.slots:
            try:
                _add(names, [(f".{name}", slot.__get__(target))])
            except AttributeError:
                # A slot that was not assigned.
                continue

    def _name_generator_parts(self, target: object, names: _Names) -> None:
        read_frame = self._describe_class(type(target)).read_frame
        frame = None if read_frame is None else read_frame.__get__(target)
        if is_a(frame, FrameType):
            where = _describe_frame(frame, frame.f_lineno)
            _add(names, [(where, frame)])
            own = read_locals(frame).items()
            _add(names, ((f"{where}: {name}", each) for name, each in own))

    def _find_owner_word(self, cls: type) -> str:
        reader = self._graph.reader
        if is_one_of(cls, reader.module_type):
            nn = reader.torch.nn
            if is_one_of(cls, nn.ModuleList, nn.Sequential, nn.ParameterList):
                return "module list"
            if is_one_of(cls, nn.ModuleDict, nn.ParameterDict):
                return "module dict"
            return "module"
        return ""

    # -- keys --------------------------------------------------------------------------------------

    def _describe(self, key: object) -> str:
        place = self._graph.find(key)
        if place is not None and self._graph.kinds[place] is Kind.TENSOR:
            return self.key_names.get(place, "…")
        return _describe_plain(key)


def _add(names: _Names, parts: Iterable[tuple[str, object]], role: Role = _PLAIN) -> None:
    for step, part in parts:
        if part is not None:
            names.setdefault(id(part), (step, role))


def _name_exception_parts(target: Any, names: _Names) -> None:
    own: Any = vars(BaseException)
    steps = {"__context__": " (its context)", "__cause__": " (its cause)", "args": ".args"}
    for part in _EXCEPTION_PARTS:
        _add(names, [(steps.get(part, ""), own[part].__get__(target))])


def _name_callable_parts(target: Any, names: _Names) -> None:
    cls = type(target)
    if cls is MethodType:
        _add(names, [(".__self__", target.__self__), ("", target.__func__)])
    elif cls is BuiltinMethodType:
        _add(names, [(".__self__", target.__self__)])
    elif is_one_of(cls, functools.partial):
        own: Any = vars(functools.partial)
        _add(names, [(f".{part}", own[part].__get__(target)) for part in ("func", "args")])
        _add(names, [(".keywords", own["keywords"].__get__(target))])


def _describe_frame(frame: FrameType, line: int | None) -> str:
    name = frame.f_code.co_name
    function = "top level" if name.startswith("<") else f"{name}()"
    return f": {function}" if line is None else f": {function} line {line}"


def _name_node(cls: type) -> str:
    return name_class(cls).rpartition(".")[2]


def _is_number(key: object) -> bool:
    return type(key) is str and re.fullmatch(r"\d+", key) is not None


def _describe_plain(key: object, levels: int = _MOST_KEY_LEVELS) -> str:
    """A key as one would type it, where it is of a builtin type that can't answer otherwise."""
    # By identity: to look a class up among others asks its metaclass for a hash.
    cls = type(key)
    if cls is str or cls is bytes:
        part: Any = key[:_MOST_KEY_LENGTH]  # type: ignore[index]  # text, by its class
        text = repr(part)
        if cls is str:
            # As in the README: double quotes.
            text = '"' + text[1:-1].replace('"', '\\"') + '"'
        is_whole = len(part) == len(key)  # type: ignore[arg-type]
        if is_whole and len(text) <= _MOST_KEY_LENGTH:
            return text
        return text[: _MOST_KEY_LENGTH - 1] + "…"
    is_small = cls is int and key.bit_length() <= _MOST_KEY_BITS  # type: ignore[attr-defined]
    if is_small or cls is float or cls is bool or key is None:
        return repr(key)
    if cls is tuple and levels and len(key) <= _MOST_KEY_PARTS:  # type: ignore[arg-type]
        parts = [_describe_plain(part, levels - 1) for part in key]  # type: ignore[attr-defined]
        return f"({', '.join(parts)}{',' * (len(parts) == 1)})"
    return "…"
