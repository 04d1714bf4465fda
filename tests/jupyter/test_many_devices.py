"""Cells on three simulated GPUs: whatever a device did is its own, whichever is the current one.

On two real ones: ``tests/gpu/test_many.py``.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch as real_torch
from IPython.core.interactiveshell import InteractiveShell

from gpumemwidget.backends.cuda import oom_observer as ooms
from gpumemwidget.model.cells import CellDevice
from gpumemwidget.model.ooms import OomCard
from gpumemwidget.testing import DeviceFullError
from gpumemwidget.units import format_bytes
from tests.jupyter.machine import GIB, MIB, Machine

TOTAL_BYTES = 2 * GIB


class Gpus(Machine):
    """Three GPUs, the last one of which nobody touches; OOMs are told as PyTorch tells them."""

    def __init__(self, *shell: Any) -> None:
        super().__init__(*shell, n_gpus=3, total_bytes=TOTAL_BYTES)
        self.observers: list[Callable[[int, int, int, int], None]] = []
        self.torch._C._cuda_attach_out_of_memory_observer = self.observers.append
        self.torch.cuda._lazy_call = lambda call: call()
        self.shell.user_ns.update(make=self.make, free=self.allocator.free)

    def make(self, n_bytes: int, device: int) -> int:
        """Allocate as PyTorch does: where there is no room, the observers first, then the error."""
        try:
            return self.allocator.allocate(n_bytes, device)
        except DeviceFullError:
            reserved = self.allocator.stats(device)["reserved_bytes"]["all"]["current"]
            for observer in self.observers:
                observer(device, n_bytes, TOTAL_BYTES, TOTAL_BYTES - reserved)
            raise real_torch.OutOfMemoryError(
                f"CUDA out of memory. Tried to allocate {format_bytes(n_bytes)}. GPU {device} "
                "has a total capacity of 2.00 GiB"
            ) from None

    def last_cell(self) -> dict[str, CellDevice]:
        """What the last cell did, by device."""
        return {each.device: each for each in self.last.devices}


@pytest.fixture
def gpus(
    shell: InteractiveShell, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Gpus:
    gpus = Gpus(shell, monkeypatch, capsys)
    monkeypatch.setattr(ooms, "_attached", [])
    monkeypatch.setattr(
        ooms,
        "TorchImportHook",
        lambda join: SimpleNamespace(expect=lambda: join(gpus.torch), cancel=lambda: None),
    )
    gpus.run("%load_ext gpumemwidget")
    gpus.run("make(1000, 0), make(1000, 1)")
    return gpus


def test_a_cells_changes_and_peaks_are_by_device(gpus: Gpus) -> None:
    """What comes and goes on one shows on that one alone; the untouched one has no record."""
    gpus.run("kept = make(300 << 20, 1)\nfree(make(700 << 20, 0))")

    cell = gpus.last_cell()
    assert list(cell) == ["cuda:0", "cuda:1", "host"]
    assert (cell["cuda:0"].allocated.change_bytes, cell["cuda:0"].allocated.rise_bytes) == (
        0,
        700 * MIB,
    )
    assert (cell["cuda:1"].allocated.change_bytes, cell["cuda:1"].allocated.rise_bytes) == (
        300 * MIB,
        300 * MIB,
    )
    assert {cell[device].peak_is for device in ("cuda:0", "cuda:1")} == {"exact"}


def test_lines_are_told_by_the_device_of_their_memory(gpus: Gpus) -> None:
    """One line for two devices is in both traces, each with its own bytes."""
    gpus.run(
        "import gpumemwidget\n"
        "with gpumemwidget.trace() as traced:\n"
        "    a = make(200 << 20, 1)\n"
        "    b = [make((100 << 20) * (n + 1), n) for n in range(2)]\n"
        "    free(a)\n"
    )

    first, second = gpus.shell.user_ns["traced"].devices
    assert (first.device, second.device) == ("cuda:0", "cuda:1")
    lines = [
        {line.line: line.use.allocated_bytes for line in each.units[0].lines if line.use}
        for each in (first, second)
    ]
    assert lines == [{4: 100 * MIB}, {3: 200 * MIB, 4: 200 * MIB}]
    assert first.allocated.rise_bytes == 100 * MIB
    assert (second.allocated.rise_bytes, second.allocated.change_bytes) == (400 * MIB, 200 * MIB)


def test_an_oom_is_of_the_device_that_ran_out(gpus: Gpus, cards: list[OomCard]) -> None:
    """Not of the fullest, nor of the first: its card, its counters and its count in the ledger."""
    gpus.run("full = make(1900 << 20, 0); some = make(500 << 20, 1)")

    gpus.run("more = make(1800 << 20, 1)")

    (card,) = cards
    assert card.event.device == "cuda:1"
    assert card.event.requested_bytes == 1800 * MIB
    assert card.event.allocated_bytes == 500 * MIB + 1024
    cell = gpus.last_cell()
    assert (cell["cuda:0"].num_ooms, cell["cuda:1"].num_ooms) == (0, 1)
    gpus.run("more = make(300 << 20, 0)")
    assert [card.event.device for card in cards] == ["cuda:1", "cuda:0"]
