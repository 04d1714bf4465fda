"""Read the code of a cell that failed: the line that asked for memory, and the names it mentions.

A recorded stack begins in PyTorch and ends in IPython; in between are the user's own lines. A name
that the cell does not mention it does not need: this errs on the side of too many names, so
whatever stands in a string of the cell counts, for that may be another magic's code.
"""

from __future__ import annotations

import ast
import functools
import re
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import PurePath
from types import CodeType, FunctionType, MethodType
from typing import Any

from gpumemwidget.model.devices import Frame
from gpumemwidget.ownership.graph.objects import (
    is_a,
    is_one_of,
    list_bases,
    list_referents,
    read_cell,
    read_type_dict,
)
from gpumemwidget.tracing.sources import Sources, is_library, name_module

_WORD = re.compile(r"\w+")
#: Classes of objects that refer to functions and, but for a method's own object, to little else.
_WRAPPERS = (MethodType, property, staticmethod, classmethod)
#: Maximum number of the notebook's objects whose code is read.
_MAX_OBJECTS = 2000


@dataclass(frozen=True, slots=True)
class FailingLine:
    """A line of the user's, and what it called."""

    #: ``In [7], line 3``; ``None`` where no line of the user's is in the stack.
    place: str | None
    text: str
    #: ``torch.nn.modules.linear.Linear.forward``; ``None`` where the line calls C at once.
    function: str | None


def find_failing_line(frames: Sequence[Frame], sources: Sources) -> FailingLine:
    """Return the user's innermost line in a stack, and the public function that it called."""
    called = takewhile(lambda frame: is_library(frame.filename), frames)
    function = _find_function(called)
    for frame in frames:
        source = sources.find(frame.filename)
        if source is None:
            continue
        number = sources.find_line(frame) or frame.line
        text = source.lines[number - 1].strip() if 0 < number <= len(source.lines) else ""
        return FailingLine(f"{source.name}, line {number}", text, function)
    return FailingLine(None, "", function)


def _find_function(frames: Iterable[Frame]) -> str | None:
    """Return the innermost function that has a public name."""
    for frame in frames:
        if all(_is_public(part) for part in frame.function.split(".")):
            module = name_module(frame.filename) or PurePath(frame.filename).stem
            return f"{module}.{frame.function}"
    return None


def _is_public(name: str) -> bool:
    # ``wrapper.<locals>.inner`` is a decorator's, and says nothing of what was called.
    return not name.startswith(("_", "<")) or (name.startswith("__") and name.endswith("__"))


def list_mentions(source: str, namespace: Mapping[str, object]) -> frozenset[str]:
    """Return all words of a cell's code: names, attributes, and those in its strings.

    Args:
        source: the cell, with its magics as typed or as IPython makes calls of them.
        namespace: the notebook's; functions and classes of its own are looked into.
    """
    words = set(_list_source_words(source))
    pending = list(words)
    met: dict[int, object] = {}
    while pending:
        value = namespace.get(pending.pop())
        new = set().union(*map(_list_code_words, _list_codes(value, namespace, met))) - words
        words |= new
        pending.extend(new)
    return frozenset(words)


def _list_source_words(source: str) -> Iterator[str]:
    try:
        with warnings.catch_warnings():
            # The warnings were shown when the cell was compiled.
            warnings.simplefilter("ignore")
            tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError):
        yield from _WORD.findall(source)
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            yield node.id
        elif isinstance(node, ast.Attribute):
            yield node.attr
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield from _WORD.findall(node.value)


def _list_code_words(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if type(constant) is CodeType:
            yield from _list_code_words(constant)


def _list_codes(
    value: object, namespace: Mapping[str, object], met: dict[int, object]
) -> Iterator[CodeType]:
    """Yield the code of the notebook's own functions in a value, as far as it is plain to see."""
    own_name = namespace.get("__name__")
    pending: list[Any] = [value]
    while pending:
        found = pending.pop()
        cls = type(found)
        if id(found) in met or len(met) >= _MAX_OBJECTS:
            continue
        met[id(found)] = found
        if cls is FunctionType:
            # That of a decorator has the function that it wraps in its closure.
            pending.extend(map(read_cell, found.__closure__ or ()))
            if found.__globals__ is namespace:
                yield found.__code__
        elif cls is functools.partial:
            pending += [found.func, *found.args, *found.keywords.values()]
        elif any(cls is wrapper for wrapper in _WRAPPERS):
            pending += list_referents(found)
        else:
            for base in list_bases(found if is_a(found, type) else cls):
                attributes = read_type_dict(base)
                module = attributes.get("__module__")
                if type(module) is str and module == own_name:
                    kinds = (FunctionType, *_WRAPPERS)
                    methods = attributes.values()
                    pending += [method for method in methods if is_one_of(type(method), *kinds)]
