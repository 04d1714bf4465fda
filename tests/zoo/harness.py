"""Runs a pattern in a fresh IPython of this process, and counts its storages.

What the cells make is watched through torch's own dispatch, in weak references: the watch holds
nothing, and a storage that nobody names is counted all the same. The figures are exact.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from gpumemwidget.backends.hardware import Hardware
from gpumemwidget.backends.host import HostBackend
from gpumemwidget.jupyter.extension import IPythonShell
from gpumemwidget.model.ownership import Cure, Explanation
from gpumemwidget.model.releases import ReleaseReport
from gpumemwidget.ownership.account import take_memory_account
from gpumemwidget.ownership.why import explain, explain_unnamed
from tests.ownership.notebook import Notebook
from tests.shell import open_shell
from tests.zoo.pattern import NO_NAME, Pattern

__all__ = ["Scene", "Watch", "play"]

# The first optimizer of a process imports modules, which with torch 2.4 leaves it to the collector.
torch.optim.Adam([nn.Parameter(torch.zeros(1))])


class Watch(TorchDispatchMode):
    """Knows every storage that torch hands out while it is entered."""

    def __init__(self, device: str) -> None:
        super().__init__()
        self._device = device
        self._storages: dict[int, tuple[StorageWeakRef, int, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Let it happen, and note the storages that come out."""
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor) and leaf.device.type == self._device:
                self.add(leaf)
        return result

    def add(self, tensor: torch.Tensor) -> None:
        """Watch a tensor's storage."""
        storage = tensor.untyped_storage()
        reference = StorageWeakRef(storage)
        self._storages[reference.cdata] = (reference, storage.data_ptr(), storage.nbytes())

    def list_alive(self) -> dict[int, int]:
        """Bytes of the storages that are still there, by address: what two share is there once."""
        return {
            address: n_bytes
            for reference, address, n_bytes in self._storages.values()
            if not reference.expired()
        }

    def count_bytes(self) -> int:
        """Bytes of the storages that are still there."""
        return sum(self.list_alive().values())


@dataclass
class Scene:
    """A pattern whose cells have been run."""

    pattern: Pattern
    notebook: Notebook
    watch: Watch
    #: What CUDA's allocator had handed out before the cells.
    floor_bytes: int

    def count_bytes(self) -> int:
        """What the pattern keeps now."""
        if self.pattern.is_counted_by_allocator:
            return self.read_allocated()
        return self.watch.count_bytes()

    def read_allocated(self) -> int:
        """What CUDA's allocator has handed out since before the cells; 0 without a GPU."""
        return _read_allocated() - self.floor_bytes

    def run(self, source: str, *, watched: bool = True) -> None:
        """Run a cell as a person would; what it prints, a traceback too, is kept from the test."""
        with (
            redirect_stdout(StringIO()),
            redirect_stderr(StringIO()),
            self.watch if watched else nullcontext(),
        ):
            self.notebook.run(source)

    def explain(self) -> list[str]:
        """Every owner and holder that we name, by its path."""
        account = take_memory_account(self.notebook.shell, self.notebook.hardware)
        paths = [owned.owner for device in account.devices for owned in device.owned]
        return [*paths, *(holder.path for holder in self.ask().holders)]

    def ask(self) -> Explanation:
        """Our answer to the pattern's question."""
        shell, hardware = self.notebook.shell, self.notebook.hardware
        if self.pattern.question == NO_NAME:
            return explain_unnamed(shell, hardware)
        return explain(shell, self.pattern.question)

    def follow(self, cure: Cure) -> None:
        """Run the commands of an answer; what they print is kept from the test."""
        with redirect_stdout(StringIO()), redirect_stderr(StringIO()), self.watch:
            self.notebook.follow(cure)

    def release(self) -> ReleaseReport:
        """Release what the pattern says; the report."""
        options = dict.fromkeys(self.pattern.options, True)
        return self.notebook.release(*self.pattern.names, **options)


@contextmanager
def play(pattern: Pattern, *, device: str, hardware: Hardware | None = None) -> Iterator[Scene]:
    """The pattern, played in a notebook of its own, and its traces removed.

    The collector runs only where it is told to: what an automatic collection happens to free would
    otherwise differ from run to run.

    Args:
        pattern: what to run.
        device: ``cpu`` or ``cuda``.
        hardware: what measures a release; the host alone if it is left out.
    """
    own = None if hardware else Hardware([HostBackend()])
    if torch.cuda.is_available():
        # Each begins without the workspaces that others have needed.
        torch._C._cuda_clearCublasWorkspaces()
    gc.disable()
    try:
        with _modules_of(pattern), TemporaryDirectory() as folder, open_shell(Path(folder)) as ip:
            ip.user_ns.update(torch=torch, nn=nn, device=device)
            notebook = Notebook(ip=ip, shell=IPythonShell(ip), hardware=hardware or own)
            scene = Scene(
                pattern=pattern,
                notebook=notebook,
                watch=Watch("cpu" if pattern.is_on_host else device),
                floor_bytes=_read_allocated(),
            )
            for number, cell in enumerate(pattern.cells, 1):
                scene.run(cell, watched=number not in pattern.unwatched)
            yield scene
            scene.run(pattern.end)
    finally:
        gc.enable()
        gc.collect()
        if own is not None:
            own.close()


def _read_allocated() -> int:
    return torch.cuda.memory_allocated(0) if torch.cuda.is_available() else 0


@contextmanager
def _modules_of(pattern: Pattern) -> Iterator[None]:
    """The modules that the cells import, on the path and off it again."""
    if not pattern.modules:
        yield
        return
    with TemporaryDirectory() as folder:
        for name, source in pattern.modules:
            Path(folder, f"{name}.py").write_text(source, encoding="utf-8")
        sys.path.insert(0, folder)
        try:
            yield
        finally:
            sys.path.remove(folder)
            for name, _ in pattern.modules:
                sys.modules.pop(name, None)
