"""List and drop IPython's own references to the user's displayed values and last exception.

A displayed value lives on in up to nine places and an exception in up to eight; memory is freed
only when the last of them lets go. All of them are known here, on IPython 8 and 9, so that a walk
can account for each and a release can drop exactly those that it announced.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Collection, MutableMapping
from types import ModuleType, TracebackType
from typing import Any, Literal

from IPython.core.interactiveshell import InteractiveShell

from gpumemwidget.model.releases import IPythonReference
from gpumemwidget.ownership.shell import LAST_EXCEPTION, ShellReference

_UNDERSCORES = ("_", "__", "___")
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

    @property
    def user_ns(self) -> MutableMapping[str, object]:
        """Return the notebook's namespace itself, not a copy."""
        namespace: MutableMapping[str, object] = self._shell.user_ns
        return namespace

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
        """Return the numbers of the cells that ran, by the names of their compiled files.

        IPython's own tracebacks say ``In[7]`` by the same map.
        """
        numbers: dict[str, int] = dict(getattr(self._shell.compile, "_filename_map", {}))
        return numbers

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

    def drop_ids(self, ids: Collection[int]) -> list[IPythonReference]:
        """Drop the references to displayed values with exactly these ids, and no other.

        Ids, so that the caller need not hold the objects.
        """
        wanted = frozenset(ids)
        return self._drop([ref for ref in self._list_out_references() if id(ref.target) in wanted])

    def drop_out(self, rows: Collection[str] | None = None) -> list[IPythonReference]:
        """Drop all displayed values, or only those of the rows named (``["Out[3]"]``)."""
        return self._drop(
            [ref for ref in self._list_out_references() if rows is None or ref.row in rows]
        )

    def drop_exceptions(self) -> list[IPythonReference]:
        """Drop the last exception everywhere; ``%debug`` has nothing to look at afterwards."""
        return self._drop(self._list_exception_references())

    # -- displayed values --------------------------------------------------------------------------

    def _is_own_underscore(self, name: str, value: object) -> bool:
        """Tell whether ``_`` still is the last displayed value, and was not bound by the user."""
        hook = self._shell.displayhook
        return value is getattr(hook, name, None) or value is self._shell.user_ns_hidden.get(name)

    def _list_out_references(self) -> list[ShellReference]:
        shell = self._shell
        found: list[tuple[str, str, object]] = []
        for number, value in dict(shell.user_ns.get("_oh", {})).items():
            found.append((f"Out[{number}]", f"Out[{number}]", value))
        for prefix, namespace in (("", shell.user_ns), ("user_ns_hidden: ", shell.user_ns_hidden)):
            for name, value in dict(namespace).items():
                match = _OUT_NAME.fullmatch(name) if type(name) is str else None
                if match:
                    found.append((f"Out[{match['number']}]", prefix + name, value))
        row_of = {id(value): row for row, _, value in found}
        # The unnumbered ones belong to the row of the same value; `%reset out` leaves them alone.
        for name in _UNDERSCORES:
            for path, value in (
                (name, shell.user_ns.get(name)),
                (f"user_ns_hidden: {name}", shell.user_ns_hidden.get(name)),
                (f"displayhook.{name}", getattr(shell.displayhook, name, None)),
            ):
                if path == name and not self._is_own_underscore(name, value):
                    continue
                if value is not None and not (type(value) is str and value == ""):
                    found.append((row_of.setdefault(id(value), name), path, value))
        last = shell.last_execution_result
        if last is not None and last.result is not None:
            row = row_of.get(id(last.result), "_")
            found.append((row, "last_execution_result.result", last.result))
        return [ShellReference(row, "out", path, value) for row, path, value in found]

    # -- exceptions --------------------------------------------------------------------------------

    def _list_exception_references(self) -> list[ShellReference]:
        shell = self._shell
        last = shell.last_execution_result
        found: list[tuple[str, object]] = [
            (f"sys.{name}", vars(sys).get(name)) for name in _SYS_NAMES
        ]
        for handler in ("InteractiveTB", "SyntaxTB"):
            # `pdb` is made by the first %debug and keeps the frames that it looked at.
            for name in ("tb", "last_syntax_error", "pdb"):
                value = getattr(getattr(shell, handler, None), name, None)
                found.append((f"{handler}.{name}", value))
        for name in ("error_in_exec", "error_before_exec"):
            found.append((f"last_execution_result.{name}", getattr(last, name, None)))
        return [
            ShellReference(LAST_EXCEPTION, "exception", path, value)
            for path, value in found
            if isinstance(value, TracebackType | BaseException) or path.endswith(".pdb")
            if value is not None
        ]

    # -- dropping ----------------------------------------------------------------------------------

    def _drop(self, references: list[ShellReference]) -> list[IPythonReference]:
        dropped: list[IPythonReference] = []
        for reference in references:
            self._drop_path(reference.path)
            dropped.append(IPythonReference(path=reference.path))
        if any(reference.root == "exception" for reference in references):
            # The class alone holds no frames, but must not speak of an exception that is gone.
            vars(sys).pop("last_type", None)
        references.clear()
        return dropped

    def _drop_path(self, path: str) -> None:
        shell = self._shell
        kind: Literal["hidden", "user"] = (
            "hidden" if path.startswith("user_ns_hidden: ") else "user"
        )
        name = path.removeprefix("user_ns_hidden: ")
        owner, _, attribute = name.rpartition(".")
        if name.startswith("Out["):
            outputs = shell.user_ns["_oh"]
            for number in [key for key in outputs if f"Out[{key}]" == name]:
                del outputs[number]
        elif not owner:
            namespace = shell.user_ns_hidden if kind == "hidden" else shell.user_ns
            if name in _UNDERSCORES:
                # All three places get the same value, or IPython takes `_` for the user's own.
                namespace[name] = ""
            else:
                namespace.pop(name, None)
        elif owner == "sys":
            vars(sys).pop(attribute, None)
        elif owner == "displayhook":
            setattr(shell.displayhook, attribute, "")
        else:
            setattr(getattr(shell, owner), attribute, None)
