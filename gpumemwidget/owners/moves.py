"""Moves storages to the CPU in place, for whoever holds them.

What somebody keeps can't be dropped, but its device memory can still go: each tensor on the storage
is given CPU memory in its stead, through ``tensor.data``. The tensor stays the same object, so a
parameter stays in its module and its optimizer. There is one CPU storage for each old one, and
every tensor keeps its offset, size and strides in it: views stay views, and tied weights tied.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from gpumemwidget.owners.account import Account
from gpumemwidget.owners.counts import list_outside_tensors
from gpumemwidget.owners.kinds import name_class

__all__ = ["Move", "carry_out", "find_move", "find_outside"]


@dataclass(slots=True)
class Move:
    """One storage and the tensors that are to live on without it."""

    #: The storage's place in the account's graph.
    place: int
    tensors: list[Any]
    #: Why it can't be moved, to complete "… stays: "; ``None`` where it can.
    obstacle: str | None = None


def find_outside(account: Account, places: Sequence[int]) -> dict[int, list[Any]]:
    """For each of these storages, its tensors that the account's walk has not met.

    The heap is searched only where torch's count says that there are any.
    """
    graph = account.graph
    reader = graph.reader
    if all(_count_unmet(account, place) == 0 for place in places):
        return {}
    found: dict[int, list[Any]] = {}
    with reader.quiet():
        for tensor in list_outside_tensors(graph):
            storage = reader.read_tensor(tensor).storage
            place = None if storage is None else graph.find(storage)
            if place is not None:
                found.setdefault(place, []).append(tensor)
    return found


def find_move(account: Account, place: int, *, dropped: int, outside: dict[int, list[Any]]) -> Move:
    """How a storage would be moved, or why it can't be.

    Args:
        account: who holds what.
        place: the storage.
        dropped: marks of what is about to be dropped: a tensor that nobody else holds stays as it
            is and goes with them.
        outside: what ``find_outside`` found.
    """
    graph = account.graph
    unmet = outside.get(place, [])
    kept = [each for each in graph.tensors_on.get(place, ()) if account.marks[each] & ~dropped]
    move = Move(place=place, tensors=[*(graph.objects[each] for each in kept), *unmet])
    if (_count_unmet(account, place) or 0) > len(unmet):
        move.obstacle = "it is held in C++, out of Python's sight"
        return move
    for each in kept:
        if any(account.marks[node] & ~dropped for node in graph.saved_by.get(each, ())):
            move.obstacle = "a computation saved it for backward; run backward() or drop its output"
            return move
    with graph.reader.quiet():
        for tensor in move.tensors:
            move.obstacle = move.obstacle or _find_obstacle(account, tensor)
    return move


def carry_out(account: Account, moves: Sequence[Move]) -> None:
    """Move the storages, all of them or none: one object's parts belong together.

    Raises:
        RuntimeError: there was no memory, or a tensor refused; what was moved is back as it was.
    """
    graph = account.graph
    base: Any = graph.reader.tensor_type
    torch = graph.reader.torch
    undo: list[tuple[Any, Any]] = []
    with graph.reader.quiet():
        try:
            for move in moves:
                new = _copy_to_cpu(torch, graph.objects[move.place])
                for tensor in move.tensors:
                    substitute = _place_on(torch, new, tensor)
                    undo.append((tensor, base.data.__get__(tensor)))
                    base.data.__set__(tensor, substitute)
        except BaseException:
            for tensor, data in reversed(undo):
                base.data.__set__(tensor, data)
            raise
        finally:
            undo.clear()


def _copy_to_cpu(torch: Any, storage: Any) -> Any:
    """A copy of the whole storage on the CPU, once all that is still writing to it is done."""
    if storage.device.type == "cuda":
        torch.cuda.synchronize(storage.device)
    copy = storage.cpu()
    return storage.clone() if copy is storage else copy


def _place_on(torch: Any, storage: Any, tensor: Any) -> Any:
    """A tensor on the storage that has the other one's offset, size, strides and bits."""
    base = torch._C.TensorBase  # noqa: SLF001 - a subclass may answer otherwise
    placed = torch.empty(0, dtype=base.dtype.__get__(tensor), device="cpu").set_(
        storage, base.storage_offset(tensor), base.size(tensor), base.stride(tensor)
    )
    # A lazily conjugated or negated tensor's bytes mean their opposite: the bit goes along.
    if base.is_conj(tensor):
        placed = placed.conj()
    if base.is_neg(tensor):
        placed = torch._neg_view(placed)  # noqa: SLF001 - has no public name
    return placed


def _find_obstacle(account: Account, tensor: Any) -> str | None:
    reader = account.graph.reader
    if reader.is_dispatched(type(tensor)):
        return f"a {name_class(type(tensor))} can't be moved in place"
    parts = reader.read_tensor(tensor)
    if parts.storage is None or not reader.is_plain(tensor):
        return "a sparse, quantised, nested or named tensor can't be moved in place"
    if parts.grad_fn is not None:
        return "it is part of a computation (it has a grad_fn); keep x.detach() instead"
    return None


def _count_unmet(account: Account, place: int) -> int | None:
    """How many users a storage has beyond those that the walk has met, where torch tells."""
    graph = account.graph
    users = graph.reader.count_storage_users(graph.objects[place])
    return None if users is None else users - 1 - graph.cpp_refs[place]
