"""The storages of an account in rows by owner, and each row as a tree by the steps of its paths.

A person can read ten thousand storages only if they are put together: what lies behind the same
steps is one node, elements that are alike are one node with their count, and a chain of steps
without a fork is one step. The bytes of a node's parts add up to those of the node.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from gpumemwidget.errors import BadInputError, UnknownNameError
from gpumemwidget.model.ownership import MemoryAccount, MemoryKind, Owned, Slices
from gpumemwidget.report.render.wording import UNATTRIBUTED, name_one_kind, name_range
from gpumemwidget.units import format_duration

#: A storage with the steps that lead to it from its node.
Entry = tuple[tuple[str, ...], Owned]

#: Label of what a node holds besides its named parts: a parameter's data besides its gradient.
ITSELF = "itself"

_NUMBER = re.compile(r"\d+", re.ASCII)


@dataclass
class Node:
    """All storages whose paths begin with the same steps."""

    #: The steps that distinguish it from its siblings, as one text.
    label: str
    entries: Sequence[Entry]
    #: Number of elements that were put together in it; 0 where there is but one.
    n_alike: int = 0
    #: Bytes of each of these elements, if all have as many.
    each_bytes: int | None = None

    @cached_property
    def n_bytes(self) -> int:
        """Bytes of all its storages."""
        return _sum_bytes(self.entries)

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

    @cached_property
    def slices(self) -> Slices:
        """The storages of which tensors show a small part."""
        found = [owned for _, owned in self.entries if owned.shown_bytes is not None]
        n_bytes = sum(owned.n_bytes for owned in found)
        return Slices(len(found), n_bytes, sum(owned.shown_bytes or 0 for owned in found))

    @property
    def is_held_elsewhere(self) -> bool:
        """True if anything but the rows holds any of the storages."""
        return any(owned.held_elsewhere for _, owned in self.entries)

    @property
    def has_parts(self) -> bool:
        """True if a step leads from here to any of the storages."""
        return any(steps for steps, _ in self.entries)

    def open(self) -> list[Node]:
        """Return the node's parts, the largest first; a list of alike elements is one with them."""
        parts = []
        for part in _split(self):
            inner = [] if part.n_alike else _split(part)
            if len(inner) == 1:
                inner[0].label = part.label + inner[0].label
            parts.append(inner[0] if len(inner) == 1 else part)
        return sorted(parts, key=lambda part: -part.n_bytes)


#: Shares of a row's bytes: a part that has less stays shut, and one that has more is opened first.
_LEAST_SHARE, _LARGE_SHARE = 0.01, 0.5


@dataclass(frozen=True, slots=True)
class Line:
    """A line of an opened tree: a node, or what was left out among the parts of one."""

    level: int
    #: ``None`` for a line of parts that are left out.
    node: Node | None
    #: The node above.
    above: Node | None = None
    #: Number of parts that are left out, and their bytes.
    n_more: int = 0
    more_bytes: int = 0


def list_lines(root: Node, *, levels: int | None, most: int | None) -> Iterator[Line]:
    """Return a node and what is below it, each followed by its parts.

    Args:
        root: the node of the first level.
        levels: how many levels are listed; ``None`` for all. Of several, a part with half of all
            bytes is opened beyond them, and one with next to nothing stays shut.
        most: maximum number of parts of one node, the rest being one line; ``None`` for all.
    """
    # No recursion: a path may have any number of steps.
    pending = [Line(0, root)]
    while pending:
        line = pending.pop()
        yield line
        level = line.level + 1
        if line.node is None or not _is_opened(
            line.node.n_bytes / (root.n_bytes or 1), level, levels
        ):
            continue
        parts = line.node.open()
        # A line that says "1 more" would take the room of that one.
        n_shown = len(parts) if most is None or len(parts) <= most + 1 else most
        if n_shown < len(parts):
            rest = parts[n_shown:]
            n_bytes = sum(part.n_bytes for part in rest)
            pending.append(Line(level, None, line.node, len(rest), n_bytes))
        pending.extend(Line(level, part, line.node) for part in reversed(parts[:n_shown]))


def _is_opened(share: float, level: int, levels: int | None) -> bool:
    """Return whether the parts of a node with this share of all bytes are listed, on a level."""
    if levels is None or levels == 1:
        return levels is None
    deepest = 2 * levels if share >= _LARGE_SHARE else levels
    return share >= _LEAST_SHARE and level < deepest


def _split(node: Node) -> list[Node]:
    """Return the parts of a node up to the next fork, elements that are alike as one."""
    if not node.has_parts:
        return []
    # Only of a row all paths may go on with the same steps.
    shared, entries = _split_shared(node.entries)
    here = [entry for entry in entries if not entry[0]]
    parts = [Node(shared or ITSELF, here)] if here else []
    by_step: dict[str, list[Entry]] = {}
    for steps, owned in entries:
        if steps:
            by_step.setdefault(steps[0], []).append((steps[1:], owned))
    for alike in _group_alike(by_step):
        elements = [by_step[step] for step in alike]
        chain, below = _split_shared([entry for element in elements for entry in element])
        part = Node(shared + name_range(alike) + chain, below)
        if len(alike) > 1:
            sizes = set(map(_sum_bytes, elements))
            part.n_alike, part.each_bytes = len(alike), sizes.pop() if len(sizes) == 1 else None
        parts.append(part)
    return parts


