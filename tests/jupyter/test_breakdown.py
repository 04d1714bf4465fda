"""``%memstat --device`` and ``breakdown()``, in a shell on simulated GPUs and without one."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from IPython.core.interactiveshell import InteractiveShell
from IPython.utils.capture import RichOutput, capture_output

import gpumemwidget
from gpumemwidget.backends.cuda.backend import CudaBackend
from gpumemwidget.backends.driver.nvml import NvmlMonitor
from gpumemwidget.backends.hardware import Hardware
from gpumemwidget.backends.host import HostBackend
from gpumemwidget.model.devices import HOST
from tests.backends.fake_nvml import FakeGpu, FakeNvml
from tests.jupyter.machine import GIB, MIB, TOTAL, Machine


@pytest.fixture
def shell_on_gpus(make_machine: Callable[..., Machine]) -> InteractiveShell:
    """The extension in a shell on two GPUs, of which the first is used."""
    machine = make_machine(n_gpus=2)
    allocator = machine.allocator
    allocator.free(allocator.allocate(30 * MIB))
    allocator.allocate(3 * MIB)
    allocator.allocate(100)
    machine.run("%load_ext gpumemwidget")
    return machine.shell


def _run(shell: InteractiveShell, code: str) -> RichOutput:
    with capture_output() as captured:
        result = shell.run_cell(code, store_history=True)
    result.raise_error()
    (output,) = captured.outputs
    return output


def test_all_devices_are_shown_in_parts(shell_on_gpus: InteractiveShell) -> None:
    """The GPU that is used, the one that is not, and the host; no value is left."""
    output = _run(shell_on_gpus, "%memstat --device")

    text = output.data["text/plain"]
    headings = [line.partition(" · ")[0] for line in text.splitlines() if " · " in line]
    assert headings == ["cuda:0", "cuda:1", HOST]
    assert "Map of segments" not in text
    assert "<svg" in output.data["text/html"]
    assert shell_on_gpus.user_ns["Out"] == {}


def test_of_one_device_the_segments_are_shown_too(shell_on_gpus: InteractiveShell) -> None:
    """Folded away in HTML."""
    output = _run(shell_on_gpus, "%memstat --device cuda:0")

    assert "cuda:1" not in output.data["text/plain"]
    assert "Map of segments · 32.00 MiB in 2 segments" in output.data["text/plain"]
    assert output.data["text/html"].count("<details") == 1


def test_limit_and_budget_are_marks(shell_on_gpus: InteractiveShell) -> None:
    """As they are set in the notebook."""
    with capture_output():
        shell_on_gpus.run_line_magic("memlimit", "20GiB --device cuda:0")
        shell_on_gpus.run_line_magic("membudget", "10GiB")

    breakdown = gpumemwidget.breakdown("cuda:0").record()

    assert (breakdown.limit_bytes, breakdown.budget_bytes) == (20 * GIB, 10 * GIB)


def test_on_windows_the_driver_reports_no_memory_of_a_process(
    make_machine: Callable[..., Machine],
) -> None:
    """Under WDDM NVML lists the processes without bytes: the note says so, and the parts add up."""
    machine = make_machine()
    machine.allocator.allocate(3 * MIB)
    # As the driver's interface has it for bytes that are not available, and as its binding does.
    processes = {os.getpid(): None, 1: 0xFFFFFFFFFFFFFFFF}
    gpu = FakeGpu(total_bytes=TOTAL, used_bytes=9 * GIB, processes=processes)
    machine.hardware = Hardware(
        [CudaBackend(machine.torch), HostBackend()],
        NvmlMonitor(FakeNvml(gpu), environ={}, driver=Path("none")),
    )
    machine.run("%load_ext gpumemwidget")

    text = " ".join(_run(machine.shell, "%memstat --device cuda:0").data["text/plain"].split())
    breakdown = gpumemwidget.breakdown().record("cuda:0")

    assert "the driver does not report the memory of each process" in text
    assert "(as on Windows, in a container or without permission)" in text
    assert sum(part.n_bytes for part in breakdown.parts) == breakdown.total_bytes == TOTAL
    assert breakdown.allocated_bytes == 3 * MIB
    [rest] = [part for part in breakdown.parts if "others" in part.merged]
    assert {"outside", "children"} < set(rest.merged)
