"""Attribute each block of a replay to a site, and the sites to lines and the calls below them.

A site is a stack, with the modules that were running: thousands of allocations share one. The
figures of a line, a call or a module are the sums over its sites.

A line that runs a model has hundreds of calls below it. A call that does nothing but call another
is one with it, and so are calls of modules that differ in a number alone: the layers of a model.

A stack of one of autograd's own threads begins with what autograd called (a hook, a custom
function, the recomputation of a checkpoint), or is empty. Stacks of Python's threads and of the
main program begin with Python's own outermost function.
"""

from __future__ import annotations

import bisect
import heapq
import itertools
import math
import re
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Literal, TypeAlias

from gpumemwidget.allocator.replay import Replay
from gpumemwidget.model.devices import Frame
from gpumemwidget.model.traces import (
    Call,
    CallMark,
    LineUse,
    NoteKind,
    SourceLine,
    SourceUnit,
    TraceAction,
    TraceNote,
)
from gpumemwidget.progress import Stage, follow
from gpumemwidget.tracing.sources import Source, Sources, is_library, name_module

#: Sites of the blocks from before the cell, and of blocks that a lost event allocated.
BEFORE, LOST = 0, 1
#: Outermost function of a thread of Python's.
_THREAD = "_bootstrap"


@dataclass(frozen=True, slots=True, eq=False)
class Stack:
    """A recorded stack.

    Attributes:
        frames: innermost first.
        kind: ``cell``: the traced cell's code, on the thread that runs it. ``autograd``: one of
            autograd's threads. ``other``: another thread, or the main program outside of the cell.
        line: the innermost line of the cell; ``None`` if no frame is the cell's.
        n_inside: number of frames up to the cell's outermost one, the innermost first.
        n_module_calls: number of calls of modules.
    """

    frames: tuple[Frame, ...]
    kind: Literal["cell", "autograd", "other"]
    line: int | None
    n_inside: int
    n_module_calls: int


@dataclass(frozen=True, slots=True, eq=False)
class Site:
    """A place that allocated.

    Attributes:
        modules: modules that the stack passes through, outermost first; ``()`` if not known.
    """

    stack: Stack
    modules: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, eq=False)
class Attribution:
    """The sites of a replay's events.

    Attributes:
        sites: all sites; the first two are ``BEFORE`` and ``LOST``.
        block_sites: for each block of the replay (type ``i``), its site.
        notes: on what was inferred.
    """

    sites: tuple[Site, ...]
    block_sites: array[int]
    notes: tuple[TraceNote, ...]


def attribute_events(
    replay: Replay, sources: Sources, marks: Sequence[CallMark] = ()
) -> Attribution:
    """Find the site of each block.

    ``marks`` are calls that were seen to begin and end while the events were recorded.
    """
    stacks = [_read_stack(frames, sources) for frames in replay.events.stack_table]
    event_stacks, inferred_bytes = _join_autograd(replay, sources, stacks, marks)
    modules = _RunningModules(marks)

    nowhere = _read_stack((), sources)
    sites = [Site(nowhere), Site(nowhere)]
    block_sites = array("i", [BEFORE]) * len(replay.blocks.sizes)
    for block in replay.lost:
        block_sites[block] = LOST

    known: dict[tuple[int, tuple[str, ...]], int] = {}
    times_us, event_blocks = replay.events.times_us, replay.event_blocks
    n_calls = [stack.n_module_calls if modules else 0 for stack in stacks]
    for place, change in enumerate(follow(replay.changes, Stage.PLACE_EVENTS, len(replay.changes))):
        if change <= 0:
            continue
        stack = event_stacks[place]
        names = modules.find(times_us[place], n_calls[stack]) if n_calls[stack] else ()
        site = block_sites[event_blocks[place]] = known.setdefault((stack, names), len(sites))
        if site == len(sites):
            sites.append(Site(stacks[stack], names))
    notes = []
    if inferred_bytes:
        notes.append(TraceNote(NoteKind.BACKWARD_INFERRED, n_bytes=inferred_bytes))
    if TraceAction.ALLOC in replay.events.actions and not any(replay.events.stack_table):
        notes.append(TraceNote(NoteKind.NO_STACKS))
    return Attribution(tuple(sites), block_sites, tuple(notes))


