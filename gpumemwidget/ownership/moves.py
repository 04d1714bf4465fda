"""Decide which storages the chosen rows own, and whether each can move to another device in place.

What somebody keeps can't be dropped, but its device memory can still go: each tensor on the storage
gets other memory through ``tensor.data``, and stays the same object.

Only what a row owns may be moved, not all that it reaches. A released model goes to the CPU
although its optimizer holds the parameters too. But a released list of losses must not take the
model along, which its autograd graphs reach; nor a released optimizer the parameters that it
trains; nor a released trainer the model that has a name of its own.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from gpumemwidget.model.devices import HOST
from gpumemwidget.model.releases import Reason, ReasonKind
from gpumemwidget.ownership.graph.kinds import Kind
from gpumemwidget.ownership.graph.objects import is_a, is_one_of, read_attribute
from gpumemwidget.ownership.graph.walk import Graph
from gpumemwidget.ownership.holdings import ELSEWHERE, Account, Row, join_marks


def list_owned(account: Account, rows: Sequence[Row], *, keep: bool) -> dict[int, bool]:
    """Return the storages that these rows own, and whether each is part of a module or optimizer.

    * A module owns its parameters, buffers and their gradients, whoever else names them: half a
      module on another device is broken.
    * An optimizer owns its state, and of the parameters those that no other row has.
    * Anything else owns what it refers to, save what another name is bound to.
    * Nobody owns through an autograd graph, a function or an exception.

    Where the rows stay, on the CPU (``keep``), what is in them belongs to them though another name
    is bound to it, or they would be torn in two.
    """
    graph = account.graph
    starts = {row.places[0] for row in rows}
    foreign: set[int] = set()
    if not keep:
        foreign = {row.places[0] for row in account.rows.values() if row.root == "name"} - starts
    chosen = join_marks(row.mark for row in rows)
    owned: dict[int, bool] = {}
    met = dict.fromkeys(starts, False)
    pending = deque(starts)
    while pending:
        place = pending.popleft()
        if graph.kinds[place] is Kind.STORAGE:
            owned[place] = met[place]
            continue
        is_joint = met[place] or is_one_of(
            type(graph.objects[place]), graph.reader.module_type, graph.reader.optimizer_type
        )
        for target, is_part in _list_parts(account, place, chosen):
            # Once met by a lesser way, it is followed again where it turns out to be a part.
            is_new = target not in met or (is_joint and not met[target])
            if is_new and (is_part or target in met or target not in foreign):
                met[target] = is_joint
                pending.append(target)
    return {place: is_joint for place, is_joint in owned.items() if place in graph.storages}


def _list_parts(account: Account, place: int, chosen: int) -> Iterator[tuple[int, bool]]:
    """Yield what an object owns, and whether as an inseparable part."""
    graph = account.graph
    kind, target = graph.kinds[place], graph.objects[place]
    cls, reader = type(target), graph.reader
    # These compute with memory, or have seen it, and do not own it.
    is_code = kind in {Kind.NODE, Kind.FUNCTION, Kind.FRAME, Kind.CLASS}
    if is_code or is_one_of(cls, BaseException):
        return
    if kind is Kind.TENSOR:
        for part in graph.edges[place]:
            # A tensor's storage and gradient, and its own Python attributes.
            yield part, graph.kinds[part] in {Kind.TENSOR, Kind.STORAGE}
        return
    if is_one_of(cls, reader.optimizer_type):
        state = read_attribute(target, "state")
        # The keys are the parameters.
        values = list(dict.values(state)) if is_a(state, dict) else []
        yield from ((part, True) for part in _find_all(graph, values))
        for part in graph.find_tensors([read_attribute(target, "param_groups")]):
            if not account.marks[part] & ~(chosen | ELSEWHERE):
                yield part, True
        return
    if is_one_of(cls, reader.module_type):
        for name in ("_parameters", "_buffers", "_modules"):
            table = read_attribute(target, name)
            if is_a(table, dict):
                yield from ((part, True) for part in _find_all(graph, dict.values(table)))
    for part in graph.edges[place]:
        yield part, False


def _find_all(graph: Graph, targets: Iterable[object]) -> list[int]:
    return [place for place in map(graph.find, list(targets)) if place is not None]


@dataclass(slots=True)
class Move:
    """One storage and the tensors that are to live on without it."""

    #: The storage's place in the account's graph.
    place: int
    tensors: list[Any]
    device: str = HOST  #: the new one
    #: Why it can't be moved; ``None`` where it can.
    obstacle: Reason | None = None


def find_moves(
    account: Account,
    rows: Sequence[Row],
    places: Sequence[int],
    owned: Mapping[int, bool],
    *,
    dropped: int = 0,
) -> tuple[dict[int, Move], list[int]]:
    """Return how storages would be moved to the host, or why not; nothing is changed.

    A tensor that nothing but the ``dropped`` marks holds stays as it is and goes with them. If one
    part of a module or an optimizer can't be moved, none of its parts is.

    Args:
        account: the walk.
        rows: the rows that are released or restored.
        places: the storages.
        owned: what ``list_owned`` found for the rows.
        dropped: the marks of what is dropped.

    Returns:
        The moves by storage, and for storages that are moved together or not at all the marks of
        the rows that reach them.
    """
    with account.graph.reader.quiet():
        inner = _find_inner(account.graph) if places else set()
        moves = {place: _find_move(account, place, dropped, inner) for place in places}
    chosen = join_marks(row.mark for row in rows)
    units = join_overlapping([account.marks[place] & chosen for place in moves])
    for unit in units:
        parts = [
            move
            for place, move in moves.items()
            if owned.get(place) and account.marks[place] & unit
        ]
        why = next((move.obstacle for move in parts if move.obstacle), None)
        if why is not None:
            for move in parts:
                move.obstacle = move.obstacle or replace(why, is_of_another=True)
    return moves, units


def join_overlapping(marks: Sequence[int]) -> list[int]:
    """Return the sets of rows that are connected by shared memory, as marks."""
    units: list[int] = []
    for mark in dict.fromkeys(marks):
        unit, apart = mark, []
        for other in units:
            if other & mark:
                unit |= other
            else:
                apart.append(other)
        units = [*apart, unit]
    return units


def _find_move(account: Account, place: int, dropped: int, inner: Container[int]) -> Move:
    graph = account.graph
    kept = [held for held in graph.tensors_on.get(place, ()) if account.marks[held] & ~dropped]
    move = Move(place, [graph.objects[held] for held in kept])
    obstacle = _find_holder_in_the_way(account, place, kept, dropped, inner)
    n_users = graph.reader.count_storage_users(graph.objects[place])
    if obstacle is None and n_users - 1 - graph.cpp_refs[place]:
        obstacle = ReasonKind.UNSEEN
    for tensor in move.tensors:
        obstacle = obstacle or _find_obstacle(account, tensor)
    move.obstacle = Reason(obstacle) if obstacle else None
    return move


def _find_holder_in_the_way(
    account: Account, place: int, kept: Sequence[int], dropped: int, inner: Container[int]
) -> ReasonKind | None:
    """Return why the holders of a storage's tensors do not let them move; ``None`` if they do."""
    graph = account.graph
    rows = [row for row in account.rows.values() if row.places[0] == place]
    if graph.python_refs[place] or any(not row.frees_marks & dropped for row in rows):
        return ReasonKind.STORAGE_HELD
    for held in kept:
        if any(account.marks[node] & ~dropped for node in graph.saved_by.get(held, ())):
            return ReasonKind.SAVED
        if held in inner:
            return ReasonKind.IMMOVABLE
        if _count_unseen(graph, held, place) > 0:
            return ReasonKind.UNSEEN
    return None


