"""Gradients that the notebook's names lead to, and what goes once they are set to ``None``.

``zero_grad(set_to_none=True)`` does the same for one model. Only leaves have them between two steps
of training; what a user's ``retain_grad()`` has kept on others is left alone.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from gpumemwidget.owners.account import ELSEWHERE, Account, spread_marks
from gpumemwidget.owners.kinds import Kind
from gpumemwidget.owners.storages import find_torch
from gpumemwidget.units import format_bytes

__all__ = ["Gradients", "clear_gradients", "find_gradients"]

_MOST_NAMED = 4


@dataclass(frozen=True, slots=True)
class Gradients:
    """The gradients of an account, by their places in its graph."""

    #: The leaves that have one.
    owners: tuple[int, ...]
    #: The storages that go once these are ``None``.
    dying: tuple[int, ...]
    #: For each place the marks of all that reaches it then.
    marks: list[int]
    #: Sentences on those that stay all the same.
    remains: tuple[str, ...]

    def watch(self, account: Account) -> list[weakref.ref[Any]]:
        """The leaves, without holding them."""
        return [weakref.ref(account.graph.objects[place]) for place in self.owners]


def find_gradients(account: Account) -> Gradients:
    """What setting to ``None`` each gradient that a name leads to would do; nothing is changed."""
    graph = account.graph
    cuts = dict(_list_owners(account))
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
        remains=tuple(_describe_stays(account, cuts.values(), marks)),
    )


def clear_gradients(owners: Sequence[weakref.ref[Any]]) -> str | None:
    """Set the gradients of these leaves to ``None``; what was done, in a few words."""
    torch: Any = find_torch()
    if torch is None:
        return None
    grad = torch._C.TensorBase.grad  # noqa: SLF001 - a class of the user's may have one of its own
    n_cleared = 0
    for reference in owners:
        owner = reference()
        if owner is not None and grad.__get__(owner) is not None:
            grad.__set__(owner, None)
            n_cleared += 1
    return f"{n_cleared} gradient{'' if n_cleared == 1 else 's'}" if n_cleared else None


def _list_owners(account: Account) -> list[tuple[int, int]]:
    """The leaves with a gradient that a name leads to, and the places of these."""
    graph, reader = account.graph, account.graph.reader
    names = 0
    for row in account.rows.values():
        names |= row.mark if row.root == "name" else 0
    found: list[tuple[int, int]] = []
    with reader.quiet():
        for place, kind in enumerate(graph.kinds):
            if kind is not Kind.TENSOR or not account.marks[place] & names:
                continue
            if graph.grads.isdisjoint(graph.edges[place]):
                continue
            parts = reader.read_tensor(graph.objects[place])
            grad = None if parts.grad is None else graph.find(parts.grad)
            if parts.grad_fn is None and grad is not None:
                found.append((place, grad))
    return found


def _describe_stays(account: Account, grads: Iterable[int], marks: Sequence[int]) -> list[str]:
    """A sentence for each of the devices and holders of gradients that something else holds."""
    graph = account.graph
    groups: dict[tuple[str, int], set[int]] = {}
    for grad in grads:
        for place in graph.edges[grad]:
            if place in graph.storages and marks[place]:
                key = (graph.storages[place].device, marks[place])
                groups.setdefault(key, set()).add(place)
    sentences = []
    for (device, held), places in groups.items():
        n_bytes = sum(each for _, each in account.sum_places(places))
        rows = list(account.name_holders(held))
        words = [*rows[:_MOST_NAMED], *(["more"] if len(rows) > _MOST_NAMED else [])]
        words += ["something that no variable names"] if held & ELSEWHERE else []
        sentences.append(
            f"{format_bytes(n_bytes)} of gradients on {device} stays: also held by "
            f"{' and '.join(words)}"
        )
    return sentences
