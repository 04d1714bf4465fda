"""A stage for pictures and browser tests: simulated GPUs on which a notebook's cells allocate.

The allocator is the simulated one, with the CUDA backend upon it as on a real GPU: limits hold,
segments are cut, peaks are exact. What no CPU machine has is told by the stage: the driver, who is
on each device, and to whom each block belongs.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from gpumemwidget.backends.cuda.backend import CudaBackend
from gpumemwidget.backends.driver.processes import ProcessTree
from gpumemwidget.backends.hardware import Hardware
from gpumemwidget.backends.host import HostBackend
from gpumemwidget.backends.protocol import Relation
from gpumemwidget.jupyter import extension
from gpumemwidget.model.devices import DeviceInfo, DeviceUse
from gpumemwidget.model.ownership import DeviceAccount, MemoryAccount, Owned
from gpumemwidget.ownership import account as entries
from gpumemwidget.testing import SimulatedGpus, simulate_torch
from gpumemwidget.testing.machine import StandInDriver

__all__ = ["MIB", "Stage", "write_load"]

MIB = 1 << 20
_DRIVER_BYTES = 480 * MIB
_CONTEXT_BYTES = 543 * MIB
_UNLISTED_BYTES = 9 * MIB
_TOTAL_BYTES = 80 * 1024 * MIB
#: Somebody else's process: no system numbers its own so high.
NEIGHBOUR = 2**31 - 7


def write_load(n_devices: int, n_used: int) -> str:
    """A cell that sets a stage in a kernel, and loads the extension."""
    return (
        "import os, subprocess, sys, time\n"
        f"sys.path.insert(0, {str(Path(__file__).parents[2])!r})\n"
        "from tests.browser.stage import MIB, Stage\n"
        f"stage = Stage({n_devices}, n_used={n_used})\n"
        "stage.set()\n"
        "%load_ext gpumemwidget"
    )


@dataclass(frozen=True)
class _Block:
    device: str
    handle: int
    n_bytes: int
    kind: Any
    owner: str


class Stage:
    """The simulated machine; the extension takes it for the real one when it is loaded.

    Args:
        n_devices: how many GPUs there are.
        n_used: how many of them are in use from the start; all, if not given.
    """

    def __init__(self, n_devices: int, *, n_used: int | None = None) -> None:
        self.gpu = SimulatedGpus(n_devices, total_bytes=_TOTAL_BYTES - _DRIVER_BYTES)
        for index in range(n_devices if n_used is None else n_used):
            self.gpu.touch(index)
        self.torch = simulate_torch(self.gpu)
        self._blocks: list[_Block] = []
        #: Bytes by device and process.
        self.processes: dict[tuple[str, int], int] = {("cuda:0", NEIGHBOUR): 3000 * MIB}
        #: Devices that have fallen off the bus.
        self.lost: set[str] = set()
        backends = [CudaBackend(self.torch), HostBackend()]
        self.hardware = Hardware(backends, _Driver(self), processes=_Processes())

    def set(self, put: Callable[[ModuleType, str, object], None] = setattr) -> None:
        """From now on this is the machine.

        Args:
            put: sets a module's attribute; pytest's takes it back.
        """
        put(extension, "detect_hardware", lambda: self.hardware)
        put(entries, "take_memory_account", self._take_account)
        put(entries, "take_block_account", self._take_block_account)

    def take(self, mib: float, kind: str, owner: str, device: int = 0) -> None:
        """Allocate a block that belongs to somebody."""
        n_bytes = max(1, int(mib * MIB))
        handle = self.gpu.allocate(n_bytes, device)
        self._blocks.append(_Block(f"cuda:{device}", handle, n_bytes, kind, owner))

    def drop(self, owner: str) -> None:
        """Free all blocks whose owner begins so."""
        for block in [each for each in self._blocks if each.owner.startswith(owner)]:
            self._blocks.remove(block)
            self.gpu.free(block.handle)

    def train(self, device: int = 0, *, n_layers: int = 12, scale: float = 1.0) -> None:
        """What stands on a GPU in the middle of training, with holes between."""
        for n in range(n_layers):
            self.take(512 * scale, "parameter", f"model.layers[{n}].weight", device)
            self.take(0.02, "parameter", f"model.layers[{n}].bias", device)
            self.take(130 * scale, "tensor", f"scratch[{n}]", device)
            self.take(512 * scale, "gradient", f"model.layers[{n}].weight.grad", device)
        for n in range(n_layers):
            self.take(512 * scale, "optimizer state", f"optimizer.state[{n}].exp_avg", device)
            self.take(700.3 * scale, "saved for backward", f"loss.grad_fn[{n}]", device)
        self.take(33, "cuBLAS workspace", "", device)
        self.take(200, "unknown", "", device)
        self.take(5000 * scale, "tensor", "evaluation", device)
        self.drop("evaluation")
        self.drop("scratch")

    # -- What the walk would have found ------------------------------------------------------------

    def _list_sizes(self) -> dict[tuple[str, int], int]:
        return {
            (f"cuda:{segment['device']}", block["address"]): block["size"]
            for segment in self.gpu.take_snapshot()["segments"]
            for block in segment["blocks"]
        }

    def _take_account(self, *_: object, **__: object) -> MemoryAccount:
        sizes = self._list_sizes()
        devices = []
        for index in self.gpu.list_touched():
            device = f"cuda:{index}"
            own = [block for block in self._blocks if block.device == device]
            allocated = self.gpu.stats(index)["allocated_bytes"]["all"]["current"]
            lines = tuple(self._own(block, sizes) for block in own)
            devices.append(DeviceAccount(device, allocated, lines))
        return MemoryAccount(tuple(devices), (), is_complete=True, duration_s=0.01)

    def _take_block_account(
        self, *_: object, **__: object
    ) -> tuple[MemoryAccount, dict[str, dict[int, tuple[Any, str]]]]:
        return self._take_account(), self._name_blocks()

    def _own(self, block: _Block, sizes: Mapping[tuple[str, int], int]) -> Owned:
        n_bytes = sizes[block.device, self.gpu.find_address(block.handle)]
        return Owned(
            device=block.device,
            n_bytes=n_bytes,
            rounding_bytes=n_bytes - block.n_bytes,
            kind=block.kind,
            steps=(block.owner or block.kind,),
            root="name" if block.owner else "nowhere",
        )

    def _name_blocks(self, *_: object, **__: object) -> dict[str, dict[int, tuple[Any, str]]]:
        names: dict[str, dict[int, tuple[Any, str]]] = {}
        for block in self._blocks:
            own = names.setdefault(block.device, {})
            own[self.gpu.find_address(block.handle)] = (block.kind, block.owner)
        return names


class _Processes(ProcessTree):
    """The machine's own, and somebody else's."""

    def are_pids_certain(self, _pids: Collection[int]) -> bool:
        return True

    def describe(self, pids: Collection[int]) -> Mapping[int, tuple[Relation, str | None]]:
        known = dict(super().describe(pids))
        if NEIGHBOUR in known:
            known[NEIGHBOUR] = ("other", "python serve.py --port 8000")
        return known


class _Driver(StandInDriver):
    """What the driver would tell of the stage."""

    def __init__(self, stage: Stage) -> None:
        super().__init__()
        self._stage = stage

    def list_infos(self) -> tuple[DeviceInfo, ...]:
        return tuple(
            DeviceInfo(f"cuda:{n}", "Simulated GPU", _TOTAL_BYTES, uuid=f"GPU-{n}")
            for n in range(len(self._stage.gpu.allocators))
        )

    def read_use(self, device: str) -> DeviceUse | None:
        if device in self._stage.lost:
            return DeviceUse(device, None, None, None, failure="GPU is lost")
        if device == "host":
            return None
        used = sum(n_bytes or 0 for _, n_bytes in self.list_processes(device) or ())
        used += _UNLISTED_BYTES if used else 0
        free = _TOTAL_BYTES - _DRIVER_BYTES - used
        return DeviceUse(device, used, free, _TOTAL_BYTES, 37, _DRIVER_BYTES)

    def list_processes(self, device: str) -> tuple[tuple[int, int | None], ...] | None:
        if device in self._stage.lost or device == "host":
            return None
        gpu, index = self._stage.gpu, int(device.removeprefix("cuda:"))
        listed: list[tuple[int, int | None]] = []
        if index in gpu.list_touched():
            reserved = gpu.stats(index)["reserved_bytes"]["all"]["current"]
            listed.append((os.getpid(), _CONTEXT_BYTES + reserved))
        own = self._stage.processes.items()
        listed += [(pid, n_bytes) for (where, pid), n_bytes in own if where == device]
        return tuple(listed)
