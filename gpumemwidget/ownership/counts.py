"""Find holders that the walk has not seen, by counting references.

An object with more references than the walk can account for is also held by something that no name
leads to: a library's table, another thread, C++. That is how "frees" is known and not guessed. The
count of a Python object is Python's; of tensors and storages torch tells a second one, of C++.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Set
from itertools import compress
from typing import Any

from gpumemwidget.ownership.graph.hidden_holders import PARAMETER_REFS
from gpumemwidget.ownership.graph.kinds import Kind
from gpumemwidget.ownership.graph.walk import Graph, find_scope

_CHECK_EVERY = 512


def list_held_elsewhere(
    graph: Graph,
    root_refs: dict[int, int],
    among: Iterable[int] | None = None,
) -> list[int]:
    """Return the places that something else holds too, which the walk has not seen.

    Args:
        graph: the walk's result; nothing else of ours may hold its objects.
        root_refs: for each place, how many references the roots have to it.
        among: only these places; all where they are not given.
    """
    leads = graph.flag_reaching_memory()
    places = list(compress(range(len(leads)), leads))
    if among is not None:
        places = [place for place in among if leads[place]]
    if graph.unseen:
        places = [place for place in places if place not in graph.unseen]
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
    """Return the number of references to a tensor or storage that nothing known accounts for."""
    reader = graph.reader
    if kind is Kind.TENSOR:
        users, holds = reader.count_tensor_users(graph.objects[place]), reader.cpp_holds_tensor
    else:
        users, holds = reader.count_storage_users(graph.objects[place]), reader.cpp_holds_storage
    if holds and users > 1:
        excess -= 1
    unseen = users - 1 - graph.cpp_refs[place]
    if unseen > 0:
        unseen -= _count_view_refs(graph, place, kind)
        if unseen in _list_reducers_refs(graph, place, kind):
            unseen = 0
    return max(excess, unseen)


def _list_reducers_refs(graph: Graph, place: int, kind: Kind) -> Set[int]:
    """Return the numbers of references that a reducer may have to a tensor or storage."""
    if kind is Kind.STORAGE:
        on = graph.tensors_on.get(place, ())
        n_views = sum(each in graph.bucket_views for each in on)
        # By a second view for each gradient; by the whole bucket, where that was not met.
        return {n_views + (len(on) == n_views)} if place in graph.buckets else set()
    if place in graph.bucket_views:
        return {1}
    if (views := graph.views_of.get(place)) and graph.bucket_views.issuperset(views):
        # The whole bucket: the second views have it too, and the reducer.
        return {len(views) + 1, len(views) + 2}
    if graph.reduced.get(place) != 1:
        return set()
    # The reducer holds the node that accumulates the gradient; a graph may lead there too.
    has_node = bool(graph.saved_by.get(place))
    return PARAMETER_REFS if has_node else {n_refs + 1 for n_refs in PARAMETER_REFS}


def _count_view_refs(graph: Graph, place: int, kind: Kind) -> int:
    """Count the references of known views to a tensor or storage, besides those as their base."""
    reader, objects = graph.reader, graph.objects
    bases = (place,) if kind is Kind.TENSOR else graph.tensors_on.get(place, ())
    n_refs = 0
    with reader.quiet():
        for base in bases:
            for view in graph.views_of.get(base, ()):
                of_base, of_storage = reader.count_view_refs(objects[view], objects[base])
                n_refs += of_base if kind is Kind.TENSOR else of_storage
    return n_refs


def _allow_for_own(graph: Graph, place: int, kind: Kind, excess: int) -> int:
    """Return the excess without the references that are known to exist."""
    target: Any = graph.objects[place]
    if kind is Kind.CLASS:
        return excess - graph.kind_finder.count_own_refs(target)
    if kind is Kind.FUNCTION and excess <= graph.n_unpackings.get(find_scope(target.__code__), 0):
        # Torch tells the hook that unpacks, and not the one that packed and lives as long: it is
        # defined in the same scope.
        return 0
    if kind is Kind.HIDDEN and graph.hidden.is_script(type(target)):
        # Its own methods hold it.
        return 0
    if kind is Kind.NODE and graph.cpp_refs[place]:
        # The node of a function written in Python always owned its context.
        return excess - (graph.reader.cpp_holds_node or place in graph.contexts)
    return excess


def list_outside(graph: Graph) -> list[Any]:
    """Return the tensors and autograd nodes that the walk has not met (100 ms on a big heap)."""
    living = graph.kind_finder.list_living(Kind.NODE, Kind.TENSOR)
    return [each for each in living if graph.find(each) is None]


def needs_outside(graph: Graph) -> bool:
    """Return whether there are autograd nodes, whose holders are counted in C++ alone."""
    kinds = compress(graph.kinds, graph.flag_reaching_memory())
    return any(kind is Kind.NODE for kind in kinds)


def list_seen_from_outside(graph: Graph, outside: Iterable[object]) -> set[int]:
    """Return the places of autograd nodes that tensors or nodes outside of the walk lead to."""
    reader, find = graph.reader, graph.kind_finder.find
    leads = graph.flag_reaching_memory()
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
                following, _, _ = reader.read_node(each)
                graph.allowance.note(each, following)
                pending.extend(following)
            elif find(type(each)) is Kind.TENSOR:
                node = reader.read_tensor(each).grad_fn
                if node is not None:
                    pending.append(node)
            met[id(each)] = each
    return found
