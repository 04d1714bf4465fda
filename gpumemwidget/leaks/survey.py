"""Take stock of who holds how much, in groups that can be compared with those of later on.

Storages whose paths differ in indexes alone are one group: ``losses[3]'s graph`` and ``losses[4]'s
graph`` are ``losses[…]'s graph``. A group that has gained members between two surveys is what
grows. (memlab and LeakCanary put traces of retained objects together likewise.)

Registries and caches of imported modules, which no variable of the notebook names, count too. A
module of the user's is looked at whole. Libraries have thousands of containers: of each only the
elements that were added since the first look are followed.
"""

from __future__ import annotations

import re
import sys
from collections import OrderedDict, defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import FunctionType, ModuleType
from typing import Any

from gpumemwidget.errors import forgets_frames
from gpumemwidget.leaks.levels import MIN_GROWTH_BYTES
from gpumemwidget.model.leaks import LeakHolder
from gpumemwidget.ownership.graph.kinds import Kind
from gpumemwidget.ownership.graph.objects import (
    is_a,
    is_one_of,
    list_items,
    name_class,
    paused_collector,
    read_attributes,
    read_class_attribute,
    read_namespace,
)
from gpumemwidget.ownership.graph.torch_reader import TorchReader, find_torch
from gpumemwidget.ownership.graph.walk import Graph
from gpumemwidget.ownership.holdings import ELSEWHERE, Depth, Holdings, take_holdings
from gpumemwidget.ownership.labels import (
    CACHE_TYPE,
    KEY,
    UNSEEN,
    PathStep,
    StepKind,
    open_index,
    spell_steps,
)
from gpumemwidget.ownership.other_holders import MACHINERY
from gpumemwidget.ownership.paths import Paths, Root, Steps
from gpumemwidget.ownership.shell import Shell
from gpumemwidget.tracing.sources import is_library

_read_cache_info: Any = vars(CACHE_TYPE)["cache_info"]
_read_maxlen: Any = vars(deque)["maxlen"].__get__


@dataclass(slots=True)
class Group:
    """The storages of one device whose paths differ in indexes alone."""

    device: str
    holder: str
    in_graph: bool
    #: ``True`` if a module keeps them.
    in_model: bool
    n_bytes: int = 0
    n_storages: int = 0
    #: The bytes of the largest, and its shape.
    largest_bytes: int = 0
    tensor: str = ""
    #: The row of the variables that holds it.
    row: str = ""
    #: ``True`` if the holder says how much it keeps at most.
    is_bounded: bool = False
    #: The holder's name where its variable is also an element of something, as a loop's variable
    #: is: ``blocks[…].cache`` of ``block.cache``; ``""`` where it is none.
    element: str = ""
    #: The container of an imported module that holds it: ``keeper.KEPT``; ``""`` for none.
    container: str = ""
    #: ``True`` if a container of a library holds it.
    in_library: bool = False
    #: The module to import before the container can be named; ``""`` for none.
    module: str = ""
    #: The bytes of the tensors on the largest storage, if they are a small part of it.
    slice_bytes: int | None = None
    #: The ``id`` of each tensor, as a parameter, at which the graph that keeps the largest storage
    #: begins; ``None`` where no graph keeps it, or too large a one.
    leaves: frozenset[int] | None = None


#: A group's device and holder.
Key = tuple[str, str]


@dataclass(frozen=True, slots=True)
class Survey:
    """The groups of one moment, and whether the walk came to its end."""

    groups: dict[Key, Group]
    is_complete: bool
    #: Whether what libraries have added was looked at.
    has_libraries: bool = False

    def count_bytes(self, device: str) -> int:
        """Return the bytes of all storages of a device."""
        return sum(group.n_bytes for group in self.groups.values() if group.device == device)


