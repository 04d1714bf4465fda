"""Peaks are exact, and invisible to the user: proved on random programs, in three processes.

Programs of notebook cells run with and without us. The modes of a process:

- ``plain``: IPython alone. What the user sees without us.
- ``loaded``: the extension is loaded, and its sampler runs as under an open dashboard. What the
  user sees with us, and the peaks that we recorded.
- ``truth``: IPython alone, with the peaks reset at each cell's start and read at its end: the
  allocator's own marks. (A user's reset in mid-cell would cut them short, so the marks are read
  before it too.)

The programs are the same in every mode, so every allocation is too.
"""

from __future__ import annotations

import random
import sys
from typing import Any

import pytest

from tests.gpu.processes import run_program

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

SEED, COUNT = 20_261_121, 150

SIZES = (1, 511, 512, 513, 100_000, 1 << 20, (1 << 20) + 1, 5 << 20, 20 << 20, 70 << 20, 300 << 20)

READS = (
    "torch.cuda.max_memory_allocated()",
    "torch.cuda.max_memory_reserved()",
    "torch.cuda.memory_allocated()",
    "torch.cuda.memory_reserved()",
    "dict(torch.cuda.memory_stats())",
    "torch.cuda.memory_stats_as_nested_dict()",
    "torch.cuda.memory_summary()",
    "torch.cuda.memory_summary(abbreviated=True)",
    "torch.cuda.memory.max_memory_allocated(0)",
    "old_max_memory_allocated()",
    "accelerator_call('max_memory_allocated')",
    "accelerator_call('max_memory_reserved')",
    "accelerator_call('memory_stats')",
)

PREAMBLE = """
import gc, torch
gc.disable()
gc.freeze()
from torch.cuda import max_memory_allocated as old_max_memory_allocated
from torch.cuda import reset_peak_memory_stats as old_reset_peak_memory_stats
held, told = {}, []
def accelerator_call(name):
    call = getattr(getattr(torch, "accelerator", None), name, None)
    return None if call is None else call()
def make(n):
    return torch.empty(n, dtype=torch.uint8, device="cuda")
def boom(n):
    x, y = make(n), make(n // 2 + 1)
    raise ValueError("a cell that fails")
"""


def make_cells(rng: random.Random) -> list[str]:
    """The sources of a program's cells."""
    cells = []
    for _ in range(rng.randint(2, 7)):
        # The frames of a failed cell go in a cycle: collected here, and not when it happens to be.
        lines = ["gc.collect();"]
        for _ in range(rng.randint(1, 6)):
            size, key = rng.choice(SIZES), rng.randint(0, 4)
            lines.append(
                rng.choices(
                    (
                        f"held[{key}] = make({size})",
                        f"held.pop({key}, None)",
                        f"make({size}); None",
                        f"told.append({rng.choice(READS)})",
                        rng.choice(
                            (
                                "torch.cuda.reset_peak_memory_stats()",
                                "old_reset_peak_memory_stats()",
                                "torch.cuda.reset_peak_memory_stats('cuda:0')",
                                "accelerator_call('reset_peak_memory_stats')",
                            )
                        ),
                        "torch.cuda.reset_accumulated_memory_stats()",
                        "torch.cuda.empty_cache()",
                        f"boom({size})",
                    ),
                    weights=(30, 15, 15, 25, 8, 2, 3, 5),
                )[0]
            )
        cells.append("\n".join(lines))
    return cells


CLEAN_UP = """
import sys
held.clear()
sys.last_type = sys.last_value = sys.last_traceback = sys.last_exc = None
get_ipython().InteractiveTB.tb = None
get_ipython().last_execution_result = None
import gc; gc.collect()
torch.cuda.empty_cache()
"""


def run(mode: str, seed: int, count: int) -> dict[str, Any]:
    """Run ``count`` programs; what they were told, and the peaks of their cells."""
    from IPython.core.interactiveshell import InteractiveShell

    shell = InteractiveShell.instance(colors="nocolor")
    shell.showtraceback = lambda *_args, **_options: None
    monitor: Any = None
    if mode == "loaded":
        shell.run_line_magic("load_ext", "gpumemwidget")
        import gpumemwidget

        monitor = gpumemwidget.monitor()
        monitor.want_samples(monitor)
    shell.run_cell(PREAMBLE, store_history=True)
    torch = sys.modules["torch"]
    peaks: list[tuple[int, int]] = []
    truth = _Truth(torch) if mode == "truth" else None
    for number in range(count):
        for source in make_cells(random.Random(seed + number)):
            if truth is not None:
                truth.start()
            shell.run_cell(source, store_history=True)
            if truth is not None:
                peaks.append(truth.end())
            elif monitor is not None:
                device = monitor.ledger[-1].devices[0]
                assert device.device in {"cuda:0", "host"}, device
                if device.device == "host":  # CUDA was not touched yet.
                    peaks.append((0, 0))
                else:
                    assert device.peak_is == "exact", device
                    peaks.append((device.allocated.peak_bytes, device.reserved.peak_bytes))
        shell.run_cell(CLEAN_UP, store_history=True)
    told = [repr(item) for item in shell.user_ns["told"]]
    return {"told": told, "peaks": peaks}


class _Truth:
    """A cell's peaks as the allocator marks them, with the user's resets in between."""

    def __init__(self, torch: Any) -> None:
        self._torch = torch
        self._reset = torch._C._cuda_resetPeakMemoryStats
        self._best = (0, 0)

        def reset(device: int) -> None:
            self._fold()
            self._reset(device)

        torch._C._cuda_resetPeakMemoryStats = reset
        if hasattr(torch._C, "_accelerator_resetPeakStats"):
            torch._C._accelerator_resetPeakStats = reset

    def start(self) -> None:
        self._best = (0, 0)
        if self._torch.cuda.is_initialized():
            self._reset(0)

    def end(self) -> tuple[int, int]:
        self._fold()
        return self._best

    def _fold(self) -> None:
        cuda = self._torch.cuda
        now = (cuda.max_memory_allocated(), cuda.max_memory_reserved())
        self._best = (max(self._best[0], now[0]), max(self._best[1], now[1]))


def run_in_process(mode: str) -> Any:
    source = f"print(json.dumps(run({mode!r}, {SEED}, {COUNT})))"
    return run_program(f"import json\nfrom tests.gpu.test_peaks import run\n{source}")


def test_user_is_told_the_same_and_our_peaks_are_the_allocators() -> None:
    """What the programs read is equal with and without us, and each cell's peak is the truth."""
    plain = run_in_process("plain")
    truth = run_in_process("truth")

    loaded = run_in_process("loaded")

    assert len(plain["told"]) > COUNT
    for number, (with_us, without) in enumerate(zip(loaded["told"], plain["told"], strict=True)):
        assert with_us.split("\\n") == without.split("\\n"), f"answer {number}"
    assert len(loaded["peaks"]) > 2 * COUNT
    assert loaded["peaks"] == truth["peaks"]