def _find_inner(graph: Graph) -> set[int]:
    """Return the tensors inside of those with ``__torch_dispatch__``."""
    reader = graph.reader
    inner: set[int] = set()
    if not reader.has_met_dispatched:
        return inner
    pending = [
        place
        for place, kind in enumerate(graph.kinds)
        if kind is Kind.TENSOR and reader.is_dispatched(type(graph.objects[place]))
    ]
    while pending:
        for part in graph.edges[pending.pop()]:
            is_tensor = graph.kinds[part] is Kind.TENSOR
            is_container = type(graph.objects[part]) in {dict, list, tuple}
            if part not in inner and (is_tensor or is_container):
                inner.add(part)
                pending.append(part)
    return inner


def _find_obstacle(account: Account, tensor: Any) -> ReasonKind | None:
    reader = account.graph.reader
    if reader.is_dispatched(type(tensor)):
        return ReasonKind.IMMOVABLE
    parts = reader.read_tensor(tensor)
    if parts.storage is None or not reader.is_plain(tensor):
        return ReasonKind.IMMOVABLE
    if parts.is_computed:
        return ReasonKind.COMPUTED
    torch = reader.torch
    # Torch knows its own kinds of devices there, and none that an extension brings.
    can_take = getattr(torch, "_has_compatible_shallow_copy_type", None)
    if can_take is not None and not can_take(tensor, torch.empty(0, device="cpu")):
        return ReasonKind.IMMOVABLE
    return None


def _count_unseen(graph: Graph, tensor_place: int, place: int) -> int:
    """Return how many C++ references to a tensor nothing known accounts for."""
    tensor = graph.objects[tensor_place]
    unseen = graph.reader.count_tensor_users(tensor) - 1 - graph.cpp_refs[tensor_place]
    if unseen > 0:
        # Some views (a conjugate's) refer to their base twice.
        views = (graph.objects[one] for one in graph.tensors_on[place])
        found = [graph.reader.read_tensor(view).tensors for view in views]
        unseen -= sum(other is tensor for parts in found for other in parts)
    return unseen