@forgets_frames
def take_survey(
    shell: Shell,
    *,
    budget_s: float,
    depth: Depth,
    contents: ModuleContents | None = None,
    with_libraries: bool = False,
) -> Survey | None:
    """Return the groups of storages that are held now; ``None`` where they are unknown.

    That is where torch is not imported, and where as many autograd nodes were looked at as may be:
    a survey without graphs would be compared with none.

    Objects in unreachable cycles are left out: the garbage collector frees them. What imported
    modules keep counts where ``contents`` is given, and what libraries have added since they were
    first looked at ``with_libraries``.
    """

    def enter_modules(graph: Graph) -> list[Root]:
        if contents is None:
            return []
        return contents.enter(graph, shell.user_ns, with_libraries=with_libraries)

    torch = find_torch()
    with paused_collector():
        if torch is None or not TorchReader(torch).node_limit.has_room():
            return None
        holdings = take_holdings(shell, budget_s=budget_s, depth=depth, enter_more=enter_modules)
        if holdings is None:
            return None
        groups = _Grouping(holdings, shell.user_ns).groups
        return Survey(groups, holdings.graph.is_complete, with_libraries)


class _Grouping:
    """Puts the storages of one walk (``Holdings``) into groups."""

    def __init__(self, holdings: Holdings, namespace: Mapping[str, object]) -> None:
        self.groups: dict[Key, Group] = {}
        self._namespace = namespace
        self._holdings = holdings
        self._graph = holdings.graph
        self._paths: Paths = holdings.find_paths()
        self._modules = set(self._paths.modules)
        self._bounds: dict[int, bool] = {}
        self._elements = self._find_elements()
        #: The largest storage of each group.
        self._largest: dict[Key, int] = {}
        for place in holdings.graph.storages:
            self._add(place)
        for key, place in self._largest.items():
            self.groups[key].leaves = self._find_leaves(place)

    def _add(self, place: int) -> None:
        root = self._paths.find_root(place)
        steps = self._paths.list_steps(place)
        is_held_elsewhere = bool(self._holdings.marks[place] & ELSEWHERE)
        if root is None or (root.kind == "nowhere" and not is_held_elsewhere):
            return
        if root.kind == "nowhere":
            steps = (PathStep(StepKind.ROOT, UNSEEN), *steps[1:])
        info = self._graph.storages[place]
        shown = _cut_at_graph(steps)
        holder = fold(shown)
        group = self.groups.get((info.device, holder))
        if group is None:
            group = self.groups[info.device, holder] = Group(
                info.device,
                holder,
                in_graph=self._paths.passes_graph(place),
                in_model=self._paths.passes(place, self._modules),
            )
        group.n_bytes += info.freed_bytes
        group.n_storages += 1
        if info.freed_bytes > group.largest_bytes:
            rows = self._holdings.name_holders(self._holdings.marks[place])
            group.largest_bytes = info.freed_bytes
            group.tensor = self._describe(place)
            group.slice_bytes = self._holdings.find_shown_bytes(place)
            group.row = root.word if root.word in rows else ""
            if root.place in self._elements:
                group.element = fold((*self._elements[root.place], *shown[1:]))
            if root.kind == "module":
                group.in_library = root.word.endswith("[…]")
                group.container = self._find_container(place, holder)
                module = root.word.rpartition(".")[0]
                group.module = "" if module.partition(".")[0] in self._namespace else module
            self._largest[info.device, holder] = place
        group.is_bounded |= self._is_bounded(place)

    def _describe(self, place: int) -> str:
        reader = self._graph.reader
        for tensor in self._graph.tensors_on.get(place, ()):
            target = self._graph.objects[tensor]
            if not reader.is_dispatched(type(target)):
                with reader.quiet():
                    shape, dtype = reader.read_shape(target)
                if shape is not None and dtype is not None:
                    return f"{dtype}{list(shape)}"
        return ""

    def _find_container(self, place: int, holder: str) -> str:
        """Return the path of the container by whose elements a module holds a storage."""
        path, index, _ = holder.partition("[…]")
        for part in self._paths.list_places(place) if index else ():
            is_container = is_one_of(type(self._graph.objects[part]), dict, list, deque)
            if is_container and spell_steps(self._paths.list_steps(part)) == path:
                return path
        return ""

    def _find_elements(self) -> dict[int, Steps]:
        """Return the ways to variables' values that are elements of others' containers too."""
        rows = self._holdings.rows.values()
        names = {place: row.name for row in rows if row.root == "name" for place in row.places}
        ways: dict[int, Steps] = {}
        for place, edges in enumerate(self._graph.edges):
            if not self._holdings.marks[place] or names.keys().isdisjoint(edges):
                continue
            root = self._paths.find_root(place)
            for part in names.keys() & set(edges):
                if root is not None and root.word != names[part]:
                    steps = self._paths.name_part(place, part)
                    if len(steps) > 1 and open_index(steps[-1].text) == "[…]":
                        ways[part] = steps
        return ways

    def _find_leaves(self, place: int) -> frozenset[int] | None:
        kinds, edges = self._graph.kinds, self._graph.edges
        # The outermost tensor's: it leads to all that the graph begins with.
        for holder in reversed(self._paths.list_places(place)):
            if kinds[holder] in (Kind.TENSOR, Kind.NODE):
                for part in (holder, *edges[holder]):
                    if kinds[part] is Kind.NODE:
                        return self._follow_to_leaves(part)
        return None

    def _follow_to_leaves(self, node: int) -> frozenset[int] | None:
        """Return the ``id`` of each tensor at which an autograd graph begins, from a node on.

        ``None`` where the graph has too many nodes.
        """
        kinds, edges, objects = self._graph.kinds, self._graph.edges, self._graph.objects
        met, pending = {node}, [node]
        leaves: set[int] = set()
        while pending:
            place = pending.pop()
            # ``AccumulateGrad``, a leaf's node, has the tensor as ``variable``:
            # https://docs.pytorch.org/docs/stable/notes/autograd.html
            if name_class(type(objects[place])) == "AccumulateGrad":
                leaves.update(id(objects[e]) for e in edges[place] if kinds[e] is Kind.TENSOR)
            following = {edge for edge in edges[place] if kinds[edge] is Kind.NODE} - met
            met |= following
            pending += following
            # To follow so many nodes takes some milliseconds.
            if len(met) > 5000:
                return None
        return frozenset(leaves)

    def _is_bounded(self, place: int) -> bool:
        """Return whether anything on the way says how many elements it keeps at most."""
        chain = self._paths.list_places(place)
        for part in chain:
            if part not in self._bounds:
                self._bounds[part] = _says_bound(self._graph.objects[part])
        return any(self._bounds[part] for part in chain)


