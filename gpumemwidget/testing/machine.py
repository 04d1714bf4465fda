"""Simulated GPUs in place of this machine's, with a driver and the processes on them."""

from __future__ import annotations

import copy
import os
from collections.abc import Collection, Mapping
from types import ModuleType
from typing import TYPE_CHECKING

from gpumemwidget.backends.cuda.backend import CudaBackend
from gpumemwidget.backends.hardware import Hardware, use_hardware
from gpumemwidget.backends.host import HostBackend
from gpumemwidget.backends.protocol import Relation
from gpumemwidget.errors import BadInputError
from gpumemwidget.model.devices import (
    ChildProcess,
    DeviceInfo,
    DeviceUse,
    HardwareNote,
    LibraryUse,
)
from gpumemwidget.session.session import find_session
from gpumemwidget.testing.simulated_gpus import SimulatedGpus, format_uuid, simulate_torch

if TYPE_CHECKING:
    from typing import Self


class SimulatedLibrary:
    """Another library of the simulated program, such as CuPy, with a cache of its own."""

    name = "Simulated library"

    def __init__(self, driver: SimulatedDriver, n_devices: int) -> None:
        self._driver = driver
        #: The bytes in use and those that are kept for later, of each GPU.
        self._uses = [(0, 0)] * n_devices

    @property
    def is_imported(self) -> bool:
        """Whether it has memory."""
        return any(map(any, self._uses))

    def count_bytes(self, index: int) -> int:
        """Return what it has of a GPU in all."""
        return sum(self._uses[index])

    def set_use(self, used_bytes: int, cached_bytes: int = 0, device: int = 0) -> None:
        """Let its arrays be in so many bytes of a GPU, and let it keep others for later.

        Raises:
            BadInputError: the GPU has no room for it.
        """
        before, self._uses[device] = self._uses[device], (used_bytes, cached_bytes)
        try:
            self._driver.make_room(device)
        except BadInputError:
            self._uses[device] = before
            raise

    def read_use(self, device: str) -> LibraryUse | None:
        """Return what it has of a GPU; ``None`` where it has nothing."""
        use = self._uses[int(device.partition(":")[2])]
        return LibraryUse(self.name, *use, can_empty=True) if any(use) else None

    def empty_cache(self, device: str) -> None:
        """Give back what is kept for later."""
        index = int(device.partition(":")[2])
        self.set_use(self._uses[index][0], 0, index)


