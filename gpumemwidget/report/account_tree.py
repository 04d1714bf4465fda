"""The storages of an account in rows by owner, and each row as a tree by the steps of its paths.

A person can read ten thousand storages only if they are put together: what lies behind the same
steps is one node, elements that are alike are one node with their count, and a chain of steps
without a fork is one step. The bytes of a node's parts add up to those of the node.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from gpumemwidget.errors import BadInputError, UnknownNameError
from gpumemwidget.model.ownership import DeviceAccount, MemoryAccount, MemoryKind, Owned
from gpumemwidget.report.render.wording import UNATTRIBUTED, name_one_kind, name_range

#: A storage with the steps that lead to it from the root of its tree.
Entry = tuple[tuple[str, ...], Owned]

#: Label of what a node holds besides its named parts: a parameter's data besides its gradient.
ITSELF = "itself"

_NUMBER = re.compile(r"\d+", re.ASCII)


class Node:
    """All storages whose paths begin with the same steps.

    Args:
        label: the steps that distinguish it from its siblings, as one text.
        entries: its storages.
        n_steps: how many steps of each entry lead to here.
        parts: the entries of the elements that were put together in it, one by one.
    """

    def __init__(
        self,
        label: str,
        entries: Sequence[Entry],
        n_steps: int,
        parts: Sequence[Sequence[Entry]] = (),
    ) -> None:
        self.label = label
        self.entries = entries
        self.n_bytes = _sum_bytes(entries)
        self.n_alike = len(parts)
        sizes = {_sum_bytes(part) for part in parts}
        #: Bytes of each element that was put together here, if all have as many.
        self.each_bytes = sizes.pop() if len(sizes) == 1 else None
        self._n_steps = n_steps

    @cached_property
    def kinds(self) -> dict[MemoryKind, int]:
        """Bytes of each kind, the largest first."""
        sums: dict[MemoryKind, int] = {}
        for _, owned in self.entries:
            sums[owned.kind] = sums.get(owned.kind, 0) + owned.n_bytes
        return dict(sorted(sums.items(), key=lambda item: (-item[1], item[0])))

    @cached_property
    def rows(self) -> dict[str, None]:
        """The rows that hold any of the storages, in the order in which they are met."""
        return dict.fromkeys(row for _, owned in self.entries for row in owned.rows)

    @cached_property
    def places(self) -> dict[str, None]:
        """The lines that allocated the storages, as far as they are known."""
        places = (owned.allocated_at for _, owned in self.entries)
        return dict.fromkeys(place for place in places if place is not None)

    @property
    def is_held_elsewhere(self) -> bool:
        """True if anything but the rows holds any of the storages."""
        return any(owned.held_elsewhere for _, owned in self.entries)

    def open(self) -> list[Node]:
        """Return the node's parts, the largest first."""
        parts = [_follow(part) for part in self._split()]
        if len(parts) == 1:
            only = parts[0]
            # The node itself tells of a single step without parts.
            if only.label == ITSELF:
                return []
            inner = only.open()
            if inner and not (only.n_alike and any(part.n_alike for part in inner)):
                return [part.put_below(only) for part in inner]
        return sorted(parts, key=lambda part: -part.n_bytes)

    def put_below(self, above: Node) -> Node:
        """Return this node, with the steps of the node above it in its label."""
        self.label = above.label if self.label == ITSELF else above.label + self.label
        self.n_alike = self.n_alike or above.n_alike
        return self

    def _split(self) -> list[Node]:
        """Return the parts by the next step, those that are alike as one."""
        here: list[Entry] = []
        by_step: dict[str, list[Entry]] = {}
        for entry in self.entries:
            steps = entry[0]
            if len(steps) == self._n_steps:
                here.append(entry)
            else:
                by_step.setdefault(steps[self._n_steps], []).append(entry)
        n_steps = self._n_steps + 1
        parts = [Node(ITSELF, here, self._n_steps)] if here else []
        for alike in _group_alike(by_step, n_steps):
            elements = [by_step[step] for step in alike]
            if len(alike) == 1:
                parts.append(Node(alike[0], elements[0], n_steps))
            else:
                entries = [entry for element in elements for entry in element]
                parts.append(Node(name_range(alike), entries, n_steps, elements))
        return parts


@dataclass(frozen=True, slots=True)
class Line:
    """A line of an opened tree: a node, or what was left out among the parts of one."""

    level: int
    #: ``None`` for a line that stands for others.
    node: Node | None
    #: The node above.
    above: Node | None = None
    #: Number of parts that the line stands for, and their bytes.
    n_more: int = 0
    more_bytes: int = 0


def list_lines(root: Node, *, levels: int | None, most: int | None) -> Iterator[Line]:
    """Return a node and what is below it, each followed by its parts.

    Args:
        root: the node of the first level.
        levels: how many levels are listed; ``None`` for all.
        most: maximum number of parts of one node, the rest being one line; ``None`` for all.
    """
    # No recursion: a path may have any number of steps.
    pending = [Line(0, root)]
    while pending:
        line = pending.pop()
        yield line
        level = line.level + 1
        if line.node is None or (levels is not None and level >= levels):
            continue
        parts = line.node.open()
        # A line that says "1 more" would take the room of the one that it stands for.
        n_shown = len(parts) if most is None or len(parts) <= most + 1 else most
        if n_shown < len(parts):
            rest = parts[n_shown:]
            n_bytes = sum(part.n_bytes for part in rest)
            pending.append(Line(level, None, line.node, len(rest), n_bytes))
        pending.extend(Line(level, part, line.node) for part in reversed(parts[:n_shown]))


