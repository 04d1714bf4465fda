"""Attribute each block of a replay to a site: a stack, with the modules that were running.

Thousands of allocations share one site. The figures of a line, a call or a module are the sums over
its sites.

A stack of one of autograd's own threads begins with what autograd called (a hook, a custom
function, the recomputation of a checkpoint), or is empty. Stacks of Python's threads and of the
main program begin with Python's own outermost function.
"""

from __future__ import annotations

import bisect
import math
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from gpumemwidget.allocator.replay import ALLOC, SEGMENT_ALLOC, SEGMENT_MAP, Replay
from gpumemwidget.model.devices import Frame
from gpumemwidget.model.traces import CallMark, LineUse, NoteKind, TraceNote
from gpumemwidget.progress import Stage, follow
from gpumemwidget.tracing.sources import Sources, is_library

#: Actions whose stack is the one that was running. The stack of a free may be the allocation's.
_TAKING = frozenset((ALLOC, SEGMENT_ALLOC, SEGMENT_MAP))
#: Sites of the blocks from before the cell, and of blocks that a lost event allocated.
BEFORE, LOST = 0, 1
#: Number of backwards to search back: as deep as threads run one at the same time, mostly one.
_MAX_NESTED = 16
#: The function by which PyTorch calls a module's forward.
_MODULE_CALL = ("_call_impl", "torch/nn/modules/module.py")
#: Outermost functions of a main program, however it was started.
_MAIN = frozenset(("<module>", "_run_module_as_main"))
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
    if ALLOC in replay.events.actions and not any(replay.events.stack_table):
        notes.append(TraceNote(NoteKind.NO_STACKS))
    return Attribution(tuple(sites), block_sites, tuple(notes))


def is_module_call(frame: Frame) -> bool:
    """Return whether PyTorch calls a module's forward at a frame."""
    function, file = _MODULE_CALL
    return frame.function == function and frame.filename.replace("\\", "/").endswith(file)


def _read_stack(frames: tuple[Frame, ...], sources: Sources) -> Stack:
    places = [place for place, frame in enumerate(frames) if sources.find_line(frame) is not None]
    outermost = frames[-1].function if frames else ""
    kind: Literal["cell", "autograd", "other"] = "autograd"
    if outermost == _THREAD or (outermost in _MAIN and not places):
        kind = "other"
    elif places:
        kind = "cell"
    return Stack(
        frames=frames,
        kind=kind,
        line=sources.find_line(frames[places[0]]) if places else None,
        # The main program outside of the cell is not the cell's doing; threads may be.
        n_inside=places[-1] + 1 if places else 0 if outermost in _MAIN else len(frames),
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
    for place, (action, stack) in enumerate(zip(events.actions, events.stacks, strict=True)):
        if action in _TAKING and kinds[stack] == "cell":
            last = stack
        if action != ALLOC or kinds[stack] != "autograd":
            continue
        time_us = events.times_us[place]
        # A backward that a checkpoint calls on autograd's own thread runs within another one.
        end = bisect.bisect_right(starts, time_us)
        around = (
            mark.frames
            for mark in reversed(calls[max(0, end - _MAX_NESTED) : end])
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
        self,
        groups: Iterable[Sequence[int]],
        layers: Sequence[Sequence[int]],
        stops: Sequence[int],
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
