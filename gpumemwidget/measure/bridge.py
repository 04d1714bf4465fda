"""A device's memory in parts that are all of it, to the byte.

Each figure that is known is a part. What is not known is what remains of the whole that it belongs
to: of one part exactly, of several together (``rest``). Figures that can't all be true, as they
were read at different moments or count different things, are given up from the outside in, until
those that are left fit. So no part is negative, and none is guessed.
"""

from __future__ import annotations

from collections.abc import Sequence

from gpumemwidget.devices import Bridge, BridgePart, DeviceState
from gpumemwidget.measure.ownparts import divide_own, match_segments
from gpumemwidget.measure.processparts import list_processes, list_unknown
from gpumemwidget.measure.shares import Slot, check_bytes, make_slot, solve
from gpumemwidget.records import HOST, DeviceAccount
from gpumemwidget.units import format_bytes

__all__ = ["build_bridge"]


def build_bridge(
    state: DeviceState,
    account: DeviceAccount | None = None,
    *,
    budget_bytes: int | None = None,
    is_complete: bool = True,
) -> Bridge | None:
    """Divide a device's memory.

    Args:
        state: what was read of the device.
        account: who owns what is allocated there, of the same moment; ``None``: not asked for.
        budget_bytes: what a cell may allocate there, where that is set.
        is_complete: whether the account had the time to look at all there is.

    Returns:
        Parts that are ``total_bytes`` together, in their order, those of no bytes left out;
        ``None`` where not even the total is known.
    """
    use, info = state.use, state.info
    has_driver = use is not None and use.total_bytes is not None
    total = use.total_bytes if use is not None and has_driver else info.total_bytes
    if total is None or total <= 0:
        return None
    notes = list(state.notes)
    if not state.is_at_one_moment:
        notes.append(
            f"{info.device}: memory was taken or freed while this was read, so its figures are not "
            "all of one moment."
        )
    on_host = info.device == HOST
    if not has_driver and not on_host:
        notes.append(
            f"{info.device}: the driver does not tell what is in use there."
            if state.reading is None
            else f"{info.device}: there are no figures of the driver's, so the total is PyTorch's, "
            "which leaves out what the driver keeps to itself."
        )
    unallocated = None if on_host else match_segments(state, notes)
    counted = divide_own(state, account, unallocated, notes, is_complete=is_complete)
    parts = _fit(state, counted, total, notes, has_driver=has_driver)
    reading = state.reading
    return Bridge(
        device=info.device,
        name=info.name,
        total_bytes=total,
        parts=parts,
        allocated_bytes=check_bytes(None if reading is None else reading.allocated_bytes),
        reserved_bytes=check_bytes(None if reading is None else reading.reserved_bytes),
        used_bytes=check_bytes(None if use is None else use.used_bytes),
        limit_bytes=info.limit_bytes,
        budget_bytes=budget_bytes,
        largest_free_block_bytes=(
            None if unallocated is None else unallocated.largest_free_block_bytes
        ),
        has_expandable=any(segment.is_expandable for segment in state.segments),
        pinned=state.pinned,
        notes=tuple(notes),
    )


def _fit(
    state: DeviceState,
    counted: Sequence[Slot],
    total: int,
    notes: list[str],
    *,
    has_driver: bool,
) -> tuple[BridgePart, ...]:
    """All of the device; what contradicts the rest is given up."""
    device, use = state.info.device, state.use
    free = check_bytes(None if use is None or not has_driver else use.free_bytes)
    ends = [make_slot("free", free)]
    # PyTorch's total leaves the driver's part out; what is not in use has the driver's.
    if device != HOST and (has_driver or state.reading is None):
        driver = check_bytes(use.driver_bytes if use is not None and has_driver else None)
        ends.insert(0, make_slot("driver", driver))
        if driver is None and free is not None:
            notes.append(
                f"{device}: it is not told what the driver keeps to itself; that is within what is "
                "in use."
            )
    parts = solve(total, [*list_processes(state, counted, notes), *ends])
    if parts is not None:
        return parts
    unknown = list_unknown(device)
    unknown_ends = [slot.forget() for slot in ends]
    for note, slots in (
        (
            "the processes have more than is in use when added up, as they share memory or were "
            "not read at one moment, so they are not told apart.",
            [*counted, *unknown, *ends],
        ),
        (
            "this process and what is free are more than there is, as they overlap or were not "
            "read at one moment, so what is not this process's is not told apart.",
            [*counted, *unknown, *unknown_ends],
        ),
        (
            f"this process would have more than the {format_bytes(total)} that there are, so "
            "nothing is told apart.",
            [*(slot.forget() for slot in counted), *unknown, *unknown_ends],
        ),
    ):
        parts = solve(total, slots)
        if parts is not None:
            notes.append(f"{device}: {note}")
            break
    return parts or ()
