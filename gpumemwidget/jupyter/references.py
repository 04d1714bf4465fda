"""List and drop IPython's own references to the user's displayed values and last exception.

A displayed value lives on in up to nine places and an exception in up to eight; memory is freed
only when the last of them lets go. All of them are known here, on IPython 8 and 9, so that a walk
can account for each and a release can drop exactly those that it announced.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, MutableMapping
from functools import partial
from types import ModuleType, TracebackType
from typing import Any

from IPython.core.interactiveshell import InteractiveShell

from gpumemwidget.ownership.shell import LAST_EXCEPTION, ShellReference

_UNDERSCORES = ("_", "__", "___")
#: How paths into IPython's copy of its own names begin.
_HIDDEN = "user_ns_hidden: "
#: The name of ``Out[5]`` in the namespace: ``_5``.
_OUT_NAME = re.compile(r"_(?P<number>\d+)")
#: Names that belong to rows alone, though ``globals()`` takes any text.
_ROW_NAME = re.compile(rf"Out\[.*\]|{LAST_EXCEPTION}", re.DOTALL)
#: IPython's own names: the inputs, the histories. (Its functions are "hidden" as well.)
_OWN_NAME = re.compile(r"_i\d+|_i{1,3}|_ih|_oh|_dh|In|Out|_exit_code|_sh|__\w+__")
_SYS_NAMES = ("last_value", "last_exc", "last_traceback")


class IPythonShell:
    """The running IPython as a ``Shell``, for walks and releases."""

    def __init__(self, shell: InteractiveShell) -> None:
        self._shell: Any = shell
        #: The numbers of cells by the names of their compiled files, where IPython 7 has none.
        self._noted: dict[str, int] = {}

    def open(self) -> None:
        """Note the files of cells that run from now on, where IPython does not."""
        if not hasattr(self._shell.compile, "_filename_map"):
            self._shell.compile.cache = self._cache

    def close(self) -> None:
        """Stop noting the files of cells. May be called twice."""
        if vars(self._shell.compile).get("cache") == self._cache:
            del self._shell.compile.cache

    def _cache(self, transformed_code: str, number: int = 0, raw_code: str | None = None) -> str:
        compiler = self._shell.compile
        name: str = type(compiler).cache(compiler, transformed_code, number, raw_code=raw_code)
        self._noted[name] = number
        return name

    @property
    def user_ns(self) -> MutableMapping[str, object]:
        """Return the notebook's namespace itself, not a copy."""
        namespace: MutableMapping[str, object] = self._shell.user_ns
        return namespace

    @property
    def names_hint(self) -> str:
        """The magic that lists the names, for an error."""
        return "%who lists what there is"

    def list_user_names(self) -> list[str]:
        """Return the names that the user bound, in the order of their making.

        A name that begins with an underscore is the user's too, and so is ``_`` once they have
        bound it themselves (``for _ in loader``).
        """
        hidden = dict(self._shell.user_ns_hidden)
        return [
            name
            for name, value in dict(self.user_ns).items()
            if type(name) is str
            and not (name in hidden and hidden[name] is value)
            and not _OWN_NAME.fullmatch(name)
            and not _OUT_NAME.fullmatch(name)
            and not _ROW_NAME.fullmatch(name)
            and not (name in _UNDERSCORES and self._is_own_underscore(name, value))
            and not issubclass(type(value), ModuleType)
        ]

    def read_cell_numbers(self) -> dict[str, int]:
        """Return the numbers of the cells that ran, by the names of their compiled files."""
        return dict(getattr(self._shell.compile, "_filename_map", self._noted))

    def list_own_objects(self) -> list[object]:
        """Return the shell with its parts, which reach everything and own nothing."""
        shell = self._shell
        own: list[object] = [
            self,
            shell,
            shell.user_ns,
            shell.user_ns_hidden,
            shell.user_module,
            shell.user_ns.get("In"),
            shell.user_ns.get("_oh"),
            shell.user_ns.get("Out"),
            shell.displayhook,
            vars(shell.displayhook),
            shell.last_execution_result,
            sys,
        ]
        own.extend(shell.configurables)
        for name in ("InteractiveTB", "SyntaxTB", "events", "display_pub", "kernel", "parent"):
            own.append(getattr(shell, name, None))
        return [part for part in own if part is not None]

    def list_references(self) -> list[ShellReference]:
        """Return every reference to a displayed value or an exception, each once."""
        return [*self._list_out_references(), *self._list_exception_references()]

    # -- displayed values --------------------------------------------------------------------------

    def _is_own_underscore(self, name: str, value: object) -> bool:
        """Return whether ``_`` still is the last displayed value, and was not bound by the user."""
        hook = self._shell.displayhook
        return value is getattr(hook, name, None) or value is self._shell.user_ns_hidden.get(name)

    def _list_out_references(self) -> Iterator[ShellReference]:
        shell = self._shell
        outputs = shell.user_ns.get("_oh", {})
        row_of: dict[int, str] = {}
        for number, value in dict(outputs).items():
            row = row_of[id(value)] = f"Out[{number}]"
            yield ShellReference(row, "out", row, value, partial(outputs.pop, number, None))
        for prefix, namespace in (("", shell.user_ns), (_HIDDEN, shell.user_ns_hidden)):
            for name, value in dict(namespace).items():
                match = _OUT_NAME.fullmatch(name) if type(name) is str else None
                if match:
                    row = row_of[id(value)] = f"Out[{match['number']}]"
                    drop = partial(namespace.pop, name, None)
                    yield ShellReference(row, "out", prefix + name, value, drop)
        # The unnumbered ones belong to the row of the same value; `%reset out` leaves them alone.
        # All three get the same value when dropped, or IPython takes `_` for the user's own.
        hook = vars(shell.displayhook)
        for name in _UNDERSCORES:
            for prefix, namespace in (
                ("", shell.user_ns),
                (_HIDDEN, shell.user_ns_hidden),
                ("displayhook.", hook),
            ):
                value = namespace.get(name)
                if prefix == "" and not self._is_own_underscore(name, value):
                    continue
                if value is not None and not (type(value) is str and value == ""):
                    row = row_of.setdefault(id(value), name)
                    drop = partial(namespace.__setitem__, name, "")
                    yield ShellReference(row, "out", prefix + name, value, drop)
        last = shell.last_execution_result
        if last is not None and last.result is not None:
            row = row_of.get(id(last.result), "_")
            drop = partial(setattr, last, "result", None)
            yield ShellReference(row, "out", "last_execution_result.result", last.result, drop)

    # -- exceptions --------------------------------------------------------------------------------

    def _list_exception_references(self) -> Iterator[ShellReference]:
        shell = self._shell
        holders: list[tuple[str, object, str]] = [("sys", sys, name) for name in _SYS_NAMES]
        for handler in ("InteractiveTB", "SyntaxTB"):
            # `pdb` is made by the first %debug and keeps the frames that it looked at.
            for name in ("tb", "last_syntax_error", "pdb"):
                holders.append((handler, getattr(shell, handler, None), name))
        for name in ("error_in_exec", "error_before_exec"):
            holders.append(("last_execution_result", shell.last_execution_result, name))
        for owner_name, owner, name in holders:
            value = getattr(owner, name, None)
            is_exception = isinstance(value, TracebackType | BaseException)
            if is_exception or (name == "pdb" and value is not None):
                drop = partial(_forget_exception, owner, name)
                path = f"{owner_name}.{name}"
                yield ShellReference(LAST_EXCEPTION, "exception", path, value, drop)


def _forget_exception(owner: object, name: str) -> None:
    if owner is not sys:
        setattr(owner, name, None)
        return
    vars(sys).pop(name, None)
    # The class alone holds no frames, but must not speak of an exception that is gone.
    vars(sys).pop("last_type", None)
