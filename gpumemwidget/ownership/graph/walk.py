"""Walk from the user's names to the storages they hold, without calling a line of their code.

The garbage collector knows which object refers to which: ``gc.get_referents`` answers from C, for
containers, instances, slots, closures, generators and frames alike, in one step that no other
thread can disturb. Tensors and autograd nodes refer to each other in C++, which it does not see;
those edges come from ``torch_reader.py``.

Nothing here asks an object for an attribute, compares it, or tests its truth. The walk is a loop,
not a recursion, and stops at a budget of time; what it has found is then "at least".
"""

from __future__ import annotations

import gc
import itertools
import sys
import time
from collections import deque
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence, Set
from types import CodeType, FrameType, FunctionType, ModuleType
from typing import Any

from gpumemwidget.model.ownership import CutSearch
from gpumemwidget.ownership.graph.hidden_holders import HiddenHolders
from gpumemwidget.ownership.graph.kinds import Kind, KindFinder
from gpumemwidget.ownership.graph.objects import (
    is_a,
    is_one_of,
    is_running,
    list_items,
    list_referents,
    list_referrers,
    paused_collector,
    read_namespace,
)
from gpumemwidget.ownership.graph.torch_reader import StorageInfo, TorchReader
from gpumemwidget.progress import Stage, report_progress

_CHECK_EVERY = 512

#: Number of elements of one container that are followed before others get their turn.
_MOST_AT_ONCE = 4096

#: Hidden holders are looked for in a container if there is one among so many of its first parts.
_MOST_HIDING = 64

_NO_EDGES: list[int] = []

#: A file, and the qualified name of what a function is defined in.
CodeScope = tuple[str, str]


def find_scope(code: CodeType) -> CodeScope:
    """Return where a function is defined."""
    return code.co_filename, code.co_qualname.rpartition(".")[0]


def list_namespaces() -> list[object]:
    """Return the namespaces of all modules, where every walk stops."""
    return [
        read_namespace(module)
        for module in list(sys.modules.values())
        if type(module) is ModuleType or is_a(module, ModuleType)
    ]


