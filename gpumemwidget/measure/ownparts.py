"""What is counted of this process, in parts: by PyTorch's allocator, on the host by malloc."""

from __future__ import annotations

from gpumemwidget.backends.unallocated import Unallocated, divide_unallocated
from gpumemwidget.devices import BridgePart, DeviceState, PartKey
from gpumemwidget.measure.shares import Slot, check_bytes, make_rest, solve
from gpumemwidget.records import HOST, DeviceAccount, MemoryKind
from gpumemwidget.units import format_bytes

__all__ = ["divide_own", "match_segments"]

#: In the order in which they stand.
_KINDS: tuple[MemoryKind, ...] = (
    "parameter",
    "gradient",
    "optimizer state",
    "saved for backward",
    "buffer",
    "tensor",
    "cuBLAS workspace",
    "CUDA-graph pool",
    "compile cache",
    "other",
)
#: What no name leads to, and is known all the same.
_NAMED_BY_KIND = frozenset({"cuBLAS workspace", "CUDA-graph pool", "compile cache", "other"})
_UNALLOCATED: tuple[PartKey, ...] = ("pending", "releasable", "fragmented", "pools")


def divide_own(
    state: DeviceState,
    account: DeviceAccount | None,
    unallocated: Unallocated | None,
    notes: list[str],
    *,
    is_complete: bool,
) -> list[Slot]:
    """What is counted of this process: by PyTorch's allocator, on the host by malloc."""
    reading, device = state.reading, state.info.device
    inner: tuple[PartKey, ...] = ("cached",) if device == HOST else _UNALLOCATED
    if reading is None:
        # A GPU that is not touched has nothing of PyTorch's.
        return [Slot(("allocated",)), Slot(inner)] if device == HOST else []
    allocated, reserved = check_bytes(reading.allocated_bytes), check_bytes(reading.reserved_bytes)
    slots = [Slot(("allocated",)), Slot(inner)]
    if allocated is not None and (reserved is None or allocated <= reserved):
        kinds = _divide_allocated(account, allocated, notes, is_complete=is_complete)
        slots[0] = Slot(("allocated",), (BridgePart("allocated", allocated, parts=kinds),))
        if unallocated is not None:
            slots[1] = Slot(inner, _divide_cached(unallocated))
    elif allocated is not None and reserved is not None:
        notes.append(
            f"malloc has handed out {format_bytes(allocated)}, of which some is not resident: what "
            "was never written to, or is swapped out, takes no memory."
            if device == HOST
            else f"{device}: {format_bytes(allocated)} are said to be allocated of "
            f"{format_bytes(reserved)} that are reserved, so they are not told apart."
        )
    if reserved is None:
        return slots
    parts = solve(reserved, slots)
    keys = tuple(key for slot in slots for key in slot.keys)
    return [Slot(keys, parts)]


def match_segments(state: DeviceState, notes: list[str]) -> Unallocated | None:
    """The segments summed up, where they are those that the counters count."""
    reading, device = state.reading, state.info.device
    if reading is None or not reading.reserved_bytes:
        return None
    if not state.segments:
        if reading.reserved_bytes != reading.allocated_bytes:
            notes.append(
                f"{device}: the allocator's segments are not told, as by cudaMallocAsync, so what "
                "is reserved but unallocated is one part."
            )
        return None
    found = divide_unallocated(state.segments)
    if (found.reserved_bytes, found.allocated_bytes) != (
        reading.reserved_bytes,
        reading.allocated_bytes,
    ):
        notes.append(
            f"{device}: the segments were read at another moment than the counters, so what is "
            "reserved but unallocated is one part."
        )
        return None
    return found


def _divide_cached(found: Unallocated) -> tuple[BridgePart, ...]:
    """What is reserved but unallocated."""
    middle: tuple[BridgePart, ...]
    if found.releasable_bytes is None or found.fragmented_bytes is None:
        free = found.reserved_bytes - found.allocated_bytes - found.pending_bytes
        keys: tuple[PartKey, ...] = ("releasable", "fragmented")
        middle = (make_rest(keys, free - found.pools_bytes),)
    else:
        middle = (
            BridgePart("releasable", found.releasable_bytes),
            BridgePart("fragmented", found.fragmented_bytes),
        )
    return (
        BridgePart("pending", found.pending_bytes),
        *middle,
        BridgePart("pools", found.pools_bytes),
    )


def _divide_allocated(
    account: DeviceAccount | None, allocated: int, notes: list[str], *, is_complete: bool
) -> tuple[BridgePart, ...]:
    """What is allocated, by kind; ``()`` where that is not known."""
    if account is None or not allocated:
        return ()
    owned = [each for each in account.owned if each.n_bytes]
    found = sum(each.n_bytes for each in owned)
    if found != allocated or any(each.n_bytes < 0 for each in owned):
        notes.append(
            f"{account.device}: the owners of {format_bytes(found)} were found while "
            f"{format_bytes(allocated)} are allocated, so what is allocated is not told by kind."
        )
        return ()
    roundings = [
        each.rounding_bytes
        for each in owned
        if each.rounding_bytes is not None and 0 <= each.rounding_bytes <= each.n_bytes
    ]
    is_known = len(roundings) == len(owned)
    if not is_known and account.device != HOST:
        notes.append(
            f"{account.device}: it is not known of all blocks how much was asked for, so each kind "
            "is with what it was rounded up."
        )
    if not is_complete:
        notes.append(
            f"{account.device}: there was too much to look at all of it, so less may be without a "
            "name."
        )
    sums: dict[MemoryKind | None, int] = {}
    for each in owned:
        is_unnamed = each.kind == "unknown" or (
            each.root == "nowhere" and each.kind not in _NAMED_BY_KIND
        )
        kind = None if is_unnamed else each.kind
        rounding = (each.rounding_bytes or 0) if is_known else 0
        sums[kind] = sums.get(kind, 0) + each.n_bytes - rounding
    parts = [BridgePart("kind", sums.get(kind, 0), kind=kind) for kind in _KINDS]
    parts.append(BridgePart("unnamed", sums.get(None, 0)))
    parts.append(BridgePart("rounding", sum(roundings) if is_known else 0))
    return tuple(part for part in parts if part.n_bytes)
