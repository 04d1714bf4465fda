"""Take stock of who holds how much, in groups that can be compared with those of later on.

Storages whose paths differ in indexes alone are one group: ``losses[3]'s graph`` and ``losses[4]'s
graph`` are ``losses[…]'s graph``. A group that has gained members between two surveys is what
grows. (memlab and LeakCanary put traces of retained objects together likewise.)
"""

from __future__ import annotations

import functools
import re
from collections import deque
from dataclasses import dataclass
from types import FunctionType
from typing import Any

from gpumemwidget.errors import forgets_frames
from gpumemwidget.ownership.graph.kinds import Kind
from gpumemwidget.ownership.graph.objects import is_a, name_class, paused_collector, read_attributes
from gpumemwidget.ownership.graph.torch_reader import TorchReader, find_torch
from gpumemwidget.ownership.holdings import ELSEWHERE, Account, Depth, take_account
from gpumemwidget.ownership.labels import UNSEEN, PathStep, StepKind
from gpumemwidget.ownership.paths import Paths, Steps
from gpumemwidget.ownership.shell import Shell

#: A key that is part of a holder's name; every other index differs between its elements.
KEY = re.compile(r'\["[^"\d]*"\]', re.ASCII)
_OUT = re.compile(r"Out\[.*\]")

#: Attributes by which a class of the user's says how many elements it keeps at most.
_CAPACITIES = ("capacity", "max_size", "maxsize", "maxlen", "buffer_size", "size_limit", "size")

#: Maximum number of steps that repeat together, as those of a tree: ``.children[…]``.
_MAX_PERIOD = 3

#: Maximum number of nodes of a graph whose leaves are searched for: some milliseconds.
_MAX_NODES = 5000

_CACHE_TYPE = type(functools.lru_cache(lambda: None))
_read_cache_info: Any = vars(_CACHE_TYPE)["cache_info"]
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
    #: The ``id`` of each tensor, as a parameter, at which the graph that keeps the largest storage
    #: begins; ``None`` where no graph keeps it, or too large a one.
    leaves: frozenset[int] | None = None


#: A group's device and holder.
Key = tuple[str, str]


@dataclass(frozen=True, slots=True)
class Survey:
    """The groups of one moment.

    Attributes:
        groups: by device and holder.
        is_complete: whether the walk came to its end.
    """

    groups: dict[Key, Group]
    is_complete: bool


@forgets_frames
def take_survey(shell: Shell, *, budget_s: float, depth: Depth) -> Survey | None:
    """Return the groups of storages that are held now; ``None`` where none can be told.

    That is where torch is not imported, and where as many autograd nodes were looked at as may be:
    a survey without graphs would be compared with none.

    Objects in unreachable cycles are left out: the garbage collector frees them.

    Args:
        shell: the running IPython.
        budget_s: seconds after which the walk stops.
        depth: how thoroughly holders are searched for; ``running`` in a cell that runs.
    """
    torch = find_torch()
    with paused_collector():
        if torch is None or not TorchReader(torch).node_limit.has_room():
            return None
        account = take_account(shell, budget_s=budget_s, depth=depth)
        if account is None:
            return None
        return Survey(_Grouping(account).groups, account.graph.is_complete)


class _Grouping:
    """Puts the storages of an account into groups."""

    def __init__(self, account: Account) -> None:
        self.groups: dict[Key, Group] = {}
        self._account = account
        self._graph = account.graph
        self._paths: Paths = account.find_paths()
        self._modules = set(self._paths.modules)
        self._bounds: dict[int, bool] = {}
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
            group.row = root.word if root.word in rows else ""
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

    def _find_leaves(self, place: int) -> frozenset[int] | None:
        kinds, edges = self._graph.kinds, self._graph.edges
        # The outermost tensor's: it leads to all that the graph begins with.
        for each in reversed(self._paths.list_places(place)):
            if kinds[each] in (Kind.TENSOR, Kind.NODE):
                for part in (each, *edges[each]):
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
            following = {each for each in edges[place] if kinds[each] is Kind.NODE} - met
            met |= following
            pending += following
            if len(met) > _MAX_NODES:
                return None
        return frozenset(leaves)

    def _is_bounded(self, place: int) -> bool:
        """Return whether anything on the way says how many elements it keeps at most."""
        chain = self._paths.list_places(place)
        for each in chain:
            if each not in self._bounds:
                self._bounds[each] = _says_bound(self._graph.objects[each])
        return any(self._bounds[each] for each in chain)


def fold(steps: Steps) -> str:
    """Return a path as text, with ``[…]`` for each index, and steps that repeat named once.

    Example:
        ``node.next.next.x`` becomes ``node.next.x``, ``losses[3]`` becomes ``losses[…]``, and
        ``root.children[0].children[4].state`` becomes ``root.children[…].state``.
    """
    texts: list[str] = []
    for step in steps:
        texts.append(_fold_step(step.text))
        for n in range(1, _MAX_PERIOD + 1):
            if texts[-n:] == texts[-2 * n : -n]:
                del texts[-n:]
                break
    return "".join(texts)


def _fold_step(text: str) -> str:
    if _OUT.fullmatch(text):
        return "Out[…]"
    return "[…]" if text.startswith("[") and not KEY.fullmatch(text) else text


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
    if cls is _CACHE_TYPE:
        return _read_cache_info(target).maxsize is not None
    attributes = read_attributes(target)
    if attributes is None or cls is FunctionType:
        return False
    sizes = (dict.get(attributes, name) for name in _CAPACITIES)
    # A queue without a limit says 0.
    return any(type(size) is int and size > 0 for size in sizes)
