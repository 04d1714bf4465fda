"""A simulated driver: whole GPUs, and the processes that use them beside the simulated program."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from gpumemwidget.backends.protocol import Relation
from gpumemwidget.errors import BadInputError
from gpumemwidget.model.devices import ChildProcess, DeviceInfo, DeviceUse, HardwareNote
from gpumemwidget.testing.gpus import SimulatedGpus, format_uuid

#: One part in so many of a GPU's memory is what a CUDA context takes.
_CONTEXT_DIVISOR = 160
_LOST = (
    "{device}: memory in use can't be read: the GPU is lost and does not answer any more "
    "(nvidia-smi tells more).",
    "{device}: processes can't be read: the GPU is lost and does not answer any more "
    "(nvidia-smi tells more).",
)


@dataclass(frozen=True, slots=True)
class _Process:
    """A process other than the simulated program, with its bytes on each GPU by index."""

    name: str
    relation: Relation
    n_bytes: Mapping[int, int]


class StandInDriver:
    """A driver for a ``DeviceMonitor`` that also tells of the processes that it lists."""

    def __init__(self) -> None:
        self.is_closed = False

    def match(self, uuids: Mapping[str, str]) -> None:
        """Do nothing: the devices have PyTorch's names."""

    def take_notes(self) -> tuple[HardwareNote, ...]:
        """Return nothing: what fails is listed with its device."""
        return ()

    def close(self) -> None:
        """Tell of no device any more."""
        self.is_closed = True

    def describe(
        self, pids: Collection[int], *, are_ours: bool | None
    ) -> Mapping[int, tuple[Relation, str | None]]:
        """Return what processes are to the program, and their names."""
        known = {} if are_ours is False else self.list_known()
        return {pid: known.get(pid, ("other", None)) for pid in pids}

    def list_known(self) -> Mapping[int, tuple[Relation, str | None]]:
        """Return the relation and the name of each process, by its pid."""
        raise NotImplementedError


class SimulatedDriver(StandInDriver):
    """The driver of simulated GPUs. What others take of a GPU is missing for its allocator.

    Attributes:
        own_pid: the pid of the simulated program, which is this process's.

    Args:
        gpus: the GPUs.
    """

    def __init__(self, gpus: SimulatedGpus) -> None:
        super().__init__()
        self.own_pid = os.getpid()
        self._gpus = gpus
        self._others: dict[int, _Process] = {}
        self._lost: set[int] = set()
        for index in range(gpus.n_devices):
            self._reserve_outside(index, {})

    # -- What happens on the machine ---------------------------------------------------------------

    def set_process(
        self,
        pid: int,
        n_bytes: int,
        device: int = 0,
        *,
        name: str = "python other.py",
        relation: Relation = "other",
    ) -> None:
        """Let another process take so many bytes of a GPU in all; 0: it is gone from there.

        Raises:
            BadInputError: the GPU has no room for it.
        """
        known = self._others.get(pid)
        taken = {} if known is None else dict(known.n_bytes)
        taken.pop(device, None)
        if n_bytes:
            taken[device] = n_bytes
        others = {**self._others, pid: _Process(name, relation, taken)}
        self._reserve_outside(device, others)
        self._others = others

    def lose(self, device: int = 0) -> None:
        """Let a GPU stop answering."""
        self._lost.add(device)

    def _reserve_outside(self, index: int, others: Mapping[int, _Process]) -> None:
        """Keep what is not PyTorch's from its allocator."""
        taken = (process.n_bytes.get(index, 0) for process in others.values())
        outside_bytes = self._count_context(index) + sum(taken)
        room_bytes = self._gpus.get_total(index) - self._gpus.count_reserved(index)
        if outside_bytes > room_bytes:
            raise BadInputError(
                f"others can't take {outside_bytes} bytes of cuda:{index}: {room_bytes} are free"
            )
        self._gpus.set_outside(outside_bytes, index)

    # -- What the driver tells of GPUs -------------------------------------------------------------

    def list_infos(self) -> tuple[DeviceInfo, ...]:
        """Return all GPUs, in use or not."""
        return tuple(
            DeviceInfo(
                f"cuda:{index}",
                self._gpus.name,
                self._gpus.get_total(index),
                uuid=f"GPU-{format_uuid(index)}",
            )
            for index in self._list_indices()
        )

    def read_use(self, device: str) -> DeviceUse | None:
        """Return the use of a whole GPU; ``None`` for one that is lost or not there."""
        listed = self.list_processes(device)
        if listed is None:
            return None
        total_bytes = self._gpus.get_total(device)
        used_bytes = sum(n_bytes for _, n_bytes in listed)
        return DeviceUse(
            device=device,
            used_bytes=used_bytes,
            free_bytes=total_bytes - used_bytes,
            total_bytes=total_bytes,
            driver_bytes=0,
        )

    def list_processes(self, device: str) -> tuple[tuple[int, int], ...] | None:
        """Return the processes on a GPU with their bytes; ``None`` where that is not told."""
        index = self._find_index(device)
        if index is None or index in self._lost:
            return None
        listed = {
            pid: process.n_bytes[index]
            for pid, process in self._others.items()
            if index in process.n_bytes
        }
        if index in self._gpus.list_touched():
            reserved_bytes = self._gpus.count_reserved(index)
            listed[self.own_pid] = self._count_context(index) + reserved_bytes
        return tuple(sorted(listed.items()))

    def list_failures(self, device: str) -> tuple[str, ...]:
        """Return why something of a GPU can't be read."""
        reasons = _LOST if self._find_index(device) in self._lost else ()
        return tuple(reason.format(device=device) for reason in reasons)

    # -- What is known of processes ----------------------------------------------------------------

    @property
    def are_pids_certain(self) -> bool:
        """Return that the driver's pids are the ones that processes have here."""
        return True

    def list_children(self) -> tuple[ChildProcess, ...]:
        """Return the program's children on GPUs, by their pids; their host memory is not known."""
        return tuple(
            ChildProcess(pid, self.own_pid, process.name, None)
            for pid, process in sorted(self._others.items())
            if process.relation == "child" and process.n_bytes
        )

    def list_known(self) -> Mapping[int, tuple[Relation, str | None]]:
        """Return the relation and the name of each process, by its pid."""
        others = {pid: (each.relation, each.name) for pid, each in self._others.items()}
        return {**others, self.own_pid: ("own", "python -m ipykernel_launcher")}

    def _count_context(self, index: int) -> int:
        return self._gpus.get_total(index) // _CONTEXT_DIVISOR

    def _list_indices(self) -> range:
        return range(0 if self.is_closed else self._gpus.n_devices)

    def _find_index(self, device: str) -> int | None:
        return next((index for index in self._list_indices() if device == f"cuda:{index}"), None)