def _split_shared(entries: Sequence[Entry]) -> tuple[str, list[Entry]]:
    """Return the steps with which all paths begin, as one text, and the entries behind them."""
    paths = [steps for steps, _ in entries]
    # The steps that the first and the last in order share are shared by all between.
    first, last = min(paths), max(paths)
    pairs = enumerate(zip(first, last, strict=False))
    n_shared = next((n for n, (one, other) in pairs if one != other), min(len(first), len(last)))
    return "".join(first[:n_shared]), [(steps[n_shared:], owned) for steps, owned in entries]


def _group_alike(by_step: Mapping[str, list[Entry]]) -> Iterable[list[str]]:
    """Return groups of steps that are alike but for numbers, as are the parts behind them.

    Elements of a list, keys such as ``["layers.3.weight"]``, the parameters of an optimizer's
    state: whatever stands in brackets. How big the parts are makes no difference.
    """
    groups: dict[object, list[str]] = {}
    for step, entries in by_step.items():
        if step.startswith("["):
            parts = frozenset(
                (*(_NUMBER.sub("0", below) for below in path), owned.kind)
                for path, owned in entries
            )
            groups.setdefault((_NUMBER.sub("0", step), parts), []).append(step)
        else:
            groups[step] = [step]
    return groups.values()


def _sum_bytes(entries: Iterable[Entry]) -> int:
    return sum(owned.n_bytes for _, owned in entries)


#: Name of the row of tensors that no variable, module or running function leads to, as in a
#: device's breakdown.
_NO_VARIABLE = "no variable"

_TENSOR_KINDS = frozenset(
    {"parameter", "gradient", "optimizer state", "buffer", "saved for backward", "tensor"}
)


class Row(NamedTuple):
    """The subject of a row of the account; several rows may have the same name."""

    name: str
    #: The name is the user's own text, to be typed as it is.
    is_path: bool = False
    #: The name is one of the account's ``variables``.
    is_variable: bool = False
    #: Stands before the kinds.
    remark: str = ""


_UNKNOWN = Row(UNATTRIBUTED)


def list_rows(lines: Iterable[Owned]) -> list[tuple[Row, Node]]:
    """Return the rows, the largest first; the last one is what is unattributed, also if empty."""
    entries: dict[Row, list[Entry]] = {}
    for owned in lines:
        row, steps = _find_row(owned)
        entries.setdefault(row, []).append((steps, owned))
    unknown = Node(UNATTRIBUTED, entries.pop(_UNKNOWN, []))
    rows = [(row, Node(row.name, own)) for row, own in entries.items()]
    return [*sorted(rows, key=lambda pair: -pair[1].n_bytes), (_UNKNOWN, unknown)]


def _find_row(owned: Owned) -> tuple[Row, tuple[str, ...]]:
    """Return the row of a storage, and the steps of its path from there."""
    begin, *rest = owned.steps or ("",)
    if owned.root == "module":
        return Row(begin, is_path=True, remark="an imported module's own"), tuple(rest)
    if owned.root == "thread":
        where = [step.removeprefix(": ") for step in rest[:1]]
        return Row(begin, remark="in a running function"), (*where, *rest[1:])
    if owned.root != "nowhere" and owned.rows:
        row = owned.rows[0]
        steps = tuple(rest) if begin == row else owned.steps
        return Row(row, is_path=True, is_variable=True), steps
    if owned.kind in _TENSOR_KINDS:
        return Row(_NO_VARIABLE), owned.steps
    steps = () if owned.steps == (owned.kind,) else owned.steps
    return Row(name_one_kind(owned.kind, owned.device)), steps


def check_rows(account: MemoryAccount, names: Sequence[str], bound: Collection[str]) -> None:
    """Refuse names that are no rows of the account; ``bound`` are all of the user's variables.

    Raises:
        BadInputError: it is a variable and holds nothing.
        UnknownNameError: there is no such name; close ones are named.
    """
    rows = [variable.name for variable in account.variables]
    rows += [row.name for part in account.devices for row, _ in list_rows(part.owned)]
    rows += [array.name for array in account.library_arrays]
    for name in names:
        if name in rows:
            continue
        if name in bound:
            if account.is_complete:
                raise BadInputError(f"{name!r} holds no tensor memory: %memvars lists what does")
            raise BadInputError(
                f"no tensor memory was found in {name!r}: there were too many objects to look at "
                f"in {format_duration(account.duration_s)}"
            )
        close = difflib.get_close_matches(name, dict.fromkeys([*rows, *bound]), n=3)
        hint = f"did you mean {' or '.join(close)}?" if close else "%memvars lists what there is"
        raise UnknownNameError(f"{name!r} is neither a variable nor a row of the account: {hint}")
