"""Build the state of every device out of figures that were read one after another.

Allocators and the driver are asked in several calls, between which other threads and processes go
on. So ``Hardware`` reads the counters on both sides of the rest, and again where they moved. Also
found here: whether the driver's pids mean the same processes here.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from gpumemwidget.backends.protocol import ProcessesByBytes, ProcessSource, Relation
from gpumemwidget.model.devices import (
    HOST,
    ChildProcess,
    DeviceInfo,
    DeviceState,
    DeviceUse,
    ProcessUse,
    Reading,
    Segment,
)


@dataclass(frozen=True, slots=True)
class DeviceLook:
    """The answers about one device, in the order of the questions."""

    info: DeviceInfo
    before: Reading | None
    segments: tuple[Segment, ...]
    use_before: DeviceUse | None
    processes: ProcessesByBytes | None
    use: DeviceUse | None
    after: Reading | None

    @property
    def is_at_one_moment(self) -> bool:
        """True if nothing moved meanwhile, and the counters count what the segments hold."""
        before, after = map(_read_counters, (self.before, self.after))
        used = [use and use.used_bytes for use in (self.use_before, self.use)]
        # The host's programs never rest.
        is_shared = self.use is not None and self.use.is_shared
        is_steady = before == after and (is_shared or used[0] == used[1])
        has_blocks = bool(self.segments) and after is not None and after[1] is not None
        is_counted = not has_blocks or _sum_segments(self.segments) == after
        return self.info.device == HOST or (is_steady and is_counted)


def _read_counters(reading: Reading | None) -> tuple[int | None, int | None] | None:
    return None if reading is None else (reading.allocated_bytes, reading.reserved_bytes)


def _sum_segments(segments: Iterable[Segment]) -> tuple[int, int]:
    allocated = reserved = 0
    for segment in segments:
        reserved += segment.n_bytes
        for block in segment.blocks:
            if block.state == "active_allocated":
                allocated += block.n_bytes
    return allocated, reserved


def build_states(
    looks: Sequence[DeviceLook], source: ProcessSource, *, pinned_bytes: int | None
) -> tuple[DeviceState, ...]:
    """Return the state of each device."""
    listed = {look.info.device: look.processes for look in looks}
    readings = {look.info.device: look.after for look in looks}
    known = _describe_listed(listed, readings, source)
    return tuple(
        DeviceState(
            info=look.info,
            # malloc's count is not read twice in a row where it is slow.
            reading=look.before if look.info.device == HOST else look.after,
            use=look.use,
            processes=None if known is None else _sort_processes(look.processes, known),
            segments=look.segments,
            pinned_bytes=pinned_bytes if look.info.device == HOST else None,
            is_at_one_moment=look.is_at_one_moment,
        )
        for look in looks
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
    if source.are_pids_certain(pids):
        return source.describe(pids)
    own = [
        (dict(processes).get(source.own_pid) or 0) >= reading.reserved_bytes
        for device, processes in listed.items()
        if (reading := readings.get(device)) and reading.reserved_bytes and processes is not None
    ]
    return source.describe(pids) if own and all(own) else None


def _sort_processes(
    listed: ProcessesByBytes | None, known: Mapping[int, tuple[Relation, str | None]]
) -> tuple[ProcessUse, ...] | None:
    """Return this process first, then its children, then the others; each biggest first."""
    if listed is None:
        return None
    uses = [ProcessUse(pid, known[pid][1], known[pid][0], n_bytes) for pid, n_bytes in listed]
    order = ("own", "child", "other")
    uses.sort(key=lambda use: (order.index(use.relation), -(use.n_bytes or 0), use.pid))
    return tuple(uses)
