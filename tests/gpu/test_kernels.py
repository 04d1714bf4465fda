"""What Jupyter kernels take of a real GPU, as its driver says."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import pytest

from gpumemwidget.backends.hardware import detect_hardware

torch = pytest.importorskip("torch")
pytestmark = [pytest.mark.gpu, pytest.mark.timeout(180)]

_MIB = 1 << 20
_TAKE = (
    "import sys, torch\n"
    "kept = torch.ones(256 << 18, device='cuda')\n"
    "torch.cuda.synchronize(); print(flush=True); sys.stdin.read()"
)


@pytest.fixture
def kernel() -> Iterator[str]:
    """The id of a kernel that has 256 MiB on the first GPU."""
    command = [sys.executable, "-c", _TAKE, "-f", "/run/user/kernel-6f0e-aa.json"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdout.readline()
        yield "6f0e-aa"
        process.stdin.close()
        process.wait()


def test_a_kernels_memory_is_told(kernel: str) -> None:
    """With its CUDA context, beside what PyTorch has reserved; with certain pids alone."""
    torch.zeros(1, device="cuda")
    hardware = detect_hardware()
    try:
        listed = hardware.read_own_use("cuda:0")
        uses = [use for use in hardware.list_kernels() if use.kernel_id == kernel]
    finally:
        hardware.close()

    if listed is None:
        # A container in which the driver's pids are not this machine's.
        assert uses == []
    else:
        [use] = uses
        assert use.device == "cuda:0"
        assert use.n_bytes is not None
        assert 256 * _MIB < use.n_bytes < 2048 * _MIB
