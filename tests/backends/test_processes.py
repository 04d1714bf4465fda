"""The processes below this one (real trees, and a procfs of plain files), names, and kernels."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpumemwidget.backends.cuda.backend import CudaBackend
from gpumemwidget.backends.driver.gpu_processes import (
    ProcessTree,
    find_kernel,
    name_process,
    parse_kernel_id,
)
from gpumemwidget.backends.hardware import Hardware
from gpumemwidget.model.devices import ChildProcess, KernelUse
from gpumemwidget.testing import SimulatedDriver, SimulatedGpus, simulate_torch
from tests.backends.procfs import FakeProc

OWN = 500
MIB = 1 << 20
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


@pytest.fixture
def proc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeProc:
    """The machine: an init, a shell of somebody's, and this process."""
    if not psutil.LINUX:
        pytest.skip("there is no procfs")
    monkeypatch.setattr(psutil, "PROCFS_PATH", str(tmp_path))
    proc = FakeProc(tmp_path)
    proc.write_process(1, 0, "/sbin/init")
    proc.write_process(400, 1, "/bin/bash")
    proc.write_process(OWN, 400, "/usr/bin/python3", "-m", "ipykernel_launcher")
    return proc


class Machine:
    """The tree of processes below one of a procfs of plain files."""

    def __init__(self) -> None:
        self.pid = OWN
        self.tree = ProcessTree(get_own_pid=lambda: self.pid)

    def list_pids(self) -> list[int]:
        return [child.pid for child in self.tree.list_children()]


@pytest.fixture
def machine(proc: FakeProc) -> Machine:
    """This process on that machine."""
    return Machine()


# -- The tree ----------------------------------------------------------------------------------


def test_a_zombie_is_not_running(proc: FakeProc, machine: Machine) -> None:
    """It has no memory any more; what it had left on a GPU is still a child's."""
    proc.write_process(600, OWN, "python", "rank.py")
    machine.list_pids()
    proc.write_process(600, OWN, state="Z", thread_name="rank")

    told = machine.tree.describe([600])

    assert machine.list_pids() == []
    assert told == {600: ("child", "rank")}


# -- Whose the numbers are ---------------------------------------------------------------------


def test_a_child_that_has_a_gpu_open_shows_whose_they_are(proc: FakeProc, machine: Machine) -> None:
    """Who has not opened what CUDA opens can't be the one that the driver means."""
    uvm = ("/dev/null", "/dev/nvidia-uvm")
    proc.write_process(600, OWN, "python", "rank.py", files=uvm)
    proc.write_process(601, OWN, "python", "loader.py", files=("/dev/nvidiactl",))
    proc.write_process(602, 1, "python", "other.py", "--x", files=uvm)

    assert machine.tree.are_pids_certain([600, 603])
    assert not machine.tree.are_pids_certain([601, 602, 603])


# -- What can't be read ------------------------------------------------------------------------


def test_a_process_that_is_gone_half_way(proc: FakeProc, machine: Machine) -> None:
    """Whatever is missing is unknown, and nothing fails."""
    proc.write_process(600, OWN, "python", "rank.py")
    proc.write_process(601, OWN, "python", "rank.py", thread_name="odd ) (name")
    (proc.root / "600" / "statm").unlink()
    (proc.root / "601" / "cmdline").unlink()
    (proc.root / "602").mkdir()

    told = machine.tree.list_children()

    assert told == (
        ChildProcess(600, OWN, "python rank.py", None),
        ChildProcess(601, OWN, "odd ) (name", 1000 * PAGE_BYTES),
    )


# -- Real trees --------------------------------------------------------------------------------


def wait_for(ask: Callable[[], bool]) -> None:
    """Until it is so; a minute at most."""
    end_s = time.monotonic() + 60
    while not ask():
        assert time.monotonic() < end_s, "it has not come"
        threading.Event().wait(0.02)


def find(tree: ProcessTree, name: str) -> list[ChildProcess]:
    return [child for child in tree.list_children() if name in child.name]


@pytest.mark.skipif(not psutil.LINUX, reason="there is no procfs")
def test_workers_of_a_data_loader() -> None:
    """Each is told by PyTorch's own name for it."""
    data = pytest.importorskip("torch.utils.data")
    if "pt_data_worker" not in Path(data._utils.worker.__file__).read_text():
        pytest.skip("this PyTorch gives its workers no name")
    tree = ProcessTree()
    loader = data.DataLoader(
        list(range(64)), num_workers=2, multiprocessing_context="fork", persistent_workers=True
    )
    batches = iter(loader)
    next(batches)

    wait_for(lambda: len(find(tree, "pt_data_worker")) == 2)
    workers = find(tree, "pt_data_worker")
    del batches
    loader._iterator._shutdown_workers()

    assert {worker.parent_pid for worker in workers} == {os.getpid()}
    assert find(tree, "pt_data_worker") == []


