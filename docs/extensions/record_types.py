"""Writes the reference of classes into a page, found by their names and not by their modules.

- ``<!-- records: ONE, TWO -->`` is replaced by the documentation of every record that the public
  functions return, of those that are named, and of those that these have as fields, in turn. So a
  new field or a new record is documented without a list to maintain.
- ``<!-- class NAME -->`` and ``<!-- class NAME: one, two -->`` are replaced by that class, with all
  of its public members or with those that are named.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import inspect
import pkgutil
import re
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from sphinx.application import Sphinx

import gpumemwidget

_RECORDS = re.compile(r"<!-- records: (?P<also>[\w, ]+) -->\n")
_CLASS = re.compile(r"<!-- class (?P<name>\w+)(?:: (?P<members>[\w, ]+))? -->\n")
_WORD = re.compile(r"[A-Za-z_]\w*")


def setup(app: Sphinx) -> dict[str, Any]:
    """Hook into Sphinx, where it reads a page's source."""
    app.connect("source-read", _insert_classes)
    # Before napoleon, which has the default priority of 500.
    app.connect("autodoc-process-docstring", _keep_colons, priority=400)
    app.connect("autodoc-process-docstring", _leave_out_parameters, priority=600)
    return {"parallel_read_safe": True}


def _insert_classes(_app: Sphinx, _page: str, source: list[str]) -> None:
    source[0] = _RECORDS.sub(
        lambda match: "\n".join(_document(cls) for cls in find_records(match["also"].split(", "))),
        source[0],
    )
    source[0] = _CLASS.sub(
        lambda match: _document(_index_classes()[match["name"]], match["members"]), source[0]
    )


def _keep_colons(
    _app: Sphinx, what: str, _name: str, _object: object, _options: object, lines: list[str]
) -> None:
    """Keep napoleon from reading "What it is: more of it" as a type and a description."""
    if what == "attribute":
        # It looks at the first line alone, which is now an empty comment.
        lines[:0] = ["..", ""]


def _leave_out_parameters(
    _app: Sphinx, what: str, _name: str, _object: object, _options: object, lines: list[str]
) -> None:
    """Leave out what a class is made of: the functions of the API make them."""
    if what == "class":
        start = next((n for n, line in enumerate(lines) if line.startswith(":param ")), None)
        if start is not None:
            del lines[start:]


def find_records(also: Sequence[str]) -> list[type]:
    """Return the records that the public functions lead to, sorted by their names.

    Args:
        also: names of further records to begin with.
    """
    found: set[type] = set()
    waiting = [_index_classes()[name] for name in also]
    for name in gpumemwidget.__all__:
        function = getattr(gpumemwidget, name)
        returned = inspect.signature(function).return_annotation
        waiting += _find_classes(str(returned), sys.modules[function.__module__])
    while waiting:
        cls = waiting.pop()
        if cls in found or not dataclasses.is_dataclass(cls):
            continue
        found.add(cls)
        module = sys.modules[cls.__module__]
        for field in dataclasses.fields(cls):
            waiting += _find_classes(str(field.type), module)
    return sorted(found, key=lambda cls: cls.__name__)


def _find_classes(annotation: str, module: Any) -> Iterator[type]:
    """The classes of ours that an annotation names."""
    for word in _WORD.findall(annotation):
        value = vars(module).get(word, _index_classes().get(word))
        if inspect.isclass(value) and value.__module__.startswith("gpumemwidget."):
            yield value


@functools.cache
def _index_classes() -> dict[str, type]:
    """Every class of the package by its name, for what a module imports for type checkers alone."""
    classes = {}
    for module_info in pkgutil.walk_packages(gpumemwidget.__path__, "gpumemwidget."):
        # The callbacks of trainers need libraries that are not ours.
        if module_info.name.endswith("__main__") or ".integrations." in module_info.name:
            continue
        module = importlib.import_module(module_info.name)
        for name, value in vars(module).items():
            if inspect.isclass(value) and value.__module__ == module.__name__:
                classes[name] = value
    return classes


def _document(cls: type, members: str | None = None) -> str:
    options = [f":members: {members}" if members else ":members:"]
    if dataclasses.is_dataclass(cls):
        options += [":undoc-members:", ":class-doc-from: class"]
    # Nobody makes one by hand, so it has no signature here.
    directive = f".. autoclass:: {cls.__module__}.{cls.__name__}()"
    lines = [directive, *(f"   {each}" for each in options)]
    return "\n".join(["```{eval-rst}", *lines, "```", ""])
