"""Each event of a trace to the place that its block belongs to: a site.

A site is a stack with the modules that were running: thousands of allocations share one. What is
asked of a line or a call is then asked of its sites.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field

from gpumemwidget.measure.backwards import Backwards, Inference
from gpumemwidget.measure.modules import RunningModules
from gpumemwidget.measure.played import ALLOC, SEGMENT_ALLOC, SEGMENT_MAP, Played
from gpumemwidget.measure.sources import Sources
from gpumemwidget.measure.stacks import Stack, read_stack
from gpumemwidget.records import Frame
from gpumemwidget.traces import CallMark
from gpumemwidget.units import format_bytes

__all__ = ["BEFORE", "LOST", "Placed", "Site", "place_blocks"]

#: Events that have the stack that was running then. A free's may be that of the allocation, unless
#: the history was asked for more.
_TAKING = frozenset((ALLOC, SEGMENT_ALLOC, SEGMENT_MAP))
#: The sites of what stood before the cell, and of what a missing event allocated.
BEFORE, LOST = 0, 1

_AUTOGRAD_NOTES: dict[Inference, str] = {
    "begun": "the line that was last seen to begin a backward",
    "source": "the only line with a backward() or grad() that can have run then",
    "last": "the line that was last seen before",
}


@dataclass(frozen=True, slots=True, eq=False)
class Site:
    """A place that allocated."""

    stack: Stack
    #: The modules that the stack passes through, outermost first; ``()`` where it is not known.
    modules: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, eq=False)
class Placed:
    """Where the blocks of a trace belong."""

    table: tuple[Site, ...]
    #: Type ``i``: of each event that allocates or frees the site of its block.
    sites: array[int]
    #: Of each block that stood when the first event came.
    standing: array[int]
    notes: tuple[str, ...]


def place_blocks(played: Played, sources: Sources, marks: Sequence[CallMark] = ()) -> Placed:
    """Find the site of each block.

    Args:
        played: the events and what they did.
        sources: which frames are the traced cell's.
        marks: calls that were seen to begin and end while the events were recorded.
    """
    placer = _Placer(played, sources)
    placer.place_autograd(Backwards(marks, sources))
    return placer.finish(RunningModules(marks))


@dataclass(slots=True, eq=False)
class _Placer:
    played: Played
    sources: Sources
    stacks: list[Stack] = field(init=False)
    #: The event's stack, with what called autograd where that is another thread's.
    effective: array[int] = field(init=False)
    joined: dict[tuple[int, tuple[Frame, ...]], int] = field(init=False, default_factory=dict)
    #: Bytes by how their line was found.
    inferred: dict[Inference, int] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        events = self.played.events
        self.stacks = [read_stack(frames, self.sources) for frames in events.stack_table]
        self.effective = events.stacks[:]

    def place_autograd(self, backwards: Backwards) -> None:
        """Give what autograd's threads allocated the stack of their caller."""
        kinds = bytes(("autograd", "cell", "other").index(each.kind) for each in self.stacks)
        if 0 not in kinds:
            return
        waiting: list[int] = []
        last: Stack | None = None
        events = self.played.events
        for place, (action, stack) in enumerate(zip(events.actions, events.stacks, strict=True)):
            if action not in _TAKING:
                continue
            kind = kinds[stack]
            if kind == 1:
                if waiting:
                    self._join(waiting, backwards, last, self.stacks[stack])
                    waiting = []
                last = self.stacks[stack]
            elif kind == 0 and action == ALLOC:
                waiting.append(place)
        self._join(waiting, backwards, last, None)

    def _join(
        self,
        places: Sequence[int],
        backwards: Backwards,
        last: Stack | None,
        following: Stack | None,
    ) -> None:
        events, changes = self.played.events, self.played.changes
        inferred = backwards.infer(last, following) if places else None
        for place in places:
            caller = backwards.find_call(events.times_us[place])
            if caller is None:
                if inferred is None:
                    continue
                caller, how = inferred
                self.inferred[how] = self.inferred.get(how, 0) + changes[place]
            key = events.stacks[place], caller
            if key not in self.joined:
                own = events.stack_table[key[0]]
                self.joined[key] = len(self.stacks)
                self.stacks.append(read_stack(own + caller, self.sources))
            self.effective[place] = self.joined[key]

    def finish(self, modules: RunningModules) -> Placed:
        """The sites of all blocks."""
        played = self.played
        nowhere = read_stack((), self.sources)
        table = [Site(nowhere), Site(nowhere)]
        known: dict[tuple[int, tuple[str, ...]], int] = {}
        standing = array("i")
        lost: dict[tuple[Frame, ...], int] = {}
        for each in played.standing:
            site = BEFORE if each.is_before else LOST
            if each.frames:
                site = lost.setdefault(each.frames, len(table))
                if site == len(table):
                    table.append(Site(read_stack(each.frames, self.sources)))
            standing.append(site)

        sites = array("i", bytes(4 * len(played.events)))
        times_us, effective, partners = played.events.times_us, self.effective, played.partners
        n_calls = [each.n_module_calls if modules else 0 for each in self.stacks]
        for place, change in enumerate(played.changes):
            if change > 0:
                stack = effective[place]
                names = modules.find(times_us[place], n_calls[stack]) if n_calls[stack] else ()
                key = (stack, names)
                site = known.get(key, -1)
                if site < 0:
                    site = known[key] = len(table)
                    table.append(Site(self.stacks[stack], names))
                sites[place] = site
            elif change:
                partner = partners[place]
                sites[place] = sites[partner] if partner >= 0 else standing[-2 - partner]
        return Placed(tuple(table), sites, standing, self._note())

    def _note(self) -> tuple[str, ...]:
        events = self.played.events
        notes = [
            f"{format_bytes(n_bytes)} of autograd's threads, which show no line of the cell, are "
            f"placed at {_AUTOGRAD_NOTES[how]}."
            for how, n_bytes in sorted(self.inferred.items())
        ]
        if ALLOC in events.actions and not any(events.stack_table):
            notes.append("The history was recorded without stacks: no line can be named.")
        return tuple(notes)