def fold(steps: Steps) -> str:
    """Return a path as text, with ``[…]`` for all indexes, and steps that repeat named once.

    Example:
        ``node.next.next.x`` becomes ``node.next.x``, ``losses[3]`` becomes ``losses[…]``, and
        ``root.children[0].children[4].state`` becomes ``root.children[…].state``.
    """
    texts: list[str] = []
    for step in steps:
        is_displayed = re.fullmatch(r"Out\[.*\]", step.text)
        texts.append("Out[…]" if is_displayed else open_index(step.text))
        # As many as three repeat together, as those of a tree: ``.children[…]``.
        for n in range(1, 4):
            if texts[-n:] == texts[-2 * n : -n]:
                del texts[-n:]
                break
    return "".join(texts)


def _cut_at_graph(steps: Steps) -> tuple[PathStep, ...]:
    """Return the steps up to the autograd graph: what is where in it says nothing to a person."""
    for number, step in enumerate(steps):
        if step.kind is StepKind.GRAPH:
            return steps[: number + 1]
    return steps


def _says_bound(target: object) -> bool:
    cls = type(target)
    if is_a(target, deque):
        return _read_maxlen(target) is not None
    if cls is CACHE_TYPE:
        return _read_cache_info(target).maxsize is not None
    attributes = read_attributes(target)
    if attributes is None or cls is FunctionType:
        return False
    # Attributes by which a class of the user's says how many elements it keeps at most.
    names = ("capacity", "max_size", "maxsize", "maxlen", "buffer_size", "size_limit", "size")
    sizes = (dict.get(attributes, name) for name in names)
    # A queue without a limit says 0.
    return any(type(size) is int and size > 0 for size in sizes)


# -- What modules keep -----------------------------------------------------------------------------