def is_module_call(frame: Frame) -> bool:
    """Return whether PyTorch calls a module's forward at a frame."""
    file = frame.filename.replace("\\", "/")
    return frame.function == "_call_impl" and file.endswith("torch/nn/modules/module.py")


def _read_stack(frames: tuple[Frame, ...], sources: Sources) -> Stack:
    places = [place for place, frame in enumerate(frames) if sources.find_line(frame) is not None]
    outermost = frames[-1].function if frames else ""
    # Outermost functions of a main program, however it was started.
    is_main = outermost in ("<module>", "_run_module_as_main")
    kind: Literal["cell", "autograd", "other"] = "autograd"
    if outermost == _THREAD or (is_main and not places):
        kind = "other"
    elif places:
        kind = "cell"
    return Stack(
        frames=frames,
        kind=kind,
        line=sources.find_line(frames[places[0]]) if places else None,
        # The main program outside of the cell is not the cell's doing; threads may be.
        n_inside=places[-1] + 1 if places else 0 if is_main else len(frames),
        n_module_calls=len([frame for frame in frames if is_module_call(frame)]),
    )


def list_blocks(
    replay: Replay, attribution: Attribution
) -> Iterator[tuple[int, int, int, int, int]]:
    """Return of each block its site, bytes, address, and the events that allocated and freed it.

    The event is -1 of a block that was in use before all events, or is in use at the end.
    """
    blocks = replay.blocks
    return zip(
        attribution.block_sites,
        blocks.sizes,
        blocks.addresses,
        blocks.begun_at,
        blocks.freed_at,
        strict=True,
    )


def _join_autograd(
    replay: Replay, sources: Sources, stacks: list[Stack], marks: Iterable[CallMark]
) -> tuple[array[int], int]:
    """Append the stack of the caller of backward to the stacks of autograd's threads.

    The caller is known where calls of backward were seen to begin and end. Else it is taken to be
    the user's line in the cell's last stack before.

    Args:
        replay: the events.
        sources: which frames are the cell's.
        stacks: those of the events' table; joined stacks are appended.
        marks: the calls that were seen.

    Returns:
        For each event (type ``i``) the index of its stack in ``stacks``, and the allocated bytes
        whose caller was inferred.
    """
    events = replay.events
    event_stacks: array[int] = events.stacks[:]
    kinds = [stack.kind for stack in stacks]
    if "autograd" not in kinds:
        return event_stacks, 0
    calls = sorted(
        (mark for mark in marks if mark.kind == "backward" and _is_users(mark, sources)),
        key=lambda mark: mark.start_us,
    )
    starts = [mark.start_us for mark in calls]
    last: int | None = None
    # The callers inferred from the cell's stacks, and the joined stacks.
    inferred: dict[int, tuple[Frame, ...]] = {}
    joined: dict[tuple[int, tuple[Frame, ...]], int] = {}
    inferred_bytes = 0
    alloc = TraceAction.ALLOC
    allocating = frozenset((alloc, TraceAction.SEGMENT_ALLOC, TraceAction.SEGMENT_MAP))
    for place, (action, stack) in enumerate(zip(events.actions, events.stacks, strict=True)):
        # The stack of a free may be the allocation's, and not the one that was running.
        if action in allocating and kinds[stack] == "cell":
            last = stack
        if action != alloc or kinds[stack] != "autograd":
            continue
        time_us = events.times_us[place]
        # A backward that a checkpoint calls on autograd's own thread runs within another one, which
        # is searched as deep as threads run one at the same time.
        end = bisect.bisect_right(starts, time_us)
        around = (
            mark.frames
            for mark in reversed(calls[max(0, end - 16) : end])
            if mark.end_us is None or time_us <= mark.end_us
        )
        caller = next(around, None)
        if caller is None:
            if last is None:
                continue
            if last not in inferred:
                inferred[last] = _cut_to_users_line(stacks[last].frames, sources)
            caller = inferred[last]
            inferred_bytes += replay.changes[place]
        key = stack, caller
        if key not in joined:
            joined[key] = len(stacks)
            stacks.append(_read_stack(events.stack_table[stack] + caller, sources))
        event_stacks[place] = joined[key]
    return event_stacks, inferred_bytes


