"""A simulated driver: whole GPUs, and the processes that use them beside the simulated program."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Literal

from gpumemwidget.backends.protocol import Relation
from gpumemwidget.errors import BadInputError
from gpumemwidget.model.devices import ChildProcess, DeviceInfo, DeviceUse
from gpumemwidget.testing.gpus import SimulatedGpus
from gpumemwidget.testing.torch_module import format_uuid

__all__ = ["DriverKind", "SimulatedDriver", "SimulatedProcesses"]

#: Kinds of drivers, by how much they tell. ``plain``: everything; ``no permission``: no processes;
#: ``MIG``: the GPU is an instance, whose utilization is unknown; ``host PIDs``: processes by the
#: numbers that the machine has for them, which differ from those within a container.
DriverKind = Literal["plain", "no permission", "MIG", "host PIDs"]

#: Parts of a GPU's memory that are not the allocator's, as shares of all of it: what the driver
#: reserves, what a CUDA context takes, what is in use and listed for no process.
_DRIVER_SHARE = 1 / 160
_CONTEXT_SHARE = 1 / 160
_UNLISTED_SHARE = 1 / 9000
#: The difference between the machine's number of a process and the container's.
_HOST_PID_OFFSET = 3_000_000
_LOST = (
    "{device}: memory in use can't be read: the GPU is lost and does not answer any more "
    "(nvidia-smi tells more).",
    "{device}: processes can't be read: the GPU is lost and does not answer any more "
    "(nvidia-smi tells more).",
)
_NO_PERMISSION = "{device}: processes can't be read: this user has no permission for it."


@dataclass(frozen=True, slots=True)
class _Use:
    """A GPU's memory in the hands of one process other than the simulated program."""

    name: str
    relation: Relation
    n_bytes: int


class SimulatedProcesses:
    """The simulated program, its children, and other processes; a ``ProcessSource``.

    Args:
        own_pid: the program's number; this process's, if not given.
        own_name: what the program runs.
        are_pids_certain: whether the driver's numbers are the ones that processes have here.
    """

    def __init__(
        self,
        own_pid: int | None = None,
        own_name: str = "python -m ipykernel_launcher",
        *,
        are_pids_certain: bool = True,
    ) -> None:
        self._own_pid = os.getpid() if own_pid is None else own_pid
        self._are_numbers_certain = are_pids_certain
        self._known: dict[int, tuple[Relation, str]] = {self._own_pid: ("own", own_name)}
        self._children: dict[int, ChildProcess] = {}

    @property
    def own_pid(self) -> int:
        """The program's number."""
        return self._own_pid

    @property
    def are_pids_certain(self) -> bool:
        """Return whether the driver's numbers are the ones that processes have here."""
        return self._are_numbers_certain

    def set_child(self, pid: int, name: str, resident_bytes: int) -> None:
        """Let a child of the program hold so much host memory; 0: it ends."""
        self.add(pid, name, "child")
        self._children[pid] = ChildProcess(pid, self._own_pid, name, resident_bytes)
        if resident_bytes == 0:
            del self._children[pid]

    def add(self, pid: int, name: str, relation: Relation) -> None:
        """Make a process known."""
        self._known[pid] = (relation, name)

    def list_children(self) -> tuple[ChildProcess, ...]:
        """Return the children, by their numbers."""
        return tuple(self._children[pid] for pid in sorted(self._children))

    def describe(
        self, pids: Collection[int], *, are_ours: bool | None
    ) -> Mapping[int, tuple[Relation, str | None]]:
        """Return what processes are to the program, and their names."""
        known = {} if are_ours is False else self._known
        return {pid: known.get(pid, ("other", None)) for pid in pids}