def _follow(node: Node) -> Node:
    """Return the node at the next fork below, labelled with all steps on the way."""
    while node.label != ITSELF:
        parts = node._split()  # noqa: SLF001 - its own kind
        if len(parts) != 1 or parts[0].label == ITSELF or (parts[0].n_alike and node.n_alike):
            break
        only = parts[0]
        only.label = node.label + only.label
        if node.n_alike:
            only.n_alike, only.each_bytes = node.n_alike, node.each_bytes
        node = only
    return node


def _group_alike(by_step: Mapping[str, list[Entry]], n_steps: int) -> Iterable[list[str]]:
    """Return groups of steps that are alike but for numbers, as are the parts behind them.

    Elements of a list, keys such as ``["layers.3.weight"]``, the parameters of an optimizer's
    state: whatever stands in brackets. How big the parts are makes no difference.
    """
    by_pattern: dict[str, list[str]] = {}
    for step in by_step:
        pattern = _NUMBER.sub("0", step) if step.startswith("[") else step
        by_pattern.setdefault(pattern, []).append(step)
    for steps in by_pattern.values():
        if len(steps) == 1:
            yield steps
            continue
        by_parts: dict[frozenset[object], list[str]] = {}
        for step in steps:
            parts = frozenset(
                (*(_NUMBER.sub("0", below) for below in path[n_steps:]), owned.kind)
                for path, owned in by_step[step]
            )
            by_parts.setdefault(parts, []).append(step)
        yield from by_parts.values()


def _sum_bytes(entries: Iterable[Entry]) -> int:
    return sum(owned.n_bytes for _, owned in entries)


#: Name of the row of tensors that no variable, module or running function leads to, as in a
#: device's breakdown.
_NO_VARIABLE = "no variable"

_TENSOR_KINDS = frozenset(
    {"parameter", "gradient", "optimizer state", "buffer", "saved for backward", "tensor"}
)


@dataclass(slots=True)
class Group:
    """A row of the account before it is opened."""

    name: str
    #: The name is the user's own text, to be typed as it is.
    is_path: bool
    #: The name is one of the account's ``variables``.
    is_variable: bool = False
    #: Stands before the kinds.
    remark: str = ""
    entries: list[Entry] = field(default_factory=list)

    @property
    def n_bytes(self) -> int:
        """Bytes of all storages of the row."""
        return _sum_bytes(self.entries)


def list_groups(account: DeviceAccount) -> list[Group]:
    """Return the rows, the largest first; the last one is what is unattributed, also if empty."""
    groups: dict[tuple[bool, str, str], Group] = {}
    for owned in account.owned:
        group, steps = _find_group(owned)
        # A variable may be called "other": it is no row of what is nobody's.
        found = groups.setdefault((group.is_path, group.name, group.remark), group)
        found.entries.append((steps, owned))
    unknown = groups.pop((False, UNATTRIBUTED, ""), None) or Group(UNATTRIBUTED, is_path=False)
    return [*sorted(groups.values(), key=lambda group: -group.n_bytes), unknown]


def _find_group(owned: Owned) -> tuple[Group, tuple[str, ...]]:
    """Return a new row for a storage, and the steps of its path from there."""
    first, rest = owned.steps[:1], owned.steps[1:]
    begin = first[0] if first else ""
    if owned.root == "module":
        return Group(begin, is_path=True, remark="an imported module's own"), rest
    if owned.root == "thread":
        # ``thread loader: load() line 7: batch``, or a context variable.
        thread = owned.thread or begin
        where = begin[len(thread) :].removeprefix(": ")
        rest = (where, *rest) if where else rest
        return Group(thread, is_path=False, remark="in a running function"), rest
    if owned.root != "nowhere" and owned.rows:
        row = owned.rows[0]
        if begin.startswith(row):
            rest = (begin[len(row) :], *rest) if begin != row else rest
        else:
            rest = owned.steps
        return Group(row, is_path=True, is_variable=True), rest
    if owned.kind in _TENSOR_KINDS:
        return Group(_NO_VARIABLE, is_path=False), owned.steps
    steps = () if owned.steps == (owned.kind,) else owned.steps
    return Group(name_one_kind(owned.kind, owned.device), is_path=False), steps


def check_rows(
    account: MemoryAccount, names: Sequence[str], *, bound: Collection[str] = ()
) -> None:
    """Refuse names that are no rows of the account.

    Args:
        account: the account.
        names: what was asked for.
        bound: the user's variables, which may hold no memory.

    Raises:
        BadInputError: it is a variable and holds nothing.
        UnknownNameError: there is no such name; close ones are told.
    """
    rows = [variable.name for variable in account.variables]
    rows += [group.name for each in account.devices for group in list_groups(each)]
    for name in names:
        if name in rows:
            continue
        if name in bound:
            raise BadInputError(f"{name!r} holds no tensor memory: %memvars lists what does")
        close = difflib.get_close_matches(name, dict.fromkeys([*rows, *bound]), n=3)
        hint = f"did you mean {' or '.join(close)}?" if close else "%memvars lists what there is"
        raise UnknownNameError(f"{name!r} is neither a variable nor a row of the account: {hint}")
