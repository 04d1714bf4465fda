"""Cycles that no garbage collector sees, because they lead through C++.

After ``backward(create_graph=True)`` a parameter's gradient has a graph, and the graph the
parameter (https://github.com/pytorch/pytorch/issues/71068): they hold each other for good. Nor does
``gc`` see through a node. When the last name of such a tensor is gone, its gradient is taken from
it; nobody is left to miss it.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

from gpumemwidget.owners.account import Account
from gpumemwidget.owners.kinds import Kind
from gpumemwidget.owners.storages import find_torch

__all__ = ["cut_cycles", "find_cycles"]


def find_cycles(account: Account, dropped: int) -> list[weakref.ref[Any]]:
    """Tensors that only what is dropped holds, and whose gradient has a graph.

    Args:
        account: who holds what.
        dropped: marks of what is to be dropped.
    """
    graph, reader = account.graph, account.graph.reader
    found = []
    with reader.quiet():
        for place, kind in enumerate(graph.kinds):
            marks = account.marks[place]
            if kind is not Kind.TENSOR or not marks or marks & ~dropped:
                continue
            parts = reader.read_tensor(graph.objects[place])
            if parts.grad_fn is None and any(
                reader.read_tensor(each).grad_fn is not None for each in parts.tensors
            ):
                found.append(weakref.ref(graph.objects[place]))
    return found


def cut_cycles(tensors: Sequence[weakref.ref[Any]]) -> int:
    """Take the gradients from those that are still there; how many that were."""
    torch: Any = find_torch()
    n_cut = 0
    for each in tensors:
        tensor = each()
        if tensor is not None:
            torch._C.TensorBase.grad.__set__(tensor, None)  # noqa: SLF001 - a subclass may answer otherwise
            n_cut += 1
        del tensor
    return n_cut
