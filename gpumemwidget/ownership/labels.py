"""Name the steps of a path such as ``history[17]["logits"]``: what one object calls another.

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
from enum import Enum, auto
from types import BuiltinMethodType, CellType, FrameType, MethodType, TracebackType
from typing import Any, NamedTuple

from gpumemwidget.ownership.graph.kinds import Kind
from gpumemwidget.ownership.graph.objects import (
    ClassParts,
    describe_class,
    is_a,
    is_fixed,
    is_one_of,
    name_class,
    read_attributes,
    read_cell,
    read_locals,
    read_type_dict,
)
from gpumemwidget.ownership.graph.walk import Graph

#: The class of a function that ``functools.lru_cache`` has wrapped.
CACHE_TYPE = type(functools.lru_cache(lambda: None))


class StepKind(Enum):
    """How an object holds the next one on a path."""

    ROOT = auto()  #: where the path begins: ``model``, ``Out[7]``, ``running: train() line 3: x``
    CONTEXT_VARIABLE = auto()  #: where the path begins: a variable of ``contextvars``
    RUBBISH = auto()  #: where the path begins: in a cycle that waits for the collector
    LENDER = auto()  #: where the path begins: at what lent its memory to torch
    PART = auto()  #: an attribute, an element, a variable of a function
    FIXED = auto()  #: a part that its whole can't let go of: of a tuple, a frozen instance
    SAME = auto()  #: no step to a person: a view's base, an instance's dictionary
    UNNAMED = auto()  #: ``[…]``: somewhere within
    CLASS = auto()  #: ``.__class__``
    GRADIENT = auto()  #: ``.grad``
    GRAPH = auto()  #: the autograd graph of a tensor
    WITHIN = auto()  #: into what goes with the whole alone: a closure, an optimizer's tables
    CACHE = auto()  #: the entries of ``functools.lru_cache``
    FRAME = auto()  #: a suspended function: ``: train() line 3``
    TRACEBACK = auto()  #: a function that failed, in an exception's traceback


class PathStep(NamedTuple):
    """One step of a path, as a person would type it after the step before."""

    # A tuple, which is made in half the time of a frozen dataclass.
    kind: StepKind
    text: str
    #: The name of a context variable.
    name: str = ""


def spell_steps(steps: Iterable[PathStep]) -> str:
    """Return a path as one text: ``model.layers[0].weight``."""
    return "".join(step.text for step in steps)


#: A key that is part of a holder's name; every other index differs between its elements.
KEY = re.compile(r'\["[^"\d]*"\]', re.ASCII)
#: An element of a container that can't be named, or any of its elements.
_SOME = "[…]"


def open_index(text: str, *, opens_all: bool = False) -> str:
    """Return ``[…]`` for a step that is an index; a key of words alone is left as it is."""
    return _SOME if text.startswith("[") and (opens_all or not KEY.fullmatch(text)) else text


class Role(NamedTuple):
    """The part that an object on a path plays for the one before it."""

    # A tuple, since names are looked up by it: a dataclass's hash takes ten times as long.
    #: ``""``; ``attributes`` of an instance or class; ``table`` of a module; ``variables`` of a
    #: closure; ``defaults``; ``locals`` of a frame.
    name: str = ""
    #: The names of variables and defaults, by their place.
    names: tuple[str, ...] = ()
    #: Whose it is: ``module``, ``module dict``, ``optimizer``, ``context``, ``fixed``.
    of: str = ""


_PLAIN = Role()

#: The step to each part of an object, by the part's id, with the part's role.
_Names = dict[int, tuple[PathStep, Role]]
_SAME_STEP = PathStep(StepKind.SAME, "")


class Labels:
    """Names the edges of a graph."""

    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        #: Names of tensors that are keys: an optimizer's state stands under the parameters.
        self.key_names: dict[int, str] = {}
        self._known: dict[tuple[int, Role], _Names] = {}
        self._classes: dict[int, ClassParts] = {}

    def name_edge(self, parent: int, role: Role, child: int) -> tuple[PathStep, Role]:
        """Return the step from an object, by its place and role, to a part, and the part's role."""
        graph = self._graph
        if graph.kinds[child] is Kind.STORAGE:
            return _SAME_STEP, _PLAIN
        names = self._known.get((parent, role))
        if names is None:
            names = self._known[parent, role] = self._list_names(parent, role)
        target = graph.objects[child]
        found = names.get(id(target))
        if found is None and is_a(target, CellType):
            # A frame shows the content of a cell, and refers to the cell.
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
            self._name_elements(target, role, names)
            return names
        if kind is Kind.FRAME:
            _add(names, _list_locals("", target))
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
            base = self._graph.hidden.find_base(target)
            for number, part in enumerate(held):
                word = f"[{number}]" if is_array and part is not base else ""
                _add(names, [(word, part)])
        else:
            self._name_plain_parts(target, role, names)
        self._name_attributes(target, role, names)
        if is_fixed(target):
            for key, (step, part_role) in names.items():
                if step.kind is StepKind.PART:
                    names[key] = PathStep(StepKind.FIXED, step.text), part_role
        return names

    def _name_plain_parts(self, target: Any, role: Role, names: _Names) -> None:
        cls = type(target)
        if is_one_of(cls, BaseException):
            _name_exception_parts(target, names)
        elif cls is TracebackType:
            _add(names, [("", target.tb_next)])
            where = _describe_frame(target.tb_frame, target.tb_lineno)
            _add(names, [(where, target.tb_frame)], kind=StepKind.TRACEBACK)
        elif is_one_of(cls, dict):
            self._name_items(target, role, names)
        elif is_one_of(cls, list, tuple, deque):
            self._name_elements(target, role, names)
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

    def _name_unlisted(self, parent: int, child: int) -> tuple[PathStep, Role]:
        kinds = self._graph.kinds
        target: Any = self._graph.objects[child]
        step, role = PathStep(StepKind.UNNAMED, _SOME), _PLAIN
        if kinds[parent] is Kind.NODE:
            node = _name_node(type(self._graph.objects[parent]))
            is_node = kinds[child] is Kind.NODE
            step = _SAME_STEP if is_node else PathStep(StepKind.PART, f": saved by {node}")
        elif kinds[child] is Kind.CLASS:
            step = PathStep(StepKind.CLASS, ".__class__")
        elif kinds[parent] is Kind.CLASS and type(target) is dict:
            # The real one; what could be asked for is a proxy.
            step, role = _SAME_STEP, Role("attributes")
        elif kinds[child] is Kind.FRAME:
            step = PathStep(StepKind.FRAME, _describe_frame(target, target.f_lineno))
        elif kinds[parent] is Kind.FRAME:
            # The variables as somebody has seen them: a debugger, the traceback's formatting.
            step, role = _SAME_STEP, Role("locals")
        elif type(self._graph.objects[parent]) is CACHE_TYPE:
            step = PathStep(StepKind.CACHE, "'s cache")
        return step, role

    def _name_tensor_parts(self, target: Any, names: _Names) -> None:
        with self._graph.reader.quiet():
            parts = self._graph.reader.read_tensor(target)
            node = self._graph.reader.read_grad_fn(target) if parts.is_computed else None
        _add(names, [(".grad", parts.grad)], kind=StepKind.GRADIENT)
        # A view and its base are one to a person.
        _add(names, (("", part) for part in parts.tensors))
        _add(names, [("'s graph", node)], kind=StepKind.GRAPH)

    def _name_node_parts(self, target: Any, names: _Names) -> None:
        with self._graph.reader.quiet():
            parts = self._graph.reader.read_node(target)
        if parts is None:
            return
        following, saved, is_python = parts
        _add(names, (("", node) for node in following))
        word = _name_node(type(target))
        _add(names, ((f": saved by {word}", tensor) for tensor in saved))
        if is_python:
            _add(names, [("", read_attributes(target))], Role("attributes", of="context"))

    def _name_function_parts(self, target: Any, names: _Names) -> None:
        code, defaults = target.__code__, target.__defaults__
        first_default = code.co_argcount - len(defaults or ())
        optional = code.co_varnames[first_default : code.co_argcount]
        for word, part, role in (
            ("'s closure: ", target.__closure__, Role("variables", code.co_freevars)),
            ("'s default: ", defaults, Role("defaults", optional)),
            ("'s default: ", target.__kwdefaults__, Role("defaults")),
        ):
            _add(names, [(word, part)], role, StepKind.WITHIN)

    def _name_items(self, target: Any, role: Role, names: _Names) -> None:
        for key, value in self._graph.list_met_items(target):
            if role.name == "attributes":
                self._name_attribute(key, value, role.of, names)
            elif role.name == "table":
                word = _SOME
                if role.of == "module dict":
                    word = f"[{describe_key(key)}]"
                elif type(key) is str:
                    word = f"[{key}]" if re.fullmatch(r"\d+", key) else f".{key}"
                _add(names, [(word, value)])
            elif role.name in {"locals", "defaults"}:
                prefix = ": " if role.name == "locals" else ""
                _add(names, [(prefix + key if type(key) is str else _SOME, value)])
            else:
                words = self._describe(key)
                _add(names, [(f"[{words}]", value)])
                # A key that holds memory is held by the table too.
                if words == "…":
                    _add(names, [("'s key", key)])

    def _name_elements(self, target: Any, role: Role, names: _Names) -> None:
        fields = self._describe_class(type(target)).fields
        base: Any = next(cls for cls in (tuple, list, deque) if is_one_of(type(target), cls))
        # One step of C each: no other thread changes the container meanwhile.
        elements: list[object] = [*base.__iter__(target)]
        is_named = role.name in {"variables", "defaults"}
        # A million numbers are skipped at the speed of C.
        for number in self._graph.list_met(elements):
            word = f"[{number}]"
            if is_named:
                word = role.names[number] if number < len(role.names) else _SOME
            elif number < len(fields):
                word = f".{fields[number]}"
            _add(names, [(word, elements[number])])

    def _name_attribute(self, key: object, value: object, of: str, names: _Names) -> None:
        if type(key) is not str:
            _add(names, [(_SOME, value)])
        elif of.startswith("module") and key in ("_parameters", "_buffers", "_modules"):
            _add(names, [("", value)], Role("table", of=of))
        elif of == "optimizer" and key in ("param_groups", "state"):
            _add(names, [(f".{key}", value)], kind=StepKind.WITHIN)
        else:
            kind = StepKind.FIXED if of == "fixed" else StepKind.PART
            _add(names, [(f": ctx.{key}" if of == "context" else f".{key}", value)], kind=kind)

    def _name_attributes(self, target: object, role: Role, names: _Names) -> None:
        """Name the values in an instance's dictionary and slots."""
        cls = type(target)
        if role.name == "attributes" and is_one_of(cls, dict):
            return
        attributes: object = None
        parts = self._describe_class(cls)
        if is_one_of(cls, type):
            attributes = read_type_dict(target)  # type: ignore[arg-type]  # a class, by its type
        elif parts.read_dict is not None:
            attributes = parts.read_dict.__get__(target)
        of = self._find_owner_word(cls) or ("fixed" if is_fixed(target) else "")
        if is_a(attributes, dict):
            # An instance refers to its dictionary if it has one of its own; if its
            # values lie in the instance itself (Python 3.11), it refers to these.
            _add(names, [("", attributes)], Role("attributes", of=of))
            for key, value in self._graph.list_met_items(attributes):
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
            _add(names, [(where, frame)], kind=StepKind.FRAME)
            _add(names, _list_locals(where, frame), kind=StepKind.FRAME)

    def _find_owner_word(self, cls: type) -> str:
        reader = self._graph.reader
        if is_one_of(cls, reader.module_type):
            nn = reader.torch.nn
            is_dict = is_one_of(cls, nn.ModuleDict, nn.ParameterDict)
            return "module dict" if is_dict else "module"
        return "optimizer" if is_one_of(cls, reader.optimizer_type) else ""

    # -- keys --------------------------------------------------------------------------------------

    def _describe(self, key: object) -> str:
        place = self._graph.find(key)
        if place is not None and self._graph.kinds[place] is Kind.TENSOR:
            return self.key_names.get(place, "…")
        return describe_key(key)