# -- Names -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("command", "name"),
    [
        ("/usr/bin/python3.11 /home/me/train.py --token abc", "python train.py"),
        ("python -u -m torch.distributed.run --n 2", "python -m torch.distributed.run"),
        ("python -X dev -W error -Bs work.py x", "python work.py"),
        ("python3", "python"),
        ("python -c login('abc')", "python -c"),
        ("/x/bin/python /x/bin/torchrun --n 2 train.py", "python torchrun"),
        ("/usr/bin/Xorg -core :0", "Xorg"),
        (r"C:\Python\python.exe C:\work\train.py", "python train.py"),
    ],
)
def test_program_and_script_are_the_name(command: str, name: str) -> None:
    """Folders, Python's own options and all arguments are left out: these may be secrets."""
    assert name_process(command.split(), "python") == name


@pytest.mark.parametrize(
    ("words", "thread_name", "name"),
    [
        # PyTorch names the thread of a data loader's worker; others' main threads say nothing.
        (["python", "-m", "ipykernel"], "pt_data_worker", "pt_data_worker"),
        (["python", "-m", "ipykernel"], "pt_main_thread", "python -m ipykernel"),
        (["y" * 80], "", "y" * 59 + "…"),
        # A title that a program gives itself is one text instead of words.
        (["ray::train(step=3) --key abc"], "", "ray::train(step=3)"),
        # A thread of the system has its name alone.
        ([], "kworker/0:1", "kworker/0:1"),
        ([], "", None),
    ],
)
def test_threads_and_titles(words: list[str], thread_name: str, name: str | None) -> None:
    """Workers by their thread, in 60 characters at most."""
    assert name_process(words, thread_name) == name


@given(st.lists(st.text(max_size=90), max_size=6), st.text(max_size=15))
def test_any_command_gives_one_short_line(command: list[str], thread_name: str) -> None:
    """Whatever stands there, also nothing: printable, one line, 60 characters at most."""
    name = name_process(command, thread_name)

    assert name is None or (0 < len(name) <= 60 and name.isprintable())


# -- Jupyter's kernels -----------------------------------------------------------------------------

_CHILD = (
    "import subprocess, sys\n"
    "wait = 'import sys; print(flush=True); sys.stdin.read()'\n"
    "child = subprocess.Popen([sys.executable, '-c', wait], stdout=subprocess.PIPE)\n"
    "child.stdout.readline(); print(child.pid, flush=True); child.wait()\n"
)


@pytest.fixture
def kernel() -> Iterator[tuple[int, int]]:
    """The pids of a process that is started as a server starts a kernel, and of its child."""
    command = [sys.executable, "-c", _CHILD, "-f", "/run/user/kernel-6f0e-aa.json"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        child_pid = int(process.stdout.readline())
        yield process.pid, child_pid
        process.stdin.close()
        process.wait()


@pytest.mark.parametrize(
    ("command", "kernel_id"),
    [
        (["python", "-m", "ipykernel_launcher", "-f", "/run/kernel-6f0e-aa.json"], "6f0e-aa"),
        (["python", "-m", "ipykernel_launcher", "-f", r"C:\run\kernel-6f0e.json"], "6f0e"),
        (["python", "train.py", "-f", "kernel.json"], None),
        (["julia", "-i", "kernel.jl", "/run/kernel-6f0e.json"], "6f0e"),
        ([], None),
    ],
)
def test_a_kernel_is_known_by_its_connection_file(
    command: list[str], kernel_id: str | None
) -> None:
    """Any other program is none."""
    assert parse_kernel_id(command) == kernel_id


def test_a_kernels_children_belong_to_it(kernel: tuple[int, int]) -> None:
    """Workers of a DataLoader take memory for their notebook."""
    pid, child_pid = kernel

    assert (find_kernel(pid), find_kernel(child_pid)) == ("6f0e-aa", "6f0e-aa")
    assert find_kernel(os.getpid()) is None
    assert find_kernel(2**31 - 7) is None


def test_what_each_kernel_takes(kernel: tuple[int, int]) -> None:
    """With its children, on each GPU; processes that are no kernel's are left out."""
    pid, child_pid = kernel
    gpus = SimulatedGpus(2)
    driver = SimulatedDriver(gpus)
    driver.set_process(pid, 300 * MIB)
    driver.set_process(child_pid, 50 * MIB)
    driver.set_process(pid, 20 * MIB, 1)
    driver.set_process(2**31 - 7, 1000 * MIB, 1)
    gpus.touch(0)

    uses = Hardware([CudaBackend(simulate_torch(gpus))], driver).list_kernels()

    assert uses == (
        KernelUse("6f0e-aa", "cuda:0", 350 * MIB),
        KernelUse("6f0e-aa", "cuda:1", 20 * MIB),
    )


def test_without_a_driver_there_are_no_other_kernels() -> None:
    """This process is no kernel."""
    gpus = SimulatedGpus(1)
    gpus.touch(0)

    assert Hardware([CudaBackend(simulate_torch(gpus))]).list_kernels() == ()
