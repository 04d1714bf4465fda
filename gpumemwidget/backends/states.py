"""Whole devices at one moment: the allocator's figures, the driver's, and who is on them.

They come from several calls, between which others go on. So the counters are read on both sides of
the rest, and the driver's figure on both sides of its list of processes, until they stand still.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Protocol

from gpumemwidget.backends.base import DeviceMonitor, ProcessSource, Relation
from gpumemwidget.devices import ChildProcess, DeviceState, Limit, PinnedUse, ProcessUse
from gpumemwidget.records import HOST, DeviceInfo, DeviceUse, Reading, Segment

__all__ = ["Counters", "find_host_use", "find_torchs_use", "list_child_uses", "take_states"]

#: How often the counters, and the driver's figures, are read before what was read last is taken.
_TRIES = 3
_DRIVER_TRIES = 5

_OTHER_NUMBERS = (
    "{device}: the driver lists its processes, but not this one by the number that it has here, as "
    "happens within containers: it can't be told which of them it is."
)
_NOT_LISTED = (
    "{device}: the driver lists no process there, and not even this one where it is in use, as "
    "happens within containers."
)

_Listed = tuple[tuple[int, int | None], ...] | None


class Counters(Protocol):
    """What is asked of the side of the allocators."""

    def list_devices(self) -> tuple[DeviceInfo, ...]:
        """The devices that have counters now."""
        ...

    def read_as_user(self) -> tuple[Reading, ...]:
        """One reading for each, with the peaks of the user's."""
        ...

    def read_segments(self) -> tuple[Segment, ...]:
        """The segments and blocks."""
        ...

    def read_pinned(self) -> PinnedUse | None:
        """Pinned host memory."""
        ...

    def read_limits(self) -> tuple[Limit, ...]:
        """The limits that are set, and those that wait."""
        ...

    def read_memory(self, device: str) -> tuple[int, int] | None:
        """What is free of a GPU in use, and its total, as PyTorch has them from the driver."""
        ...

    def available_host_bytes(self) -> int | None:
        """Host memory that can still be taken."""
        ...


def take_states(
    counters: Counters,
    monitor: DeviceMonitor | None,
    processes: ProcessSource,
    infos: Mapping[str, DeviceInfo],
    *,
    with_segments: bool,
) -> tuple[DeviceState, ...]:
    """All that can be told of the devices now.

    Args:
        counters: the allocators.
        monitor: the driver; ``None`` where there is none.
        processes: whose the numbers of processes are.
        infos: the devices, in the order in which they are to be told.
        with_segments: read the blocks too.
    """
    gpus = [device for device in infos if device != HOST]
    blocks: dict[str, tuple[Segment, ...]] = {}
    uses: dict[str, tuple[DeviceUse | None, _Listed, bool]] = {}
    fitting: set[str] = set()
    readings = [_read(counters)]
    for _ in range(_TRIES):
        blocks = _group(counters.read_segments() if with_segments else ())
        if monitor is not None:
            uses = {each: _read_driver(monitor, counters, each) for each in infos}
        readings.append(_read(counters))
        fitting = {
            each
            for each in gpus
            if _stands(readings[-2:], each) and _fits(blocks.get(each), readings[-1].get(each))
        }
        if len(fitting) == len(gpus):
            break
    pinned = counters.read_pinned()
    # Blocks that never fit although nothing happens are told as they are: nobody knows why.
    quiet = {each for each in gpus if _stands(readings, each)}
    sure = {each: readings[-1].get(each) for each in fitting | quiet}
    are_ours = _are_numbers_ours(sure, uses, processes)
    pids = {pid for _, listed, _ in uses.values() for pid, _ in listed or ()}
    known = processes.describe(pids, are_ours=are_ours) if pids else {}
    are_told = are_ours or not pids or _are_children_told(known, processes)
    states = []
    for device, info in infos.items():
        use, listed, stood = uses.get(device, (None, None, True))
        # malloc's count is not told twice in a row where it is slow.
        reading = readings[0 if device == HOST else -1].get(device)
        if device != HOST and device not in sure:
            reading = _count_blocks(reading, blocks.get(device))
        if device == HOST and use is None:
            use = find_host_use(info, counters)
        notes = () if monitor is None else monitor.list_failures(device)
        if are_ours is False and listed is not None:
            note = (_OTHER_NUMBERS if listed else _NOT_LISTED).format(device=device)
            # A recording has it already.
            notes = (*(each for each in notes if each != note), note)
            listed = listed or None  # They are kept from us.
        states.append(
            DeviceState(
                info=info,
                reading=reading,
                use=use,
                processes=None if listed is None else _sort(listed, known),
                segments=blocks.get(device, ()),
                pinned=pinned if device == HOST else None,
                is_at_one_moment=stood and (device == HOST or device in fitting),
                are_children_told=are_told,
                notes=notes,
            )
        )
    return tuple(states)


