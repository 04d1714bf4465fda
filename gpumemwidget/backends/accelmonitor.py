"""Whole devices of an accelerator other than CUDA, as far as PyTorch asks their driver for us.

On XPU that is what is free of a device, other processes too. On MPS it is what Metal has given this
process: the memory is the machine's own, and of others nothing is told.
"""

from __future__ import annotations

from collections.abc import Mapping

from gpumemwidget.backends.accelerator import AcceleratorBackend
from gpumemwidget.backends.base import DeviceMonitor, ProcessSource
from gpumemwidget.records import DeviceInfo, DeviceUse

__all__ = ["AcceleratorMonitor"]


class AcceleratorMonitor:
    """A ``DeviceMonitor`` that adds these to what another tells.

    Args:
        backend: whose devices they are; it stays the caller's to close.
        others: the monitor of all other devices.
    """

    def __init__(self, backend: AcceleratorBackend, others: DeviceMonitor) -> None:
        self._backend = backend
        self._others = others

    def list_infos(self) -> tuple[DeviceInfo, ...]:
        """The others' devices, and those of the accelerator that the user has touched."""
        return self._others.list_infos() + self._backend.list_devices()

    def match(self, uuids: Mapping[str, str]) -> None:
        """Set the others' numbering right."""
        self._others.match(
            {device: uuid for device, uuid in uuids.items() if not self._is_ours(device)}
        )

    def read_use(self, device: str) -> DeviceUse | None:
        """The whole device now; ``None`` where PyTorch does not ask, or nobody has touched it."""
        if not self._is_ours(device):
            return self._others.read_use(device)
        memory = self._backend.read_memory(device)
        if memory is None:
            return None
        free_bytes, total_bytes = memory
        return DeviceUse(
            device=device,
            used_bytes=total_bytes - free_bytes,
            free_bytes=free_bytes,
            total_bytes=total_bytes,
        )

    def read_own_use(self, device: str) -> int | None:
        """What this process takes there; on XPU nobody tells."""
        if not self._is_ours(device):
            return self._others.read_own_use(device)
        return self._backend.read_own_use(device)

    def list_processes(self, device: str) -> tuple[tuple[int, int | None], ...] | None:
        """``None`` for the accelerator's devices: PyTorch asks for no processes."""
        return None if self._is_ours(device) else self._others.list_processes(device)

    def list_failures(self, device: str) -> tuple[str, ...]:
        """The others'; what PyTorch does not ask has not failed."""
        return () if self._is_ours(device) else self._others.list_failures(device)

    @property
    def processes(self) -> ProcessSource | None:
        """The others'."""
        return self._others.processes

    def take_notes(self) -> tuple[str, ...]:
        """The others'."""
        return self._others.take_notes()

    def close(self) -> None:
        """Close the others."""
        self._others.close()

    def _is_ours(self, device: str) -> bool:
        return device.partition(":")[0] == self._backend.kind
