"""All of the machine behind one object: who joins, what the driver adds, and who is on a device."""

from __future__ import annotations

import os
import threading
from collections.abc import Collection, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pynvml
import pytest

from gpumemwidget.backends.cuda.backend import CudaBackend
from gpumemwidget.backends.driver.gpu_processes import ProcessTree
from gpumemwidget.backends.driver.nvml import NvmlMonitor
from gpumemwidget.backends.hardware import Hardware
from gpumemwidget.backends.host import HostBackend
from gpumemwidget.errors import BackendError
from gpumemwidget.model.devices import (
    ChildProcess,
    DeviceState,
    DeviceUse,
    HardwareNoteKind,
    ProcessUse,
)
from gpumemwidget.testing import SimulatedDriver, SimulatedGpus, simulate_torch
from tests.backends.fake_nvml import FakeGpu, FakeNvml
from tests.backends.procfs import FakeProc

MIB, GIB = 1 << 20, 1 << 30
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


# -- Whole devices at one moment, and who is on them -----------------------------------------------

OWN, CHILD, OTHER = 500, 600, 700
KERNEL = "python -m ipykernel_launcher"


class Machine:
    """Two GPUs of which the first is in use, this process, a rank below it, somebody else."""

    def __init__(self, folder: Path, namespace: str) -> None:
        self.allocator = SimulatedGpus(2, total_bytes=1000 * MIB)
        self.gpus = [
            FakeGpu(
                uuid=f"GPU-{name}", total_bytes=1000 * MIB, used_bytes=200 * MIB, reserved_bytes=MIB
            )
            for name in ("first", "second")
        ]
        self.library = FakeNvml(*self.gpus)
        self.proc = FakeProc(folder)
        self.proc.write_namespace(namespace)
        self.proc.write_process(OWN, 1, "python", "-m", "ipykernel_launcher")
        self.proc.write_process(CHILD, OWN, "python", "rank.py", resident_pages=3)
        self.proc.write_process(OTHER, 1, "python", "theirs.py", "--lr", "1")
        self.backend = CudaBackend(self._make_torch())
        self.hardware = Hardware(
            [self.backend, HostBackend()],
            NvmlMonitor(self.library, environ={}),
            processes=ProcessTree(get_own_pid=lambda: OWN),
        )

    def _make_torch(self) -> Any:
        torch = simulate_torch(self.allocator)
        torch.cuda.get_device_properties = lambda index: SimpleNamespace(
            name="GPU", total_memory=999 * MIB, uuid=("first", "second")[index]
        )
        return torch

    def take(self) -> tuple[DeviceState, ...]:
        return self.hardware.take_device_states()


def open_machine(folder: Path, namespace: str, patch: pytest.MonkeyPatch) -> Iterator[Machine]:
    """Yield a machine whose processes psutil reads from files."""
    if not psutil.LINUX:
        pytest.skip("there is no procfs")
    patch.setattr(psutil, "PROCFS_PATH", str(folder / "proc"))
    machine = Machine(folder / "proc", namespace)
    yield machine
    machine.hardware.close()


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Machine]:
    """A machine whose pids are the driver's."""
    yield from open_machine(tmp_path, "pid:[4026531836]", monkeypatch)


@pytest.fixture
def container(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Machine]:
    """A container, where the driver's pids may be other processes'."""
    yield from open_machine(tmp_path, "pid:[4026532700]", monkeypatch)


def test_all_of_a_machine(machine: Machine) -> None:
    """GPUs touched or not, then the host; counters and blocks of what is in use alone."""
    machine.allocator.allocate(3 * MIB)
    machine.gpus[0].processes = {OTHER: 90 * MIB, OWN: 50 * MIB, CHILD: 5 * MIB}

    first, second, host = machine.take()

    assert [each.info.device for each in (first, second, host)] == ["cuda:0", "cuda:1", "host"]
    assert first.processes == (
        ProcessUse(OWN, KERNEL, "own", 50 * MIB),
        ProcessUse(CHILD, "python rank.py", "child", 5 * MIB),
        ProcessUse(OTHER, "python theirs.py", "other", 90 * MIB),
    )
    assert first.reading.allocated_bytes == 3 * MIB
    assert sum(each.n_bytes for each in first.segments) == first.reading.reserved_bytes == 20 * MIB
    assert (first.use.used_bytes, first.use.driver_bytes, first.use.free_bytes) == (
        200 * MIB,
        MIB,
        799 * MIB,
    )
    assert (second.reading, second.segments, second.processes) == (None, (), ())
    assert second.use.used_bytes == 200 * MIB
    assert (host.processes, host.segments) == (None, ())
    assert host.use.used_bytes + host.use.free_bytes == host.use.total_bytes
    assert host.use.used_bytes >= host.reading.reserved_bytes > 0
    assert all(each.is_at_one_moment for each in (first, second, host))
    assert machine.allocator.list_touched() == (0,)


def test_processes_are_sorted_by_what_they_are_and_take(machine: Machine) -> None:
    """Each kind biggest first; those without bytes last, by number."""
    machine.gpus[1].processes = {9: 5, 8: None, 7: None, OTHER: 6, CHILD: None}

    processes = machine.take()[1].processes

    assert [each.pid for each in processes] == [CHILD, OTHER, 9, 7, 8]
    assert [each.relation for each in processes] == ["child", *["other"] * 4]
    assert processes[2].name is None


