"""The CUDA backend on a real GPU: what it must not do, and what it must notice."""

from __future__ import annotations

import pytest

from tests.gpu.processes import SHELL, run_python

__all__ = ["SHELL", "run_python"]

pytestmark = pytest.mark.gpu


def test_watching_never_initialises_cuda() -> None:
    """Cells, the sampler and %memstat leave an untouched device without a context."""
    out = run_python(
        SHELL
        + """
cell("import torch")
cell("1 + 1")
monitor.want_samples(monitor)
monitor.read_now()
cell("%memstat")
gpumemwidget.stat()
print("segments", hardware.read_segments())
monitor.unwant_samples(monitor)
import torch
print("initialised", torch.cuda.is_initialized())
print("context", torch._C._cuda_hasPrimaryContext(0))
print(sorted(devices()))
"""
    )

    assert "segments ()" in out
    assert "initialised False" in out
    assert "context False" in out
    assert out.splitlines()[-1] == "['host']"


def test_recording_begins_in_mid_cell() -> None:
    """The cell that imports torch and touches the GPU first is recorded from 0, exactly."""
    out = run_python(
        SHELL
        + """
cell('''
import torch
x = torch.empty(10 << 20, dtype=torch.uint8, device="cuda")
y = torch.empty(50 << 20, dtype=torch.uint8, device="cuda")
torch.cuda.reset_peak_memory_stats()
del y
torch.cuda.reset_peak_memory_stats()
''')
d = devices()["cuda:0"]
print(d.allocated.before_bytes, d.allocated.after_bytes, d.allocated.peak_bytes, d.peak_is)
import torch
print(torch.cuda.max_memory_allocated())
"""
    )

    mib = 1 << 20
    assert out.splitlines()[-2:] == [f"0 {10 * mib} {60 * mib} exact", str(10 * mib)]


def test_unload_restores_the_bindings() -> None:
    """After unload torch._C holds its own functions again, and peaks are read from it alone."""
    out = run_python(
        """
import torch
names = [n for n in dir(torch._C) if n in (
    "_cuda_memoryStats", "_accelerator_getDeviceStats", "_cuda_resetPeakMemoryStats",
    "_accelerator_resetPeakStats", "_cuda_resetAccumulatedMemoryStats",
    "_accelerator_resetAccumulatedStats")]
before = [getattr(torch._C, n) for n in names]
"""
        + SHELL
        + """
assert any(getattr(torch._C, n) is not b for n, b in zip(names, before))
cell("%unload_ext gpumemwidget")
assert all(getattr(torch._C, n) is b for n, b in zip(names, before)), names
print(len(names), "restored")
"""
    )

    assert out.splitlines()[-1].endswith("restored")


def test_current_device_and_rng_are_untouched() -> None:
    """The random numbers that a cell draws are the same with the extension loaded."""
    body = """
cell("import torch; torch.manual_seed(0); a = torch.rand(3, device='cuda')")
cell("b = torch.rand(3, device='cuda')")
import torch
print(torch.cuda.current_device(), shell.user_ns["b"].tolist())
"""
    plain = run_python(
        SHELL.replace('cell("%load_ext gpumemwidget")', "").partition("import gpu")[0] + body
    )

    loaded = run_python(SHELL + body)

    assert loaded.splitlines()[-1] == plain.splitlines()[-1]


def test_workspaces_go_unless_a_graph_may_use_them() -> None:
    """All bytes of cuBLAS's come back; a captured graph that bears their address is protected."""
    out = run_python(
        """
import gc, torch
from gpumemwidget.backends.hardware import detect_hardware
from gpumemwidget.errors import BackendError
hardware = detect_hardware()
print(hardware.release_workspaces())
x = torch.ones(256, 256, device="cuda")
before = torch.cuda.memory_allocated()
x @ x
print(torch.cuda.memory_allocated() - before >= 8 << 20)
print(hardware.release_workspaces(), torch.cuda.memory_allocated() - before)
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    y = x @ x
try:
    hardware.release_workspaces()
except BackendError as error:
    print(error)
del graph, y
gc.collect()
print(hardware.release_workspaces())
hardware.close()
"""
    )

    assert out.splitlines() == [
        "False",
        "True",
        "True 0",
        "cuBLAS's workspaces stay while a CUDA graph is alive, which may use them: delete the "
        "graphs first (those of torch.compile with torch._dynamo.reset())",
        "True",
    ]
