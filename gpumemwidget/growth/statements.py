"""Read the statements of a cell: the names that they bind, and those that they may read.

That a statement does not read a name has to be certain: it would fail with a ``NameError`` if the
name were deleted before. So all that the statement can reach is searched for code of the user's
that uses the name, and what can't be followed counts as such code.
"""

from __future__ import annotations

import ast
import builtins
import dis
import re
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import CodeType, FunctionType, ModuleType
from typing import Any

from gpumemwidget.ownership.graph.objects import (
    is_a,
    is_library_class,
    list_referents,
    read_class_attribute,
    read_namespace,
)
from gpumemwidget.tracing.sources import is_library

#: Maximum number of objects to search, which takes up to 0.2 s. A transformer of 12 layers with its
#: optimizer has some 3,000.
_MAX_OBJECTS = 50_000

#: A line that IPython alone understands, after its indentation and the magic's name.
_MAGIC_LINE = re.compile(r"^([ \t]*)(?:%+\w*|!)(.*)", re.MULTILINE)
_WORD = re.compile(r"\b[^\W\d]\w*")

#: Instructions that bind or delete a name in the notebook's namespace, or in a class's.
_BINDING = frozenset({"STORE_NAME", "DELETE_NAME"})
#: Instructions that bind or delete a name of the notebook's from within a function.
_BINDING_GLOBAL = frozenset({"STORE_GLOBAL", "DELETE_GLOBAL"})
#: Instructions that use a name of the notebook's.
_USING = _BINDING_GLOBAL | {"LOAD_NAME", "LOAD_GLOBAL", "LOAD_FROM_DICT_OR_GLOBALS"}

#: Functions that read names that are not written in the code that calls them.
_READERS: tuple[object, ...] = (eval, exec, globals, locals, vars, __import__)
#: Packages that lead to the notebook's namespace from anywhere.
_OPEN_PACKAGES = frozenset({"__main__", "sys", "inspect", "importlib", "IPython"})


@dataclass(frozen=True, slots=True)
class Statement:
    """A statement at the top level of a cell.

    Attributes:
        line: the cell's line where it begins, from 1.
        code: the statement as it is compiled alone.
        assigned: the names that it assigns, if it is an assignment.
        bound: the notebook's names that are assigned or deleted anywhere in it.
    """

    line: int
    code: CodeType
    assigned: frozenset[str]
    bound: frozenset[str]


def parse_statements(source: str) -> list[Statement]:
    """Return the statements at the top level of a cell; ``[]`` if it is no Python.

    A line magic stands for an expression that reads all the names in it.
    """
    try:
        with warnings.catch_warnings():
            # The warnings were shown when the cell was compiled.
            warnings.simplefilter("ignore")
            tree = ast.parse(_MAGIC_LINE.sub(_replace_magic, source))
            return [_describe(statement) for statement in tree.body]
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return []


def find_replacement(
    statements: Sequence[Statement], name: str, namespace: Mapping[str, object]
) -> int | None:
    """Return the number of the statement that replaces the old value of a name.

    Args:
        statements: the cell, which has run.
        name: the name.
        namespace: the notebook's names after the cell.

    Returns:
        ``None`` unless the name is first bound by an assignment at the top level, and it is certain
        that nothing has read the old value in this cell.
    """
    number = next((n for n, each in enumerate(statements) if name in each.bound), None)
    if number is None or name not in statements[number].assigned:
        return None
    search = _ReaderSearch(name, namespace)
    for first, statement in enumerate(statements[: number + 1]):
        rebound = frozenset[str]().union(*(each.bound for each in statements[first:]))
        if search.may_read(statement.code, rebound):
            return None
    return number


def _replace_magic(line: re.Match[str]) -> str:
    return f"{line[1]}({''.join(f'{word}, ' for word in _WORD.findall(line[2]))})"


def _describe(statement: ast.stmt) -> Statement:
    targets: list[ast.expr] = []
    if isinstance(statement, ast.Assign):
        targets = statement.targets
    elif isinstance(statement, ast.AnnAssign) and statement.value is not None:
        targets = [statement.target]
    names = [each for target in targets for each in ast.walk(target) if isinstance(each, ast.Name)]
    code = compile(ast.Module([statement], []), "<cell>", "exec", dont_inherit=True)
    return Statement(
        line=statement.lineno,
        code=code,
        assigned=frozenset(each.id for each in names if isinstance(each.ctx, ast.Store)),
        bound=frozenset(
            name
            for each in _list_codes(code)
            for name in _list_names(each, _BINDING_GLOBAL | (_BINDING if each is code else set()))
        ),
    )