def list_child_uses(
    children: Sequence[ChildProcess],
    counters: Counters,
    monitor: DeviceMonitor,
    processes: ProcessSource,
) -> tuple[ChildProcess, ...]:
    """Children with what the driver lists of each.

    Args:
        children: who is below this process.
        counters: the allocators, which show whether the driver's numbers are those of here.
        monitor: the driver.
        processes: whose the numbers are.
    """
    is_certain = processes.are_numbers_certain
    before = {} if is_certain else _read(counters)
    listed = {info.device: monitor.list_processes(info.device) for info in monitor.list_infos()}
    after = {} if is_certain else _read(counters)
    still = {each: after.get(each) for each in listed if _stands([before, after], each)}
    uses = {device: (None, told, True) for device, told in listed.items()}
    are_ours = _are_numbers_ours(still, uses, processes)
    found: dict[int, list[tuple[str, int | None]]] = {child.pid: [] for child in children}
    meant = {pid for told in listed.values() for pid, _ in told or () if pid in found}
    known = processes.describe(meant, are_ours=are_ours) if meant else {}
    for device, told in listed.items():
        for pid, n_bytes in told or ():
            if pid in known and known[pid][0] == "child":
                found[pid].append((device, n_bytes))
    return tuple(replace(child, devices=tuple(found[child.pid])) for child in children)


def _read(counters: Counters) -> dict[str, Reading]:
    return {reading.device: reading for reading in counters.read_as_user()}


def _read_driver(
    monitor: DeviceMonitor, counters: Counters, device: str
) -> tuple[DeviceUse | None, _Listed, bool]:
    """What is used there, by whom, and whether both are of one moment."""
    use, listed, stood = _read_monitor(monitor, device)
    return use or find_torchs_use(monitor, counters, device), listed, stood


def _read_monitor(monitor: DeviceMonitor, device: str) -> tuple[DeviceUse | None, _Listed, bool]:
    use = monitor.read_use(device)
    listed: _Listed = None
    for _ in range(_DRIVER_TRIES):
        before = use
        listed = monitor.list_processes(device)
        if listed is None:
            return use, None, True
        use = monitor.read_use(device)
        if (before and before.used_bytes) == (use and use.used_bytes):
            return use, listed, True
    return use, listed, False


def find_torchs_use(
    monitor: DeviceMonitor | None, counters: Counters, device: str
) -> DeviceUse | None:
    """The whole device, as PyTorch has it from the driver, where the monitor knows no such device.

    That is so without NVML: on ROCm, and in containers without the driver's capability "utility".
    """
    if monitor is None or monitor.list_failures(device):
        return None
    memory = counters.read_memory(device)
    if memory is None:
        return None
    free_bytes, total_bytes = memory
    return DeviceUse(device, total_bytes - free_bytes, free_bytes, total_bytes)


def find_host_use(info: DeviceInfo, counters: Counters) -> DeviceUse | None:
    """The machine's memory, or that of its control group: what can't be had is in use.

    Nobody is told of on it: resident sizes share pages, as a forked worker does with its parent.
    """
    total_bytes, available_bytes = info.total_bytes, counters.available_host_bytes()
    if total_bytes is None or available_bytes is None:
        return None
    free_bytes = min(available_bytes, total_bytes)
    return DeviceUse(HOST, total_bytes - free_bytes, free_bytes, total_bytes)


