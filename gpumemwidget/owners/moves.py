"""Moves storages to another device in place, for whoever holds them.

What somebody keeps can't be dropped, but its device memory can still go: each tensor on the storage
is given CPU memory in its stead, through ``tensor.data``. The tensor stays the same object, so a
parameter stays in its module and its optimizer. There is one CPU storage for each old one, and
every tensor keeps its offset, size and strides in it: views stay views, and tied weights tied. The
way back to the device is the same.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from gpumemwidget.owners.account import Account
from gpumemwidget.owners.counts import list_outside
from gpumemwidget.owners.kinds import Kind, name_class
from gpumemwidget.owners.walk import Graph

__all__ = ["Move", "Outside", "carry_out", "find_move", "find_outside"]

_HELD_IN_CPP = (
    "a computation that no name leads to has it, or something in C++ (a traced module, DDP)"
)
_UNSEEN = "it is held in C++, out of Python's sight"
_SAVED = "a computation saved it for backward; run backward() or drop its output"


@dataclass(slots=True)
class Move:
    """One storage and the tensors that are to live on without it."""

    #: The storage's place in the account's graph.
    place: int
    tensors: list[Any]
    #: Where to, as torch names it.
    device: str = "cpu"
    #: Why it can't be moved, to complete "… stays: "; ``None`` where it can.
    obstacle: str | None = None
    #: Whether this is the one at which ``carry_out`` failed.
    is_failed: bool = False


@dataclass(slots=True)
class Outside:
    """What bears on a move and stands beside the walk's edges."""

    #: For each storage, its tensors that the walk has not met.
    tensors: dict[int, list[Any]] = field(default_factory=dict)
    #: How often such tensors refer to others in C++ (as view of, as gradient), by the others' ids.
    refs: dict[int, int] = field(default_factory=dict)
    #: The storages that rows have themselves, and the marks with which each is let go.
    roots: list[tuple[int, int]] = field(default_factory=list)
    #: Tensors that are parts of tensors of another class, which knows their device.
    inner: set[int] = field(default_factory=set)


def find_outside(account: Account, places: Sequence[int]) -> Outside:
    """What there is beside the walk that moves of these storages must know; within ``quiet()``.

    The heap is searched only where torch's counts say that there is something.
    """
    graph = account.graph
    reader = graph.reader
    outside = Outside(inner=_find_inner(graph))
    for row in account.rows.values():
        if graph.kinds[row.places[0]] is Kind.STORAGE:
            outside.roots.append((row.places[0], row.frees_marks))
    if not any(
        _count_unmet(account, place)
        or any(
            _count_unseen(graph, each, place, outside) > 0
            for each in graph.tensors_on.get(place, ())
        )
        for place in places
    ):
        return outside
    for tensor in list_outside(graph, Kind.TENSOR):
        parts = reader.read_tensor(tensor)
        for other in parts.tensors:
            outside.refs[id(other)] = outside.refs.get(id(other), 0) + 1
        place = None if parts.storage is None else graph.find(parts.storage)
        if place is not None:
            outside.tensors.setdefault(place, []).append(tensor)
    return outside


def find_move(account: Account, place: int, *, dropped: int, outside: Outside) -> Move:
    """How a storage would be moved, or why it can't be; call within ``quiet()``.

    Args:
        account: who holds what.
        place: the storage.
        dropped: marks of what is about to be dropped: a tensor that nobody else holds stays as it
            is and goes with them.
        outside: what ``find_outside`` found.
    """
    graph = account.graph
    unmet = outside.tensors.get(place, [])
    kept = [each for each in graph.tensors_on.get(place, ()) if account.marks[each] & ~dropped]
    move = Move(place=place, tensors=[*(graph.objects[each] for each in kept), *unmet])
    move.obstacle = _find_holder_in_the_way(account, place, kept, dropped, outside)
    if move.obstacle is None and (_count_unmet(account, place) or 0) > len(unmet):
        move.obstacle = _UNSEEN
    for tensor in move.tensors:
        move.obstacle = move.obstacle or _find_obstacle(account, tensor, move.device)
    return move


def carry_out(account: Account, moves: Sequence[Move]) -> list[Any]:
    """Move the storages, all of them or none: one object's parts belong together.

    Args:
        account: who holds what.
        moves: what is to be moved.

    Returns:
        The new storages, in the order of the moves.

    Raises:
        RuntimeError: there was no memory, or a tensor refused; what was moved is back as it was.
    """
    graph = account.graph
    base: Any = graph.reader.tensor_type
    torch = graph.reader.torch
    undo: list[tuple[Any, Any]] = []
    made: list[Any] = []
    with graph.reader.quiet():
        try:
            for move in moves:
                move.is_failed = True
                new = _copy_storage(torch, graph.objects[move.place], move.device)
                made.append(new)
                for tensor in move.tensors:
                    with _mode_of(torch, tensor):
                        substitute = _place_on(torch, new, tensor, move.device)
                        undo.append((tensor, base.data.__get__(tensor)))
                        base.data.__set__(tensor, substitute)
                move.is_failed = False
        except BaseException:
            _put_back(torch, undo)
            made.clear()
            raise
        finally:
            undo.clear()
    return made