def _list_codes(code: CodeType) -> Iterator[CodeType]:
    """Yield a code object and those of the functions and classes that it defines."""
    yield code
    for constant in code.co_consts:
        if type(constant) is CodeType:
            yield from _list_codes(constant)


def _list_names(code: CodeType, instructions: frozenset[str]) -> set[str]:
    return {each.argval for each in dis.get_instructions(code) if each.opname in instructions}


class _ReaderSearch:
    """Searches all that statements can reach for what may read a name of the notebook's.

    No code of the user's runs.

    Args:
        name: the name.
        namespace: the notebook's names.
    """

    def __init__(self, name: str, namespace: Mapping[str, object]) -> None:
        self._name = name
        self._namespace = namespace
        #: The objects that were searched, by their ids, which no others get while they are here.
        self._met: dict[int, object] = {}

    def may_read(self, code: CodeType, rebound: frozenset[str]) -> bool:
        """Return whether the name may be read while a statement of the notebook runs.

        Args:
            code: the statement.
            rebound: the names whose values may have been others then than they are now.
        """
        pending: list[object] = [code]
        while pending:
            each = pending.pop()
            if id(each) in self._met:
                continue
            self._met[id(each)] = each
            if len(self._met) + len(pending) > _MAX_OBJECTS or self._is_reader(each):
                return True
            if type(each) is CodeType:
                found = self._list_used(each, self._namespace, rebound)
                if found is None:
                    return True
                pending += found
            elif type(each) is FunctionType:
                pending += [each.__closure__, each.__defaults__, each.__kwdefaults__, each.__dict__]
                if not is_library(each.__code__.co_filename):
                    found = self._list_used(each.__code__, each.__globals__, rebound)
                    if found is None:
                        return True
                    pending += found
            elif not (is_a(each, ModuleType) or (is_a(each, type) and _is_of_library(each))):
                pending += [type(each), *list_referents(each)]
        return False

    def _is_reader(self, target: object) -> bool:
        """Return whether an object gives access to any name of the notebook's."""
        if target is self._namespace or any(target is each for each in _READERS):
            return True
        scope: dict[str, Any] = {}
        if type(target) is FunctionType and is_library(target.__code__.co_filename):
            scope = target.__globals__
        elif is_a(target, ModuleType):
            scope = read_namespace(target)
        package = str(scope.get("__name__", "")).partition(".")[0]
        return scope is self._namespace or package in _OPEN_PACKAGES

    def _list_used(
        self, code: CodeType, scope: Mapping[str, object], rebound: frozenset[str]
    ) -> list[object] | None:
        """Return the values that code finds by the names in it, in modules too.

        Returns:
            ``None`` if it names the name itself, or one whose value then is not known.
        """
        codes = list(_list_codes(code))
        names = {name for each in codes for name in each.co_names}
        found: list[object] = [
            sys.modules.get(module)
            for each in codes
            for name in _list_names(each, frozenset({"IMPORT_NAME"}))
            for module in (name, name.partition(".")[0])
        ]
        for each in codes:
            used = _list_names(each, _USING)
            if scope is self._namespace and (self._name in used or used & rebound):
                return None
            known = {**vars(builtins), **scope}
            # A class's body has names of its own.
            missing = used - known.keys() - _list_names(each, _BINDING) - {"__annotations__"}
            if scope is self._namespace and missing:
                return None
            found += [known[name] for name in used if name in known]
        met: set[int] = set()
        for value in found:  # The loop adds to the list.
            if is_a(value, ModuleType) and id(value) not in met:
                met.add(id(value))
                attributes = read_namespace(value)
                found += [attributes[name] for name in names if name in attributes]
        return found


def _is_of_library(cls: type) -> bool:
    """Return whether a class is of Python or of an installed package."""
    module = sys.modules.get(str(read_class_attribute(cls, "__module__")))
    file = read_namespace(module).get("__file__") if is_a(module, ModuleType) else None
    return is_library_class(cls) and (file is None or is_library(str(file)))
