"""Divide a device's memory into parts that are all of it, to the byte.

Each figure that is known is a part. Unknown parts are the remainder of the whole that they belong
to: a single one exactly, several of them together (``rest``). Figures that can't all be true, as
they were read at different moments or count different things, are given up from the outside in,
until the figures that are left fit. So no part is negative, and none is guessed.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from gpumemwidget.backends.cuda.releasable import Unallocated, divide_unallocated
from gpumemwidget.breakdowns.part_groups import (
    UNALLOCATED_KEYS,
    PartGroup,
    divide_total,
    drop_impossible,
    forget_all,
    make_group,
    merge_parts,
)
from gpumemwidget.model.breakdowns import (
    Breakdown,
    BreakdownDoubt,
    BreakdownNote,
    BreakdownPart,
    PartKey,
)
from gpumemwidget.model.devices import HOST, DeviceState, ProcessUse
from gpumemwidget.model.ownership import DeviceAccount, MemoryKind

#: The order of the kinds.
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
#: Kinds that are known although no name leads to them.
_KNOWN_WITHOUT_NAME = frozenset({"cuBLAS workspace", "CUDA-graph pool", "compile cache", "other"})


def build_breakdown(
    state: DeviceState,
    account: DeviceAccount | None = None,
    *,
    budget_bytes: int | None = None,
    is_complete: bool = True,
) -> Breakdown | None:
    """Return a device's memory in parts.

    Args:
        state: what was read of the device.
        account: the owners of the allocated memory, of the same moment; ``None``: not asked for.
        budget_bytes: the memory that a cell may allocate there, where a budget is set.
        is_complete: whether the account had the time to look at all objects.

    Returns:
        Parts that are ``total_bytes`` together, in their order, without parts of no bytes; ``None``
        where not even the total is known.
    """
    use, info, reading = state.use, state.info, state.reading
    has_driver = use is not None and use.total_bytes is not None
    total = use.total_bytes if use is not None and has_driver else info.total_bytes
    if total is None or total <= 0:
        return None
    notes: list[BreakdownNote] = []
    if not state.is_at_one_moment:
        notes.append(BreakdownNote(BreakdownDoubt.MOVED_MEANWHILE))
    on_host = info.device == HOST
    if not has_driver and not on_host:
        is_unused = reading is None
        notes.append(
            BreakdownNote(
                BreakdownDoubt.USE_UNKNOWN if is_unused else BreakdownDoubt.TOTAL_OF_PYTORCH
            )
        )
    unallocated = None if on_host else _match_segments(state, notes)
    own = _list_own_groups(state, account, unallocated, notes, is_complete=is_complete)
    return Breakdown(
        device=info.device,
        name=info.name,
        total_bytes=total,
        parts=_divide_device(state, own, total, notes, has_driver=has_driver),
        allocated_bytes=drop_impossible(None if reading is None else reading.allocated_bytes),
        reserved_bytes=drop_impossible(None if reading is None else reading.reserved_bytes),
        used_bytes=drop_impossible(None if use is None else use.used_bytes),
        limit_bytes=info.limit_bytes,
        budget_bytes=budget_bytes,
        largest_free_block_bytes=(
            None if unallocated is None else unallocated.largest_free_block_bytes
        ),
        has_expandable=any(segment.is_expandable for segment in state.segments),
        pinned=state.pinned,
        failures=state.notes,
        notes=tuple(notes),
    )


def _divide_device(
    state: DeviceState,
    own: Sequence[PartGroup],
    total: int,
    notes: list[BreakdownNote],
    *,
    has_driver: bool,
) -> tuple[BreakdownPart, ...]:
    """Return the parts of the whole device, without figures that contradict the others.

    Args:
        state: what was read of the device.
        own: the memory that this process's own allocator counts.
        total: bytes of the device.
        notes: gets the reasons why figures were given up.
        has_driver: whether the total is the driver's.
    """
    device, use = state.info.device, state.use
    free = drop_impossible(None if use is None or not has_driver else use.free_bytes)
    ends = [make_group("free", free)]
    # PyTorch's total leaves the driver's part out; that of an unused device is the driver's.
    if device != HOST and (has_driver or state.reading is None):
        driver = drop_impossible(use.driver_bytes if use is not None and has_driver else None)
        ends.insert(0, make_group("driver", driver))
        if driver is None and free is not None:
            notes.append(BreakdownNote(BreakdownDoubt.DRIVER_PART_UNKNOWN))
    parts = divide_total(total, [*_list_process_groups(state, own, notes), *ends])
    if parts is not None:
        return parts
    others, unknown_ends = _list_unknown_groups(device), forget_all(ends)
    for doubt, groups in (
        (BreakdownDoubt.PROCESSES_EXCEED_USE, [*own, *others, *ends]),
        (BreakdownDoubt.OWN_OVERLAPS_FREE, [*own, *others, *unknown_ends]),
        (BreakdownDoubt.OWN_EXCEEDS_TOTAL, [*forget_all(own), *others, *unknown_ends]),
    ):
        parts = divide_total(total, groups)
        if parts is not None:
            notes.append(BreakdownNote(doubt, total))
            break
    return parts or ()


# -- The memory that this process's allocator counts -----------------------------------------------


def _list_own_groups(
    state: DeviceState,
    account: DeviceAccount | None,
    unallocated: Unallocated | None,
    notes: list[BreakdownNote],
    *,
    is_complete: bool,
) -> list[PartGroup]:
    """Return this process's memory as PyTorch's allocator counts it, or malloc on the host."""
    reading, device = state.reading, state.info.device
    cached_keys: tuple[PartKey, ...] = ("cached",) if device == HOST else UNALLOCATED_KEYS
    groups = [PartGroup(("allocated",)), PartGroup(cached_keys)]
    if reading is None:
        # On a GPU that is not touched PyTorch has nothing.
        return groups if device == HOST else []
    allocated = drop_impossible(reading.allocated_bytes)
    reserved = drop_impossible(reading.reserved_bytes)
    if allocated is not None and (reserved is None or allocated <= reserved):
        kinds = _divide_allocated(account, allocated, notes, is_complete=is_complete)
        groups[0] = PartGroup(("allocated",), (BreakdownPart("allocated", allocated, parts=kinds),))
        if unallocated is not None:
            groups[1] = PartGroup(cached_keys, _divide_unallocated(unallocated))
    elif allocated is not None and reserved is not None:
        on_host = device == HOST
        doubt = BreakdownDoubt.NOT_RESIDENT if on_host else BreakdownDoubt.ALLOCATED_EXCEEDS
        notes.append(BreakdownNote(doubt, allocated, reserved))
    if reserved is None:
        return groups
    keys = tuple(key for group in groups for key in group.keys)
    return [PartGroup(keys, divide_total(reserved, groups))]


def _match_segments(state: DeviceState, notes: list[BreakdownNote]) -> Unallocated | None:
    """Return the sums of the segments, if these are the segments that the counters count."""
    reading = state.reading
    if reading is None or not reading.reserved_bytes:
        return None
    if not state.segments:
        if reading.reserved_bytes != reading.allocated_bytes:
            notes.append(BreakdownNote(BreakdownDoubt.SEGMENTS_UNKNOWN))
        return None
    found = divide_unallocated(state.segments)
    counted = (reading.reserved_bytes, reading.allocated_bytes)
    if (found.reserved_bytes, found.allocated_bytes) != counted:
        notes.append(BreakdownNote(BreakdownDoubt.SEGMENTS_OF_ANOTHER_MOMENT))
        return None
    return found


def _divide_unallocated(found: Unallocated) -> tuple[BreakdownPart, ...]:
    """Return the memory that is reserved but unallocated, in parts."""
    middle: tuple[BreakdownPart, ...]
    if found.releasable_bytes is None or found.fragmented_bytes is None:
        free = found.reserved_bytes - found.allocated_bytes - found.pending_bytes
        middle = (merge_parts(("releasable", "fragmented"), free - found.pools_bytes),)
    else:
        middle = (
            BreakdownPart("releasable", found.releasable_bytes),
            BreakdownPart("fragmented", found.fragmented_bytes),
        )
    return (
        BreakdownPart("pending", found.pending_bytes),
        *middle,
        BreakdownPart("pools", found.pools_bytes),
    )


def _divide_allocated(
    account: DeviceAccount | None, allocated: int, notes: list[BreakdownNote], *, is_complete: bool
) -> tuple[BreakdownPart, ...]:
    """Return the allocated memory by kind; ``()`` where that is not known."""
    if account is None or not allocated:
        return ()
    owned = [line for line in account.owned if line.n_bytes]
    found = sum(line.n_bytes for line in owned)
    if found != allocated or any(line.n_bytes < 0 for line in owned):
        notes.append(BreakdownNote(BreakdownDoubt.OWNERS_DIFFER, found, allocated))
        return ()
    roundings = [
        line.rounding_bytes
        for line in owned
        if line.rounding_bytes is not None and 0 <= line.rounding_bytes <= line.n_bytes
    ]
    is_known = len(roundings) == len(owned)
    if not is_known and account.device != HOST:
        notes.append(BreakdownNote(BreakdownDoubt.ROUNDING_UNKNOWN))
    if not is_complete:
        notes.append(BreakdownNote(BreakdownDoubt.OWNERS_INCOMPLETE))
    sums: dict[MemoryKind | None, int] = {}
    for line in owned:
        is_unnamed = line.kind == "unknown" or (
            line.root == "nowhere" and line.kind not in _KNOWN_WITHOUT_NAME
        )
        kind = None if is_unnamed else line.kind
        rounding = (line.rounding_bytes or 0) if is_known else 0
        sums[kind] = sums.get(kind, 0) + line.n_bytes - rounding
    parts = [BreakdownPart("kind", sums.get(kind, 0), kind=kind) for kind in _KINDS]
    parts.append(BreakdownPart("unnamed", sums.get(None, 0)))
    parts.append(BreakdownPart("rounding", sum(roundings) if is_known else 0))
    return tuple(part for part in parts if part.n_bytes)


# -- The processes ---------------------------------------------------------------------------------


def _list_unknown_groups(device: str) -> list[PartGroup]:
    """Return the memory beside this process's allocator, all of it unknown."""
    keys: tuple[PartKey, ...] = ("outside", "children", "others", "unlisted")
    return [PartGroup((key,)) for key in (("children", "others") if device == HOST else keys)]


