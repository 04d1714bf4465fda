"""Traced cells on a simulated GPU: the whole way from the allocator's events to the lines."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest
from IPython.core.interactiveshell import InteractiveShell

from gpumemwidget.backends.cuda.backend import CudaBackend
from gpumemwidget.backends.cuda.snapshot_file import load_snapshot
from gpumemwidget.backends.hardware import Hardware
from gpumemwidget.backends.host.backend import HostBackend
from gpumemwidget.jupyter import extension
from gpumemwidget.model.cells import Span
from gpumemwidget.model.traces import LineUse
from gpumemwidget.session.session import current_session
from gpumemwidget.testing import SimulatedGpus, simulate_torch
from gpumemwidget.tracing import device_trace as tracing
from gpumemwidget.tracing.trace_file import read_trace

MIB = 1 << 20


class Gpu:
    """A simulated GPU that the extension takes for the machine's."""

    def __init__(self, shell: InteractiveShell, capsys: pytest.CaptureFixture[str]) -> None:
        self.allocator = SimulatedGpus()
        self.allocator.touch(0)
        self.torch: Any = simulate_torch(self.allocator)
        self.hardware = Hardware([CudaBackend(self.torch), HostBackend()])
        self._shell = shell
        self._capsys = capsys
        shell.user_ns.update(gpu=self.allocator, torch=self.torch)

    def run(self, source: str) -> str:
        """Run a cell; what it printed."""
        self._capsys.readouterr()
        self._shell.run_cell(source, store_history=True)
        return self._capsys.readouterr().out


@pytest.fixture
def gpu(
    shell: InteractiveShell, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Gpu:
    gpu = Gpu(shell, capsys)
    monkeypatch.setattr(extension, "detect_hardware", lambda: gpu.hardware)
    gpu.run("%load_ext gpumemwidget")
    return gpu


def test_each_line_has_its_bytes(gpu: Gpu, tmp_path: Path) -> None:
    """What it allocated, what is left of it, and what it had at the peak: to the byte."""
    gpu.run("weights = gpu.allocate(500 << 20)")

    gpu.run(
        f"%%memtrace --export {tmp_path / 'cell.json'}\n"
        "kept = [gpu.allocate((100 + n) << 20) for n in range(5)]\n"
        "for each in kept[1:]:\n"
        "    gpu.free(each)\n"
        "def grow(n):\n"
        "    return gpu.allocate(n << 20)\n"
        "more = grow(300)\n"
    )

    (told,) = read_trace(tmp_path / "cell.json").devices
    assert told.device == "cuda:0"
    cell = told.units[0]
    uses = {line.line: line.use for line in cell.lines if line.use is not None}
    # Blocks from 100 MiB on have segments of their own, whose sizes are even numbers of MiB.
    taken = [100 * MIB, 102 * MIB, 102 * MIB, 104 * MIB, 104 * MIB]
    assert uses == {
        2: LineUse(sum(taken), 5, taken[0], sum(taken), sum(taken)),
        6: LineUse(300 * MIB, 1, 300 * MIB, 0, 300 * MIB),
    }
    assert told.before.net_bytes == 500 * MIB
    assert told.allocated == Span(500 * MIB, 900 * MIB, 500 * MIB + sum(taken))
    assert told.notes == ()


def test_a_ctrl_c_stops_the_report_in_one_line(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """The cell ends by it, as what waits behind it must not run; the next one has its report."""
    real = tracing.describe_device

    def interrupted(*args: Any, **options: Any) -> Any:
        signal.raise_signal(signal.SIGINT)
        return real(*args, **options)

    with monkeypatch.context() as patched:
        patched.setattr(tracing, "describe_device", interrupted)
        said = gpu.run("%%memtrace --no-live\nkept = gpu.allocate(1 << 20)")
    after = gpu.run("%%memtrace --no-live\nkept = gpu.allocate(1 << 20)")

    assert said.startswith("A Ctrl-C stopped the report of %%memtrace.\n")
    assert "Error in callback" not in said
    assert "+1.00 MiB" in after
    assert [each.status for each in current_session().monitor.ledger][1:] == ["ok"] * 2


def test_nothing_runs_between_traced_cells(gpu: Gpu) -> None:
    """Nor after one that fails, nor when the extension goes."""
    for body in ("x = gpu.allocate(1)", "1 / 0", "raise KeyboardInterrupt"):
        gpu.run(f"%%memtrace\n{body}")
        assert not gpu.allocator.is_history_on

    gpu.run("%%memtrace\n%unload_ext gpumemwidget")

    assert not gpu.allocator.is_history_on


def test_a_history_that_the_cell_starts_is_its_own(gpu: Gpu) -> None:
    """The report says that the trace ends where that history began, which goes on."""
    shown = gpu.run(
        "%%memtrace\n"
        "one = gpu.allocate(1 << 20)\n"
        "torch.cuda.memory._record_memory_history('all', context='all')\n"
        "two = gpu.allocate(2 << 20)\n"
    )

    assert "this trace ends where that began" in " ".join(shown.split())
    assert gpu.allocator.is_history_on


def test_the_file_of_torchs_viewer_is_written(gpu: Gpu, tmp_path: Path) -> None:
    """It holds what the cell did."""
    path = tmp_path / "cell.pickle"

    gpu.run(f"%%memtrace --snapshot {path}\nkept = gpu.allocate(777)\n")

    (trace,) = load_snapshot(path)
    assert 777 in trace.events.sizes
    assert not gpu.allocator.is_history_on