def _put_back(torch: Any, undo: list[tuple[Any, Any]]) -> None:
    """Give each tensor what it had, the last one first, however often that is interrupted."""
    while undo:
        try:
            while undo:
                tensor, data = undo[-1]
                with _mode_of(torch, tensor):
                    torch._C.TensorBase.data.__set__(tensor, data)  # noqa: SLF001 - see _place_on
                undo.pop()
        except KeyboardInterrupt:
            # Twice the same is the same: half a model on another device is worse than a late end.
            continue


@contextmanager
def _mode_of(torch: Any, tensor: Any) -> Iterator[None]:
    """The mode in which a tensor was made, whatever is on now.

    Data that was made under ``torch.inference_mode`` makes an inference tensor of the one that it
    is given to, which can't be trained any more, and the other way round.
    """
    is_inference = torch._C.TensorBase.is_inference(tensor)  # noqa: SLF001 - see _place_on
    with torch.inference_mode(is_inference), torch.no_grad():
        yield


def _copy_storage(torch: Any, storage: Any, device: str) -> Any:
    """A copy of the whole storage, once all that is still writing to it is done."""
    _synchronize(torch, storage.device)
    if device == "cpu":
        copy = storage.cpu()
        return storage.clone() if copy is storage else copy
    return torch.UntypedStorage(storage.nbytes(), device=device).copy_(storage)


def _synchronize(torch: Any, device: Any) -> None:
    """Wait for all streams of a device that is in use."""
    module: Any = getattr(torch, device.type, None)
    accelerator = getattr(torch, "accelerator", None)
    if device.type == "mps":
        # It has one device, and takes no argument.
        module.synchronize()
    elif hasattr(module, "synchronize"):
        module.synchronize(device)
    elif device.type != "cpu" and accelerator is not None:
        accelerator.synchronize(device)


def _place_on(torch: Any, storage: Any, tensor: Any, device: str) -> Any:
    """A tensor on the storage that has the other one's offset, size, strides and bits."""
    base = torch._C.TensorBase  # noqa: SLF001 - a subclass may answer otherwise
    placed = torch.empty(0, dtype=base.dtype.__get__(tensor), device=device).set_(
        storage, base.storage_offset(tensor), base.size(tensor), base.stride(tensor)
    )
    # A lazily conjugated or negated tensor's bytes mean their opposite: the bit goes along.
    if base.is_conj(tensor):
        placed = placed.conj()
    if base.is_neg(tensor):
        placed = torch._neg_view(placed)  # noqa: SLF001 - has no public name
    return placed


def _find_holder_in_the_way(
    account: Account, place: int, kept: Sequence[int], dropped: int, outside: Outside
) -> str | None:
    """Why those who hold a storage's tensors do not let them move; ``None`` where they do."""
    graph = account.graph
    is_root = any(root == place and not marks & dropped for root, marks in outside.roots)
    if graph.python_refs[place] or is_root:
        return "its storage is held itself (x.untyped_storage()); drop that first"
    for each in kept:
        if any(account.marks[node] & ~dropped for node in graph.saved_by.get(each, ())):
            return _SAVED
        if each in outside.inner:
            return "it is a part of a tensor of another class, which can't be moved in place"
        if _count_unseen(graph, each, place, outside) > 0:
            return _HELD_IN_CPP
    return None


def _find_inner(graph: Graph) -> set[int]:
    """The tensors inside of those that answer by ``__torch_dispatch__``."""
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


def _find_obstacle(account: Account, tensor: Any, device: str) -> str | None:
    reader = account.graph.reader
    if reader.is_dispatched(type(tensor)):
        return f"a {name_class(type(tensor))} can't be moved in place"
    parts = reader.read_tensor(tensor)
    if parts.storage is None or not reader.is_plain(tensor):
        return "a sparse, quantised, nested or named tensor can't be moved in place"
    if parts.grad_fn is not None:
        return "it is part of a computation (it has a grad_fn); keep x.detach() instead"
    torch = reader.torch
    # Torch knows its own kinds of devices there, and none that an extension brings.
    can_take = getattr(torch, "_has_compatible_shallow_copy_type", None)
    if can_take is not None and not can_take(tensor, torch.empty(0, device=device)):
        kind = torch._C.TensorBase.device.__get__(tensor).type  # noqa: SLF001 - see _place_on
        return (
            f"PyTorch can't give a tensor on {kind} other memory in place; move it with .{device}()"
        )
    return None


def _count_unmet(account: Account, place: int) -> int | None:
    """How many users a storage has beyond those that the walk has met, where torch tells."""
    graph = account.graph
    users = graph.reader.count_storage_users(graph.objects[place])
    return None if users is None else users - 1 - graph.cpp_refs[place]


def _count_unseen(graph: Graph, each: int, place: int, outside: Outside) -> int:
    """How many references from C++ a tensor has that nothing known accounts for."""
    tensor = graph.objects[each]
    users = graph.reader.count_tensor_users(tensor)
    if users is None:
        return 0
    unseen = users - 1 - graph.cpp_refs[each] - outside.refs.get(id(tensor), 0)
    if unseen > 0:
        # Some views (a conjugate's) refer to their base twice.
        views = [graph.objects[one] for one in graph.tensors_on[place]]
        views += outside.tensors.get(place, [])
        found = [graph.reader.read_tensor(view).tensors for view in views]
        unseen -= sum(other is tensor for parts in found for other in parts)
    return unseen
