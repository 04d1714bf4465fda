"""The names of a program that is no notebook, for the account of its memory at an OOM."""

from __future__ import annotations

import sys
from collections.abc import MutableMapping
from pathlib import Path
from types import ModuleType

from gpumemwidget.ownership.shell import ShellReference
from gpumemwidget.session.oom_watch import EndedRun
from gpumemwidget.tracing.sources import find_block_sources


class ProgramShell:
    """A program as a ``Shell``: its names are the globals of ``__main__``.

    Args:
        owner: an object whose attributes are the names instead, such as an actor.
    """

    def __init__(self, owner: object = None) -> None:
        self._owner = owner

    @property
    def user_ns(self) -> MutableMapping[str, object]:
        """The globals of the program, or the attributes of the owner."""
        return vars(sys.modules["__main__"] if self._owner is None else self._owner)

    @user_ns.setter
    def user_ns(self, _namespace: MutableMapping[str, object]) -> None:
        raise AttributeError("a program's globals stay")

    @property
    def names_hint(self) -> str:
        """The place of the names, for an error."""
        return (
            "a variable is a global of the program's main module"
            if self._owner is None
            else "a variable is an attribute of the actor, as model is of self.model"
        )

    def list_user_names(self) -> list[str]:
        """Return the program's own names, but for modules and those with underscores around."""
        return [
            name
            for name, value in dict(self.user_ns).items()
            if type(name) is str
            and not (name.startswith("__") and name.endswith("__"))
            and not issubclass(type(value), ModuleType)
        ]

    def list_references(self) -> list[ShellReference]:
        """Return nothing: Python keeps no displayed value and no exception of a program."""
        return []

    def list_own_objects(self) -> list[object]:
        """Return where a walk through the program's objects has to stop."""
        return [self]

    def read_cell_numbers(self) -> dict[str, int]:
        """Return nothing: a program has no cells."""
        return {}


def describe_program() -> EndedRun:
    """Return the code of the running program."""
    path = getattr(sys.modules["__main__"], "__file__", None) or ""
    try:
        source = Path(path).read_text(encoding="utf-8", errors="replace") if path else ""
    except OSError:
        source = ""
    return EndedRun(source, "", find_block_sources(path, {}))
