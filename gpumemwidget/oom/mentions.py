"""List the names that a cell's code mentions, and the notebook's functions that the cell calls.

What it does not mention it does not need. This errs on the side of too many: whatever stands in a
string of the cell counts, for that may be another magic's code.
"""

from __future__ import annotations

import ast
import functools
import re
import warnings
from collections.abc import Iterator, Mapping
from types import CodeType, FunctionType, MethodType

from gpumemwidget.ownership.graph.objects import (
    is_a,
    is_one_of,
    list_bases,
    read_cell,
    read_type_dict,
)

_WORD = re.compile(r"\w+")
#: Maximum number of the notebook's objects whose code is read.
_MAX_OBJECTS = 2000
_METHODS = (FunctionType, property, staticmethod, classmethod)


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
    for each in code.co_consts:
        if type(each) is CodeType:
            yield from _list_code_words(each)


def _list_codes(
    value: object, namespace: Mapping[str, object], met: dict[int, object]
) -> Iterator[CodeType]:
    """The code of the notebook's own functions in a value, as far as it is plain to see."""
    pending = [value]
    while pending:
        each = pending.pop()
        if id(each) in met or len(met) >= _MAX_OBJECTS:
            continue
        met[id(each)] = each
        if type(each) is FunctionType:
            pending.extend(map(read_cell, each.__closure__ or ()))
            # A decorated function.
            pending.append(dict.get(each.__dict__, "__wrapped__"))
            if each.__globals__ is namespace:
                yield each.__code__
        elif type(each) is MethodType:
            pending += [each.__func__, each.__self__]
        elif type(each) is functools.partial:
            pending += [each.func, *each.args, *each.keywords.values()]
        elif type(each) is property:
            pending += [each.fget, each.fset]
        elif type(each) is staticmethod or type(each) is classmethod:
            pending.append(each.__func__)
        else:
            cls = each if is_a(each, type) else type(each)
            pending.extend(_list_methods(cls, namespace))


def _list_methods(cls: type, namespace: Mapping[str, object]) -> Iterator[object]:
    """Yield the methods of a class that the notebook defines, and of its bases."""
    own_name = namespace.get("__name__")
    for base in list_bases(cls):
        attributes = read_type_dict(base)
        module = attributes.get("__module__")
        if type(module) is str and module == own_name:
            yield from (each for each in attributes.values() if is_one_of(type(each), *_METHODS))
