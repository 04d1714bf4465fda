"""The lines of an account as a tree that can be opened: by the steps of their paths.

Ten thousand storages are read by a person only when they are put together: what lies behind the
same steps is one node, elements that are alike are one node with their count, and a chain of steps
without a fork is one step. Nothing is lost on the way: what a node's parts hold adds up to what it
holds.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from gpumemwidget.records import MemoryKind, Owned

__all__ = ["ITSELF", "Entry", "Line", "Node", "list_lines"]

#: A storage with the steps that lead to it from the root of its tree.
Entry = tuple[tuple[str, ...], Owned]

#: What a node holds beside the parts that have a name: a parameter's data beside its gradient.
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
        #: What each of those that were put together holds, where all hold the same.
        self.each_bytes = sizes.pop() if len(sizes) == 1 else None
        self._n_steps = n_steps

    @cached_property
    def kinds(self) -> dict[MemoryKind, int]:
        """Bytes of each kind, the most first."""
        sums: dict[MemoryKind, int] = {}
        for _, owned in self.entries:
            sums[owned.kind] = sums.get(owned.kind, 0) + owned.n_bytes
        return dict(sorted(sums.items(), key=lambda item: (-item[1], item[0])))

    @cached_property
    def rows(self) -> dict[str, None]:
        """The rows that hold any of it, in the order in which they are met."""
        return dict.fromkeys(row for _, owned in self.entries for row in owned.rows)

    @cached_property
    def places(self) -> dict[str, None]:
        """The lines that allocated it, as far as they are known."""
        places = (owned.allocated_at for _, owned in self.entries)
        return dict.fromkeys(place for place in places if place is not None)

    @cached_property
    def held_elsewhere(self) -> frozenset[bool]:
        """Whether something that is not one of the rows holds it: all, none or some of it."""
        return frozenset(owned.held_elsewhere for _, owned in self.entries)

    def open(self) -> list[Node]:
        """Its parts, the most first; ``[]`` where it has none."""
        parts = [_follow(part) for part in self._split()]
        if len(parts) == 1:
            only = parts[0]
            # What stands under one step alone is told by the node itself.
            if only.label == ITSELF:
                return []
            inner = only.open()
            if inner and not (only.n_alike and any(part.n_alike for part in inner)):
                return [part.put_below(only) for part in inner]
        return sorted(parts, key=lambda part: -part.n_bytes)

    def put_below(self, above: Node) -> Node:
        """This node with the steps of the one above in its label."""
        self.label = above.label if self.label == ITSELF else above.label + self.label
        self.n_alike = self.n_alike or above.n_alike
        return self

    def _split(self) -> list[Node]:
        """Its parts by the next step, those that are alike as one, in the order of the account."""
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
                parts.append(Node(_name_range(alike), entries, n_steps, elements))
        return parts


@dataclass(frozen=True, slots=True)
class Line:
    """A line of an opened tree: a node, or what was left out among the parts of one."""

    level: int
    #: ``None`` for a line that stands for others.
    node: Node | None
    #: The node that it is a part of.
    above: Node | None = None
    #: How many parts a line stands for, and what they hold together.
    n_more: int = 0
    more_bytes: int = 0


def list_lines(nodes: Iterable[Node], *, levels: int | None, most: int | None) -> Iterator[Line]:
    """Nodes and what is below them, each followed by its parts.

    Args:
        nodes: the roots, in the order in which they are to stand.
        levels: how many levels are listed, the roots' own one of them; ``None`` for all.
        most: how many parts of one node are listed; ``None`` for all. A line tells of the rest.
    """
    # No recursion: a path may have any number of steps.
    pending = [Line(0, node) for node in nodes]
    pending.reverse()
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
    """The node at the next fork below, with all the steps to there as its label."""
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
    """Steps in groups of those that are alike but for numbers, and so are the parts behind them.

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


def _name_range(steps: Sequence[str]) -> str:
    """``[0…11]``, ``["layers.0…11.weight"]``: from the least to the most of each number."""
    words = _NUMBER.split(steps[0])
    columns = zip(*(_NUMBER.findall(step) for step in steps), strict=True)
    ranges = []
    for column in columns:
        numbers = sorted(set(column), key=lambda number: (len(number.lstrip("0")), number))
        ranges.append(numbers[0] if len(numbers) == 1 else f"{numbers[0]}…{numbers[-1]}")
    return "".join(map(str.__add__, words, [*ranges, ""]))


def _sum_bytes(entries: Iterable[Entry]) -> int:
    return sum(owned.n_bytes for _, owned in entries)
