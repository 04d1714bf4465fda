"""Find which rows hold which storage, for the rows of variables, plans and releases alike.

All rows are walked at once, into one graph. Then each row's mark runs along the edges, so that a
storage ends up with the set of all rows that reach it, and with one more mark where something that
is no row holds it too. What a set of rows frees is then plain: the storages that carry no other
mark.
"""

from __future__ import annotations

import functools
import itertools
import operator
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

from gpumemwidget.model.devices import BytesByDevice
from gpumemwidget.model.ownership import DeviceBytes, Slices
from gpumemwidget.ownership.graph.kinds import Kind
from gpumemwidget.ownership.graph.torch_reader import (
    BlockFinder,
    StorageInfo,
    TorchReader,
    find_torch,
)
from gpumemwidget.ownership.graph.walk import Graph, list_namespaces
from gpumemwidget.ownership.other_holders import (
    enter_outside,
    enter_running,
    find_module_roots,
    list_held_elsewhere,
    list_rootless,
)
from gpumemwidget.ownership.paths import Paths, Root
from gpumemwidget.ownership.shell import Shell, ShellReference
from gpumemwidget.progress import Stage, report_progress

#: How thoroughly holders beside the rows are searched for. ``rows``: as far as the rows lead; it is
#: not noticed that something else holds an autograd graph too, for that takes a look at every
#: object of the process. ``release``: with that look, by which tensors in rubbish are found too.
#: ``running``: as ``release``, with what running functions hold, and without a search for other
#: holders. ``holders``: all of these, and it is found out what holds what no row reaches.
#: ``names``: what running functions hold is entered, and nothing else: no list of the process's
#: objects is made, which another thread's tuple can't grow in
#: (https://bugs.python.org/issue15108).
Depth = Literal["rows", "release", "running", "holders", "names"]

#: Minimum number of bytes beyond a slice that are worth a word: a clone would free them.
_LEAST_UNSHOWN_BYTES = 2**20

#: The mark of whatever holds memory without being a row.
ELSEWHERE = 1


def join_marks(marks: Iterable[int]) -> int:
    """Return all of these marks as one set of marks."""
    return functools.reduce(operator.or_, marks, 0)


@dataclass(slots=True)
class Row:
    """One root: a name, a displayed value, the last exception."""

    name: str
    root: Literal["name", "out", "exception"]
    #: The row's mark, a bit of its own.
    mark: int
    #: The row's objects, as places in the graph, one for each reference.
    places: list[int] = field(default_factory=list)
    #: Marks of what goes with it: a name's value is dropped from ``Out`` too.
    frees_marks: int = 0


