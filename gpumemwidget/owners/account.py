"""Who holds which storage: the account that the rows, the plan and the release all read.

All rows are walked at once, into one graph. Then each row's mark runs along the edges, so that a
storage ends up with the set of all rows that reach it, and with one more mark where something that
is no row holds it too. What a set of rows frees is then plain: the storages that carry no other
mark.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from gpumemwidget.owners.around import enter_running, enter_surroundings, find_holder
from gpumemwidget.owners.base import Shell, ShellReference
from gpumemwidget.owners.counts import (
    list_held_elsewhere,
    list_outside,
    list_seen_from_outside,
    needs_outside,
)
from gpumemwidget.owners.groups import Groups, sum_storages
from gpumemwidget.owners.kinds import Kind
from gpumemwidget.owners.paths import Paths, Root
from gpumemwidget.owners.storages import TorchReader, find_torch
from gpumemwidget.owners.walk import Graph, list_namespaces

__all__ = ["ELSEWHERE", "Account", "Row", "Scope", "spread_marks", "take_account"]

#: How far a walk looks. ``names``: as far as the rows lead; it is not noticed that something else
#: holds an autograd graph too, for that takes a look at every object of the process. ``process``:
#: with that look. ``surroundings``: it is also found out what holds what no row reaches.
#: ``running``: what running functions hold too, and no search for holders: as much as can be told
#: in a moment. ``both``: what ``process`` and ``running`` tell, in one walk.
Scope = Literal["names", "process", "surroundings", "running", "both"]

#: For so many places it is found out what else holds them: each is a search through all there is.
_MOST_HOLDERS = 8

#: What Python does not know the holders of: they are in C++. No set: to hash a kind takes long.
_UNTOLD = (Kind.NODE, Kind.STORAGE)

#: The mark of whatever holds memory without being a row.
ELSEWHERE = 1


@dataclass(slots=True)
class Row:
    """One root: a name, a displayed value, the last exception."""

    name: str
    root: Literal["name", "out", "exception"]
    #: Its mark, one bit of its own.
    mark: int
    #: Its objects, as places in the graph, one for each reference.
    places: list[int] = field(default_factory=list)
    #: Marks of what goes with it: a name's value is dropped from ``Out`` too.
    frees_marks: int = 0


@dataclass(slots=True)
class Account:
    """Who holds which storage. It holds every object of the walk: let go of it before a release."""

    graph: Graph
    rows: dict[str, Row]
    #: For each place, the marks of all that reaches it (0 for what leads to no storage).
    marks: list[int]
    #: What is no row and holds memory, as far as it was looked for.
    outer: list[Root] = field(default_factory=list)
    #: The places that something beside the rows holds.
    elsewhere: list[int] = field(default_factory=list)
    _groups: Groups | None = None
    _named: dict[int, tuple[str, ...]] = field(default_factory=dict)

    def find_paths(self) -> Paths:
        """The best path to each object that leads to memory, names before all else."""
        return Paths(self.graph, self.list_roots())

    def list_roots(self) -> list[Root]:
        """Where paths begin: the rows, then what was found around them."""
        roots = [
            Root(place, row.name, row.root) for row in self.rows.values() for place in row.places
        ]
        return [*roots, *self.outer]

    def list_root_marks(self) -> list[tuple[int, int]]:
        """Where marks begin to run: the places of the rows, and what else holds memory."""
        roots = [(place, row.mark) for row in self.rows.values() for place in row.places]
        return [*roots, *((place, ELSEWHERE) for place in self.elsewhere)]

    def replace_marks(self, marks: list[int]) -> None:
        """Take these for the marks, as if some edges were cut."""
        self.marks = marks
        self._groups = None

    @property
    def groups(self) -> Groups:
        """The storages by the marks that they carry."""
        if self._groups is None:
            self._groups = Groups(self.graph.storages, self.marks)
        return self._groups

    def list_storages(self, marks: int) -> list[int]:
        """The storages that any of these marks reaches."""
        return self.groups.list_places(self.groups.find(marks))

    def find_marks(self, names: Iterable[str]) -> int:
        """The marks of all that is dropped when these rows are released."""
        marks = 0
        for name in names:
            marks |= self.rows[name].frees_marks
        return marks

    def sum_held(self, marks: int) -> tuple[tuple[str, int], ...]:
        """Bytes of the storages that any of these marks reaches, for each device."""
        return self.groups.sum(self.groups.find(marks), rounded=False)

    def sum_frees(self, marks: int) -> tuple[tuple[str, int], ...]:
        """Bytes of the storages that nothing but these marks reaches, for each device.

        On CUDA rounded up to the allocator's 512 bytes, as the allocator counts them.
        """
        only = [carried for carried in self.groups.find(marks) if not carried & ~marks]
        return self.groups.sum(only, rounded=True)

    def name_holders(self, marks: int) -> tuple[str, ...]:
        """The rows behind these marks."""
        found = self._named.get(marks)
        if found is None:
            names = [row.name for row in self.rows.values() if row.mark & marks]
            found = self._named[marks] = tuple(names)
        return found

    def sum_places(
        self, places: Iterable[int], *, rounded: bool = True
    ) -> tuple[tuple[str, int], ...]:
        """Bytes of these storages for each device, as held or as the allocator counts them."""
        return sum_storages(map(self.graph.storages.__getitem__, places), rounded)


def take_account(
    shell: Shell,
    *,
    budget_s: float,
    extra_roots: Sequence[object] = (),
    scope: Scope = "process",
    reads_graphs: bool = True,
    with_host: bool = True,
    is_enough: Callable[[Graph], bool] | None = None,
) -> Account | None:
    """Walk from all of the user's names; ``None`` where torch is not imported.

    Args:
        shell: the running IPython.
        budget_s: seconds after which the walk stops; what it then knows is "at least".
        extra_roots: objects to enter that no row leads to; they count as held elsewhere.
        scope: how far it looks.
        reads_graphs: whether autograd's nodes are asked what they hold.
        with_host: whether host memory is looked at too, which may have most of the tensors.
        is_enough: tells of a walk from rows and running functions whether it has met all; where it
            has, what nobody leads to is not looked for.
    """
    torch = find_torch()
    if torch is None:
        return None
    graph = Graph(
        TorchReader(torch),
        boundaries=[*shell.list_own_objects(), *list_namespaces()],
        budget_s=budget_s,
        with_host=with_host,
    )
    if not reads_graphs:
        graph.allowance.close()
    rows, root_refs = _enter_rows(shell, graph)
    elsewhere = [place for each in extra_roots if (place := graph.add_root(each)) is not None]
    started_s = time.perf_counter()
    graph.walk()
    # A look at all of the process takes its time: about as long as the walk, or as the last look.
    ahead_s = (time.perf_counter() - started_s) / 2 if scope in ("process", "both") else 0.0
    outer: list[Root] = []
    outside: list[object] | None = None
    if scope == "both":
        outer.extend(enter_running(graph))
    elif scope in ("surroundings", "running"):
        outer.extend(enter_running(graph))
        outside = []
        if is_enough is None or not is_enough(graph):
            found, outside = _enter_unmet(graph, budget_s=budget_s, is_brief=scope == "running")
            outer.extend(found)
    looked_s = time.perf_counter()
    held = _find_elsewhere(
        graph,
        root_refs,
        budget_s=0.0 if scope == "running" else budget_s / 4,
        ahead_s=ahead_s,
    )
    ahead_s = max(ahead_s, time.perf_counter() - looked_s) if ahead_s else 0.0
    if scope == "surroundings":
        outer.extend(_find_holders(graph, held, outer))
    elsewhere.extend(held)
    if scope == "both":
        # Only now: what is met here would be among those whose holders are searched for.
        n_known = len(graph.objects)
        found, outside = _enter_unmet(graph, budget_s=budget_s, is_brief=True, ahead_s=ahead_s)
        outer.extend(found)
        elsewhere.extend(list_held_elsewhere(graph, {}, since=n_known))
    elsewhere.extend(root.place for root in outer if root.kind != "nowhere")
    if scope != "running" and needs_outside(graph, is_thorough=scope != "names"):
        if outside is None:
            outside = [] if graph.is_late(ahead_s) else list_outside(graph)
        elsewhere.extend(list_seen_from_outside(graph, outside))
    del outside
    account = Account(graph=graph, rows=rows, marks=[], outer=outer, elsewhere=elsewhere)
    account.marks = spread_marks(graph, account.list_root_marks())
    return account


def _enter_unmet(
    graph: Graph, *, budget_s: float, is_brief: bool, ahead_s: float = 0.0
) -> tuple[list[Root], list[object]]:
    """Enter the tensors that were not met; their roots, and what is then still not met."""
    # To look at all of the process takes a moment too, that is not there when the time is up.
    outside = [] if is_brief and graph.is_late(ahead_s) else list_outside(graph)
    if is_brief:
        roots = enter_surroundings(graph, outside, budget_s=budget_s / 2, most_climbs=0)
    else:
        roots = enter_surroundings(graph, outside, budget_s=budget_s / 2)
    # What has been met meanwhile would be held by this list.
    return roots, [each for each in outside if graph.find(each) is None]


def _enter_rows(shell: Shell, graph: Graph) -> tuple[dict[str, Row], dict[int, int]]:
    """Enter every root; the rows, and how many references the roots have to each place.

    Nothing of the user's may stay in a variable after this: it would count as a holder.
    """
    rows: dict[str, Row] = {}
    root_refs: dict[int, int] = {}

    def enter(name: str, root: Literal["name", "out", "exception"], target: object) -> None:
        place = graph.add_root(target)
        if place is None:
            return
        row = rows.get(name)
        if row is None:
            row = rows[name] = Row(name=name, root=root, mark=2 << len(rows))
            row.frees_marks = row.mark
        row.places.append(place)
        root_refs[place] = root_refs.get(place, 0) + 1

    namespace = dict(shell.user_ns)
    for name in shell.list_user_names():
        if name in namespace:
            enter(name, "name", namespace[name])
    references: list[ShellReference] = shell.list_references()
    for reference in references:
        enter(reference.row, reference.root, reference.target)

    marks_of_out: dict[int, int] = {}
    for row in rows.values():
        if row.root == "out":
            for place in row.places:
                marks_of_out[place] = marks_of_out.get(place, 0) | row.mark
    for row in rows.values():
        if row.root == "name":
            row.frees_marks |= marks_of_out.get(row.places[0], 0)
    return rows, root_refs


def _find_elsewhere(
    graph: Graph, root_refs: dict[int, int], *, budget_s: float, ahead_s: float
) -> list[int]:
    """What leads to storages and is held by something beside the rows, rubbish not counted."""
    deadline = time.perf_counter() + budget_s
    found = list_held_elsewhere(graph, root_refs)
    while True:
        held = [place for place in found if graph.kinds[place] not in _UNTOLD]
        late = time.perf_counter() > deadline or not graph.is_complete
        if late or not held or (ahead_s and graph.is_late(ahead_s)):
            return found
        n_known = len(graph.objects)
        if not graph.adopt_referrers(held):
            return found
        # What was accounted for is so still.
        again = list_held_elsewhere(graph, root_refs, of=found)
        found = [*again, *list_held_elsewhere(graph, root_refs, since=n_known)]


def _find_holders(graph: Graph, held: Iterable[int], known: Iterable[Root]) -> list[Root]:
    """The modules that hold what is held elsewhere, as far as it is worth a search each."""
    met = {root.place for root in known}
    places = [place for place in held if place not in met and graph.kinds[place] not in _UNTOLD]
    found: list[Root] = []
    for place in places[:_MOST_HOLDERS]:
        word = find_holder(graph, place)
        if word is not None:
            found.append(Root(place, word, "module"))
    return found


def spread_marks(graph: Graph, roots: Iterable[tuple[int, int]]) -> list[int]:
    """Run each root's mark along the edges, through all that leads to a storage."""
    marks = [0] * len(graph.objects)
    leads = graph.list_leads()
    pending: deque[int] = deque()
    # What thousands of rows share would stand there as often.
    is_pending = bytearray(len(graph.objects))
    for place, mark in roots:
        if leads[place]:
            marks[place] |= mark
            if not is_pending[place]:
                is_pending[place] = 1
                pending.append(place)
    while pending:
        place = pending.popleft()
        is_pending[place] = 0
        mark = marks[place]
        for target in graph.edges[place]:
            if leads[target] and marks[target] | mark != marks[target]:
                marks[target] |= mark
                if not is_pending[target]:
                    is_pending[target] = 1
                    pending.append(target)
    return marks