def test_children_with_their_devices(machine: Machine) -> None:
    """What the driver lists of each, device by device, and the host's memory."""
    machine.proc.write_process(601, CHILD, "pt_data_worker")
    machine.gpus[0].processes = {CHILD: 5, OWN: 7}
    machine.gpus[1].processes = {CHILD: None}

    children = machine.hardware.list_children()

    page_bytes = os.sysconf("SC_PAGE_SIZE")
    assert children == (
        ChildProcess(
            CHILD, OWN, "python rank.py", 3 * page_bytes, (("cuda:0", 5), ("cuda:1", None))
        ),
        ChildProcess(601, CHILD, "pt_data_worker", 1000 * page_bytes),
    )


def test_without_nvml_pytorch_tells_what_is_used(machine: Machine) -> None:
    """Of a GPU in use alone, so that none is touched; nobody tells whose it is."""
    machine.allocator.allocate(3 * MIB)
    machine.backend._torch.cuda.mem_get_info = lambda _: (700 * MIB, 999 * MIB)
    # As on ROCm, and in a container that has CUDA alone.
    machine.library.init_error = pynvml.NVML_ERROR_LIBRARY_NOT_FOUND

    first, *others = machine.take()
    reports = machine.hardware.read_devices()

    use = DeviceUse("cuda:0", 299 * MIB, 700 * MIB, 999 * MIB)
    assert (first.use, first.processes, first.is_at_one_moment) == (use, None, True)
    assert [each.info.device for each in others] == ["host"]
    assert reports[0].use == use
    assert machine.allocator.list_touched() == (0,)


@pytest.mark.parametrize(("n_bytes", "is_told"), [(50 * MIB, True), (29 * MIB, False)])
def test_children_are_not_mixed_up_with_others_of_their_number(
    container: Machine, n_bytes: int, is_told: bool
) -> None:
    """Where this process's own number is somebody else's, so may be a child's."""
    container.allocator.allocate(30 * MIB)
    container.gpus[0].processes = {OWN: n_bytes, CHILD: 5}

    (child,) = container.hardware.list_children()

    assert child.devices == ((("cuda:0", 5),) if is_told else ())


# -- One moment --------------------------------------------------------------------------------


def test_read_again_while_something_is_allocated(machine: Machine) -> None:
    """Once nothing happens between the two readings, all is of one moment."""
    machine.allocator.allocate(3 * MIB)
    read = machine.backend.read_segments
    left = [30 * MIB]

    def read_segments() -> Any:
        found = read()
        if left:
            machine.allocator.allocate(left.pop())
        return found

    machine.backend.read_segments = read_segments  # type: ignore[method-assign]
    (first, *_) = machine.take()

    assert first.is_at_one_moment
    assert sum(each.n_bytes for each in first.segments) == first.reading.reserved_bytes > 33 * MIB


def test_what_never_stands_still_says_so(machine: Machine) -> None:
    """After some tries; the other device is not concerned, and it ends."""
    machine.allocator.allocate(3 * MIB)
    machine.allocator.allocate(3 * MIB, 1)
    read = machine.backend.read_segments

    def read_segments() -> Any:
        found = read()
        machine.allocator.allocate(30 * MIB)
        return found

    machine.backend.read_segments = read_segments  # type: ignore[method-assign]
    first, second, _ = machine.take()

    assert (first.is_at_one_moment, second.is_at_one_moment) == (False, True)


# -- Numbers within a container ----------------------------------------------------------------


@pytest.mark.parametrize(
    ("first", "second", "found"),
    [
        # This process is not among them, so nobody is who has that number here.
        ({90_001: 50 * MIB, OTHER: 5 * MIB}, {CHILD: 5 * MIB}, [None, None]),
        # This process is listed with what it has, so everybody is who has that number here.
        ({OWN: 50 * MIB}, {CHILD: 5 * MIB}, [[(OWN, "own")], [(CHILD, "child")]]),
        # Not even this process is listed, which is there.
        ({}, {}, [None, None]),
    ],
)
def test_numbers_within_a_container_where_pytorch_is_in_use(
    container: Machine,
    first: dict[int, int],
    second: dict[int, int],
    found: list[list[tuple[int, str]] | None],
) -> None:
    """They may be the machine's own, or those that processes have here."""
    container.allocator.allocate(3 * MIB)
    container.gpus[0].processes, container.gpus[1].processes = first, second

    states = container.take()[:2]

    listed = [state.processes for state in states]
    assert [uses and [(use.pid, use.relation) for use in uses] for uses in listed] == found


def test_a_container_in_which_nothing_is_in_use_yet(container: Machine) -> None:
    """A child that has opened a GPU shows whose the numbers are; without one nothing does."""
    container.gpus[0].processes = {CHILD: 5, OTHER: 6}

    before, *_ = container.take()
    container.proc.write_process(CHILD, OWN, "python", "rank.py", files=("/dev/nvidia-uvm",))
    after, *_ = container.take()

    assert before.processes is None
    assert after.processes == (
        ProcessUse(CHILD, "python rank.py", "child", 5),
        ProcessUse(OTHER, "python theirs.py", "other", 6),
    )
