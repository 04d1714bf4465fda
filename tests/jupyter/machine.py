"""A shell on simulated GPUs, which the extension takes for the machine's."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
from IPython.core.interactiveshell import InteractiveShell

import gpumemwidget
from gpumemwidget.backends.cuda.backend import CudaBackend
from gpumemwidget.backends.hardware import Hardware
from gpumemwidget.backends.host import HostBackend
from gpumemwidget.jupyter import extension
from gpumemwidget.model.cells import CellRecord
from gpumemwidget.session.session import current_session
from gpumemwidget.testing import SimulatedDriver, SimulatedGpus, simulate_torch

__all__ = ["GIB", "MIB", "TOTAL", "Machine", "has_run_meanwhile"]

MIB = 1 << 20
GIB = 1 << 30
TOTAL = 80 * GIB


class Machine:
    """GPUs with a driver, and a shell whose cells find them as ``gpu`` and ``torch``.

    Args:
        n_gpus: how many there are; none is in use.
        total_bytes: of each.
        options: of the simulated torch.
    """

    def __init__(
        self,
        shell: InteractiveShell,
        monkeypatch: pytest.MonkeyPatch,
        capsys: pytest.CaptureFixture[str],
        *,
        n_gpus: int = 1,
        total_bytes: int = TOTAL,
        **options: Any,
    ) -> None:
        self.shell = shell
        self._capsys = capsys
        self.allocator = SimulatedGpus(n_gpus, total_bytes=total_bytes)
        self.torch: Any = simulate_torch(self.allocator, **options)
        self.driver = SimulatedDriver(self.allocator)
        self.hardware = Hardware([CudaBackend(self.torch), HostBackend()], self.driver)
        monkeypatch.setattr(extension, "detect_hardware", lambda: self.hardware)
        shell.user_ns.update(gpu=self.allocator, torch=self.torch, gpumemwidget=gpumemwidget)

    def run(self, source: str) -> str:
        """Run a cell; what it printed."""
        self._capsys.readouterr()
        self.shell.run_cell(source, store_history=True)
        return "".join(self._capsys.readouterr())

    def say(self, source: str) -> str:
        """Run a cell; the words that it printed."""
        return " ".join(self.run(source).split())

    @property
    def last(self) -> CellRecord:
        """The last cell."""
        return current_session().monitor.ledger[-1]


def has_run_meanwhile(
    monkeypatch: pytest.MonkeyPatch,
    hardware: Hardware,
    ask: Callable[[], object],
    run_cell: Callable[[], object],
) -> bool:
    """Whether a cell runs to its end while the driver has not answered what a page asks."""
    is_asked, has_answered = threading.Event(), threading.Event()
    list_all_devices = hardware.list_all_devices

    def list_late() -> Any:
        is_asked.set()
        assert has_answered.wait(60)
        return list_all_devices()

    monkeypatch.setattr(hardware, "list_all_devices", list_late)
    asking, cell = threading.Thread(target=ask), threading.Thread(target=run_cell)
    asking.start()
    assert is_asked.wait(60)
    cell.start()
    cell.join(30)
    has_run = not cell.is_alive()
    has_answered.set()
    asking.join()
    cell.join()
    return has_run
