"""What a name owns, beyond what it merely reaches: only that may be moved to the CPU in place.

A released model goes to the CPU although its optimizer holds the parameters too. But a released
list of losses must not take the model with it, which its autograd graphs reach; nor a released
optimizer the parameters that it trains; nor a released trainer the model that the user still calls
by a name of its own.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

from gpumemwidget.owners.account import ELSEWHERE, Account, Row
from gpumemwidget.owners.kinds import Kind, is_a, is_one_of
from gpumemwidget.owners.walk import Graph

__all__ = ["list_owned"]

#: What computes with memory, or has seen it, does not own it.
_NO_OWNERS = {Kind.NODE, Kind.FUNCTION, Kind.FRAME, Kind.CLASS}


def list_owned(account: Account, rows: Sequence[Row], *, keep: bool) -> dict[int, bool]:
    """The storages that these rows own, and whether each is part of a module or an optimizer.

    * A module owns its parameters, buffers and their gradients, whoever else names them: half a
      module on another device is broken.
    * An optimizer owns its state, and of the parameters those that no other row has.
    * Anything else owns what it refers to, save what another name is bound to.
    * Nobody owns through an autograd graph, a function or an exception.

    Args:
        account: who holds what.
        rows: the chosen rows.
        keep: the rows stay, on the CPU; then what is in them belongs to them though another name
            is bound to it, or they would be torn in two.

    Returns:
        For each storage, whether it has to stay with others on one device.
    """
    graph = account.graph
    starts = {row.places[0] for row in rows}
    foreign: set[int] = set()
    if not keep:
        foreign = {row.places[0] for row in account.rows.values() if row.root == "name"} - starts
    chosen = 0
    for row in rows:
        chosen |= row.mark
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
    """What an object owns, and whether it does so as an inseparable part."""
    graph = account.graph
    kind, target = graph.kinds[place], graph.objects[place]
    cls, reader = type(target), graph.reader
    if kind in _NO_OWNERS or is_one_of(cls, BaseException):
        return
    if kind is Kind.TENSOR:
        for part in graph.edges[place]:
            # Its storage and its gradient; of its own Python attributes, what is not another's.
            yield part, graph.kinds[part] in {Kind.TENSOR, Kind.STORAGE}
        return
    if is_one_of(cls, reader.optimizer_type):
        attributes = _read_attributes(reader.optimizer_type, target)
        state = attributes.get("state")
        if is_a(state, dict):
            # The keys are the parameters.
            yield from _find_all(graph, list(dict.values(state)))
        for part, is_part in _find_all(graph, _list_parameters(attributes.get("param_groups"))):
            if not account.marks[part] & ~(chosen | ELSEWHERE):
                yield part, is_part
        return
    if is_one_of(cls, reader.module_type):
        attributes = _read_attributes(reader.module_type, target)
        for name in ("_parameters", "_buffers", "_modules"):
            table = attributes.get(name)
            if is_a(table, dict):
                yield from _find_all(graph, list(dict.values(table)))
    for part in graph.edges[place]:
        yield part, False


def _read_attributes(base: Any, target: object) -> dict[str, object]:
    """An instance's own attributes, by its base class's descriptor: no code of its own runs."""
    attributes: dict[str, object] = vars(base)["__dict__"].__get__(target)
    return attributes


def _list_parameters(groups: object) -> list[object]:
    """What an optimizer's groups list, whatever else the user has put there."""
    found: list[object] = []
    for group in list(groups) if type(groups) is list else ():
        listed = dict.get(group, "params") if is_a(group, dict) else None
        found.extend(listed if type(listed) is list else ())
    return found


def _find_all(graph: Graph, targets: list[object]) -> Iterator[tuple[int, bool]]:
    for target in targets:
        place = graph.find(target)
        if place is not None:
            yield place, True
