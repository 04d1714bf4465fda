"""A real IPython in this process, its namespace empty and its caches its own."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator

import pytest
import torch.distributed

from gpumemwidget.backends.hardware import Hardware
from gpumemwidget.backends.host import HostBackend
from gpumemwidget.jupyter.extension import IPythonShell
from tests.ownership.hostile import nothing_is_called
from tests.ownership.notebook import Notebook, Tracker
from tests.shell import open_shell

__all__ = [
    "hardware",
    "movable",
    "notebook",
    "nothing_is_called",
    "process_group",
    "tracker",
]


@pytest.fixture
def hardware() -> Iterator[Hardware]:
    """This machine's host memory, and nothing else."""
    hardware = Hardware([HostBackend()])
    yield hardware
    hardware.close()


@pytest.fixture
def notebook(
    hardware: Hardware, monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Notebook]:
    """Cells that run in a fresh IPython, and the shell as the owners see it."""
    # What is exact in a test may take longer on a busy machine: only this process's time counts.
    monkeypatch.setattr("gpumemwidget.ownership.account.LIST_BUDGET_S", 60.0)
    if not torch.cuda.is_available():
        monkeypatch.setattr(time, "perf_counter", time.process_time)
    with open_shell(tmp_path_factory.mktemp("ipython")) as ip:
        yield Notebook(ip=ip, shell=IPythonShell(ip), hardware=hardware)
        ip.reset(new_session=False)
    gc.collect()


@pytest.fixture
def tracker(notebook: Notebook) -> Tracker:
    """Watches what the notebook makes with ``make(n_elements)``."""
    tracker = Tracker()
    notebook.put(make=tracker.make)
    return tracker


@pytest.fixture
def movable(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the plan take the host for a device that memory can be moved away from.

    What is moved is then copied from host to host: the old storages must go all the same.
    """
    monkeypatch.setattr("gpumemwidget.ownership.partition.HOST", "no device")


@pytest.fixture
def process_group(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A group of this process alone, for DistributedDataParallel."""
    store = tmp_path_factory.mktemp("store") / "file"
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{store}", rank=0, world_size=1
    )
    yield
    torch.distributed.destroy_process_group()