class SimulatedDriver:
    """The driver of simulated GPUs. What others take of a GPU is missing for its allocator.

    Attributes:
        own_pid: the pid of the simulated program, which is this process's.
        driver_bytes: what it keeps of each GPU for itself, beside what the allocator counts.
        library: another library of the program, which takes memory beside PyTorch.
    """

    def __init__(self, gpus: SimulatedGpus) -> None:
        self.own_pid = os.getpid()
        self.is_closed = False
        self.driver_bytes = 0
        self._gpus = gpus
        self._known: dict[int, tuple[Relation, str]] = {
            self.own_pid: ("own", "python -m ipykernel_launcher")
        }
        #: The bytes of other processes on each GPU, by pid.
        self._others: list[dict[int, int]] = [{} for _ in gpus.allocators]
        self._lost: set[int] = set()
        self._asleep = [0] * len(gpus.allocators)
        #: The bytes that the host's programs take, where the GPUs share its memory.
        self._host_bytes: int | None = None
        self.library = SimulatedLibrary(self, len(gpus.allocators))
        for index in range(len(gpus.allocators)):
            self._set_others(index, {})

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
        others = {**self._others[device], pid: n_bytes}
        self._set_others(device, {other: taken for other, taken in others.items() if taken})
        self._known[pid] = (relation, name)

    def make_room(self, device: int) -> None:
        """Keep from a GPU's allocator what is outside of it now.

        Raises:
            BadInputError: the GPU has no room for it.
        """
        self._set_others(device, self._others[device])

    def sleep(self, n_bytes: int, device: int = 0) -> None:
        """Take the memory from so many bytes that PyTorch has reserved, or give it back: 0.

        Raises:
            BadInputError: PyTorch has not reserved so much, or its memory is another's meanwhile.
        """
        reserved_bytes = self._gpus.allocators[device].reserved_bytes
        if n_bytes > reserved_bytes:
            raise BadInputError(f"{n_bytes} bytes can't sleep: {reserved_bytes} are reserved")
        before, self._asleep[device] = self._asleep[device], n_bytes
        try:
            self.make_room(device)
        except BadInputError:
            self._asleep[device] = before
            raise

    def share(self, host_bytes: int) -> None:
        """Let the GPU's memory be the host's, of which the host's programs take so many bytes.

        Raises:
            BadInputError: the GPU has no room for them.
        """
        before, self._host_bytes = self._host_bytes, host_bytes
        try:
            self.make_room(0)
        except BadInputError:
            self._host_bytes = before
            raise

    def lose(self, device: int = 0) -> None:
        """Let a GPU stop answering."""
        self._lost.add(device)

    def _set_others(self, index: int, others: dict[int, int]) -> None:
        """Keep what others take, and a CUDA context, from a GPU's allocator."""
        allocator = self._gpus.allocators[index]
        outside_bytes = self._count_context(index) + sum(others.values()) + (self._host_bytes or 0)
        outside_bytes += self.library.count_bytes(index) - self._asleep[index]
        room_bytes = allocator.total_bytes - allocator.reserved_bytes
        if outside_bytes > room_bytes:
            raise BadInputError(
                f"others can't take {outside_bytes} bytes of cuda:{index}: {room_bytes} are free"
            )
        allocator.outside_bytes = outside_bytes
        self._others[index] = others

    # -- What the driver knows of GPUs -------------------------------------------------------------

    def list_infos(
        self,
        uuids: Mapping[str, str] | None = None,  # noqa: ARG002 - the devices have PyTorch's names
    ) -> tuple[DeviceInfo, ...]:
        """Return all GPUs, in use or not."""
        gpus = () if self.is_closed else self._gpus.allocators
        return tuple(
            DeviceInfo(
                f"cuda:{n}",
                self._gpus.name,
                gpu.total_bytes + self.driver_bytes,
                uuid=f"GPU-{format_uuid(n)}",
            )
            for n, gpu in enumerate(gpus)
        )

    def read_use(self, device: str) -> DeviceUse | None:
        """Return the use of a whole GPU, or that it is lost; ``None`` for one that is not there."""
        index = self._find_index(device)
        if index is None:
            return None
        if index in self._lost:
            return DeviceUse(device, None, None, None, failure="GPU is lost")
        room_bytes = self._gpus.allocators[index].total_bytes
        used_bytes = sum(n_bytes for _, n_bytes in self.list_processes(device) or ())
        used_bytes += self._host_bytes or 0
        return DeviceUse(
            device,
            used_bytes,
            room_bytes - used_bytes,
            room_bytes + self.driver_bytes,
            driver_bytes=self.driver_bytes,
            is_shared=self._host_bytes is not None,
        )

    def list_processes(self, device: str) -> tuple[tuple[int, int], ...] | None:
        """Return the processes on a GPU with their bytes; ``None`` where that is unknown."""
        index = self._find_index(device)
        if index is None or index in self._lost:
            return None
        listed = dict(self._others[index])
        library_bytes = self.library.count_bytes(index)
        if library_bytes or index in self._gpus.list_touched():
            reserved_bytes = self._gpus.allocators[index].reserved_bytes
            own_bytes = self._count_context(index) + reserved_bytes + library_bytes
            listed[self.own_pid] = own_bytes - self._asleep[index]
        return tuple(sorted(listed.items()))

    def read_process(self, device: str, pid: int) -> int | None:
        """Return the bytes of one process on a GPU."""
        return dict(self.list_processes(device) or ()).get(pid)

    def list_children(self) -> tuple[ChildProcess, ...]:
        """Return the program's children on GPUs, by their pids; their host memory is not known."""
        return tuple(
            ChildProcess(pid, self.own_pid, name, None)
            for pid, (relation, name) in sorted(self._known.items())
            if relation == "child" and any(pid in others for others in self._others)
        )

    def take_notes(self) -> tuple[HardwareNote, ...]:
        """Return nothing: a lost GPU is reported with its use."""
        return ()

    def close(self) -> None:
        """List no device any more."""
        self.is_closed = True

    def are_pids_certain(self, pids: Collection[int]) -> bool:  # noqa: ARG002 - the protocol's
        """Return that the pids are this machine's."""
        return True

    def describe(self, pids: Collection[int]) -> Mapping[int, tuple[Relation, str | None]]:
        """Return the relation of processes to the program, and their names."""
        return {pid: self._known.get(pid, ("other", None)) for pid in pids}

    def _count_context(self, index: int) -> int:
        return self._gpus.allocators[index].total_bytes // 160

    def _find_index(self, device: str) -> int | None:
        names = [info.device for info in self.list_infos()]
        return names.index(device) if device in names else None


class SimulatedMachine(SimulatedGpus):
    """Simulated GPUs that gpumemwidget finds on this machine, until ``close``.

    It is its own context manager. What ``simulate_gpus`` returns.

    Attributes:
        driver: the GPUs' driver, where other processes and lost GPUs are set.
        torch: a placeholder of the module ``torch``, with the GPUs' counters and history.
    """

    def __init__(self, n_devices: int, *, total_bytes: int, expandable: bool) -> None:
        if find_session() is not None:
            raise BadInputError(
                "gpumemwidget is loaded and has this machine's GPUs: run %unload_ext gpumemwidget "
                "first"
            )
        super().__init__(n_devices, total_bytes=total_bytes, expandable=expandable)
        self.driver = SimulatedDriver(self)
        self.torch: ModuleType = simulate_torch(self, version="2.13.0")
        use_hardware(self.make_hardware)

    def make_hardware(self) -> Hardware:
        """Return the GPUs and the host's memory as the hardware that is recorded."""
        # A driver that was closed stays so. A copy shares all but that.
        backends = [CudaBackend(self.torch), HostBackend()]
        return Hardware(backends, copy.copy(self.driver), libraries=[self.driver.library])

    def close(self) -> None:
        """Let gpumemwidget find this machine's own GPUs again, when it is loaded next."""
        use_hardware(None)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def simulate_gpus(
    n_devices: int = 1, *, total_bytes: int = 80 * 1024**3, expandable: bool = False
) -> SimulatedMachine:
    """Let gpumemwidget find simulated GPUs on this machine, until they are closed.

    Cells then allocate with ``gpus.allocate(n_bytes, device)`` and free with ``gpus.free(handle)``.
    Peaks, traced lines, limits and the dashboard work as on real GPUs. Tensors are not affected.

    Args:
        n_devices: the number of GPUs.
        total_bytes: the memory of each.
        expandable: whether segments grow, as with ``expandable_segments:True``.

    Returns:
        The GPUs, which are their own context manager.

    Raises:
        BadInputError: the extension is loaded already.
    """
    return SimulatedMachine(n_devices, total_bytes=total_bytes, expandable=expandable)
