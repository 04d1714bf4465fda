"""Finds what the walk has not seen, by counting references.

An object with more references than the walk can account for is also held by something that no name
leads to: a library's table, another thread, C++. That is how "frees" is known and not guessed. The
count of a Python object is Python's; of tensors and storages torch tells a second one, of C++.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from itertools import compress
from types import CodeType
from typing import Any

from gpumemwidget.owners.kinds import Kind
from gpumemwidget.owners.walk import Graph

__all__ = [
    "list_held_elsewhere",
    "list_outside",
    "list_seen_from_outside",
    "needs_outside",
]

_CHECK_EVERY = 512


def list_held_elsewhere(
    graph: Graph,
    root_refs: dict[int, int],
    *,
    since: int = 0,
    of: Iterable[int] | None = None,
) -> list[int]:
    """What leads to a storage and is also held by something that the walk has not seen.

    Args:
        graph: the walk's result; nothing else of ours may hold its objects.
        root_refs: for each place, how many references the roots have to it.
        since: only from this place on.
        of: only these places.
    """
    leads = graph.list_leads()
    if of is None:
        places = list(compress(range(since, len(leads)), leads[since:]))
    else:
        places = [place for place in of if leads[place]]
    # Exactly as many references of our own as a fresh object in a fresh list has.
    base = next(map(sys.getrefcount, [object()]))
    counts = map(sys.getrefcount, map(graph.objects.__getitem__, places))
    infos = graph.storages
    found = {place for place in places if place in infos and infos[place].is_borrowed}
    kinds, python_refs = graph.kinds, graph.python_refs
    for place, count in zip(places, counts, strict=True):
        excess = count - base - python_refs[place]
        if excess and place in root_refs:
            excess -= root_refs[place]
        kind = kinds[place]
        if kind is Kind.TENSOR or kind is Kind.STORAGE:
            excess = _count_users(graph, place, kind, excess)
        elif excess > 0 and kind is not Kind.PLAIN:
            excess = _allow_for_own(graph, place, kind, excess)
        if excess > 0:
            found.add(place)
    return sorted(found)


def _count_users(graph: Graph, place: int, kind: Kind, excess: int) -> int:
    """How many references to a tensor or storage are not accounted for, those of C++ too."""
    reader = graph.reader
    if kind is Kind.TENSOR:
        users, holds = reader.count_tensor_users(graph.objects[place]), reader.cpp_holds_tensor
    else:
        users, holds = reader.count_storage_users(graph.objects[place]), reader.cpp_holds_storage
    if users is None:
        return excess
    if holds and users > 1:
        excess -= 1
    return max(excess, users - 1 - graph.cpp_refs[place])


def _allow_for_own(graph: Graph, place: int, kind: Kind, excess: int) -> int:
    """How many references are left without those that are known to be there."""
    if kind is Kind.CLASS:
        return excess - graph.kind_finder.count_own_refs(graph.objects[place])
    if kind is Kind.FUNCTION and excess in _list_unpackings(graph, place):
        # The hook that packed is held with the one that unpacks, and torch tells only the latter.
        return 0
    if kind is Kind.NODE and graph.cpp_refs[place]:
        # The node of a function written in Python always owned its context.
        return excess - (graph.reader.cpp_holds_node or place in graph.contexts)
    return excess


def _list_unpackings(graph: Graph, place: int) -> list[int]:
    """How often each hook unpacks that was defined beside this function."""
    code: Any = graph.objects[place].__code__  # type: ignore[attr-defined]  # a function, by its kind
    return [
        count
        for other, count in graph.n_unpackings.items()
        if (other.co_filename, _name_scope(other)) == (code.co_filename, _name_scope(code))
    ]


def _name_scope(code: CodeType) -> str:
    # Python 3.10 tells only the function's own name.
    return str(getattr(code, "co_qualname", "")).rpartition(".")[0]


def list_outside(graph: Graph, *kinds: Kind) -> list[Any]:
    """All of these kinds that Python can see and the walk has not met (some 100 ms on a big heap).

    Tensors and autograd nodes, where no kinds are given.
    """
    living = graph.kind_finder.list_living(*(kinds or (Kind.NODE, Kind.TENSOR)))
    return [each for each in living if graph.find(each) is None]


def needs_outside(graph: Graph, *, is_thorough: bool) -> bool:
    """Whether what holds the graph's objects can't be told by counts alone.

    Args:
        graph: the walk's result.
        is_thorough: autograd nodes matter too, which are counted in C++ alone.
    """
    if not graph.reader.can_count:
        return True
    leads = graph.list_leads()
    kinds = compress(graph.kinds, leads)
    return is_thorough and any(kind is Kind.NODE for kind in kinds)


def list_seen_from_outside(graph: Graph, outside: Iterable[object]) -> set[int]:
    """What a tensor or node outside of the walk leads to, where no count can be read.

    Autograd nodes are counted in C++ alone, and older releases of torch do not tell how many users
    a tensor or a storage has: then all others that Python can see are followed.

    Args:
        graph: the walk's result.
        outside: what ``list_outside`` gave.
    """
    reader, find = graph.reader, graph.kind_finder.find
    can_count = reader.can_count
    leads = graph.list_leads()
    nodes = {place for place, kind in enumerate(graph.kinds) if kind is Kind.NODE and leads[place]}
    pending = [each for each in outside if graph.find(each) is None]
    met: dict[int, object] = {}
    found: set[int] = set()
    if graph.is_late():
        # Then they may not even be listed. Not to know is to be careful.
        return nodes
    with reader.quiet():
        while pending:
            if len(met) % _CHECK_EVERY == 0 and graph.is_late():
                return found | nodes
            each = pending.pop()
            place = graph.find(each)
            if place is not None:
                found.add(place)
            elif id(each) in met:
                continue
            elif find(type(each)) is Kind.NODE:
                if not graph.allowance.may_read(each):
                    return found | nodes
                following, saved, _ = reader.read_node(each)
                graph.allowance.note(each, following)
                pending.extend(following if can_count else [*following, *saved])
            elif find(type(each)) is Kind.TENSOR:
                parts = reader.read_tensor(each)
                more: tuple[object, ...] = (parts.grad_fn,)
                if not can_count:
                    more = (parts.grad_fn, parts.storage, *parts.tensors)
                pending.extend(other for other in more if other is not None)
            met[id(each)] = each
    return found
