"""Take stock of who holds how much, in groups that can be compared with those of later on.

Storages whose paths differ in indexes alone are one group: ``losses[3]'s graph`` and ``losses[4]'s
graph`` are ``losses[…]'s graph``. A group that has gained members between two surveys is what
grows. (memlab and LeakCanary put traces of retained objects together likewise.)
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from types import FunctionType
from typing import Any

from gpumemwidget.errors import forgets_frames
from gpumemwidget.leaks.modules import ModuleContents
from gpumemwidget.ownership.graph.kinds import Kind
from gpumemwidget.ownership.graph.objects import (
    is_a,
    is_one_of,
    name_class,
    paused_collector,
    read_attributes,
)
from gpumemwidget.ownership.graph.torch_reader import TorchReader, find_torch
from gpumemwidget.ownership.graph.walk import Graph
from gpumemwidget.ownership.holdings import ELSEWHERE, Account, Depth, take_account
from gpumemwidget.ownership.labels import (
    CACHE_TYPE,
    UNSEEN,
    PathStep,
    StepKind,
    open_index,
    spell_steps,
)
from gpumemwidget.ownership.paths import Paths, Root, Steps
from gpumemwidget.ownership.shell import Shell

_OUT = re.compile(r"Out\[.*\]")

#: Attributes by which a class of the user's says how many elements it keeps at most.
_CAPACITIES = ("capacity", "max_size", "maxsize", "maxlen", "buffer_size", "size_limit", "size")

#: Maximum number of steps that repeat together, as those of a tree: ``.children[…]``.
_MAX_PERIOD = 3

#: Maximum number of nodes of a graph whose leaves are searched for: some milliseconds.
_MAX_NODES = 5000

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
        account = take_account(shell, budget_s=budget_s, depth=depth, enter_more=enter_modules)
        if account is None:
            return None
        groups = _Grouping(account, shell.user_ns).groups
        return Survey(groups, account.graph.is_complete, with_libraries)


class _Grouping:
    """Puts the storages of an account into groups."""

    def __init__(self, account: Account, namespace: Mapping[str, object]) -> None:
        self.groups: dict[Key, Group] = {}
        self._namespace = namespace
        self._account = account
        self._graph = account.graph
        self._paths: Paths = account.find_paths()
        self._modules = set(self._paths.modules)
        self._bounds: dict[int, bool] = {}
        self._elements = self._find_elements()
        #: The largest storage of each group.
        self._largest: dict[Key, int] = {}
        for place in account.graph.storages:
            self._add(place)
        for key, place in self._largest.items():
            self.groups[key].leaves = self._find_leaves(place)

    def _add(self, place: int) -> None:
        root = self._paths.find_root(place)
        steps = self._paths.list_steps(place)
        is_held_elsewhere = bool(self._account.marks[place] & ELSEWHERE)
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
            rows = self._account.name_holders(self._account.marks[place])
            group.largest_bytes = info.freed_bytes
            group.tensor = self._describe(place)
            group.slice_bytes = self._account.find_shown_bytes(place)
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
        rows = self._account.rows.values()
        names = {place: row.name for row in rows if row.root == "name" for place in row.places}
        ways: dict[int, Steps] = {}
        for place, edges in enumerate(self._graph.edges):
            if not self._account.marks[place] or names.keys().isdisjoint(edges):
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
            if len(met) > _MAX_NODES:
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
        texts.append("Out[…]" if _OUT.fullmatch(step.text) else open_index(step.text))
        for n in range(1, _MAX_PERIOD + 1):
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
    sizes = (dict.get(attributes, name) for name in _CAPACITIES)
    # A queue without a limit says 0.
    return any(type(size) is int and size > 0 for size in sizes)
