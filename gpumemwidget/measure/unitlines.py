"""The lines of the traced cell, of earlier cells and of the user's files, with what they did."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from gpumemwidget.measure.calltree import CallNode, grow_tree
from gpumemwidget.measure.folding import fold_frames
from gpumemwidget.measure.placing import BEFORE, Placed, Site
from gpumemwidget.measure.sources import Source, Sources
from gpumemwidget.measure.tallies import Tallies
from gpumemwidget.traces import SourceLine, SourceUnit

__all__ = ["Unit", "list_units"]

#: Lines of an earlier cell or a file that are shown above and below one that allocated.
_CONTEXT = 3
#: The most earlier cells and files.
_MOST_UNITS = 20


@dataclass(slots=True, eq=False)
class Unit:
    """A source with the lines that allocated."""

    source: Source
    nodes: dict[int, CallNode] = field(default_factory=dict)

    def list_groups(self) -> Iterator[Sequence[int]]:
        """The sites of each line, and of each call that is shown below it."""
        for line in self.nodes.values():
            for node in line.walk():
                yield node.sites

    def describe(self, tallies: Tallies, sources: Sources) -> SourceUnit:
        """The record; the groups must have been followed."""
        texts = self.source.lines
        numbers = range(1, len(texts) + 1)
        if self.source.kind == "cell":
            shown = {*self.nodes, *numbers}
        else:
            around = {
                number + step
                for number in self.nodes
                for step in range(-_CONTEXT, _CONTEXT + 1)
                if number + step in numbers
            }
            shown = {*self.nodes, *around}
        lines = []
        for number in sorted(shown):
            node = self.nodes.get(number)
            lines.append(
                SourceLine(
                    line=number,
                    text=texts[number - 1] if number in numbers else "",
                    use=None if node is None else tallies.describe(node.sites),
                    calls=()
                    if node is None
                    else tuple([each.describe(tallies.describe, sources) for each in node.shown]),
                )
            )
        source = self.source
        return SourceUnit(source.name, source.filename, source.kind, tuple(lines))


def list_units(placed: Placed, sources: Sources, tallies: Tallies, depth: int | None) -> list[Unit]:
    """The traced cell first, then the others, the one that allocated most first.

    Args:
        placed: the sites.
        sources: which frames are whose.
        tallies: by which calls are big.
        depth: how many calls deep a line opens at most.
    """
    traced = Unit(sources.traced)
    others: dict[str, Unit] = {}
    for index, site in enumerate(placed.table):
        if index == BEFORE:
            continue
        _add_lines(index, site, sources, traced, others)
    ordered = sorted(
        others.values(),
        key=lambda unit: -sum(tallies.sum_allocated(node.sites) for node in unit.nodes.values()),
    )
    units = [traced, *ordered[:_MOST_UNITS]]
    for unit in units:
        grow_tree(unit.nodes.values(), tallies.sum_allocated, depth)
    return units


def _add_lines(
    index: int, site: Site, sources: Sources, traced: Unit, others: dict[str, Unit]
) -> None:
    stack = site.stack
    if stack.line is not None:
        steps = fold_frames(stack.frames[: stack.n_below], site.modules)
        traced.nodes.setdefault(stack.line, CallNode()).add(index, steps)
    seen = {sources.traced.filename}
    for place, frame in enumerate(stack.frames[: stack.n_inside]):
        source = sources.find(frame.filename)
        if source is None or source.filename in seen:
            continue
        seen.add(source.filename)
        unit = others.setdefault(source.filename, Unit(source))
        steps = fold_frames(stack.frames[:place], site.modules)
        unit.nodes.setdefault(frame.line, CallNode()).add(index, steps)
