"""Budgets on real GPUs: the cell is over to the byte, and the one that crosses is interrupted."""

from __future__ import annotations

import time

import pytest
import torch
from IPython.core.interactiveshell import InteractiveShell

import gpumemwidget
from gpumemwidget.records import CellDevice
from tests.gpu.test_cuda import SHELL, run_python
from tests.gpu.test_oom import run, shell  # noqa: F401 - a fixture

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(180)]

MIB = 1024**2
N_GPUS = torch.cuda.device_count()
needs_two = pytest.mark.skipif(N_GPUS < 2, reason="needs two GPUs")


def read_last(device: str = "cuda:0") -> CellDevice:
    """What the last cell did to a device."""
    record = gpumemwidget.monitor().ledger[-1]
    return next(each for each in record.devices if each.device == device)


@pytest.mark.parametrize(("more", "is_over"), [(0, False), (512, True)])
def test_a_cell_is_over_to_the_byte(
    shell: InteractiveShell,  # noqa: F811 - a fixture
    *,
    more: int,
    is_over: bool,
) -> None:
    """By its peak, however short that was; the user's own peak goes on as it would."""
    gpumemwidget.budget(torch.cuda.memory_allocated(0) + 64 * MIB)
    torch.cuda.reset_peak_memory_stats(0)
    peak = torch.cuda.memory_allocated(0) + 64 * MIB + more

    run(
        shell,
        "big = torch.empty(64 << 20, dtype=torch.uint8, device='cuda:0')\n"
        f"small = torch.empty({more}, dtype=torch.uint8, device='cuda:0')\n"
        "del big, small",
    )
    run(shell, "pass")

    told = [record.devices[0] for record in gpumemwidget.monitor().ledger][-2:]
    assert [each.is_over_budget for each in told] == [is_over, False]
    assert (told[0].allocated.peak_bytes, told[0].peak_is) == (peak, "exact")
    assert torch.cuda.max_memory_allocated(0) == peak


@pytest.mark.parametrize(
    "body",
    [
        "while True:\n    kept.append(torch.empty(8 << 20, dtype=torch.uint8, device='cuda:0'))\n"
        "    time.sleep(0.005)",
        "while True:\n    kept.append(model(x[:256]).sum())",
        "import asyncio\nfor _ in range(10_000):\n"
        "    kept.append(torch.empty(8 << 20, dtype=torch.uint8, device='cuda:0'))\n"
        "    await asyncio.sleep(0.005)",
        "kept.append(torch.empty(300 << 20, dtype=torch.uint8, device='cuda:0'))\ntime.sleep(60)",
    ],
    ids=["loop", "graphs", "await", "sleep"],
)
def test_the_cell_that_crosses_it_is_interrupted(
    shell: InteractiveShell,  # noqa: F811 - a fixture
    body: str,
) -> None:
    """Soon after, and what comes next works."""
    allowed = torch.cuda.memory_allocated(0) + 200 * MIB
    gpumemwidget.budget(allowed, stop=True)
    started_s = time.monotonic()

    run(shell, f"import time\nkept = []\n{body}")
    told, status = read_last(), gpumemwidget.monitor().ledger[-1].status
    run(shell, "kept = None")
    run(shell, "y = float((x[:64] @ x[:64].T).sum())\nimport time; time.sleep(0.1)")

    assert time.monotonic() - started_s < 60
    assert status == "interrupted"
    assert told.budget_bytes == allowed
    assert told.stopped_at_bytes is not None
    assert told.stopped_at_bytes > allowed
    assert told.allocated.peak_bytes is not None
    assert told.allocated.peak_bytes >= told.stopped_at_bytes
    after = gpumemwidget.monitor().ledger[-1]
    assert (after.status, read_last().stopped_at_bytes) == ("ok", None)
    assert "y" in shell.user_ns


def test_a_cell_that_uses_cuda_first_is_stopped() -> None:
    """Its budget was set before there was anything to read; no other device comes into use."""
    out = run_python(
        SHELL
        + """
import time
print(gpumemwidget.budget(100 << 20, stop=True))
started = time.monotonic()
cell('''
import time, torch
x = torch.empty(200 << 20, dtype=torch.uint8, device="cuda:0")
time.sleep(60)
''')
print("took", time.monotonic() - started < 50)
import torch
print("status", monitor.ledger[-1].status, devices()["cuda:0"].stopped_at_bytes)
print("others", [torch._C._cuda_hasPrimaryContext(n) for n in range(1, torch.cuda.device_count())])
"""
    )

    assert "took True" in out
    assert f"status interrupted {200 * MIB}" in out
    assert "True" not in out.splitlines()[-1]


@needs_two
def test_each_gpu_has_the_budget_by_itself() -> None:
    """The device that crosses it is named, and the current one stays what it was."""
    out = run_python(
        SHELL
        + """
gpumemwidget.budget(100 << 20)
cell('''
import torch
a = torch.empty(60 << 20, dtype=torch.uint8, device="cuda:0")
b = torch.empty(120 << 20, dtype=torch.uint8, device="cuda:1")
''')
print({name: each.is_over_budget for name, each in devices().items()})
import torch
print("current", torch.cuda.current_device())
"""
    )

    assert "cuda:1 went beyond its budget: 120.00 MiB allocated" in " ".join(out.split())
    assert "{'cuda:0': False, 'cuda:1': True, 'host': False}" in out
    assert out.splitlines()[-1] == "current 0"
