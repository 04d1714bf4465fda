"""Divide a device's memory into parts that are all of it, to the byte, and map its segments.

Each figure that is known is a part. Unknown parts are the remainder of the whole that they belong
to: a single one exactly, several of them together (``rest``). Figures that can't all be true, as
they were read at different moments or count different things, are given up from the outside in,
until the figures that are left fit. So no part is negative, and none is guessed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import get_args

from gpumemwidget.model.breakdowns import (
    Breakdown,
    BreakdownDoubt,
    BreakdownPart,
    PartKey,
    SegmentMap,
)
from gpumemwidget.model.devices import HOST, DeviceState, Frame, LibraryUse, ProcessUse, Segment
from gpumemwidget.model.ownership import BlockNames, DeviceAccount, MemoryKind


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
    if not total:
        return None
    on_host = info.device == HOST
    doubts = [] if state.is_at_one_moment else [BreakdownDoubt.FIGURES_DIFFER]
    doubts += [] if has_driver or on_host else [BreakdownDoubt.NO_DRIVER]
    unallocated = None if on_host else _match_segments(state, doubts)
    own = _list_own_groups(state, account, unallocated, doubts)
    asleep_bytes = _count_asleep(state)
    if asleep_bytes:
        own = [_PartGroup(group.keys) for group in own]
    if account is not None and not is_complete:
        doubts.append(BreakdownDoubt.OWNERS_INCOMPLETE)
    return Breakdown(
        device=info.device,
        name=info.name,
        total_bytes=total,
        parts=_divide_device(state, own, total, doubts),
        allocated_bytes=None if reading is None else reading.allocated_bytes,
        reserved_bytes=None if reading is None else reading.reserved_bytes,
        used_bytes=None if use is None else use.used_bytes,
        limit_bytes=info.limit_bytes,
        budget_bytes=budget_bytes,
        largest_free_block_bytes=(
            None if unallocated is None else unallocated.largest_free_block_bytes
        ),
        has_expandable=any(segment.page_bytes is not None for segment in state.segments),
        pinned_bytes=state.pinned_bytes,
        asleep_bytes=asleep_bytes,
        silent_libraries=_list_silent(state.libraries),
        driver_failure="" if use is None else use.failure,
        is_shared=use is not None and use.is_shared,
        doubts=tuple(dict.fromkeys(doubts)),
    )


def _list_silent(libraries: Iterable[LibraryUse]) -> tuple[str, ...]:
    """Return the names of libraries that may have more than they say, which may be nothing."""
    return tuple(
        library.name
        for library in libraries
        if not library.used_bytes and library.cached_bytes is None
    )


def build_segment_map(
    segments: Iterable[Segment],
    names: BlockNames | None = None,
    *,
    find_line: Callable[[Sequence[Frame]], str | None] | None = None,
) -> SegmentMap | None:
    """Return the map of one device's segments, the largest first; ``None`` where it has none.

    Args:
        segments: all segments of the device.
        names: kind and owner of the blocks, of the same moment; ``None``: not asked for.
        find_line: returns the line of a stack: ``In [7], line 3``.
    """
    ordered = tuple(sorted(segments, key=lambda segment: (-segment.n_bytes, segment.address)))
    if not ordered:
        return None
    lines: dict[int, str] = {}
    if find_line is not None:
        blocks = [block for segment in ordered for block in segment.blocks]
        in_use = (block for block in blocks if block.state != "inactive")
        found = ((block.address, find_line(block.frames)) for block in in_use)
        lines = {address: line for address, line in found if line}
    return SegmentMap(ordered[0].device, ordered, names, lines)


def _divide_device(
    state: DeviceState, own: Sequence[_PartGroup], total: int, doubts: list[BreakdownDoubt]
) -> tuple[BreakdownPart, ...]:
    """Return the parts of the whole device, without figures that contradict the others.

    Why figures were given up is added to ``doubts``.
    """
    device, use = state.info.device, state.use
    if use is not None and use.total_bytes is None:
        use = None
    ends = [_make_group("free", None if use is None else use.free_bytes)]
    # PyTorch's total leaves the driver's part out; that of an unused device is the driver's.
    if device != HOST and (use is not None or state.reading is None):
        ends.insert(0, _make_group("driver", None if use is None else use.driver_bytes))
    parts = _divide_total(total, [*_list_process_groups(state, own, doubts), *ends])
    if parts is not None:
        return parts
    others = _list_unknown_groups(device)
    unknown_own, unknown_ends = ([_PartGroup(group.keys) for group in of] for of in (own, ends))
    doubts.append(BreakdownDoubt.FIGURES_DIFFER)
    attempts = (
        [*own, *others, *ends],
        [*own, *others, *unknown_ends],
        [*unknown_own, *others, *unknown_ends],
    )
    divided = (_divide_total(total, groups) for groups in attempts)
    return next((parts for parts in divided if parts is not None), ())


# -- Reserved memory by its state ------------------------------------------------------------------

# ``empty_cache`` first waits for what other streams may still use: such blocks hold nothing back.
# Then it gives back each segment without a block in use; of a segment that grows (expandable
# segments) it gives back the whole pages between blocks in use, counted from the segment's start:
# https://github.com/pytorch/pytorch/blob/main/c10/cuda/CUDACachingAllocator.cpp


@dataclass(frozen=True, slots=True)
class Unallocated:
    """Reserved memory of a device, summed up by its state."""

    reserved_bytes: int
    allocated_bytes: int
    pending_bytes: int  #: freed, but another stream may still use it; pools included
    #: Given back by ``empty_cache``, and not.
    releasable_bytes: int
    fragmented_bytes: int
    pools_bytes: int  #: unallocated in the pools of CUDA graphs and of ``MemPool``
    largest_free_block_bytes: int  #: outside of the pools; 0 where no block is free


def divide_unallocated(segments: Iterable[Segment]) -> Unallocated:
    """Return one device's reserved memory by its state."""
    reserved = allocated = pending = pools = free = releasable = largest = 0
    for segment in segments:
        reserved += segment.n_bytes
        for block in segment.blocks:
            if block.state == "active_allocated":
                allocated += block.n_bytes
            elif block.state == "active_pending_free":
                pending += block.n_bytes
            elif segment.is_private:
                pools += block.n_bytes
            else:
                free += block.n_bytes
                largest = max(largest, block.n_bytes)
        releasable += sum(end - start for start, end in list_releasable_ranges(segment))
    return Unallocated(
        reserved_bytes=reserved,
        allocated_bytes=allocated,
        pending_bytes=pending,
        releasable_bytes=releasable,
        fragmented_bytes=free - releasable,
        pools_bytes=pools,
        largest_free_block_bytes=largest,
    )


