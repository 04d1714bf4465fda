"""The lines of an account in rows: by the name, or whatever else, that each path begins with."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from gpumemwidget.errors import BadInputError, UnknownNameError
from gpumemwidget.records import DeviceAccount, MemoryAccount, MemoryKind, Owned
from gpumemwidget.report.tree import Entry

__all__ = ["NO_NAME", "UNKNOWN", "Group", "check_rows", "list_groups"]

#: The rows of tensors to which no name, module or running function leads, and of what is no more
#: than a number of bytes.
NO_NAME = "no name"
UNKNOWN: MemoryKind = "unknown"

_TENSOR_KINDS = frozenset(
    {"parameter", "gradient", "optimizer state", "buffer", "saved for backward", "tensor"}
)


@dataclass(slots=True)
class Group:
    """A row of the account before it is opened."""

    name: str
    #: Whether the name is the user's own text, to be typed as it is.
    is_path: bool
    #: Whether it is one of the account's ``holdings``.
    is_holding: bool = False
    #: Stands before the kinds.
    remark: str = ""
    entries: list[Entry] = field(default_factory=list)

    @property
    def n_bytes(self) -> int:
        """What its lines hold together."""
        return sum(owned.n_bytes for _, owned in self.entries)


def list_groups(account: DeviceAccount) -> list[Group]:
    """The rows, the most first; what is unknown comes last, and stands there in any case."""
    groups: dict[tuple[str, str], Group] = {}
    for owned in account.owned:
        group, steps = _find_group(owned)
        found = groups.setdefault((group.name, group.remark), group)
        found.entries.append((steps, owned))
    unknown = groups.pop((UNKNOWN, ""), None) or Group(UNKNOWN, is_path=False)
    return [*sorted(groups.values(), key=lambda group: -group.n_bytes), unknown]


def _find_group(owned: Owned) -> tuple[Group, tuple[str, ...]]:
    """The row that a line belongs to, new, and the steps from there."""
    first, rest = owned.steps[:1], owned.steps[1:]
    begin = first[0] if first else ""
    if owned.root == "module":
        return Group(begin, is_path=True, remark="an imported module's own"), rest
    if owned.root == "thread":
        # ``thread loader: load() line 7: batch``
        thread, _, where = begin.partition(": ")
        rest = (where, *rest) if where else rest
        return Group(thread, is_path=False, remark="in a running function"), rest
    if owned.root != "nowhere" and owned.rows:
        row = owned.rows[0]
        if begin.startswith(row):
            rest = (begin[len(row) :], *rest) if begin != row else rest
        else:
            rest = owned.steps
        return Group(row, is_path=True, is_holding=True), rest
    if owned.kind in _TENSOR_KINDS:
        # ``no name (held where Python can't see)``
        words = begin.removeprefix(f"{NO_NAME} (")
        begin = begin if words == begin else words.removesuffix(")")
        return Group(NO_NAME, is_path=False), (begin, *rest) if begin else rest
    steps = () if owned.steps == (owned.kind,) else owned.steps
    return Group(owned.kind, is_path=False), steps


def check_rows(
    account: MemoryAccount, names: Sequence[str], *, bound: Collection[str] = ()
) -> None:
    """Refuse what is no row of the account.

    Args:
        account: the account.
        names: what was asked for.
        bound: the user's variables, which may hold no memory.

    Raises:
        BadInputError: it is a variable and holds nothing.
        UnknownNameError: there is no such name; close ones are told.
    """
    rows = [holding.name for holding in account.holdings]
    rows += [group.name for each in account.devices for group in list_groups(each)]
    for name in names:
        if name in rows:
            continue
        if name in bound:
            raise BadInputError(f"{name!r} holds no tensor memory: %memvars lists what does")
        close = difflib.get_close_matches(name, dict.fromkeys([*rows, *bound]), n=3)
        hint = f"did you mean {' or '.join(close)}?" if close else "%memvars lists what there is"
        raise UnknownNameError(f"{name!r} is no variable and no row of the account: {hint}")