class Graph:
    """Objects that the roots reach, who refers to whom, and how often.

    It holds every object it has met: drop it before memory is to be freed.

    It stops at the ``boundaries``, and after ``budget_s`` seconds, when it is not
    ``is_complete``.
    """

    def __init__(
        self,
        reader: TorchReader,
        *,
        boundaries: Iterable[object],
        budget_s: float,
    ) -> None:
        self.reader = reader
        self.hidden = HiddenHolders(reader.torch)
        self.kind_finder = KindFinder(reader, self.hidden)
        self.objects: list[object] = []
        self.kinds: list[Kind] = []
        #: For each place where it leads; the many that lead nowhere share one empty list.
        self.edges: list[list[int]] = []
        #: References to each object that the walk has seen, from Python objects and from C++.
        self.python_refs: list[int] = []
        self.cpp_refs: list[int] = []
        self.storages: dict[int, StorageInfo] = {}
        #: The tensors on each storage.
        self.tensors_on: dict[int, list[int]] = {}
        #: Tensors that an autograd node saved for backward, with those nodes.
        self.saved_by: dict[int, list[int]] = {}
        #: Tensors that are another's gradient.
        self.grads: set[int] = set()
        #: Nodes that are their own Python function's context.
        self.contexts: set[int] = set()
        #: How often autograd is to unpack with a function that is defined in a scope.
        self.n_unpackings: dict[CodeScope, int] = {}
        #: The views that were met, by the places of their bases.
        self.views_of: dict[int, list[int]] = {}
        #: Objects that may hold memory which Python can't see.
        self.opaque: set[int] = set()
        #: Holders that were met from below, each behind what it holds.
        self.adopted: list[int] = []
        #: Places that a known object holds which is not followed: a module's table, a running
        #: function.
        self.met_holders: set[int] = set()
        self._index: dict[int, int] = {}
        self._boundaries = {id(boundary) for boundary in boundaries}
        #: The boundaries, and library's classes that were met: by id, as all objects here.
        self._left_out = set(self._boundaries)
        self._dead_ends = DeadEnds(self.kind_finder, self.hidden)
        #: Places to follow: what has memory first, then the rest in the order of its discovery.
        self._urgent: deque[int] = deque()
        self._pending: deque[int] = deque()
        #: The rest of containers too big to be followed at once: others come first.
        self._rest: deque[tuple[int, Iterator[object], Sequence[object]]] = deque()
        #: References that were looked at, also those to objects that are not entered: the progress.
        self._n_references = 0
        self._leads: bytearray | None = None
        self._is_cut = False
        self._budget_s = budget_s
        self._deadline = time.perf_counter() + budget_s

    @property
    def is_complete(self) -> bool:
        """True if every reference was followed; if not, more is held than was found."""
        return not self._is_cut and not self.reader.node_limit.is_spent

    def find_cut(self) -> CutSearch | None:
        """Return what the walk could look at if it is not complete."""
        if self.is_complete:
            return None
        return CutSearch(len(self.objects), self._budget_s if self._is_cut else None)

    def add_root(self, target: object, *, is_known_holder: bool = False) -> int | None:
        """Enter an object; return its place in ``objects``, or ``None`` if it can hold nothing.

        A library's class, whose end nobody sees, is entered only as a known holder.
        """
        # The collector leaves out a dictionary or tuple of arrays, as it does the arrays.
        is_bare = type(target) is dict or type(target) is tuple
        kind = self.kind_finder.find(type(target))
        is_followed = gc.is_tracked(target) or is_bare or kind is Kind.HIDDEN
        if not is_followed or id(target) in self._boundaries:
            return None
        is_library_class = kind is Kind.CLASS and self.kind_finder.is_library_class(target)
        if kind is Kind.SKIP or (is_library_class and not is_known_holder):
            return None
        return self._enter(target, kind)

    def find(self, target: object) -> int | None:
        """Return the place of an object; ``None`` if it was not met."""
        return self._index.get(id(target))

    def is_uncounted(self, place: int) -> bool:
        """Return whether a place is a storage whose end no allocator's figure shows."""
        info = self.storages.get(place)
        return info is not None and not info.freed_bytes

    def list_wrappers(self) -> list[int]:
        """Return the modules under ``DistributedDataParallel`` that were met."""
        return [place for place in self.opaque if self.kinds[place] is Kind.WRAPPER]

    def list_met(self, targets: Sequence[object]) -> list[int]:
        """Return the indices of those objects that were met."""
        is_met = map(self._index.__contains__, map(id, targets))
        return list(itertools.compress(range(len(targets)), is_met))

    def list_met_items(self, target: Mapping[Any, Any]) -> list[tuple[Any, Any]]:
        """Return the items of a dictionary whose key or value was met."""
        index = self._index
        return [item for item in list_items(target) if id(item[1]) in index or id(item[0]) in index]

    def walk(self) -> None:
        """Follow every reference from the roots, nearest first, as far as the budget allows."""
        with paused_collector(), self.reader.quiet():
            n_followed = 0
            while True:
                if n_followed >= _CHECK_EVERY or self._rest:
                    report_progress(Stage.WALK_OBJECTS, self._n_references)
                    if self.is_late():
                        break
                n_followed %= _CHECK_EVERY
                if self._urgent:
                    n_followed += self._follow_some(self._urgent)
                elif self._pending:
                    n_followed += self._follow_some(self._pending)
                elif self._rest:
                    self._add_python(*self._rest.popleft())
                else:
                    break

    def is_late(self) -> bool:
        """Return whether the time is up; the walk is cut short then."""
        if time.perf_counter() > self._deadline:
            self._is_cut = True
            for left in (self._urgent, self._pending, self._rest):
                left.clear()
        return self._is_cut

    def _follow_some(self, queue: deque[int]) -> int:
        """Follow the first of these places; return how many that were."""
        kinds = self.kinds
        places = [queue.popleft() for _ in range(min(len(queue), 64))]
        plain: list[int] = []
        for place in places:
            kind = kinds[place]
            if kind is Kind.TENSOR:
                self._follow_tensor(place)
            elif kind is Kind.NODE:
                self._follow_node(place)
            elif kind is Kind.PLAIN:
                plain.append(place)
            else:
                self._follow_python(place, kind)
        if plain:
            self._follow_plain(plain)
        return len(places)

    def adopt_referrers(self, places: Sequence[int]) -> bool:
        """Enter and walk what refers to these places; return whether anything new was met.

        An object with more references than the walk has seen may be held by rubbish that waits for
        its collection: IPython's own formatting of a traceback leaves cycles that hold each frame.
        Once such a holder is part of the graph its references are accounted for. It is no root.
        """
        targets = [self.objects[place] for place in places]
        met = len(self.objects)
        own = {id(holder) for holder in (targets, self.objects, self.reader.held_classes)}
        referrers = list_referrers(targets)
        for referrer in referrers:
            if id(referrer) in own or (type(referrer) is FrameType and is_running(referrer)):
                continue
            place = self.add_root(referrer, is_known_holder=True)
            if place is None:
                self._note_met(referrer, places)
            elif place >= met:
                self.adopted.append(place)
        del targets, referrers
        self.walk()
        return len(self.objects) > met

    def _note_met(self, referrer: object, places: Sequence[int]) -> None:
        held = set(map(id, list_referents(referrer)))
        self.met_holders.update(place for place in places if id(self.objects[place]) in held)

    def flag_reaching_memory(self) -> bytearray:
        """Return for each place 1 if it leads to a storage, or may lead to one out of sight."""
        if self._leads is None or len(self._leads) != len(self.objects):
            self._leads = flag_reaching(self.edges, [*self.storages, *self.opaque])
        return self._leads

    def reach(
        self,
        starts: Iterable[int],
        *,
        beyond: Container[int] = (),
        links: Container[tuple[int, int]] = (),
    ) -> set[int]:
        """Return these places and all that they lead to, as far as it leads to memory.

        Places ``beyond`` are not entered, and ``links``, pairs of places, not followed.
        """
        edges, leads = self.edges, self.flag_reaching_memory()
        reached = {place for place in starts if place not in beyond}
        pending = list(reached)
        while pending:
            place = pending.pop()
            for part in edges[place]:
                if part not in reached and leads[part] and part not in beyond:
                    if links and (place, part) in links:
                        continue
                    reached.add(part)
                    pending.append(part)
        return reached

    def find_tensors(self, containers: Iterable[object]) -> set[int]:
        """Return the tensors in these containers, however they are nested."""
        found: set[int] = set()
        met: set[int] = set()
        level = {place for place in map(self.find, list(containers)) if place is not None}
        while level:
            found.update(place for place in level if self.kinds[place] is Kind.TENSOR)
            met |= level
            plain = [place for place in level if self.kinds[place] is Kind.PLAIN]
            level = {part for place in plain for part in self.edges[place]} - met
        return found

    def list_instances(self, *classes: type) -> tuple[list[int], ...]:
        """Return for each of these classes the places of its objects that lead to memory."""
        found: tuple[list[int], ...] = tuple([] for _ in classes)
        # By the ids of their classes: a user's metaclass may have a hash of its own.
        known: dict[int, list[int] | None] = {}
        for place in itertools.compress(range(len(self.objects)), self.flag_reaching_memory()):
            cls = type(self.objects[place])
            if id(cls) not in known:
                pairs = zip(found, classes, strict=True)
                known[id(cls)] = next((own for own, base in pairs if is_one_of(cls, base)), None)
            places = known[id(cls)]
            if places is not None:
                places.append(place)
        return found

    # -- what a place refers to --------------------------------------------------------------------

    def _enter(self, target: object, kind: Kind) -> int:
        key = id(target)
        place = self._index.get(key)
        if place is not None:
            return place
        place = self._index[key] = len(self.objects)
        self.objects.append(target)
        self.kinds.append(kind)
        self.edges.append(_NO_EDGES)
        self.python_refs.append(0)
        self.cpp_refs.append(0)
        if kind is Kind.TENSOR:
            self._urgent.append(place)
        elif kind is Kind.STORAGE:
            # A storage leads nowhere, so it needs no turn of its own.
            info = self.reader.read_storage(target)
            if info is not None:
                self.storages[place] = info
        else:
            self._pending.append(place)
        return place

    def _follow_python(self, place: int, kind: Kind) -> None:
        target: Any = self.objects[place]
        stops: tuple[object, ...] = ()
        if kind is Kind.FUNCTION:
            stops = (target.__globals__,)
        elif kind is Kind.FRAME:
            if is_running(target):
                return
            stops = (target.f_globals, target.f_builtins)
        elif kind is Kind.WRAPPER:
            # The buckets in which its reducer joins gradients can't be listed.
            self.opaque.add(place)
        referents = list_referents(target)
        if kind is Kind.HIDDEN and not self.hidden.is_result(type(target)):
            self._follow_hidden(place, target)
        else:
            self._add_hidden(place, referents)
        self._add_python(place, iter(referents), stops)

    def _follow_plain(self, places: Sequence[int]) -> None:
        """Follow plain objects, whose parts are asked together whether they lead anywhere."""
        lots = [list_referents(self.objects[place]) for place in places]
        begins = list(itertools.chain.from_iterable(lot[:_MOST_HIDING] for lot in lots))
        untracked = itertools.filterfalse(gc.is_tracked, begins)
        # The collector does not track a dictionary or a tuple where it tracks none of their parts.
        is_bare = not {id(dict), id(tuple)}.isdisjoint(map(id, map(type, untracked)))
        if is_bare or self.hidden.are_any(begins):
            for place, lot in zip(places, lots, strict=True):
                self._add_hidden(place, lot)
        tracked: list[list[object]] = []
        for place, lot in zip(places, lots, strict=True):
            if len(lot) < _MOST_AT_ONCE:
                tracked.append(list(filter(gc.is_tracked, lot)))
            else:
                rest = iter(lot)
                tracked.append(self._take_tracked(place, rest))
        dead_ends = self._find_dead_ends(list(itertools.chain.from_iterable(tracked)))
        for place, targets in zip(places, tracked, strict=True):
            if targets:
                self._add_tracked(place, targets, dead_ends)

    def _follow_hidden(self, place: int, target: object) -> None:
        held = self.hidden.list_held(target)
        if self.hidden.is_opaque(target):
            self.opaque.add(place)
        if not self.hidden.holds_in_cpp(type(target)):
            # A column of text has millions.
            self._add_hidden(place, held)
            self._add_python(place, iter(held))
            return
        for part in held:
            if self.kind_finder.find(type(part)) is Kind.TENSOR:
                self._add_cpp(place, part, Kind.TENSOR)
            else:
                self._add_python(place, iter((part,)))

    def _add_hidden(self, place: int, referents: Sequence[object]) -> None:
        """Enter the hidden holders among an object's parts, which the collector does not track."""
        begin = referents[:_MOST_HIDING]
        # Nor does it track a dictionary or a tuple of arrays, such as an instance's attributes.
        bare = (part for part in begin if type(part) is dict or type(part) is tuple)
        holders = [
            part
            for part in bare
            if part and not gc.is_tracked(part) and self.hidden.are_any(list_referents(part))
        ]
        found = [self._enter(part, Kind.PLAIN) for part in holders]
        if self.hidden.are_any(begin):
            find = self.kind_finder.find
            hidden = (part for part in referents[:_MOST_AT_ONCE] if find(type(part)) is Kind.HIDDEN)
            found += [self._enter(part, Kind.HIDDEN) for part in hidden]
        self._add_edges(place, found)
        for part_place in found:
            self.python_refs[part_place] += 1

    def _add_python(
        self, place: int, targets: Iterator[object], stops: Sequence[object] = ()
    ) -> None:
        tracked = self._take_tracked(place, targets, stops)
        if tracked:
            self._add_tracked(place, tracked, self._find_dead_ends(tracked), stops)

    def _take_tracked(
        self, place: int, targets: Iterator[object], stops: Sequence[object] = ()
    ) -> list[object]:
        # A million numbers in a list are filtered out at the speed of C.
        tracked = list(itertools.islice(filter(gc.is_tracked, targets), _MOST_AT_ONCE))
        if len(tracked) == _MOST_AT_ONCE:
            self._rest.append((place, targets, stops))
        return tracked

    def _find_dead_ends(self, targets: Sequence[object]) -> set[int]:
        """Return the ids of those objects that need not be entered: they lead to no memory."""
        index = self._index
        plain = self.kind_finder.list_plain(targets)
        return self._dead_ends.find([target for target in plain if id(target) not in index])

    def _add_tracked(
        self,
        place: int,
        targets: Sequence[object],
        dead_ends: Set[int],
        stops: Sequence[object] = (),
    ) -> None:
        self._n_references += len(targets)
        index, left_out, python_refs = self._index, self._left_out, self.python_refs
        edges: list[int] = []
        for target in targets:
            key = id(target)
            found = index.get(key)
            if found is None:
                if key in dead_ends or key in left_out:
                    continue
                kind = self.kind_finder.find(type(target))
                if kind is Kind.SKIP:
                    continue
                if kind is Kind.CLASS and self.kind_finder.is_library_class(target):
                    # The finder's note keeps the class, and so its id.
                    left_out.add(key)
                    continue
                if stops and any(target is stop for stop in stops):
                    continue
                found = self._enter(target, kind)
            edges.append(found)
            python_refs[found] += 1
        self._add_edges(place, edges)

    def _add_edges(self, place: int, edges: list[int]) -> None:
        if self.edges[place] is _NO_EDGES:
            self.edges[place] = edges or _NO_EDGES
        else:
            self.edges[place].extend(edges)

    def _add_cpp(self, place: int, target: object, kind: Kind) -> int:
        self._n_references += 1
        found = self._enter(target, kind)
        self._add_edges(place, [found])
        self.cpp_refs[found] += 1
        return found

    def _follow_tensor(self, place: int) -> None:
        tensor = self.objects[place]
        parts = self.reader.read_tensor(tensor)
        if parts.storage is not None:
            self._add_storage(place, parts.storage)
        if parts.is_opaque:
            self.opaque.add(place)
        for storage in parts.inner_storages:
            self._add_storage(place, storage)
        for other in parts.tensors:
            found = self._add_cpp(place, other, Kind.TENSOR)
            if other is parts.grad:
                self.grads.add(found)
            elif other is parts.base:
                self.views_of.setdefault(found, []).append(place)
        node = self.reader.read_grad_fn(tensor) if parts.is_computed else None
        if node is not None:
            self._add_cpp(place, node, Kind.NODE)
        referents = list_referents(tensor)
        if len(referents) == 1 and id(referents[0]) in self._left_out:
            # Most have nothing but their class.
            return
        # The collector shows the node only where it belongs to this tensor alone: taken above.
        find = self.kind_finder.find
        self._add_python(place, (part for part in referents if find(type(part)) is not Kind.NODE))

    def _add_storage(self, place: int, storage: object) -> None:
        found = self._add_cpp(place, storage, Kind.STORAGE)
        self.tensors_on.setdefault(found, []).append(place)

    def _follow_node(self, place: int) -> None:
        node = self.objects[place]
        parts = self.reader.read_node(node)
        if parts is None:
            return
        following, saved, is_python = parts
        if is_python:
            self.contexts.add(place)
        if self.reader.is_opaque_node(node):
            self.opaque.add(place)
        for other in following:
            self._add_cpp(place, other, Kind.NODE)
        for data in saved:
            if self.kind_finder.find(type(data)) is Kind.TENSOR:
                found = self._add_cpp(place, data, Kind.TENSOR)
                self.saved_by.setdefault(found, []).append(place)
            else:
                self._add_python(place, iter((data,)))
                if type(data) is FunctionType:
                    scope = find_scope(data.__code__)
                    self.n_unpackings[scope] = self.n_unpackings.get(scope, 0) + 1
        referents = list_referents(node)
        if referents:
            self._add_python(place, iter(referents))


