"""Which Jupyter kernel a process on a GPU belongs to, and what each kernel takes."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator

import pytest

from gpumemwidget.backends.cuda.backend import CudaBackend
from gpumemwidget.backends.driver.gpu_processes import find_kernel, parse_kernel_id
from gpumemwidget.backends.hardware import Hardware
from gpumemwidget.model.devices import KernelUse
from gpumemwidget.testing import SimulatedDriver, SimulatedGpus, simulate_torch

_MIB = 1 << 20
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
    driver.set_process(pid, 300 * _MIB)
    driver.set_process(child_pid, 50 * _MIB)
    driver.set_process(pid, 20 * _MIB, 1)
    driver.set_process(2**31 - 7, 1000 * _MIB, 1)
    gpus.touch(0)

    uses = Hardware([CudaBackend(simulate_torch(gpus))], driver).list_kernels()

    assert uses == (
        KernelUse("6f0e-aa", "cuda:0", 350 * _MIB),
        KernelUse("6f0e-aa", "cuda:1", 20 * _MIB),
    )


def test_without_a_driver_there_are_no_other_kernels() -> None:
    """This process is no kernel."""
    gpus = SimulatedGpus(1)
    gpus.touch(0)

    assert Hardware([CudaBackend(simulate_torch(gpus))]).list_kernels() == ()
