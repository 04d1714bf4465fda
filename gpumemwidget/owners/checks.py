"""Refuses names that a release can't be about, in one line and before anything is looked at."""

from __future__ import annotations

import builtins
import difflib
from collections.abc import Mapping, Sequence
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType

from gpumemwidget.errors import BadInputError, UnknownNameError
from gpumemwidget.owners.account import Account
from gpumemwidget.owners.base import Shell
from gpumemwidget.owners.kinds import is_one_of, name_class

__all__ = ["check_functions", "check_names", "check_types"]

_CODE_TYPES = (FunctionType, BuiltinFunctionType, MethodType, type)


def check_types(names: Sequence[object]) -> None:
    """Refuse the objects themselves, without asking them anything.

    Raises:
        BadInputError: a name is not text.
    """
    for name in names:
        if not is_one_of(type(name), str):
            raise BadInputError(
                f"a {name_class(type(name))} is no name: give the variable's name as text, "
                "release('model') and not release(model); nothing was changed"
            )


def check_names(shell: Shell, names: Sequence[str], *, rows: Mapping[str, str]) -> None:
    """Refuse what is no variable of the user's.

    Raises:
        UnknownNameError: there is no such name; close ones are told.
        BadInputError: it is IPython's, Python's or a module.
    """
    known = shell.list_user_names()
    for name in names:
        if name in known:
            continue
        if name not in shell.user_ns:
            if hasattr(builtins, name):
                raise BadInputError(f"{name!r} is a builtin: name variables; nothing was changed")
            close = difflib.get_close_matches(name, [*known, *rows], n=3)
            hint = f"did you mean {' or '.join(close)}?" if close else "%who lists what there is"
            raise UnknownNameError(f"{name!r} is no variable: {hint}; nothing was changed")
        if is_one_of(type(shell.user_ns[name]), ModuleType):
            raise BadInputError(
                f"{name!r} is a module and stays imported: name variables; nothing was changed"
            )
        raise BadInputError(
            f"{name!r} is IPython's own: name a variable, a row such as Out[3], or give --out; "
            "nothing was changed"
        )


def check_functions(shell: Shell, names: Sequence[str], account: Account | None) -> None:
    """Refuse functions and classes, unless they hold memory (in a closure, a cache).

    Raises:
        BadInputError: it is a function or class that holds none.
    """
    for name in names:
        cls = type(shell.user_ns[name])
        row = None if account is None else account.rows.get(name)
        holds = account is not None and row is not None and account.list_storages(row.mark)
        if not holds and is_one_of(cls, *_CODE_TYPES):
            raise BadInputError(
                f"{name!r} is a function or a class and holds no tensor memory: name variables; "
                "nothing was changed"
            )