def _cut_to_users_line(frames: tuple[Frame, ...], sources: Sources) -> tuple[Frame, ...]:
    """Return a stack of the cell's from its innermost line of the user's on."""
    users = next(
        place
        for place, frame in enumerate(frames)
        if sources.find_line(frame) is not None or not is_library(frame.filename)
    )
    return frames[users:]


def _is_users(mark: CallMark, sources: Sources) -> bool:
    return bool(mark.frames) and (
        any(sources.find_line(frame) is not None for frame in mark.frames)
        or mark.frames[-1].function == _THREAD
    )


class _RunningModules:
    def __init__(self, marks: Iterable[CallMark]) -> None:
        # The last one begins first. Of calls that begin in the same microsecond the one that ends
        # last is around the others.
        self._coming = sorted(
            (mark for mark in marks if mark.kind == "module"),
            key=lambda mark: (mark.start_us, -math.inf if mark.end_us is None else -mark.end_us),
        )[::-1]
        self._threads: dict[int, list[CallMark]] = {}
        self._time_us = 0

    def __bool__(self) -> bool:
        return bool(self._coming or self._threads)

    def find(self, time_us: int, n_calls: int) -> tuple[str, ...]:
        """Return the names of the modules that a stack passes through, the outermost first.

        Args:
            time_us: when; never earlier than at the last call.
            n_calls: number of calls of modules in the stack.

        Returns:
            ``()`` if no thread was running that many modules.
        """
        if time_us != self._time_us:
            self._time_us = time_us
            self._advance(time_us)
        for running in self._threads.values():
            marks = list(running)
            # A clock of microseconds can't order what ended and what began in the same one.
            while len(marks) > n_calls and self._time_us in (marks[-1].start_us, marks[-1].end_us):
                marks.pop()
            if len(marks) == n_calls:
                return tuple([mark.name for mark in marks])
        return ()

    def _advance(self, time_us: int) -> None:
        while self._coming and self._coming[-1].start_us <= time_us:
            mark = self._coming.pop()
            running = self._threads.setdefault(mark.thread, [])
            while running and _has_ended(running[-1], mark.start_us, is_next=True):
                running.pop()
            running.append(mark)
        for running in self._threads.values():
            while running and _has_ended(running[-1], time_us, is_next=False):
                running.pop()


def _has_ended(mark: CallMark, time_us: int, *, is_next: bool) -> bool:
    if mark.end_us is None:
        return False
    return mark.end_us < time_us or (is_next and mark.end_us == time_us > mark.start_us)