@dataclass
class Holdings:
    """The storages of a walk, each with the rows that hold it.

    Holdings hold every object of the walk: let go of them before a release.
    """

    graph: Graph
    rows: dict[str, Row]
    #: For each place, the marks of all that reaches it (0 for what leads to no storage).
    marks: list[int]
    #: Roots beside the rows that hold memory, as far as they were searched for.
    outer: list[Root] = field(default_factory=list)
    #: The places that something beside the rows holds.
    elsewhere: list[int] = field(default_factory=list)
    #: Places in ``elsewhere`` whose holder was not met: it may be in C++, and go with a row.
    unmet: list[int] = field(default_factory=list)
    #: When the walk began, on ``time.perf_counter``.
    started_s: float = 0.0
    _named: dict[int, tuple[str, ...]] = field(default_factory=dict)

    def find_paths(self) -> Paths:
        """Return the best path to each object that leads to memory, names before all else."""
        return Paths(self.graph, self.list_roots())

    def list_roots(self) -> list[Root]:
        """Return the roots of paths: the rows, then what was found around them."""
        roots = [
            Root(place, row.name, row.root) for row in self.rows.values() for place in row.places
        ]
        return [*roots, *self.outer]

    @cached_property
    def groups(self) -> Groups:
        """The storages, grouped by the marks that they carry."""
        return Groups(self.graph.storages, self.marks)

    @cached_property
    def training_marks(self) -> int:
        """The marks of the rows with which a module or an optimizer is released.

        A displayed value, or an exception, that shows what a variable holds too is none of them.
        """
        reader = self.graph.reader
        names = join_marks(row.mark for row in self.rows.values() if row.root == "name")
        modules, optimizers = self.graph.list_instances(reader.module_type, reader.optimizer_type)
        held = (self.marks[place] for place in (*modules, *optimizers))
        return join_marks(marks & names or marks for marks in held) & ~ELSEWHERE

    def list_storages(self, marks: int) -> list[int]:
        """Return the storages that any of these marks reaches."""
        return self.groups.list_places(self.groups.find(marks))

    def list_rubbish(self) -> list[int]:
        """Return the storages that nothing holds: they wait for the garbage collector.

        ``[]`` where the walk was cut short: what it has met no holder of may well have one.
        """
        places = self.graph.storages if self.graph.is_complete else ()
        return [place for place in places if not self.marks[place]]

    def find_marks(self, names: Iterable[str]) -> int:
        """Return the marks of all that is dropped when these rows are released."""
        return join_marks(self.rows[name].frees_marks for name in names)

    def sum_held(self, marks: int) -> DeviceBytes:
        """Return the bytes of the storages that any of these marks reaches."""
        return self.sum_groups(self.groups.find(marks), rounded=False)

    def sum_groups(self, groups: Sequence[int], *, rounded: bool, dropped: int = 0) -> DeviceBytes:
        """Return the bytes of these groups, or a lower bound of what a release frees.

        The bytes are ``rounded`` as the allocator counts them, or as they are held; ``dropped`` are
        the marks of what is released.
        """
        return self._mark_bound(self.groups.sum(groups, rounded=rounded), dropped)

    def may_free_more(self, marks: int) -> bool:
        """Return whether more may be freed with these marks than is known.

        Something among what goes may have memory that Python can't see, or be what holds a thing
        in C++ that nothing else that is known holds.
        """
        return any(
            self.marks[place] & marks and not self.marks[place] & ~(marks | ELSEWHERE)
            for place in (*self.graph.opaque, *self.unmet)
        )

    @cached_property
    def modules(self) -> dict[str, set[int]]:
        """The variables of imported modules that hold memory, each with its storages."""
        roots = find_module_roots(self.graph, self.elsewhere)
        storages = self.graph.storages.keys()
        return {root.word: self.graph.reach([root.place]) & storages for root in roots}

    @cached_property
    def _directly_held(self) -> set[int]:
        """The places that roots, or holders that were not met, refer to themselves."""
        return {root.place for root in self.list_roots()}.union(self.elsewhere)

    def find_shown_bytes(self, place: int) -> int | None:
        """Return the bytes that tensors show of a storage, if that is a small part of it.

        A slice keeps all of its storage, though the tensor that it was taken from has no name any
        more: to clone it would free the rest.
        """
        graph = self.graph
        n_bytes = graph.storages[place].n_bytes
        if n_bytes < _LEAST_UNSHOWN_BYTES or place in self._directly_held:
            return None
        shown_bytes = 0
        for tensor in graph.tensors_on.get(place, ()):
            if graph.reader.is_dispatched(type(graph.objects[tensor])):
                return None
            # The tensor that a slice was taken from lives on in C++.
            n_views = len(graph.views_of.get(tensor, ()))
            is_seen = graph.python_refs[tensor] or tensor in self._directly_held
            if is_seen or graph.cpp_refs[tensor] > n_views or not n_views:
                with graph.reader.quiet():
                    shown_bytes += graph.reader.count_bytes(graph.objects[tensor])
        is_small = 2 * shown_bytes <= n_bytes and n_bytes - shown_bytes >= _LEAST_UNSHOWN_BYTES
        return shown_bytes if is_small and shown_bytes else None

    def sum_slices(self, places: Iterable[int]) -> Slices:
        """Return those of these storages of which tensors show a small part, together."""
        shown = {place: self.find_shown_bytes(place) for place in places}
        found = {place: n_bytes for place, n_bytes in shown.items() if n_bytes is not None}
        n_bytes = sum(self.graph.storages[place].n_bytes for place in found)
        return Slices(len(found), n_bytes, sum(found.values()))

    def name_holders(self, marks: int) -> tuple[str, ...]:
        """Return the names of the rows behind these marks."""
        if marks not in self._named:
            rows = self.rows.values()
            self._named[marks] = tuple([row.name for row in rows if row.mark & marks])
        return self._named[marks]

    def sum_places(
        self, places: Iterable[int], *, rounded: bool = True, dropped: int = 0
    ) -> DeviceBytes:
        """Return the bytes of these storages, or a lower bound; see ``sum_groups``."""
        infos = map(self.graph.storages.__getitem__, places)
        return self._mark_bound(sum_storages(infos, rounded), dropped)

    def _mark_bound(self, sums: BytesByDevice, dropped: int) -> DeviceBytes:
        is_at_least = not self.graph.is_complete or self.may_free_more(dropped)
        return DeviceBytes(sums, is_at_least=is_at_least)


