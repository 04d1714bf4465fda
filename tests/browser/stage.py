"""A stage for pictures and browser tests: simulated GPUs on which a notebook's cells allocate.

The allocator is the simulated one, with the CUDA backend upon it as on a real GPU: limits hold,
segments are cut, peaks are exact. What no CPU machine has is told by the stage: to whom each block
belongs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any

from gpumemwidget.backends.cuda.backend import CudaBackend
from gpumemwidget.backends.hardware import Hardware
from gpumemwidget.backends.host import HostBackend
from gpumemwidget.jupyter import extension
from gpumemwidget.model.devices import DeviceUse
from gpumemwidget.model.ownership import DeviceAccount, MemoryAccount, Owned
from gpumemwidget.ownership import account as entries
from gpumemwidget.testing import SimulatedDriver, SimulatedGpus, simulate_torch

__all__ = ["MIB", "Stage", "write_load"]

MIB = 1 << 20
#: Somebody else's process: no system numbers its own so high.
NEIGHBOUR = 2**31 - 7


def write_load(n_devices: int, n_used: int) -> str:
    """A cell that sets a stage in a kernel, and loads the extension."""
    return (
        "import sys, time\n"
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
        self.gpu = SimulatedGpus(n_devices)
        for index in range(n_devices if n_used is None else n_used):
            self.gpu.touch(index)
        self._blocks: list[_Block] = []
        self.driver = _Driver(self.gpu)
        self.driver.set_process(NEIGHBOUR, 3000 * MIB, name="python serve.py --port 8000")
        backends = [CudaBackend(simulate_torch(self.gpu)), HostBackend()]
        self.hardware = Hardware(backends, self.driver, libraries=[self.driver.library])

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


class _Driver(SimulatedDriver):
    """GPUs that are always as busy."""

    def read_use(self, device: str) -> DeviceUse | None:
        use = super().read_use(device)
        return use if use is None or use.failure else replace(use, utilization_percent=37)