def _list_process_groups(
    state: DeviceState, own: Sequence[PartGroup], notes: list[BreakdownNote]
) -> list[PartGroup]:
    """Return this process and the others, as far as the driver's list of them makes sense.

    Within a container the driver lists processes by pids from outside of it, or none at all: then
    this process can't be told from the others.

    Args:
        state: what was read of the device.
        own: the memory that this process's own allocator counts.
        notes: gets the reasons why figures are not believed.
    """
    device, processes = state.info.device, state.processes
    unknown = [*own, *_list_unknown_groups(device)]
    if processes is None:
        return unknown
    if device == HOST:
        # Pages that a child shares with this process are resident in both.
        has_children = any(process.relation == "child" for process in processes)
        return unknown if has_children else [*own, PartGroup(("others",))]
    this = [process for process in processes if process.relation == "own"]
    if not this and state.reading is not None:
        notes.append(BreakdownNote(BreakdownDoubt.NOT_LISTED, processes=processes))
        return unknown
    own_bytes = _sum_processes(this)
    counted_bytes = sum(group.known_bytes for group in own)
    if own_bytes is not None and own_bytes < counted_bytes:
        notes.append(BreakdownNote(BreakdownDoubt.PID_OF_ANOTHER, own_bytes, counted_bytes))
        return unknown
    silent = tuple(process for process in processes if drop_impossible(process.n_bytes) is None)
    if silent:
        notes.append(BreakdownNote(BreakdownDoubt.BYTES_UNKNOWN, processes=silent))
    children = _group_processes(
        "children", [process for process in processes if process.relation == "child"]
    )
    others = _group_processes(
        "others", [process for process in processes if process.relation == "other"]
    )
    outer = [children, others] if state.are_children_told else [_join_processes(children, others)]
    inner = [*own, PartGroup(("outside",))]
    if own_bytes is not None:
        keys = tuple(key for group in inner for key in group.keys)
        inner = [PartGroup(keys, divide_total(own_bytes, inner))]
    return [*inner, *outer, PartGroup(("unlisted",))]


