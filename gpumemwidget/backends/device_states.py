"""Build the state of every device out of figures that were read one after another.

Allocators and the driver are asked in several calls, between which other threads and processes go
on. So ``Hardware`` reads the counters on both sides of the rest, again and again until they stand
still. What is checked here: whether figures are of one moment, and whether the driver's pids mean
the same processes here.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from gpumemwidget.backends.protocol import ProcessesByBytes, ProcessSource, Relation
from gpumemwidget.model.devices import (
    HOST,
    ChildProcess,
    DeviceInfo,
    DeviceState,
    DeviceUse,
    PinnedUse,
    ProcessUse,
    Reading,
    Segment,
)

_OTHER_PIDS = (
    "{device}: the driver lists its processes, but not this one by the number that it has here, as "
    "happens within containers: it can't be told which of them it is."
)
_NOT_LISTED = (
    "{device}: the driver lists no process there, and not even this one where it is in use, as "
    "happens within containers."
)
_RELATION_ORDER = {"own": 0, "child": 1, "other": 2}


@dataclass(frozen=True, slots=True)
class DriverAnswer:
    """The driver's answers about one device."""

    use: DeviceUse | None = None
    #: ``None`` where it does not list them.
    processes: ProcessesByBytes | None = None
    #: True if the use was the same before and after the processes were listed.
    is_steady: bool = True


@dataclass(slots=True)
class Moment:
    """Readings of all devices within some milliseconds."""

    #: The counters by device, from before and after all else was read.
    before: Mapping[str, Reading]
    after: Mapping[str, Reading]
    segments: Mapping[str, Sequence[Segment]] = field(default_factory=dict)
    answers: Mapping[str, DriverAnswer] = field(default_factory=dict)

    def is_steady(self, device: str) -> bool:
        """Return whether nothing was taken or given back meanwhile."""
        before, after = self.before.get(device), self.after.get(device)
        if before is None or after is None:
            return before is after
        return (before.allocated_bytes, before.reserved_bytes) == (
            after.allocated_bytes,
            after.reserved_bytes,
        )

    def is_consistent(self, device: str) -> bool:
        """Return whether the counters stood still, and count what the segments hold."""
        segments, reading = self.segments.get(device), self.after.get(device)
        if not self.is_steady(device):
            return False
        if not segments or reading is None or reading.reserved_bytes is None:
            return True
        return _sum_segments(segments) == (reading.allocated_bytes, reading.reserved_bytes)

    def are_pids_ours(self, processes: ProcessSource) -> bool | None:
        """Return whether the driver's pids are those that processes have here.

        Where PyTorch has reserved memory this process must be listed, with as much or more. If it
        is not, it goes by another pid there, and so may everybody: a container has pids of its own.

        Returns:
            ``None`` where no device shows it.
        """
        is_certain = processes.are_pids_certain
        found: bool | None = True if is_certain else None
        for device, answer in self.answers.items():
            reading = self.after.get(device)
            if answer.processes is None or not answer.is_steady or not self.is_steady(device):
                continue
            if reading is None or not reading.reserved_bytes:
                continue
            own_bytes = dict(answer.processes).get(processes.own_pid, -1)
            if own_bytes == -1:
                return False
            if own_bytes is not None:
                if own_bytes < reading.reserved_bytes and not is_certain:
                    return False
                found = True
        return found


