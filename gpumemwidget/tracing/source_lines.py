"""List the lines that allocated, each with a tree of the calls below it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from gpumemwidget.model.traces import Call, LineUse, SourceLine, SourceUnit
from gpumemwidget.tracing.attribution import BEFORE, Attribution, Site, SiteTotals
from gpumemwidget.tracing.sources import Source, Sources
from gpumemwidget.tracing.stacks import Step, fold_frames, name_step

#: Maximum number of earlier cells and files.
_MAX_SOURCES = 20
#: How many calls deep a line opens by default, and at most.
_DEPTH = 10
_MAX_DEPTH = 50
#: Maximum number of calls below one call, and below all lines of a source.
_MAX_CHILDREN = 64
_MAX_NODES = 1500
#: Name of the smallest calls below a call, taken together.
_OTHER = "other"


@dataclass(slots=True, eq=False)
class _CallNode:
    """A line, or a call below one.

    Attributes:
        step: the call; ``None`` for a line, and for the smallest calls taken together.
        sites: sites below the node.
        children: all calls below the node.
        shown: those to show, biggest first.
    """

    step: Step | None = None
    sites: list[int] = field(default_factory=list)
    children: dict[Step, _CallNode] = field(default_factory=dict)
    shown: list[_CallNode] = field(default_factory=list)

    def add(self, site: int, steps: Iterable[Step]) -> None:
        """Add a site below a path of calls."""
        node = self
        node.sites.append(site)
        for step in steps:
            node = node.children.setdefault(step, _CallNode(step))
            node.sites.append(site)

    def walk(self) -> Iterator[_CallNode]:
        """Yield this node and all that are shown below it."""
        yield self
        for child in self.shown:
            yield from child.walk()

    def describe(self, describe_use: Callable[[Sequence[int]], LineUse], sources: Sources) -> Call:
        """Return the record of a call."""
        calls = tuple([child.describe(describe_use, sources) for child in self.shown])
        if self.step is None:
            return Call(_OTHER, "", 0, describe_use(self.sites), calls=calls)
        frame, module = self.step
        function = name_step(self.step, sources)
        use = describe_use(self.sites)
        return Call(function, frame.filename, frame.line, use, module or None, calls)


@dataclass(slots=True, eq=False)
class AllocatingSource:
    """A cell or file with the lines that allocated."""

    source: Source
    lines: dict[int, _CallNode] = field(default_factory=dict)

    def list_groups(self) -> Iterator[Sequence[int]]:
        """Yield the sites of each line, and of each call that is shown below it."""
        for line in self.lines.values():
            for node in line.walk():
                yield node.sites

    def describe(self, totals: SiteTotals, sources: Sources) -> SourceUnit:
        """Return the record; ``totals`` must have followed the groups."""
        source = self.source
        lines = []
        for number, text in source.list_shown(self.lines):
            node = self.lines.get(number)
            if node is None:
                lines.append(SourceLine(number, text))
                continue
            calls = tuple([child.describe(totals.describe, sources) for child in node.shown])
            lines.append(SourceLine(number, text, totals.describe(node.sites), calls))
        return SourceUnit(source.name, source.filename, source.kind, tuple(lines))


def list_sources(
    attribution: Attribution, sources: Sources, totals: SiteTotals, depth: int | None
) -> list[AllocatingSource]:
    """Return the traced cell, then the other sources, the one that allocated most first."""
    traced = AllocatingSource(sources.traced)
    found = {sources.traced.filename: traced}
    for index, site in enumerate(attribution.sites):
        if index != BEFORE:
            _add_site(index, site, sources, found)
    _, *others = found.values()
    ordered = sorted(
        others,
        key=lambda other: -sum(totals.sum_allocated(line.sites) for line in other.lines.values()),
    )
    chosen = [traced, *ordered[:_MAX_SOURCES]]
    for source in chosen:
        _choose_calls(source.lines.values(), totals.sum_allocated, depth)
    return chosen


def _add_site(index: int, site: Site, sources: Sources, found: dict[str, AllocatingSource]) -> None:
    """Add a site to the innermost line of each source that its stack passes through."""
    frames = site.stack.frames
    seen = set()
    for place, frame in enumerate(frames[: site.stack.n_inside]):
        source = sources.find(frame.filename)
        if source is None or source.filename in seen:
            continue
        seen.add(source.filename)
        lines = found.setdefault(source.filename, AllocatingSource(source)).lines
        line = lines.setdefault(sources.find_line(frame) or frame.line, _CallNode())
        line.add(index, fold_frames(frames[:place], site.modules))


def _choose_calls(
    lines: Iterable[_CallNode], weigh: Callable[[Sequence[int]], int], depth: int | None
) -> None:
    """Set which calls are shown below a source's lines: the biggest, and outer ones before inner.

    ``weigh`` returns the bytes of some sites.
    """
    n_left = _MAX_NODES
    level = list(lines)
    for _ in range(_DEPTH if depth is None else min(depth, _MAX_DEPTH)):
        callers = sorted(
            (node for node in level if node.children), key=lambda node: -weigh(node.sites)
        )
        level = []
        for node in callers:
            if n_left <= 0:
                return
            node.shown = _list_biggest(node, weigh)
            n_left -= len(node.shown)
            level += node.shown


def _list_biggest(node: _CallNode, weigh: Callable[[Sequence[int]], int]) -> list[_CallNode]:
    children = sorted(node.children.values(), key=lambda child: -weigh(child.sites))
    if len(children) <= _MAX_CHILDREN:
        return children
    other = _CallNode()
    for child in children[_MAX_CHILDREN - 1 :]:
        other.sites += child.sites
    return [*children[: _MAX_CHILDREN - 1], other]