def _add(
    names: _Names,
    parts: Iterable[tuple[str, object]],
    role: Role = _PLAIN,
    kind: StepKind = StepKind.PART,
) -> None:
    for word, part in parts:
        if part is not None and id(part) not in names:
            own = StepKind.SAME if not word else StepKind.UNNAMED if word == _SOME else kind
            names[id(part)] = PathStep(own, word), role


def _name_exception_parts(target: Any, names: _Names) -> None:
    own: Any = vars(BaseException)
    for part, step in (
        ("__traceback__", ""),
        ("__cause__", " (its cause)"),
        ("__context__", " (its context)"),
        ("args", ".args"),
    ):
        _add(names, [(step, own[part].__get__(target))])


def _name_callable_parts(target: Any, names: _Names) -> None:
    cls = type(target)
    if cls is MethodType:
        _add(names, [(".__self__", target.__self__), ("", target.__func__)])
    elif cls is BuiltinMethodType:
        _add(names, [(".__self__", target.__self__)])
    elif is_one_of(cls, functools.partial):
        own: Any = vars(functools.partial)
        parts = ("func", "args", "keywords")
        _add(names, [(f".{part}", own[part].__get__(target)) for part in parts])


def _list_locals(where: str, frame: Any) -> list[tuple[str, object]]:
    return [(f"{where}: {name}", value) for name, value in read_locals(frame).items()]