class ModuleContents:
    """What imported modules keep, as far as it may grow."""

    def __init__(self) -> None:
        #: The number of elements that each container of a library had when it was first seen.
        self._sizes: dict[tuple[str, str], int] = {}

    def note_sizes(self) -> None:
        """Note how many elements those containers of libraries have that were not seen before."""
        self._list_added({})

    def enter(
        self, graph: Graph, namespace: Mapping[str, object], *, with_libraries: bool
    ) -> list[Root]:
        """Enter and walk what modules keep; return the roots of it.

        The graph was walked from the user's names. To look at libraries takes 25 ms.
        """
        own = dict(_list_own_modules(namespace))
        found = [
            (f"{name}.{key}", value)
            for name, module in own.items()
            for key, value in list_items(read_namespace(module))
            if type(key) is str
        ]
        found += self._list_added(own) if with_libraries else []
        places = ((word, graph.add_root(target)) for word, target in found)
        roots = [Root(place, word, "module") for word, place in places if place is not None]
        graph.walk()
        return roots

    def _list_added(self, own: Mapping[str, ModuleType]) -> list[tuple[str, object]]:
        """Return what modules other than the user's have added, each with its container's name."""
        found: list[tuple[str, object]] = []
        # The ids of the classes of containers whose last elements are those that were added last: a
        # user's metaclass may have a hash of its own, or none.
        tables = set(map(id, (dict, OrderedDict, defaultdict)))
        containers = tables | {id(list), id(deque)}
        for name, module in list(sys.modules.items()):
            if type(name) is not str or type(module) is not ModuleType or name in own:
                continue
            if MACHINERY.fullmatch(name):
                continue
            for key, container in list_items(read_namespace(module)):
                cls = id(type(container))
                if cls in containers and type(key) is str:
                    n_known = self._sizes.setdefault((name, key), len(container))
                    if len(container) > n_known:
                        elements = list(dict.values(container) if cls in tables else container)
                        found += [(f"{name}.{key}[…]", element) for element in elements[n_known:]]
        return found


def _list_own_modules(namespace: Mapping[str, object]) -> Iterator[tuple[str, ModuleType]]:
    """Yield the modules that are no libraries, from those that the notebook uses on."""
    pending: list[object] = list(namespace.values())
    met: set[str] = set()
    while pending:
        target = pending.pop()
        name: object = None
        if is_a(target, ModuleType):
            name = dict.get(read_namespace(target), "__name__")
        elif type(target) is FunctionType:
            name = dict.get(target.__globals__, "__name__")
        elif is_a(target, type):
            name = read_class_attribute(target, "__module__")
        if type(name) is not str or name in met:
            continue
        met.add(name)
        module = sys.modules.get(name)
        if not is_a(module, ModuleType) or MACHINERY.fullmatch(name):
            continue
        attributes = read_namespace(module)
        file = dict.get(attributes, "__file__")
        if type(file) is str and not is_library(file):
            yield name, module
            pending += [value for _, value in list_items(attributes)]


# -- What has grown between two surveys ------------------------------------------------------------

#: Number of keys of one dictionary, and of parts of one container, beyond which they are no part of
#: a holder's name: a cache gets ever new ones.
_N_KEYS = 8


@dataclass(frozen=True, slots=True)
class Gain:
    """A group of storages, and how many bytes and storages it has gained.

    ``parts`` are the groups in one container that were added up: ``items[…].out``, ``items[…].x``.
    """

    group: Group
    n_bytes: int
    n_storages: int
    parts: tuple[Gain, ...] = ()

    def is_of_most(self, n_steps: int) -> bool:
        """Return whether a storage was gained in most of the steps between the two surveys."""
        return self.n_storages >= 0.5 * n_steps


def find_gains(
    before: Survey | None, after: Survey | None, device: str, grown_bytes: int
) -> list[Gain]:
    """Return the holders that explain a growth, the one that has gained the most first.

    What says how much it keeps at most is left out: it is meant to fill up. Without an earlier
    survey nothing is known.

    Returns:
        The holders; none if they have gained less than half of it, or a survey was cut short.
    """
    if before is None or after is None or not (before.is_complete and after.is_complete):
        return []
    gains = _list_gains(before, after, device)
    if sum(gain.n_bytes for gain in gains) < 0.5 * grown_bytes:
        return []
    # A holder that has gained less than a fifth of it is not reported beside others.
    least = max(MIN_GROWTH_BYTES, 0.2 * grown_bytes)
    large = [gain for gain in gains if gain.n_bytes >= least]
    return [gain for gain in _join_parts(_join_graphs(large or gains)) if gain.n_bytes >= least]


