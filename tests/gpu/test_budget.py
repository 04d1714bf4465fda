"""Budgets on real GPUs: the cell is over to the byte."""

from __future__ import annotations

import pytest
import torch
from IPython.core.interactiveshell import InteractiveShell

import gpumemwidget
from tests.gpu.test_cuda import SHELL, run_python
from tests.gpu.test_oom import run, shell  # noqa: F401 - a fixture

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(180)]

MIB = 1024**2
N_GPUS = torch.cuda.device_count()
needs_two = pytest.mark.skipif(N_GPUS < 2, reason="needs two GPUs")


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

    assert "cuda:1 exceeded its budget of 100.00 MiB: 120.00 MiB" in " ".join(out.split())
    assert "{'cuda:0': False, 'cuda:1': True, 'host': False}" in out
    assert out.splitlines()[-1] == "current 0"