def take_holdings(
    shell: Shell,
    *,
    budget_s: float,
    depth: Depth = "release",
    reads_graphs: bool = True,
    blocks: BlockFinder | None = None,
    enter_more: Callable[[Graph], list[Root]] | None = None,
) -> Holdings | None:
    """Walk from all of the user's names; return ``None`` if torch is not imported.

    Args:
        shell: the running IPython.
        budget_s: seconds after which the walk stops; what it then knows is "at least".
        depth: how thoroughly holders beside the rows are searched for.
        reads_graphs: whether autograd's nodes are asked what they hold.
        blocks: the allocators' blocks; without them sizes are rounded as the allocators round.
        enter_more: enters further roots, and returns them.
    """
    started_s = time.perf_counter()
    torch = find_torch()
    if torch is None:
        return None
    graph = Graph(
        TorchReader(torch, blocks),
        boundaries=[*shell.list_own_objects(), *list_namespaces()],
        budget_s=budget_s,
    )
    if not reads_graphs:
        graph.reader.node_limit.close()
    rows, root_refs = _enter_rows(shell, graph)
    graph.walk()
    outer = enter_running(graph) if depth in ("running", "holders", "names") else []
    if enter_more is not None:
        outer.extend(enter_more(graph))
    rootless = [] if depth in ("rows", "names") else enter_outside(graph)
    # Each round takes some 150 ns for each object of the process. Two find what rubbish of a
    # traceback holds; nine the module's variable behind a widget's callback, and a module in a
    # reference cycle behind the parameter of one of its layers.
    n_rounds = {"rows": 2, "release": 10, "running": 0, "holders": 10, "names": 0}[depth]
    held = _find_elsewhere(graph, root_refs, n_rounds=n_rounds)
    if depth == "holders":
        met = {root.place for root in outer}
        outer.extend(find_module_roots(graph, (place for place in held if place not in met)))
    named = [*(place for row in rows.values() for place in row.places), *(r.place for r in outer)]
    elsewhere = [*held, *(root.place for root in outer)]
    if depth in ("running", "holders"):
        outer.extend(list_rootless(graph, named, [*rootless, *graph.adopted]))
    if depth in ("release", "holders") and not graph.is_complete:
        # Holders of these are counted in C++ alone. Not to know is to be careful.
        nodes = (place for place, kind in enumerate(graph.kinds) if kind is Kind.NODE)
        elsewhere.extend(nodes)
    roots = [(place, row.mark) for row in rows.values() for place in row.places]
    roots += [(place, ELSEWHERE) for place in elsewhere]
    return Holdings(
        graph=graph,
        rows=rows,
        marks=_spread_marks(graph, roots),
        outer=outer,
        elsewhere=elsewhere,
        unmet=_list_unmet(graph, held),
        started_s=started_s,
    )


def _list_unmet(graph: Graph, held: Iterable[int]) -> list[int]:
    """Return the places of which a holder was never met."""
    places = (place for place in held if place not in graph.met_holders)
    return [place for place in places if not graph.is_uncounted(place)]