def make_holders(gains: Iterable[Gain], n_times: int = 1) -> tuple[LeakHolder, ...]:
    """Return what has grown over ``n_times`` runs or steps, with the bytes of one of them."""
    parts = [part for gain in gains for part in gain.parts or (gain,)]
    return tuple(
        LeakHolder(
            path=part.group.holder,
            each_bytes=part.n_bytes // n_times,
            n_storages=max(1, round(part.n_storages / n_times)),
            tensor=part.group.tensor,
            in_graph=part.group.in_graph,
            in_model=part.group.in_model,
            row=part.group.row,
            container=part.group.container,
            module=part.group.module,
            slice_bytes=part.group.slice_bytes,
            storage_bytes=part.group.largest_bytes,
        )
        for part in sorted(parts, key=lambda part: -part.n_bytes)
    )


def _list_gains(before: Survey, after: Survey, device: str) -> list[Gain]:
    """Return what holds more than before; the many keys of a dictionary are one holder."""
    both = {**before.groups, **after.groups}.values()
    are_known = before.has_libraries and after.has_libraries
    groups = [
        group
        for group in both
        if group.device == device and not group.is_bounded and (are_known or not group.in_library)
    ]
    by_holder = {group.holder: group for group in groups}
    changes: dict[str, tuple[int, int]] = {}
    for group in groups:
        key = device, group.holder
        was, now = before.groups.get(key), after.groups.get(key)
        n_bytes = (0 if now is None else now.n_bytes) - (0 if was is None else was.n_bytes)
        n_storages = (0 if now is None else now.n_storages) - (0 if was is None else was.n_storages)
        # A loop's variable holds an element of what the loop went through.
        holder = group.element if group.element in by_holder else group.holder
        known_bytes, n_known = changes.get(holder, (0, 0))
        changes[holder] = known_bytes + n_bytes, n_known + n_storages
    by_pattern: dict[str, list[Gain]] = {}
    for holder, change in changes.items():
        by_pattern.setdefault(KEY.sub("[…]", holder), []).append(Gain(by_holder[holder], *change))
    gains = []
    for pattern, members in by_pattern.items():
        gains += [_join(pattern, members)] if len(members) > _N_KEYS else members
    return [gain for gain in gains if gain.n_bytes > 0]


def _join(holder: str, members: Sequence[Gain]) -> Gain:
    largest = max(members, key=lambda gain: gain.group.largest_bytes).group
    group = replace(
        largest,
        holder=holder,
        in_graph=any(gain.group.in_graph for gain in members),
        in_model=any(gain.group.in_model for gain in members),
    )
    n_storages = sum(gain.n_storages for gain in members)
    return Gain(group, sum(gain.n_bytes for gain in members), n_storages)


def _join_graphs(gains: Sequence[Gain]) -> list[Gain]:
    """Return one gain for a tensor and its graph: ``items[…].out's graph``."""
    found = {gain.group.holder: gain for gain in gains}
    for gain in gains:
        graph = f"{gain.group.holder}'s graph"
        if graph in found:
            found[graph] = _join(graph, [found[graph], found.pop(gain.group.holder)])
    return list(found.values())


def _join_parts(gains: Sequence[Gain]) -> list[Gain]:
    """Return one gain for all whose elements lie in the same container, the most first."""
    parts: dict[str, list[Gain]] = {}
    for gain in gains:
        begin, index, _ = gain.group.holder.partition("[…]")
        parts.setdefault(begin + index, []).append(gain)
    joined = []
    for container, members in parts.items():
        gain = _join(container, members)
        # What is added as a whole has many parts, as a model has: then the container says more.
        named = tuple(members) if len(members) <= _N_KEYS else ()
        joined.append(members[0] if len(members) == 1 else replace(gain, parts=named))
    return sorted(joined, key=lambda gain: -gain.n_bytes)