def build_states(
    infos: Mapping[str, DeviceInfo],
    moment: Moment,
    processes: ProcessSource,
    *,
    pinned: PinnedUse | None,
    failures: Mapping[str, tuple[str, ...]],
) -> tuple[DeviceState, ...]:
    """Return the state of each device.

    Args:
        infos: the devices, in the order of the states.
        moment: what was read of them; the host's reading is the one from before.
        processes: describes the processes that the driver lists.
        pinned: pinned host memory.
        failures: sentences on what the driver could not tell, by device.
    """
    are_ours = moment.are_pids_ours(processes)
    pids = {pid for answer in moment.answers.values() for pid, _ in answer.processes or ()}
    known = processes.describe(pids, are_ours=are_ours) if pids else {}
    # A pid that is known to be this process's or a child's shows whose the others are.
    is_known = any(relation != "other" for relation, _ in known.values())
    are_told = are_ours or not pids or is_known or not processes.list_children()
    states = []
    for device, info in infos.items():
        answer = moment.answers.get(device, DriverAnswer())
        listed, notes = answer.processes, failures.get(device, ())
        if device == HOST:
            reading, is_consistent = moment.before.get(HOST), True
        else:
            reading, is_consistent = moment.after.get(device), moment.is_consistent(device)
            if not moment.is_steady(device):
                reading = _count_blocks(reading, moment.segments.get(device))
        if are_ours is False and listed is not None:
            note = (_OTHER_PIDS if listed else _NOT_LISTED).format(device=device)
            # A recording has this note already.
            notes = (*(old for old in notes if old != note), note)
            listed = listed or None  # An empty list is kept from us.
        states.append(
            DeviceState(
                info=info,
                reading=reading,
                use=answer.use,
                processes=None if listed is None else _sort_processes(listed, known),
                segments=tuple(moment.segments.get(device, ())),
                pinned=pinned if device == HOST else None,
                is_at_one_moment=answer.is_steady and is_consistent,
                are_children_told=are_told,
                notes=notes,
            )
        )
    return tuple(states)


def join_children(
    children: Sequence[ChildProcess], moment: Moment, processes: ProcessSource
) -> tuple[ChildProcess, ...]:
    """Return the children with what the driver lists of each in its answers."""
    found: dict[int, list[tuple[str, int | None]]] = {child.pid: [] for child in children}
    listed = [
        (device, pid, n_bytes)
        for device, answer in moment.answers.items()
        for pid, n_bytes in answer.processes or ()
        if pid in found
    ]
    pids = {pid for _, pid, _ in listed}
    known = processes.describe(pids, are_ours=moment.are_pids_ours(processes)) if pids else {}
    for device, pid, n_bytes in listed:
        if known[pid][0] == "child":
            found[pid].append((device, n_bytes))
    return tuple(replace(child, devices=tuple(found[child.pid])) for child in children)


def index_by_device(readings: Iterable[Reading]) -> dict[str, Reading]:
    """Return readings by their devices."""
    return {reading.device: reading for reading in readings}


def group_by_device(segments: Iterable[Segment]) -> dict[str, list[Segment]]:
    """Return segments by their devices."""
    found: dict[str, list[Segment]] = {}
    for segment in segments:
        found.setdefault(segment.device, []).append(segment)
    return found


def _sum_segments(segments: Iterable[Segment]) -> tuple[int, int]:
    allocated = reserved = 0
    for segment in segments:
        reserved += segment.n_bytes
        for block in segment.blocks:
            if block.state == "active_allocated":
                allocated += block.n_bytes
    return allocated, reserved


def _count_blocks(reading: Reading | None, segments: Sequence[Segment] | None) -> Reading | None:
    """Return a reading of the moment of the segments, which the allocator tells all at once.

    Where the counters never stand still, allocated and reserved are the sums of the blocks.
    """
    if reading is None or not segments:
        return reading
    allocated, reserved = _sum_segments(segments)
    peaks = (reading.allocated_peak_bytes, reading.reserved_peak_bytes)
    return replace(
        reading,
        allocated_bytes=allocated,
        reserved_bytes=reserved,
        allocated_peak_bytes=None if peaks[0] is None else max(peaks[0], allocated),
        reserved_peak_bytes=None if peaks[1] is None else max(peaks[1], reserved),
    )


def _sort_processes(
    listed: ProcessesByBytes, known: Mapping[int, tuple[Relation, str | None]]
) -> tuple[ProcessUse, ...]:
    """Return this process first, then its children, then the others; each biggest first."""
    uses = [ProcessUse(pid, known[pid][1], known[pid][0], n_bytes) for pid, n_bytes in listed]
    uses.sort(key=lambda use: (_RELATION_ORDER[use.relation], -(use.n_bytes or 0), use.pid))
    return tuple(uses)