def _enter_rows(shell: Shell, graph: Graph) -> tuple[dict[str, Row], dict[int, int]]:
    """Enter every root; return the rows, and the number of references of the roots to each place.

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


def _find_elsewhere(graph: Graph, root_refs: dict[int, int], *, n_rounds: int) -> list[int]:
    """Return the places that something beside the rows holds, rubbish not counted.

    In each round the process is searched for holders, then for their holders; they are entered.
    """
    found = list_held_elsewhere(graph, root_refs)
    sought: set[int] = set()
    # Their holders are in C++, unknown to Python. A tuple: to hash an Enum takes longer.
    in_cpp = (Kind.NODE, Kind.STORAGE)
    while n_rounds > 0 and graph.is_complete:
        held = [
            place for place in found if place not in sought and graph.kinds[place] not in in_cpp
        ]
        if not held:
            break
        # With 256 a round takes three to five times as long as with few. So a few are tried first:
        # one list may hold them all.
        is_trial = not sought and len(held) > 16
        held = held[: 16 if is_trial else 256]
        n_rounds -= not is_trial
        report_progress(Stage.FIND_HOLDERS, len(graph.adopted))
        sought.update(held)
        n_known = len(graph.objects)
        if not graph.adopt_referrers(held) and not is_trial:
            break
        # References that were accounted for are so still.
        among = [*found, *range(n_known, len(graph.objects))]
        found = list_held_elsewhere(graph, root_refs, among)
    return found


def _spread_marks(graph: Graph, roots: Iterable[tuple[int, int]]) -> list[int]:
    """Run each root's mark along the edges, through all that leads to a storage."""
    marks = [0] * len(graph.objects)
    leads = graph.flag_reaching_memory()
    pending: deque[int] = deque()
    # A place that thousands of rows share would be pending as often.
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


class Groups:
    """The storages of one walk (``Holdings``), by the marks that they carry."""

    def __init__(self, storages: Mapping[int, StorageInfo], marks: Sequence[int]) -> None:
        self._storages = storages
        #: With each storage's place in the order of all.
        self._members: dict[int, list[tuple[int, int]]] = {}
        for number, place in enumerate(storages):
            self._members.setdefault(marks[place], []).append((number, place))
        addresses = {info.find_key(rounded=True) for info in storages.values()}
        #: True if any memory has two storages (DLPack): sums of groups may not be added then.
        self._has_twins = len(addresses) < len(storages)
        self._sums: dict[tuple[int, bool], dict[str, int]] = {}
        self._last: tuple[int, list[int]] = (0, [])

    def find(self, marks: int) -> list[int]:
        """Return the groups that any of these marks reaches, each by its whole set of marks."""
        if self._last[0] != marks:
            # A row is asked several things, one after the other.
            self._last = marks, [carried for carried in self._members if carried & marks]
        return self._last[1]

    def list_places(self, groups: Iterable[int]) -> list[int]:
        """Return the storages of these groups, in the order of all storages."""
        members = itertools.chain.from_iterable(map(self._members.__getitem__, groups))
        return [place for _, place in sorted(members)]

    def has_other_than(self, device: str, groups: Iterable[int]) -> bool:
        """Return whether any of these groups has a storage on another device."""
        return any(self._sum(carried, rounded=False).keys() - {device} for carried in groups)

    def sum(self, groups: Sequence[int], *, rounded: bool) -> BytesByDevice:
        """Return the bytes of these groups for each device, biggest first; see ``sum_storages``."""
        if self._has_twins:
            return sum_storages(map(self._storages.__getitem__, self.list_places(groups)), rounded)
        return add_up(
            pair for carried in groups for pair in self._sum(carried, rounded=rounded).items()
        )

    def _sum(self, carried: int, *, rounded: bool) -> dict[str, int]:
        if (carried, rounded) not in self._sums:
            infos = [self._storages[place] for _, place in self._members[carried]]
            self._sums[carried, rounded] = dict(sum_storages(infos, rounded))
        return self._sums[carried, rounded]


def sum_storages(infos: Iterable[StorageInfo], rounded: bool) -> BytesByDevice:
    """Return the bytes of storages for each device, biggest first; of one memory once.

    Rounded as the device's allocator counts them, or as they are held.
    """
    by_address: dict[tuple[str, int], int] = {}
    for info in infos:
        n_bytes = info.freed_bytes if rounded else info.n_bytes
        key = info.find_key(rounded=rounded)
        by_address[key] = max(n_bytes, by_address.get(key, 0))
    return add_up((device, n_bytes) for (device, _), n_bytes in by_address.items())


def add_up(pairs: Iterable[tuple[str, int]]) -> BytesByDevice:
    """Return the sum of such bytes for each device, biggest first."""
    sums: dict[str, int] = {}
    for device, n_bytes in pairs:
        sums[device] = sums.get(device, 0) + n_bytes
    return tuple(sorted(sums.items(), key=lambda item: (-item[1], item[0])))
