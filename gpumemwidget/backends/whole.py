"""The driver's side of the machine: whole devices, in use or not, and the processes on them."""

from __future__ import annotations

import dataclasses

from gpumemwidget.backends.accelerator import AcceleratorBackend
from gpumemwidget.backends.accelmonitor import AcceleratorMonitor
from gpumemwidget.backends.base import DeviceMonitor, ProcessSource
from gpumemwidget.backends.processes import ProcessTree
from gpumemwidget.backends.states import (
    Counters,
    find_host_use,
    find_torchs_use,
    list_child_uses,
    take_states,
)
from gpumemwidget.devices import ChildProcess, DeviceState
from gpumemwidget.records import HOST, DeviceInfo, DeviceUse

__all__ = ["WholeDevices", "by_kind_and_index"]


class WholeDevices:
    """What a driver adds to the counters of a process.

    Args:
        counters: the side of the allocators.
        monitor: the driver; ``None`` where there is none.
        processes: whose the numbers of processes are; the monitor's, or the operating system, if
            not given.
    """

    def __init__(
        self, counters: Counters, monitor: DeviceMonitor | None, processes: ProcessSource | None
    ) -> None:
        self._counters = counters
        self._monitor = monitor
        if processes is None and monitor is not None:
            processes = monitor.processes
        self._processes = ProcessTree() if processes is None else processes

    def list_infos(self) -> dict[str, DeviceInfo]:
        """Every device that can be seen, touched or not, in their order: GPUs first."""
        infos = {info.device: info for info in self._counters.list_devices()}
        if self._monitor is not None:
            uuids = {info.device: info.uuid for info in infos.values() if info.uuid is not None}
            self._monitor.match(uuids)
            for info in self._monitor.list_infos():
                known = infos.get(info.device)
                infos[info.device] = info if known is None else _merge(known, info)
            # Those in use have theirs; of others it may wait, or be there before the first byte.
            for limit in self._counters.read_limits():
                untouched = infos.get(limit.device)
                if untouched is not None and limit.limit_bytes is not None:
                    infos[limit.device] = dataclasses.replace(
                        untouched, limit_bytes=limit.limit_bytes
                    )
        return {device: infos[device] for device in sorted(infos, key=by_kind_and_index)}

    def read_use(self, info: DeviceInfo) -> DeviceUse | None:
        """The whole device now, the host too; ``None`` where nobody tells."""
        use = None if self._monitor is None else self._monitor.read_use(info.device)
        if use is None and info.device == HOST:
            return find_host_use(info, self._counters)
        return use or find_torchs_use(self._monitor, self._counters, info.device)

    def add_accelerator(self, backend: AcceleratorBackend) -> None:
        """Let PyTorch tell of the devices of an accelerator that has joined."""
        if self._monitor is not None:
            self._monitor = AcceleratorMonitor(backend, self._monitor)

    def read_own_use(self, device: str) -> int | None:
        """What this process takes there, its context included; ``None`` where nobody tells."""
        return None if self._monitor is None else self._monitor.read_own_use(device)

    def find_failure(self, device: str) -> str | None:
        """Why something of a device can't be read, of several reasons the first."""
        if self._monitor is None:
            return None
        return next(iter(self._monitor.list_failures(device)), None)

    def take_states(self, *, with_segments: bool) -> tuple[DeviceState, ...]:
        """All that can be told of every device at one moment."""
        return take_states(
            self._counters,
            self._monitor,
            self._processes,
            self.list_infos(),
            with_segments=with_segments,
        )

    def list_children(self) -> tuple[ChildProcess, ...]:
        """The processes below this one, with what they take of each device."""
        children = self._processes.list_children()
        if self._monitor is None or not children:
            return children
        return list_child_uses(children, self._counters, self._monitor, self._processes)

    def take_notes(self) -> tuple[str, ...]:
        """Sentences on what failed, each once."""
        return () if self._monitor is None else self._monitor.take_notes()

    def close(self) -> None:
        """Let go of the driver. May be called twice."""
        if self._monitor is not None:
            self._monitor.close()


def by_kind_and_index(device: str) -> tuple[bool, str, int]:
    """The order of devices: by kind, ``cuda:10`` behind ``cuda:9``, the host last."""
    kind, _, index = device.partition(":")
    return device == HOST, kind, int(index) if index.isdigit() else -1


def _merge(counted: DeviceInfo, seen: DeviceInfo) -> DeviceInfo:
    """What the allocator's side knows of a device, filled up with what the driver knows."""
    missing = {
        field.name: getattr(seen, field.name)
        for field in dataclasses.fields(counted)
        if getattr(counted, field.name) is None
    }
    return dataclasses.replace(counted, **missing)