class SiteTotals:
    """The totals of each site, and of groups of sites.

    Attributes:
        allocated_bytes: for each site, all that it allocated.
        net_bytes: for each site, what is still in use at the end.
        at_peak_bytes: for each site, what was in use at the peak.

    Args:
        peak: index of the event with the most allocated; -1 if that was before all events.
    """

    def __init__(self, replay: Replay, attribution: Attribution, peak: int) -> None:
        self._changes, self._event_blocks = replay.changes, replay.event_blocks
        self._block_sites = attribution.block_sites
        n_sites = len(attribution.sites)
        allocated, net, at_peak, initial = ([0] * n_sites for _ in range(4))
        for site, n_bytes, _, begun_at, freed_at in list_blocks(replay, attribution):
            allocated[site] += n_bytes
            if begun_at < 0:
                initial[site] += n_bytes
            if freed_at < 0:
                net[site] += n_bytes
            if begun_at <= peak and not 0 <= freed_at <= peak:
                at_peak[site] += n_bytes
        self.allocated_bytes = allocated
        self.net_bytes, self.at_peak_bytes = net, at_peak
        self._initial_bytes = initial
        #: For each group the index of its figures in ``_highest``.
        self._groups: dict[tuple[int, ...], int] = {}
        self._highest: list[int] = []

    def sum_allocated(self, sites: Iterable[int]) -> int:
        """Return the bytes that some sites allocated."""
        allocated = self.allocated_bytes
        return sum([allocated[site] for site in sites])

    def weigh(self, sites: Sequence[int]) -> int:
        """Return what some sites allocated, had at the peak, or have kept, whichever is most."""
        at_peak = sum([self.at_peak_bytes[site] for site in sites])
        net = sum([self.net_bytes[site] for site in sites])
        return max(self.sum_allocated(sites), at_peak, net)

    def follow(
        self, groups: Iterable[Sequence[int]], layers: Sequence[Sequence[int]], stops: Sequence[int]
    ) -> list[list[int]]:
        """Find the most that each group held, which ``describe`` then returns.

        Args:
            groups: groups of sites.
            layers: further groups, whose bytes are returned at each stop.
            stops: indices of events, ascending; -1 is before all of them.

        Returns:
            For each stop the bytes of each layer after that event.
        """
        for group in (*groups, *layers):
            self._groups.setdefault(tuple(group), len(self._groups))
        groups_of_site: list[list[int]] = [[] for _ in self.allocated_bytes]
        held = [0] * len(self._groups)
        for sites, index in self._groups.items():
            for site in sites:
                groups_of_site[site].append(index)
                held[index] += self._initial_bytes[site]
        highest = self._highest = held[:]
        shown = [self._groups[tuple(layer)] for layer in layers]
        changes, blocks, block_sites = self._changes, self._event_blocks, self._block_sites
        rows = []
        first = 0
        for end in (*(stop + 1 for stop in stops), len(changes)):
            for change, block in zip(changes[first:end], blocks[first:end], strict=True):
                if change:
                    for index in groups_of_site[block_sites[block]]:
                        now = held[index] = held[index] + change
                        if now > highest[index]:  # noqa: PLR1730 - a call of max takes longer
                            highest[index] = now
            rows.append([held[index] for index in shown])
            first = end
        return rows[:-1]

    def describe(self, sites: Sequence[int]) -> LineUse:
        """Return the figures of a group that was followed."""
        return LineUse(
            allocated_bytes=self.sum_allocated(sites),
            net_bytes=sum([self.net_bytes[site] for site in sites]),
            at_peak_bytes=sum([self.at_peak_bytes[site] for site in sites]),
            highest_bytes=self._highest[self._groups[tuple(sites)]],
        )


# -- Lines, and the calls below them ---------------------------------------------------------------

#: Files that only pass calls on.
_PLUMBING = re.compile(
    r"[/\\](torch[/\\](nn[/\\]modules[/\\]module|_dynamo[/\\].*|_compile|_ops|overrides|_classes"
    r"|utils[/\\](_contextlib|_device)|autograd[/\\](function|graph)|optim[/\\]optimizer"
    r"|_functorch[/\\].*|_higher_order_ops[/\\].*)|contextlib|functools)\.py$"
)
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
    """Return the traced cell, then six other sources at most, the biggest first.

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
    return [AllocatingSource(sources.traced, cell), *others[:6]]


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
    # A call below has at least two hundredths of what the line allocated.
    min_bytes = int(0.02 * totals.sum_allocated(line.sites))
    tie = itertools.count()
    #: The calls of those that are shown, by their bytes: the biggest first.
    waiting: list[tuple[int, int, _ShownCall, _Group, list[int]]] = []

    def open_call(caller: _ShownCall, groups: Iterable[_Group]) -> None:
        for group in groups:
            sites = [site for node in group for site in node.sites]
            heapq.heappush(waiting, (-totals.weigh(sites), next(tie), caller, group, sites))

    open_call(shown, _list_alike([line]))
    n_left = 12
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
            path = re.sub(r"[0-9]+", "#", module or "")
            key: object = (path, frame.function, frame.filename)
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
    # They import it from a package, and not from the module that defines it.
    exported = r"^(?:(torch\.nn)\.modules|(torch\.optim)|(torch))\.\w+(?=\.[A-Z])"
    return re.sub(exported, lambda match: match[match.lastindex or 0], f"{package}.{name}")
