"""Find and clear gradients: those that variables lead to, and those that keep themselves alive.

``zero_grad(set_to_none=True)`` clears the gradients of one model. Only leaves have gradients
between two steps of training; what a user's ``retain_grad()`` has kept on others is left alone.

After ``backward(create_graph=True)`` a parameter's gradient has a graph, and the graph the
parameter (https://github.com/pytorch/pytorch/issues/71068): they hold each other for good, in C++,
where the garbage collector sees no cycle. When the last name of such a tensor is gone, its gradient
is taken from it.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from gpumemwidget.model.releases import ReleaseStay
from gpumemwidget.ownership.graph.kinds import Kind
from gpumemwidget.ownership.graph.torch_reader import find_torch
from gpumemwidget.ownership.holdings import Account, spread_marks
from gpumemwidget.ownership.partition import find_sharing


@dataclass(frozen=True, slots=True)
class Gradients:
    """The gradients of an account, by their places in its graph."""

    #: The leaves that have one.
    owners: tuple[int, ...]
    #: The storages that go once these are ``None``.
    dying: tuple[int, ...]
    #: For each place the marks of all that reaches it then.
    marks: list[int]
    #: The gradients that stay all the same.
    stays: tuple[ReleaseStay, ...]

    def watch(self, account: Account) -> list[weakref.ref[Any]]:
        """The leaves, without holding them."""
        return [weakref.ref(account.graph.objects[place]) for place in self.owners]


def find_gradients(account: Account) -> Gradients:
    """Return what clearing each gradient that a variable leads to would do; changes nothing."""
    graph = account.graph
    cuts = _find_owners(account)
    whole = {place: graph.edges[place] for place in cuts}
    try:
        for place, grad in cuts.items():
            left = list(whole[place])
            left.remove(grad)
            graph.edges[place] = left
        marks = spread_marks(graph, account.list_root_marks()) if cuts else account.marks
    finally:
        for place, edges in whole.items():
            graph.edges[place] = edges
    dying = [place for place in graph.storages if account.marks[place] and not marks[place]]
    return Gradients(
        owners=tuple(cuts),
        dying=tuple(dying),
        marks=marks,
        stays=tuple(_list_stays(account, cuts.values(), marks)),
    )


def clear_gradients(owners: Sequence[weakref.ref[Any]]) -> int:
    """Set the gradients of these leaves to ``None``; return how many there were."""
    torch: Any = find_torch()
    if torch is None:
        return 0
    grad = torch._C.TensorBase.grad  # noqa: SLF001 - a class of the user's may have one of its own
    n_cleared = 0
    for reference in owners:
        owner = reference()
        if owner is not None and grad.__get__(owner) is not None:
            grad.__set__(owner, None)
            n_cleared += 1
    return n_cleared


def _list_leaves(account: Account) -> Iterator[tuple[int, Any]]:
    """Yield the leaves that have a gradient, with these; call within ``quiet()``."""
    graph = account.graph
    for place, kind in enumerate(graph.kinds):
        if kind is not Kind.TENSOR or graph.grads.isdisjoint(graph.edges[place]):
            continue
        # The gradient among the edges may be one that this is a view of.
        parts = graph.reader.read_tensor(graph.objects[place])
        if parts.grad_fn is None and parts.grad is not None:
            yield place, parts.grad


def _find_owners(account: Account) -> dict[int, int]:
    """Return the leaves with a gradient that a name leads to, and the places of these."""
    names = 0
    for row in account.rows.values():
        names |= row.mark if row.root == "name" else 0
    with account.graph.reader.quiet():
        return {
            place: found
            for place, grad in _list_leaves(account)
            if account.marks[place] & names and (found := account.graph.find(grad)) is not None
        }


def _list_stays(
    account: Account, grads: Iterable[int], marks: Sequence[int]
) -> Iterator[ReleaseStay]:
    """Yield the gradients that something else holds, by their devices and holders."""
    graph = account.graph
    groups: dict[tuple[str, int], set[int]] = {}
    for grad in grads:
        for place in graph.edges[grad]:
            if place in graph.storages and marks[place]:
                key = (graph.storages[place].device, marks[place])
                groups.setdefault(key, set()).add(place)
    for (device, held), places in groups.items():
        found = account.sum_places(places)
        yield ReleaseStay("gradients", device, found, find_sharing(account, held))


def find_cycles(account: Account, dropped: int) -> list[weakref.ref[Any]]:
    """Return tensors that only what is dropped holds (marks), and whose gradient has a graph."""
    graph, marks = account.graph, account.marks
    with graph.reader.quiet():
        return [
            weakref.ref(graph.objects[place])
            for place, grad in _list_leaves(account)
            if marks[place]
            and not marks[place] & ~dropped
            and graph.reader.read_tensor(grad).grad_fn is not None
        ]