def _describe_frame(frame: FrameType, line: int | None) -> str:
    name = frame.f_code.co_name
    function = "top level" if name.startswith("<") else f"{name}()"
    return f": {function}" if line is None else f": {function} line {line}"


def _name_node(cls: type) -> str:
    return name_class(cls).rpartition(".")[2]


def describe_key(key: object, levels: int = 2) -> str:
    """A key as one would type it, where it is of a builtin type that can't answer otherwise.

    Numbers of more than 128 bits, tuples of more than four parts and those within ``levels`` others
    are not written: Python refuses to write out a number of some thousand digits.
    """
    most_length = 40
    # By identity: to look a class up among others asks its metaclass for a hash.
    cls = type(key)
    if cls is str or cls is bytes:
        part: Any = key[:most_length]  # type: ignore[index]  # text, by its class
        text = repr(part)
        if cls is str:
            # With double quotes, as in the README.
            text = '"' + text[1:-1].replace('"', '\\"') + '"'
        is_whole = len(part) == len(key)  # type: ignore[arg-type]
        if is_whole and len(text) <= most_length:
            return text
        return text[: most_length - 1] + "…"
    is_small = cls is int and key.bit_length() <= 128  # type: ignore[attr-defined]
    if is_small or cls is float or cls is bool or key is None:
        return repr(key)
    if cls is tuple and levels and len(key) <= 4:  # type: ignore[arg-type]
        parts = [describe_key(part, levels - 1) for part in key]  # type: ignore[attr-defined]
        return f"({', '.join(parts)}{',' * (len(parts) == 1)})"
    return "…"


#: The holder of borrowed memory.
LENDER = "whatever lent it to torch (NumPy, CuPy, JAX, a file)"
#: The holder of what libraries or running functions hold.
UNNAMED = "something that no variable names"
#: The holder of what C++ holds.
UNSEEN = "something that Python can't see"


def find_kind_name(graph: Graph, place: int) -> str:
    """Return what a person would call an object: ``tensor``, ``view``, ``module``."""
    target, reader = graph.objects[place], graph.reader
    cls = type(target)
    if graph.kinds[place] is Kind.TENSOR:
        if is_one_of(cls, reader.parameter_type):
            return "parameter"
        with reader.quiet():
            return "view" if reader.is_view(target) else "tensor"
    for kind, classes in (
        ("module", (reader.module_type,)),
        ("optimizer", (reader.optimizer_type,)),
        ("exception", (BaseException,)),
        ("container", (dict, list, tuple, set, frozenset, deque)),
    ):
        if is_one_of(cls, *classes):
            return kind
    return "object"
