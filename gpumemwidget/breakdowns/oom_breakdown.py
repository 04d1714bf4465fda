"""Divide a device's memory as it was when an allocation failed, for the card of the error."""

from __future__ import annotations

from collections.abc import Sequence

from gpumemwidget.breakdowns.part_groups import (
    UNALLOCATED_KEYS,
    PartGroup,
    divide_total,
    drop_impossible,
    forget_all,
    make_group,
    merge_parts,
)
from gpumemwidget.model.breakdowns import Breakdown, BreakdownPart, PartKey
from gpumemwidget.model.devices import HOST
from gpumemwidget.model.ooms import OomEvent
from gpumemwidget.model.ownership import MemoryKind


def build_oom_breakdown(
    event: OomEvent, kinds: Sequence[tuple[MemoryKind, int]] = ()
) -> Breakdown | None:
    """Return the device in parts that add up to all of it.

    Figures that contradict each other, as they were read at different moments, are given up from
    the outside in, until those that are left fit.

    Args:
        event: the readings taken when the allocation failed.
        kinds: what was allocated, by kind.

    Returns:
        ``None`` if the total or every part of it is unknown.
    """
    total = event.device_total_bytes
    own = _list_host_groups(event) if event.device == HOST else _list_torch_groups(event, kinds)
    others, free = drop_impossible(event.others_bytes), drop_impossible(event.device_free_bytes)
    is_gpu = event.device != HOST
    outer = [
        *([make_group("outside", drop_impossible(event.outside_bytes))] if is_gpu else []),
        make_group("others", others),
        *([make_group("unlisted", event.unlisted_bytes or 0)] if is_gpu else []),
    ]
    ends = [
        *([make_group("driver", event.driver_bytes or 0)] if is_gpu else []),
        make_group("free", free),
    ]
    is_known = any(group.parts is not None for group in own) or not {others, free} <= {None}
    if total is None or total <= 0 or not is_known:
        return None
    unknown_outer, unknown_ends = forget_all(outer), forget_all(ends)
    parts: tuple[BreakdownPart, ...] | None = None
    for groups in (
        (*own, *outer, *ends),
        # A remainder although every part is known is of no process that the driver lists.
        (*own, *outer[:-1], *unknown_outer[-1:], *ends),
        (*own, *unknown_outer, *ends),
        (*own, *unknown_outer, *unknown_ends),
        (*forget_all(own), *unknown_outer, *unknown_ends),
    ):
        parts = divide_total(total, groups)
        if parts is not None:
            break
    return Breakdown(
        device=event.device,
        name=event.device,
        total_bytes=total,
        parts=parts or (),
        allocated_bytes=event.allocated_bytes,
        reserved_bytes=event.reserved_bytes,
        used_bytes=None,
        limit_bytes=event.limit_bytes,
        largest_free_block_bytes=event.largest_free_block_bytes,
    )


def _list_host_groups(event: OomEvent) -> list[PartGroup]:
    """Return the group of this process, which has what is resident: the host knows no reserve."""
    keys: tuple[PartKey, ...] = ("allocated", "cached")
    resident = drop_impossible(event.reserved_bytes)
    return [PartGroup(keys, None if resident is None else (merge_parts(keys, resident),))]


def _list_torch_groups(event: OomEvent, kinds: Sequence[tuple[MemoryKind, int]]) -> list[PartGroup]:
    allocated = drop_impossible(event.allocated_bytes)
    reserved = drop_impossible(event.reserved_bytes)
    cached = drop_impossible(event.unallocated_bytes)
    if allocated is None:
        keys: tuple[PartKey, ...] = ("allocated", *UNALLOCATED_KEYS)
        return [PartGroup(keys, None if reserved is None else (merge_parts(keys, reserved),))]
    parts = _divide_allocated(allocated, kinds)
    return [
        PartGroup(("allocated",), (BreakdownPart("allocated", allocated, parts=parts),)),
        PartGroup(
            UNALLOCATED_KEYS, None if cached is None else (merge_parts(UNALLOCATED_KEYS, cached),)
        ),
    ]


def _divide_allocated(
    allocated: int, kinds: Sequence[tuple[MemoryKind, int]]
) -> tuple[BreakdownPart, ...]:
    """Return the kinds, the largest first, with what was not attributed to any."""
    known = sorted((item for item in kinds if item[1] > 0), key=lambda item: -item[1])
    rest = allocated - sum(n_bytes for _, n_bytes in known)
    if not known or rest < 0:
        return ()
    sums = dict(known)
    if rest:
        sums["unknown"] = sums.get("unknown", 0) + rest
    return tuple(BreakdownPart("kind", n_bytes, kind=kind) for kind, n_bytes in sums.items())
