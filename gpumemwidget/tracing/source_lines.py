"""List the lines that allocated, each with the biggest calls below it.

A line that runs a model has hundreds of calls below it. A call that does nothing but call another
is one with it, and so are calls of modules that differ in a number alone: the layers of a model.
"""

from __future__ import annotations

import heapq
import itertools
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TypeAlias

from gpumemwidget.model.devices import Frame
from gpumemwidget.model.traces import Call, SourceLine, SourceUnit
from gpumemwidget.tracing.attribution import (
    BEFORE,
    Attribution,
    Site,
    SiteTotals,
    is_module_call,
)
from gpumemwidget.tracing.sources import Source, Sources, is_library, name_module

#: Maximum number of earlier cells and files.
_MAX_SOURCES = 6
#: Maximum number of calls below one line of the cell.
_MAX_CALLS = 12
#: Minimum share of a line's bytes that a call is shown for.
_MIN_CALL_SHARE = 0.02

#: Files that only pass calls on.
_PLUMBING = re.compile(
    r"[/\\](torch[/\\](nn[/\\]modules[/\\]module|_dynamo[/\\].*|_compile|_ops|overrides|_classes"
    r"|utils[/\\](_contextlib|_device)|autograd[/\\](function|graph)|optim[/\\]optimizer"
    r"|_functorch[/\\].*|_higher_order_ops[/\\].*)|contextlib|functools)\.py$"
)
#: The package that users import a class from, in place of the module that defines it.
_EXPORTED = re.compile(r"^(?:(torch\.nn)\.modules|(torch\.optim)|(torch))\.\w+(?=\.[A-Z])")
_NUMBER = re.compile(r"\d+", re.ASCII)

#: A call, and the module's path if it is a module's forward (``""``: not known).
Step: TypeAlias = "tuple[Frame, str | None]"


@dataclass(slots=True, eq=False)
class _Node:
    """A line, or a call below one; ``sites`` are all below it."""

    step: Step | None = None
    sites: list[int] = field(default_factory=list)
    children: dict[Step, _Node] = field(default_factory=dict)

    def add(self, site: int, steps: Iterable[Step]) -> None:
        """Add a site below a path of calls."""
        node = self
        node.sites.append(site)
        for step in steps:
            node = node.children.setdefault(step, _Node(step))
            node.sites.append(site)

    def find_module(self) -> str | None:
        """Return the innermost known module of the calls of which each makes only the next."""
        node, found = self, None
        while True:
            found = (node.step and node.step[1]) or found
            if len(node.children) != 1:
                return found
            [only] = node.children.values()
            if len(only.sites) != len(node.sites):
                return found
            node = only


#: Calls that are alike: their modules differ in a number alone, or they are a library's and come
#: from different lines of one function.
_Group: TypeAlias = "list[_Node]"


@dataclass(slots=True, eq=False)
class _ShownCall:
    """A line, or a call that is shown below it.

    Attributes:
        sites: all sites below it.
        chain: the calls, of which each makes only the next; ``()`` for a line.
        calls: the calls to show, biggest first.
        others: the sites of each call that is not shown by itself.
    """

    sites: list[int]
    chain: Sequence[_Group] = ()
    calls: list[_ShownCall] = field(default_factory=list)
    others: list[list[int]] = field(default_factory=list)

    def list_groups(self) -> Iterator[list[int]]:
        """Yield the sites of each call, of the others together, and of all calls below."""
        yield self.sites
        if self.others:
            yield self.list_other_sites()
        for call in self.calls:
            yield from call.list_groups()

    def list_other_sites(self) -> list[int]:
        """Return the sites of the calls that are not shown by themselves."""
        return [site for sites in self.others for site in sites]

    def describe_calls(self, totals: SiteTotals, sources: Sources) -> tuple[Call, ...]:
        """Return the records of the calls below."""
        calls = [call.describe(totals, sources) for call in self.calls]
        if self.others:
            use = totals.describe(self.list_other_sites())
            calls.append(Call((), "", 0, use, n_calls=len(self.others)))
        return tuple(calls)

    def describe(self, totals: SiteTotals, sources: Sources) -> Call:
        """Return the record of a call."""
        steps = [group[0].step for group in self.chain if group[0].step is not None]
        users = [frame for frame, _ in steps if sources.find(frame.filename) is not None]
        place = users[-1] if users else Frame("", 0, "")
        known = [[node.find_module() or "" for node in group] for group in self.chain]
        modules = next((names for names in reversed(known) if all(names)), [])
        return Call(
            functions=tuple(dict.fromkeys(_name_step(step, sources) for step in steps)),
            filename=place.filename,
            line=place.line,
            use=totals.describe(self.sites),
            modules=tuple(modules),
            n_calls=len(self.chain[0]),
            calls=self.describe_calls(totals, sources),
        )


@dataclass(slots=True, eq=False)
class AllocatingSource:
    """A cell or file with the lines that allocated."""

    source: Source
    lines: dict[int, _ShownCall]

    def list_groups(self) -> Iterator[Sequence[int]]:
        """Yield the sites of each line, and of each call that is shown below it."""
        for line in self.lines.values():
            yield from line.list_groups()

    def describe(self, totals: SiteTotals, sources: Sources) -> SourceUnit:
        """Return the record; ``totals`` must have followed the groups."""
        source = self.source
        lines = []
        for number, text in source.list_shown(self.lines):
            shown = self.lines.get(number)
            if shown is None:
                lines.append(SourceLine(number, text))
            else:
                calls = shown.describe_calls(totals, sources)
                lines.append(SourceLine(number, text, totals.describe(shown.sites), calls))
        return SourceUnit(source.name, source.filename, source.kind, tuple(lines))


