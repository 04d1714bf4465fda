"""Join what was read of a device one after another: is it of one moment, and whose are the pids.

Allocators and the driver are asked in several calls, between which other threads and processes go
on. So ``Hardware`` reads the counters on both sides of the rest, and again where they moved.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from gpumemwidget.backends.protocol import ProcessesByBytes, ProcessSource, Relation
from gpumemwidget.model.devices import (
    HOST,
    ChildProcess,
    DeviceState,
    DeviceUse,
    ProcessUse,
    Reading,
)


def is_steady(before: Reading | None, state: DeviceState, use_before: DeviceUse | None) -> bool:
    """Return whether nothing moved meanwhile, and the counters count what the segments hold."""
    counters = _read_counters(state.reading)
    used = [use and use.used_bytes for use in (use_before, state.use)]
    # The host's programs never rest.
    is_shared = state.use is not None and state.use.is_shared
    if _read_counters(before) != counters or (used[0] != used[1] and not is_shared):
        return False
    if not state.segments or counters is None or counters[1] is None:
        return True
    blocks = (block for segment in state.segments for block in segment.blocks)
    allocated = sum(block.n_bytes for block in blocks if block.state == "active_allocated")
    return counters == (allocated, sum(segment.n_bytes for segment in state.segments))


def _read_counters(reading: Reading | None) -> tuple[int | None, int | None] | None:
    return None if reading is None else (reading.allocated_bytes, reading.reserved_bytes)


def add_processes(
    states: Sequence[DeviceState],
    listed: Mapping[str, ProcessesByBytes | None],
    source: ProcessSource,
) -> tuple[DeviceState, ...]:
    """Return the states with the processes that the driver lists on each device."""
    readings = {state.info.device: state.reading for state in states}
    known = _describe_listed(listed, readings, source)
    return tuple(
        replace(state, processes=_sort_processes(listed[state.info.device], known))
        for state in states
    )


def join_children(
    children: Sequence[ChildProcess],
    listed: Mapping[str, ProcessesByBytes | None],
    readings: Mapping[str, Reading | None],
    source: ProcessSource,
) -> tuple[ChildProcess, ...]:
    """Return the children with what the driver lists of each, by device."""
    known = _describe_listed(listed, readings, source) or {}
    found: dict[int, list[tuple[str, int | None]]] = {child.pid: [] for child in children}
    for device, processes in listed.items():
        for pid, n_bytes in processes or ():
            if pid in found and pid in known and known[pid][0] == "child":
                found[pid].append((device, n_bytes))
    return tuple(replace(child, devices=tuple(found[child.pid])) for child in children)


def _describe_listed(
    listed: Mapping[str, ProcessesByBytes | None],
    readings: Mapping[str, Reading | None],
    source: ProcessSource,
) -> Mapping[int, tuple[Relation, str | None]] | None:
    """Return the relation and the name of each listed process.

    Where the driver may count processes differently, as within a container, its pids are believed
    if a child shows that it does not, or this process is listed with as much as PyTorch has
    reserved.

    Returns:
        ``None`` where the driver's pids may mean other processes here.
    """
    pids = {pid for processes in listed.values() for pid, _ in processes or ()}
    if not source.are_pids_certain(pids):
        own = [
            (device, n_bytes)
            for device, processes in listed.items()
            for pid, n_bytes in processes or ()
            if pid == source.own_pid
        ]
        silent = [device for device, processes in listed.items() if processes is None]
        known = [reading for device, reading in readings.items() if device not in silent]
        if not has_reserved(own, filter(None, known)):
            return None
    return source.describe(pids)


def has_reserved(own: Iterable[tuple[str, int | None]], readings: Iterable[Reading]) -> bool:
    """Return whether what is listed for a process may be this one's: PyTorch has some of it.

    That is, as much as PyTorch has reserved, on each GPU where it has any.
    """
    listed = dict(own)
    enough = [
        (listed.get(reading.device) or 0) >= reading.reserved_bytes
        for reading in readings
        if reading.device != HOST and reading.reserved_bytes
    ]
    return bool(enough) and all(enough)


def _sort_processes(
    listed: ProcessesByBytes | None, known: Mapping[int, tuple[Relation, str | None]] | None
) -> tuple[ProcessUse, ...] | None:
    """Return this process first, then its children, then the others; each biggest first."""
    if listed is None or known is None:
        return None
    uses = [ProcessUse(pid, known[pid][1], known[pid][0], n_bytes) for pid, n_bytes in listed]
    order = ("own", "child", "other")
    uses.sort(key=lambda use: (order.index(use.relation), -(use.n_bytes or 0), use.pid))
    return tuple(uses)
