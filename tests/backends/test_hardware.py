"""All of the machine behind one object: who comes first, who joins, and what the driver adds."""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterator
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from gpumemwidget.backends.cuda.backend import CudaBackend
from gpumemwidget.backends.driver.nvml import NvmlMonitor
from gpumemwidget.backends.hardware import Hardware
from gpumemwidget.backends.host import HostBackend
from gpumemwidget.errors import BackendError
from gpumemwidget.model.devices import HardwareNoteKind
from gpumemwidget.testing import SimulatedDriver, SimulatedGpus, simulate_torch
from tests.backends.fake_nvml import FakeGpu, FakeNvml
from tests.backends.procfs import FakeProc

GIB = 1 << 30
SMALL = FakeGpu(name="Small", uuid="GPU-small", total_bytes=8 * GIB, used_bytes=1 * GIB)
LARGE = FakeGpu(name="Large", uuid="GPU-large", total_bytes=80 * GIB, used_bytes=30 * GIB)


def make_two_gpus(allocator: SimulatedGpus) -> SimpleNamespace:
    """CUDA puts the fastest first; the driver goes by the bus, where the small one is first."""
    torch = simulate_torch(allocator)
    torch.cuda.get_device_properties = lambda index: SimpleNamespace(
        name=("Large", "Small")[index],
        total_memory=(80 * GIB, 8 * GIB)[index],
        uuid=("large", "small")[index],
    )
    return torch


@pytest.fixture
def allocator() -> SimulatedGpus:
    """Two simulated devices."""
    return SimulatedGpus(2)


@pytest.fixture
def hardware(allocator: SimulatedGpus) -> Iterator[Hardware]:
    """Two GPUs and the host."""
    hardware = Hardware(
        [CudaBackend(make_two_gpus(allocator)), HostBackend()],
        NvmlMonitor(FakeNvml(SMALL, LARGE), environ={}),
    )
    yield hardware
    hardware.close()
    hardware.close()


def test_workspaces_are_released_where_a_gpu_is_in_use(allocator: SimulatedGpus) -> None:
    """Not while a CUDA graph is alive, which may use them; without a GPU there is nothing."""

    class Graph:
        pass

    torch = simulate_torch(allocator)
    workspaces = [allocator.allocate(32 << 20)]

    def clear() -> None:
        while workspaces:
            allocator.free(workspaces.pop())

    torch._C._cuda_clearCublasWorkspaces = clear
    torch._C._CUDAGraph = Graph
    hardware = Hardware([CudaBackend(torch), HostBackend()])
    graph = [type("CUDAGraph", (Graph,), {})()]

    with pytest.raises(BackendError, match="stay while a CUDA graph is alive"):
        hardware.release_workspaces()
    assert len(workspaces) == 1
    graph.clear()
    done = hardware.release_workspaces()
    again = hardware.release_workspaces()
    hardware.close()

    assert (done, again, workspaces) == (True, False, [])
    assert not Hardware([]).release_workspaces()


def test_whole_devices_are_matched_by_uuid(hardware: Hardware, allocator: SimulatedGpus) -> None:
    """The driver's first is not CUDA's first: each counter stands beside its own device."""
    allocator.allocate(100, 0)
    allocator.allocate(100, 1)

    reports = {report.info.device: report for report in hardware.read_devices()}

    assert list(reports) == ["cuda:0", "cuda:1", "host"]
    large, small = reports["cuda:0"], reports["cuda:1"]
    assert (large.info.name, large.use.used_bytes) == ("Large", 30 * GIB)
    assert (small.info.name, small.use.used_bytes) == ("Small", 1 * GIB)
    assert large.reading.allocated_bytes == 512
    host = reports["host"].use
    assert host.used_bytes + host.free_bytes == host.total_bytes


class _UncertainDriver(SimulatedDriver):
    """A driver whose pids may be other processes' here, as within a container."""

    def are_pids_certain(self, _pids: Collection[int]) -> bool:
        return False