def list_sources(
    attribution: Attribution, sources: Sources, totals: SiteTotals
) -> list[AllocatingSource]:
    """Return the traced cell, then the other sources, the one that allocated most first.

    Only the cell's lines have calls: other sources show these as lines of their own.
    """
    #: The lines of each source, by their numbers.
    found: dict[Source, dict[int, _Node]] = {sources.traced: {}}
    for index, site in enumerate(attribution.sites):
        if index != BEFORE:
            _add_site(index, site, sources, found)
    cell = {n: _choose_calls(line, totals) for n, line in found.pop(sources.traced).items()}
    others = [
        AllocatingSource(source, {n: _ShownCall(line.sites) for n, line in lines.items()})
        for source, lines in found.items()
    ]
    others.sort(
        key=lambda other: -sum(totals.sum_allocated(line.sites) for line in other.lines.values())
    )
    return [AllocatingSource(sources.traced, cell), *others[:_MAX_SOURCES]]


def _add_site(
    index: int, site: Site, sources: Sources, found: dict[Source, dict[int, _Node]]
) -> None:
    """Add a site to the innermost line of each source that its stack passes through."""
    frames = site.stack.frames
    seen = set()
    for place, frame in enumerate(frames[: site.stack.n_inside]):
        source = sources.find(frame.filename)
        if source is None or source in seen:
            continue
        seen.add(source)
        number = sources.find_line(frame) or frame.line
        line = found.setdefault(source, {}).setdefault(number, _Node())
        line.add(index, _fold_frames(frames[:place], site.modules))


# -- The calls below a line ------------------------------------------------------------------------


def _choose_calls(line: _Node, totals: SiteTotals) -> _ShownCall:
    """Return a line with the biggest calls below it, of which none is bigger than its caller."""
    shown = _ShownCall(line.sites)
    min_bytes = int(_MIN_CALL_SHARE * totals.sum_allocated(line.sites))
    tie = itertools.count()
    #: The calls of those that are shown, by their bytes: the biggest first.
    waiting: list[tuple[int, int, _ShownCall, _Group, list[int]]] = []

    def open_call(caller: _ShownCall, groups: Iterable[_Group]) -> None:
        for group in groups:
            sites = [site for node in group for site in node.sites]
            heapq.heappush(waiting, (-totals.weigh(sites), next(tie), caller, group, sites))

    open_call(shown, _list_alike([line]))
    n_left = _MAX_CALLS
    while waiting and n_left and -waiting[0][0] >= min_bytes:
        _, _, caller, group, sites = heapq.heappop(waiting)
        chain = [group]
        below = _list_alike(group)
        while len(below) == 1 and sum(len(node.sites) for node in below[0]) == len(sites):
            chain += below
            below = _list_alike(below[0])
        call = _ShownCall(sites, chain)
        caller.calls.append(call)
        n_left -= 1
        open_call(call, below)
    for _, _, caller, _, sites in waiting:
        if caller.calls:
            caller.others.append(sites)
    return shown


def _list_alike(nodes: Iterable[_Node]) -> list[_Group]:
    """Return the calls below some nodes, with those that are alike as one group."""
    alike: dict[object, _Group] = {}
    for node in nodes:
        for step, child in node.children.items():
            # The module of a layer is often known only one or two calls further down.
            module = child.find_module()
            frame, _ = step
            key: object = (_NUMBER.sub("#", module or ""), frame.function, frame.filename)
            if module is None and not is_library(frame.filename):
                key = step  # Lines of the user's own functions are shown one by one.
            alike.setdefault(key, []).append(child)
    return list(alike.values())


def _fold_frames(frames: Sequence[Frame], modules: Sequence[str]) -> tuple[Step, ...]:
    """Return the calls that a person would name, outermost first.

    Of a library's frames there remain: the forward of each module, the function that was called,
    and the last one that the library offers to its users.

    Args:
        frames: innermost first.
        modules: the modules of the calls that the frames pass through, outermost first; there may
            be others before them.
    """
    n_calls = len([frame for frame in frames if is_module_call(frame)])
    names = iter(modules[len(modules) - n_calls :] if n_calls else ())
    steps: list[Step] = []
    library_steps: list[Step] = []
    module: str | None = None
    for frame in reversed(frames):
        if is_module_call(frame):
            steps += _shorten(library_steps)
            library_steps = []
            module = next(names, "")
        elif not is_library(frame.filename):
            steps += _shorten(library_steps)
            library_steps = []
            steps.append((frame, module))
            module = None
        elif not _is_plumbing(frame.filename):
            library_steps.append((frame, module))
            module = None
    return (*steps, *_shorten(library_steps))


def _shorten(steps: Sequence[Step]) -> list[Step]:
    """Return the first and the last of a library's calls that it offers to its users."""
    if not steps:
        return []
    offered = [step for step in steps if not step[0].function.startswith(("_", "<"))]
    first = steps[0] if steps[0][1] is not None or not offered else offered[0]
    last = offered[-1] if offered else first
    return [first] if last is first else [first, last]


@lru_cache(maxsize=4096)
def _is_plumbing(filename: str) -> bool:
    return _PLUMBING.search(filename) is not None


def _name_step(step: Step, sources: Sources) -> str:
    """Return ``step``, ``Net.forward``, or ``torch.nn.functional.linear`` for a library's."""
    frame, module = step
    name = sources.qualify(frame)
    package = name_module(frame.filename) if is_library(frame.filename) else None
    # Users know a module by its class.
    if package is None or (module is not None and "." in name):
        return name
    return _EXPORTED.sub(lambda match: match[match.lastindex or 0], f"{package}.{name}")
