"""Define what walks and releases need of IPython, as a protocol.

The real one is ``jupyter/extension.py``. Keeping it behind a seam lets everything here be tested
with a plain object, and keeps IPython out of the core.
"""

from __future__ import annotations

from collections.abc import Callable, MutableMapping
from dataclasses import dataclass
from typing import Literal, Protocol

#: The row of all that IPython and Python keep of the last exception.
LAST_EXCEPTION = "last exception"


@dataclass(frozen=True, slots=True)
class ShellReference:
    """One strong reference that IPython (or ``sys``) itself holds, and that can be dropped.

    It holds its target: keep it no longer than the question takes.
    """

    #: The row it belongs to: ``Out[5]``, ``last exception``.
    row: str
    root: Literal["out", "exception"]
    #: The reference's path: ``Out[5]``, ``_5``, ``displayhook._``, ``sys.last_value``.
    path: str
    target: object
    #: Drops this one reference.
    drop: Callable[[], object]


class Shell(Protocol):
    """The user's names and what IPython holds beside them."""

    user_ns: MutableMapping[str, object]

    @property
    def names_hint(self) -> str:
        """What an error about an unknown name ends with: ``%who lists what there is``."""
        ...

    def list_user_names(self) -> list[str]:
        """Return the user's own names: not ``In``, ``Out``, ``_5``, ``get_ipython``, modules."""
        ...

    def list_references(self) -> list[ShellReference]:
        """Return each reference that IPython has to a displayed value or an exception.

        Complete and without repetition: the walk subtracts them from reference counts.
        """
        ...

    def list_own_objects(self) -> list[object]:
        """Return IPython's own machinery, where a walk through the user's objects has to stop."""
        ...

    def read_cell_numbers(self) -> dict[str, int]:
        """Return the numbers of the cells that ran, by the names of their compiled files."""
        ...