@pytest.mark.parametrize(
    ("listed_bytes", "found"), [(10 << 30, None), (30 << 30, 30 << 30), (None, None)]
)
def test_another_process_of_this_ones_number_is_not_believed(
    allocator: SimulatedGpus, listed_bytes: int | None, found: int | None
) -> None:
    """Within a container: less than PyTorch has reserved can't be this process's."""
    allocator.allocate(20 << 30)
    driver = _UncertainDriver(allocator)
    hardware = Hardware([CudaBackend(simulate_torch(allocator)), HostBackend()], driver)
    driver.read_process = lambda *_: listed_bytes  # type: ignore[method-assign]

    own = hardware.read_own_use("cuda:0")
    uses = hardware.read_own_uses()
    hardware.close()

    assert own == found
    assert uses == (() if found is None else (("cuda:0", found),))


def test_a_driver_that_is_slow_once_has_its_last_answer(allocator: SimulatedGpus) -> None:
    """Nothing has changed, as far as is known: a cell is not said to take what was there before."""
    allocator.allocate(20 << 30)
    hardware = Hardware([CudaBackend(simulate_torch(allocator))], SimulatedDriver(allocator))
    known = hardware.read_own_uses()
    goes_on = threading.Event()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SimulatedDriver, "read_process", lambda *_: goes_on.wait(30))
        slow = hardware.read_own_uses()
        goes_on.set()
    hardware.close()

    assert known == slow != ()


@pytest.mark.skipif(not psutil.LINUX, reason="there is no procfs")
@pytest.mark.parametrize("files", [(), ("/dev/nvidia-uvm",)])
def test_without_pytorch_a_process_that_uses_cuda_is_believed(
    allocator: SimulatedGpus,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    files: tuple[str, ...],
) -> None:
    """Within a container; a number that is listed is another's where this one has no context."""
    allocator.touch(0)
    driver = _UncertainDriver(allocator)
    hardware = Hardware([CudaBackend(simulate_torch(allocator)), HostBackend()], driver)
    FakeProc(tmp_path).write_process(driver.own_pid, 1, "python", files=files)
    monkeypatch.setattr(psutil, "PROCFS_PATH", str(tmp_path))

    listed = driver.read_process("cuda:0", driver.own_pid)
    found = hardware.read_own_uses()
    own = hardware.read_own_use("cuda:0")
    hardware.close()

    assert found == ((("cuda:0", listed),) if files else ())
    assert own == (listed if files else None)


def test_torch_joins_in_the_middle_of_a_span(allocator: SimulatedGpus) -> None:
    """The backend of a torch that is imported later stands first, its counters from 0."""
    hardware = Hardware([HostBackend()])
    hardware.start_span()

    hardware._join(simulate_torch(allocator))  # type: ignore[arg-type]  # as the import hook does
    allocator.free(allocator.allocate(1 << 20, 0))

    readings = hardware.read_exact()
    hardware.close()
    assert [reading.device for reading in readings] == ["cuda:0", "host"]
    assert readings[0].allocated_peak_bytes == 1 << 20
    assert readings[0].peak_is == "exact"


def test_broken_torch_never_fails_the_users_import() -> None:
    """What fails of ours within ``import torch`` becomes a note, once."""
    hardware = Hardware([HostBackend()])

    hardware._join(SimpleNamespace())  # type: ignore[arg-type]

    (note,) = hardware.take_notes()
    assert note.kind is HardwareNoteKind.NOT_RECORDED
    assert note.text.startswith("AttributeError")
    assert hardware.take_notes() == ()
    hardware.close()


def test_closed_before_torch_arrived(allocator: SimulatedGpus) -> None:
    """A torch that is imported after unload finds nobody, and its bindings stay its own."""
    torch = simulate_torch(allocator)
    before = dict(vars(torch._C))
    hardware = Hardware([HostBackend()])
    hardware.close()

    hardware._join(torch)  # type: ignore[arg-type]

    assert vars(torch._C) == before
    assert [info.device for info in hardware.list_devices()] == ["host"]