def list_releasable_ranges(segment: Segment) -> list[tuple[int, int]]:
    """Return the ranges of a segment that ``empty_cache`` gives back; none of a private pool's.

    Returns:
        Start and end of each range, in bytes from the segment's start.
    """
    if segment.is_private:
        return []
    page = segment.page_bytes or None
    if page is None and any(block.state == "active_allocated" for block in segment.blocks):
        return []
    given = []
    for is_in_use, blocks in groupby(
        segment.blocks, key=lambda block: block.state == "active_allocated"
    ):
        if is_in_use:
            continue
        run = [(block.address - segment.address, block) for block in blocks]
        first, last = run[0][0], run[-1][0] + run[-1][1].n_bytes
        if page is not None:
            # The blocks of a run are one block as soon as all of them are free.
            first, last = -(-first // page) * page, last // page * page
        for at, block in run:
            start, end = max(at, first), min(at + block.n_bytes, last)
            if block.state == "inactive" and start < end:
                given.append((start, end))
    return given


# -- The memory that this process's allocator counts -----------------------------------------------


def _list_own_groups(
    state: DeviceState,
    account: DeviceAccount | None,
    unallocated: Unallocated | None,
    doubts: list[BreakdownDoubt],
) -> list[_PartGroup]:
    """Return this process's memory as PyTorch's allocator counts it, or malloc on the host."""
    reading, device = state.reading, state.info.device
    cached_keys: tuple[PartKey, ...] = ("pending", "releasable", "fragmented", "pools")
    if device == HOST:
        cached_keys = ("cached",)
    groups = [_PartGroup(("allocated",)), _PartGroup(cached_keys)]
    if reading is None:
        # On a GPU that is not touched PyTorch has nothing.
        return groups if device == HOST else []
    allocated, reserved = reading.allocated_bytes, reading.reserved_bytes
    if allocated is not None and (reserved is None or allocated <= reserved):
        kinds = _divide_allocated(account, allocated, doubts)
        groups[0] = _PartGroup(
            ("allocated",), (BreakdownPart("allocated", allocated, parts=kinds),)
        )
        if unallocated is not None:
            amounts = (
                unallocated.pending_bytes,
                unallocated.releasable_bytes,
                unallocated.fragmented_bytes,
                unallocated.pools_bytes,
            )
            groups[1] = _PartGroup(cached_keys, tuple(map(BreakdownPart, cached_keys, amounts)))
    elif allocated is not None and device == HOST:
        doubts.append(BreakdownDoubt.FIGURES_DIFFER)
    if reserved is None:
        return groups
    keys = tuple(key for group in groups for key in group.keys)
    return [_PartGroup(keys, _divide_total(reserved, groups))]


def _count_asleep(state: DeviceState) -> int:
    """Return by how much PyTorch has reserved more than this process, or everybody, has there."""
    reading, use = state.reading, state.use
    if state.info.device == HOST or reading is None or not state.is_at_one_moment:
        return 0
    bounds = [process.n_bytes for process in state.processes or () if process.relation == "own"]
    bounds.append(None if use is None else use.used_bytes)
    reserved_bytes = reading.reserved_bytes or 0
    return max(0, *(reserved_bytes - bound for bound in bounds if bound is not None), 0)


def _match_segments(state: DeviceState, doubts: list[BreakdownDoubt]) -> Unallocated | None:
    """Return the sums of the segments, if these are the segments that the counters count."""
    reading = state.reading
    if reading is None or not reading.reserved_bytes:
        return None
    if not state.segments:
        if reading.reserved_bytes != reading.allocated_bytes:
            doubts.append(BreakdownDoubt.SEGMENTS_UNKNOWN)
        return None
    found = divide_unallocated(state.segments)
    counted = (reading.reserved_bytes, reading.allocated_bytes)
    if (found.reserved_bytes, found.allocated_bytes) != counted:
        doubts.append(BreakdownDoubt.SEGMENTS_UNKNOWN)
        return None
    return found


def _divide_allocated(
    account: DeviceAccount | None, allocated: int, doubts: list[BreakdownDoubt]
) -> tuple[BreakdownPart, ...]:
    """Return the allocated memory by kind; ``()`` where that is not known."""
    if account is None or not allocated:
        return ()
    owned = [line for line in account.owned if line.n_bytes]
    found = sum(line.n_bytes for line in owned)
    if found != allocated:
        doubts.append(BreakdownDoubt.OWNERS_DIFFER)
        return ()
    sums: dict[MemoryKind, int] = {}
    for line in owned:
        sums[line.kind] = sums.get(line.kind, 0) + line.n_bytes - (line.rounding_bytes or 0)
    parts = [
        BreakdownPart("kind", sums.get(kind, 0), kind=kind)
        for kind in get_args(MemoryKind)
        if kind != "unknown"
    ]
    parts.append(BreakdownPart("unnamed", sums.get("unknown", 0)))
    rounding_bytes = sum(line.rounding_bytes or 0 for line in owned)
    parts.append(BreakdownPart("rounding", rounding_bytes))
    return tuple(part for part in parts if part.n_bytes)


# -- The processes ---------------------------------------------------------------------------------


def _list_unknown_groups(device: str) -> list[_PartGroup]:
    """Return the memory beside this process's allocator, all of it unknown."""
    keys: tuple[PartKey, ...] = ("outside", "children", "others", "unlisted")
    return [_PartGroup((key,)) for key in (("children", "others") if device == HOST else keys)]


def _list_process_groups(
    state: DeviceState, own: Sequence[_PartGroup], doubts: list[BreakdownDoubt]
) -> list[_PartGroup]:
    """Return this process and the others, as far as the driver's list of them makes sense.

    Within a container the driver lists processes by pids from outside of it, or none at all: then
    this process can't be distinguished from the others.

    Why figures are not believed is added to ``doubts``.
    """
    device, processes = state.info.device, state.processes
    unknown = [*own, *_list_unknown_groups(device)]
    if processes is None:
        if device != HOST and state.use is not None and state.use.used_bytes is not None:
            doubts.append(BreakdownDoubt.NOT_LISTED)
        return unknown
    if device == HOST:
        # Pages that a child shares with this process are resident in both.
        has_children = any(process.relation == "child" for process in processes)
        return unknown if has_children else [*own, _PartGroup(("others",))]
    this = [process for process in processes if process.relation == "own"]
    own_bytes = _sum_processes(this)
    counted_bytes = sum(group.known_bytes for group in own)
    is_listed = bool(this) or state.reading is None
    if not is_listed or (own_bytes is not None and own_bytes < counted_bytes):
        doubts.append(BreakdownDoubt.NOT_LISTED)
        return unknown
    if _sum_processes(processes) is None:
        doubts.append(BreakdownDoubt.NOT_LISTED)
    children = _group_processes("children", [p for p in processes if p.relation == "child"])
    others = _group_processes("others", [p for p in processes if p.relation == "other"])
    inner = [*own, _PartGroup(("outside",))]
    if own_bytes is not None:
        inner = [_divide_own(own_bytes, inner, state, doubts)]
    return [*inner, children, others, _PartGroup(("unlisted",))]


def _divide_own(
    own_bytes: int, groups: Sequence[_PartGroup], state: DeviceState, doubts: list[BreakdownDoubt]
) -> _PartGroup:
    """Return all of this process's parts as one group."""
    keys = tuple(key for group in groups for key in group.keys)
    divided = _divide_total(own_bytes, groups)
    if divided is None:
        return _PartGroup(keys)
    return _PartGroup(keys, tuple(_divide_outside(part, state, doubts) for part in divided))


def _divide_outside(
    part: BreakdownPart, state: DeviceState, doubts: list[BreakdownDoubt]
) -> BreakdownPart:
    """Return this process's part outside PyTorch, divided by the libraries that say what they have.

    Why they are not believed is added to ``doubts``.
    """
    if part.key != "outside":
        return part
    found: list[BreakdownPart] = []
    for library in state.libraries:
        amounts: tuple[tuple[PartKey, int | None], ...]
        amounts = ("library", library.used_bytes), ("library cache", library.cached_bytes)
        found += [BreakdownPart(key, n, library=library) for key, n in amounts if n]
    rest_bytes = part.n_bytes - sum(inner.n_bytes for inner in found)
    if rest_bytes < 0:
        # Managed memory need not be on the device.
        doubts.append(BreakdownDoubt.FIGURES_DIFFER)
        return part
    rest = [BreakdownPart("context", rest_bytes)] if rest_bytes else []
    return replace(part, parts=(*found, *rest)) if found else part


def _sum_processes(processes: Iterable[ProcessUse]) -> int | None:
    """Return the bytes of processes; ``None`` where those of one are not known."""
    known = [process.n_bytes for process in processes]
    return None if None in known else sum(n_bytes or 0 for n_bytes in known)


def _group_processes(key: PartKey, processes: Sequence[ProcessUse]) -> _PartGroup:
    """Return processes as one part, made of a part for each of them, biggest first."""
    n_bytes = _sum_processes(processes)
    if n_bytes is None:
        return _PartGroup((key,))
    # Processes come biggest first.
    parts = [
        BreakdownPart("process", process.n_bytes, process=process)
        for process in processes
        if process.n_bytes
    ]
    return _PartGroup((key,), (BreakdownPart(key, n_bytes, parts=tuple(parts)),))


# -- Known and unknown parts -----------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _PartGroup:
    """Parts that are read together, and so are known together, or unknown (``parts`` is None)."""

    keys: tuple[PartKey, ...]
    parts: tuple[BreakdownPart, ...] | None = None

    @property
    def known_bytes(self) -> int:
        return sum(part.n_bytes for part in self.parts or ())


def _divide_total(
    total_bytes: int, groups: Sequence[_PartGroup]
) -> tuple[BreakdownPart, ...] | None:
    """Return parts that add up to ``total_bytes``, in the order of ``groups``.

    All unknown groups together become one remainder, at the place of the first of them. ``None``
    if the known parts exceed the total, or fall short of it although no group is unknown.
    """
    remainder_bytes = total_bytes - sum(group.known_bytes for group in groups)
    unknown_keys = tuple(key for group in groups if group.parts is None for key in group.keys)
    if remainder_bytes < 0 or (remainder_bytes and not unknown_keys):
        return None
    parts: list[BreakdownPart] = []
    for group in groups:
        if group.parts is not None:
            parts.extend(part for part in group.parts if part.n_bytes)
        elif remainder_bytes:
            is_one = len(unknown_keys) == 1
            rest = BreakdownPart("rest", remainder_bytes, merged=unknown_keys)
            parts.append(BreakdownPart(unknown_keys[0], remainder_bytes) if is_one else rest)
            remainder_bytes = 0
    return tuple(parts)


def _make_group(key: PartKey, n_bytes: int | None) -> _PartGroup:
    """Return a group of one part; ``None`` bytes make it unknown."""
    if n_bytes is None:
        return _PartGroup((key,))
    return _PartGroup((key,), (BreakdownPart(key, n_bytes),))