class DeadEnds:
    """Finds containers that end in numbers and text, and so lead to no memory."""

    def __init__(self, kind_finder: KindFinder, hidden: HiddenHolders) -> None:
        self._kind_finder = kind_finder
        self._hidden = hidden
        # Most containers end in these.
        for cls in (int, str, float, bool, bytes, type(None)):
            kind_finder.find(cls)

    def find(self, targets: Sequence[object]) -> set[int]:
        """Return the ids of those plain objects that surely lead to no memory."""
        found: set[int] = set()
        # Asked about together, as most lots lead nowhere; the others are looked at one by one.
        n_lot = 32
        for start in range(0, len(targets), n_lot):
            lot = targets[start : start + n_lot]
            if self._lead_nowhere(lot):
                found.update(map(id, lot))
            elif len(lot) > 1:
                # Most of what a module has is empty: its tables of hooks.
                found.update(
                    id(target)
                    for target in lot
                    if not list_referents(target) or self._lead_nowhere((target,))
                )
        return found

    def _lead_nowhere(self, level: Sequence[object]) -> bool:
        """Return whether containers within containers end in numbers and text."""
        finder = self._kind_finder
        # Deeper and wider ones are walked as all other objects: this is to save time alone.
        for _ in range(6):
            parts = list_referents(*level)
            level = list(filter(gc.is_tracked, parts))
            if not finder.are_known_plain(parts) and (
                not finder.are_plain(level) or self._hidden.are_any(parts)
            ):
                return False
            if not level:
                return True
            if len(level) > 1024:
                return False
        return False


def flag_reaching(edges: Sequence[Sequence[int]], ends: Iterable[int]) -> bytearray:
    """Return for each place 1 if it leads to one of the ends or is one."""
    leads = bytearray(len(edges))
    for place in ends:
        leads[place] = 1
    # Holders were mostly met before what they hold: backwards, one pass decides nearly all.
    undecided: list[int] = []
    for place in range(len(leads) - 1, -1, -1):
        targets = edges[place]
        for target in targets:
            if leads[target]:
                leads[place] = 1
                break
        else:
            if targets:
                undecided.append(place)
    # Cycles, mostly: they are followed upwards from what the pass has decided.
    referrers: dict[int, list[int]] = {}
    pending: list[int] = []
    for place in undecided:
        for target in edges[place]:
            if leads[target]:
                pending.append(place)
            else:
                referrers.setdefault(target, []).append(place)
    while pending:
        place = pending.pop()
        if not leads[place]:
            leads[place] = 1
            pending.extend(referrers.get(place, ()))
    return leads