def _group(segments: Iterable[Segment]) -> dict[str, tuple[Segment, ...]]:
    """Segments by their devices."""
    found: dict[str, list[Segment]] = {}
    for segment in segments:
        found.setdefault(segment.device, []).append(segment)
    return {device: tuple(each) for device, each in found.items()}


def _stands(readings: Sequence[Mapping[str, Reading]], device: str) -> bool:
    """Whether nothing of a device was taken or given back over some readings."""
    counts = {
        None if each is None else (each.allocated_bytes, each.reserved_bytes)
        for each in (reading.get(device) for reading in readings)
    }
    return len(counts) == 1


def _count(segments: Iterable[Segment]) -> tuple[int, int]:
    """What blocks have allocated and segments reserved."""
    segments = tuple(segments)
    allocated = sum(
        block.n_bytes
        for segment in segments
        for block in segment.blocks
        if block.state == "active_allocated"
    )
    return allocated, sum(segment.n_bytes for segment in segments)


def _fits(segments: Sequence[Segment] | None, reading: Reading | None) -> bool:
    """Whether the blocks are what is counted."""
    if not segments or reading is None or reading.reserved_bytes is None:
        return True
    return _count(segments) == (reading.allocated_bytes, reading.reserved_bytes)


def _count_blocks(reading: Reading | None, segments: Sequence[Segment] | None) -> Reading | None:
    """A reading of the moment of the segments, which the allocator tells all at once.

    For where the counters never stand still: allocated and reserved are the sums of the blocks.
    """
    if reading is None or not segments:
        return reading
    allocated, reserved = _count(segments)
    peaks = (reading.allocated_peak_bytes, reading.reserved_peak_bytes)
    return replace(
        reading,
        allocated_bytes=allocated,
        reserved_bytes=reserved,
        allocated_peak_bytes=None if peaks[0] is None else max(peaks[0], allocated),
        reserved_peak_bytes=None if peaks[1] is None else max(peaks[1], reserved),
    )


def _are_numbers_ours(
    readings: Mapping[str, Reading | None],
    uses: Mapping[str, tuple[DeviceUse | None, _Listed, bool]],
    processes: ProcessSource,
) -> bool | None:
    """Whether the driver's numbers are those that processes have here.

    Where PyTorch has reserved memory this process must be listed, with as much or more. If it is
    not, it goes by another number there, and so may everybody: a container has numbers of its own.

    Returns:
        ``None`` where no device shows it.
    """
    is_certain = processes.are_numbers_certain
    found: bool | None = True if is_certain else None
    for device, (_, listed, stood) in uses.items():
        reading = readings.get(device)
        if listed is None or not stood or reading is None or not reading.reserved_bytes:
            continue
        own = dict(listed).get(processes.own_pid, -1)
        if own == -1 or (own is not None and own < reading.reserved_bytes and not is_certain):
            return False
        if own is not None:
            found = True
    return found


def _are_children_told(
    known: Mapping[int, tuple[Relation, str | None]], processes: ProcessSource
) -> bool:
    """Whether children would be known by numbers that may be another's: one of ours is, or none is.

    A number that is known to be this process's or a child's shows whose the others are.
    """
    is_known = any(relation != "other" for relation, _ in known.values())
    return is_known or not processes.list_children()


def _sort(
    listed: Iterable[tuple[int, int | None]], known: Mapping[int, tuple[Relation, str | None]]
) -> tuple[ProcessUse, ...]:
    """This process first, then its children, then the others; each biggest first."""
    uses = [
        ProcessUse(pid, name, relation, n_bytes)
        for pid, n_bytes in listed
        for relation, name in [known[pid]]
    ]
    places = {"own": 0, "child": 1, "other": 2}
    return tuple(sorted(uses, key=lambda use: (places[use.relation], -(use.n_bytes or 0), use.pid)))
