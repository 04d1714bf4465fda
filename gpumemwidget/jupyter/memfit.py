"""Predict a cell: ``%%memfit`` above it."""

from __future__ import annotations

import ast
import linecache
from collections.abc import Callable
from types import CodeType, FunctionType
from typing import Any

from gpumemwidget.errors import BadInputError
from gpumemwidget.session.predictions import CELL_FILENAME

_NAME = "the cell"


def make_step(cell: str, transform: Callable[[str], str], names: dict[str, Any]) -> FunctionType:
    """Return a function that does what a cell would, with the user's names as its globals.

    Its lines have the numbers that the notebook shows, where the magic's line is the first.
    ``transform`` makes Python of IPython's syntax.

    Raises:
        BadInputError: the cell is no Python, or begins what a dry run can't do.
    """
    # IPython drops the blank lines at the beginning.
    n_blank = cell[: len(cell) - len(cell.lstrip())].count("\n")
    source = "\n" * (1 + n_blank) + transform(cell)
    try:
        tree = ast.parse(source)
        code = compile(
            tree, CELL_FILENAME, "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT, dont_inherit=True
        )
    except SyntaxError as exc:
        raise BadInputError(f"line {exc.lineno}: {exc.msg}") from None
    except ValueError as exc:  # a null byte
        raise BadInputError(f"the cell is no Python: {exc}") from None
    _check(tree)
    lines = source.splitlines(keepends=True)
    linecache.cache[CELL_FILENAME] = (len(source), None, lines, CELL_FILENAME)
    return _make_function(code, names)


def _make_function(code: CodeType, names: dict[str, Any]) -> FunctionType:
    function = FunctionType(code, names, _NAME)
    function.__qualname__ = _NAME
    return function


def _check(tree: ast.Module) -> None:
    """Refuse what would be carried out for real, or what no function can do."""
    for node in ast.walk(tree):
        line = getattr(node, "lineno", 0)
        if isinstance(node, ast.Name) and node.id == "get_ipython":
            raise BadInputError(
                f"line {line} is a magic or a command of the shell, which would run for real: "
                "leave it out of the cell to predict it"
            )
    for node in _list_own(tree):
        if isinstance(node, (ast.Await, ast.AsyncFor, ast.AsyncWith)):
            raise BadInputError(
                f"line {node.lineno} waits for something (await): put the rest into a cell of its "
                "own to predict it"
            )


def _list_own(tree: ast.Module) -> list[ast.AST]:
    """Return the nodes of a module's own code, without those of the functions in it."""
    found: list[ast.AST] = []
    waiting: list[ast.AST] = [tree]
    while waiting:
        node = waiting.pop()
        found.append(node)
        if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            waiting.extend(ast.iter_child_nodes(node))
    return found