class SimulatedDriver:
    """The driver of simulated GPUs; a ``DeviceMonitor``.

    What others take of a GPU is missing for its allocator.

    Args:
        gpus: the GPUs, with what is left of their memory for PyTorch: see ``leave_for_pytorch``.
        total_bytes: the whole memory of each.
        kind: what the driver tells.
        processes: the processes; only the program itself, if not given.

    Attributes:
        utilization_percent: how busy each GPU is said to be.
    """

    def __init__(
        self,
        gpus: SimulatedGpus,
        total_bytes: int,
        *,
        kind: DriverKind = "plain",
        processes: SimulatedProcesses | None = None,
    ) -> None:
        if processes is None:
            processes = SimulatedProcesses(are_pids_certain=kind != "host PIDs")
        self.utilization_percent: dict[int, int] = {}
        self._gpus = gpus
        self._total_bytes = total_bytes
        self._kind = kind
        self._processes = processes
        self._uses: dict[tuple[int, int], _Use] = {}
        #: Bytes of each GPU that libraries of the program hold, such as NCCL.
        self._libraries: dict[int, int] = {}
        self._lost: set[int] = set()
        self._is_closed = False
        for index in range(gpus.n_devices):
            self._reserve_outside(index)

    @staticmethod
    def leave_for_pytorch(total_bytes: int) -> int:
        """Return how much of a GPU of this size is no driver's: its total, as PyTorch tells it."""
        return total_bytes - int(total_bytes * _DRIVER_SHARE)

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
        before = self._uses.pop((device, pid), None)
        if n_bytes:
            self._uses[device, pid] = _Use(name, relation, n_bytes)
            self._processes.add(pid, name, relation)
        try:
            self._reserve_outside(device)
        except BadInputError:
            del self._uses[device, pid]
            if before is not None:
                self._uses[device, pid] = before
            raise

    def set_libraries(self, n_bytes: int, device: int = 0) -> None:
        """Let libraries of the program, such as NCCL, take so many bytes of a GPU.

        Raises:
            BadInputError: the GPU has no room for it.
        """
        self._libraries[device] = n_bytes
        self._reserve_outside(device)

    def lose(self, device: int = 0) -> None:
        """Let a GPU stop answering."""
        self._lost.add(device)

    def _reserve_outside(self, index: int) -> None:
        """Keep what is not PyTorch's from its allocator."""
        others = (use.n_bytes for (place, _), use in self._uses.items() if place == index)
        outside_bytes = sum(
            (*others, self._context_bytes, self._libraries.get(index, 0), self._unlisted_bytes)
        )
        room_bytes = self._gpus.get_total(index) - self._gpus.count_reserved(index)
        if outside_bytes > room_bytes:
            raise BadInputError(
                f"others can't take {outside_bytes} bytes of cuda:{index}: {room_bytes} are free"
            )
        self._gpus.set_outside(outside_bytes, index)

    # -- What the driver tells ---------------------------------------------------------------------

    @property
    def processes(self) -> SimulatedProcesses:
        """The processes by whose numbers it tells."""
        return self._processes

    def list_infos(self) -> tuple[DeviceInfo, ...]:
        """Return all GPUs, in use or not."""
        prefix = "MIG" if self._kind == "MIG" else "GPU"
        return tuple(
            DeviceInfo(
                f"cuda:{index}",
                self._gpus.name,
                self._total_bytes,
                uuid=f"{prefix}-{format_uuid(index)}",
            )
            for index in range(0 if self._is_closed else self._gpus.n_devices)
        )

    def match(self, uuids: Mapping[str, str]) -> None:
        """Do nothing: PyTorch has the GPUs in the same order."""

    def read_use(self, device: str) -> DeviceUse | None:
        """Return the use of a whole GPU; ``None`` for one that is lost or not there."""
        index = self._find_index(device)
        if index is None or index in self._lost:
            return None
        listed = self._list_by_pid(index)
        used_bytes = self._unlisted_bytes + sum(listed.values())
        driver_bytes = int(self._total_bytes * _DRIVER_SHARE)
        percent = self.utilization_percent.get(index, 0)
        return DeviceUse(
            device=device,
            used_bytes=used_bytes,
            free_bytes=self._total_bytes - driver_bytes - used_bytes,
            total_bytes=self._total_bytes,
            utilization_percent=None if self._kind == "MIG" else percent,
            driver_bytes=driver_bytes,
        )

    def list_processes(self, device: str) -> tuple[tuple[int, int | None], ...] | None:
        """Return the processes on a GPU with their bytes; ``None`` where that is not told."""
        index = self._find_index(device)
        if index is None or index in self._lost or self._kind == "no permission":
            return None
        offset = _HOST_PID_OFFSET if self._kind == "host PIDs" else 0
        return tuple(
            (pid + offset, n_bytes) for pid, n_bytes in sorted(self._list_by_pid(index).items())
        )

    def list_failures(self, device: str) -> tuple[str, ...]:
        """Return why something of a GPU can't be read."""
        index = self._find_index(device)
        reasons: tuple[str, ...] = ()
        if index in self._lost:
            reasons = _LOST
        elif index is not None and self._kind == "no permission":
            reasons = (_NO_PERMISSION,)
        return tuple(reason.format(device=device) for reason in reasons)

    def take_notes(self) -> tuple[str, ...]:
        """Return nothing: what fails is listed with its GPU."""
        return ()

    def close(self) -> None:
        """Tell of no GPU any more."""
        self._is_closed = True

    @property
    def _context_bytes(self) -> int:
        return int(self._total_bytes * _CONTEXT_SHARE)

    @property
    def _unlisted_bytes(self) -> int:
        return int(self._total_bytes * _UNLISTED_SHARE)

    def _find_index(self, device: str) -> int | None:
        known = () if self._is_closed else range(self._gpus.n_devices)
        return next((index for index in known if device == f"cuda:{index}"), None)

    def _list_by_pid(self, index: int) -> dict[int, int]:
        listed = {pid: use.n_bytes for (place, pid), use in self._uses.items() if place == index}
        if index in self._gpus.list_touched():
            own_bytes = self._context_bytes + self._libraries.get(index, 0)
            listed[self._processes.own_pid] = own_bytes + self._gpus.count_reserved(index)
        return listed