def _sum_processes(processes: Iterable[ProcessUse]) -> int | None:
    """Return the bytes of processes; ``None`` where those of one are not known."""
    known = [drop_impossible(process.n_bytes) for process in processes]
    return None if None in known else sum(n_bytes or 0 for n_bytes in known)


def _group_processes(key: PartKey, processes: Sequence[ProcessUse]) -> PartGroup:
    """Return processes as one part, made of a part for each of them, biggest first."""
    n_bytes = _sum_processes(processes)
    if n_bytes is None:
        return PartGroup((key,))
    parts = [
        BreakdownPart("process", process.n_bytes, process=process)
        for process in processes
        if process.n_bytes
    ]
    parts.sort(key=lambda part: -part.n_bytes)
    return PartGroup((key,), (BreakdownPart(key, n_bytes, parts=tuple(parts)),))


def _join_processes(children: PartGroup, others: PartGroup) -> PartGroup:
    """Return both as one part made of all processes, as any of the others may be a child."""
    keys = (*children.keys, *others.keys)
    if children.parts is None or others.parts is None:
        return PartGroup(keys)
    processes = [
        part for group in (children, others) for whole in group.parts or () for part in whole.parts
    ]
    processes.sort(key=lambda part: -part.n_bytes)
    n_bytes = sum(part.n_bytes for part in processes)
    whole = BreakdownPart("rest", n_bytes, merged=keys, parts=tuple(processes))
    return PartGroup(keys, (whole,))
