"""The calls below each line, as trees that stay small enough to look at."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from gpumemwidget.measure.folding import Step, name_step
from gpumemwidget.measure.sources import Sources
from gpumemwidget.traces import Call, LineUse

__all__ = ["DEPTH", "OTHER", "CallNode", "grow_tree"]

#: How many calls deep a line opens, if nothing else is said; and however much is asked for.
DEPTH = 10
_MOST_DEPTH = 50
#: The most calls below one, and below all lines of a unit.
_MOST_CHILDREN = 64
_MOST_NODES = 1500
#: The name of what is left of a call's calls.
OTHER = "other"


@dataclass(slots=True, eq=False)
class CallNode:
    """A line, or a call below one, with the sites below it."""

    #: ``None`` for a line, and for the rest of what a call called.
    step: Step | None = None
    sites: list[int] = field(default_factory=list)
    children: dict[Step, CallNode] = field(default_factory=dict)
    #: Those that are shown, biggest first.
    shown: list[CallNode] = field(default_factory=list)

    def add(self, site: int, steps: Iterable[Step]) -> None:
        """Let a site be below a path of calls."""
        node = self
        node.sites.append(site)
        for step in steps:
            node = node.children.setdefault(step, CallNode(step))
            node.sites.append(site)

    def walk(self) -> Iterator[CallNode]:
        """This one and all that are shown below it."""
        yield self
        for each in self.shown:
            yield from each.walk()

    def describe(self, use: Callable[[Sequence[int]], LineUse], sources: Sources) -> Call:
        """The record of a call.

        Args:
            use: what sites did together.
            sources: whose text tells a function's class.
        """
        calls = tuple([each.describe(use, sources) for each in self.shown])
        if self.step is None:
            return Call(OTHER, "", 0, use(self.sites), calls=calls)
        frame, module = self.step
        function = name_step(self.step, sources)
        return Call(function, frame.filename, frame.line, use(self.sites), module or None, calls)


def grow_tree(
    lines: Iterable[CallNode], weigh: Callable[[Sequence[int]], int], depth: int | None = None
) -> None:
    """Choose what is shown below lines: the biggest calls first.

    Args:
        lines: the nodes of a unit's lines.
        weigh: the bytes by which sites are big.
        depth: how many calls deep at most.
    """
    most = DEPTH if depth is None else min(depth, _MOST_DEPTH)
    count = itertools.count()
    # The heaviest first; what is equally heavy in the order of its coming.
    waiting = [(-weigh(line.sites), next(count), 0, line) for line in lines]
    heapq.heapify(waiting)
    n_left = _MOST_NODES
    while waiting and n_left > 0:
        *_, level, node = heapq.heappop(waiting)
        if level >= most:
            continue
        children = sorted(node.children.values(), key=lambda each: -weigh(each.sites))
        if len(children) > _MOST_CHILDREN:
            rest = CallNode()
            for each in children[_MOST_CHILDREN - 1 :]:
                rest.sites += each.sites
            children = [*children[: _MOST_CHILDREN - 1], rest]
        node.shown = children
        n_left -= len(children)
        for each in children:
            if each.children:
                heapq.heappush(waiting, (-weigh(each.sites), next(count), level + 1, each))
