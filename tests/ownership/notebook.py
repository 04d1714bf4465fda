"""Running cells, and telling which storages are still there without holding one."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from IPython.core.interactiveshell import InteractiveShell
from torch.multiprocessing.reductions import StorageWeakRef

from gpumemwidget.backends.hardware import Hardware
from gpumemwidget.jupyter.extension import IPythonShell
from gpumemwidget.model.ownership import Cure, Variable
from gpumemwidget.model.releases import ReleasePlan, ReleaseReport, ReleaseRequest
from gpumemwidget.ownership.account import list_variables
from gpumemwidget.releasing.plan import plan_release
from gpumemwidget.releasing.release import execute_release
from gpumemwidget.report.release import list_commands


@dataclass
class Notebook:
    """A notebook in this process."""

    ip: InteractiveShell
    shell: IPythonShell
    hardware: Hardware
    #: Where tests keep what no variable of the notebook names.
    elsewhere: list[object] = field(default_factory=list)

    def run(self, source: str) -> None:
        """Run a cell, as a person would."""
        self.ip.run_cell(source, store_history=True)

    def put(self, **values: object) -> None:
        """Bind names, as a cell would."""
        self.ip.user_ns.update(values)

    def drop(self, *rows: str) -> list[str]:
        """Drop what IPython holds of these rows; the paths of the references."""
        references = [each for each in self.shell.list_references() if each.row in rows]
        for each in references:
            each.drop()
        return [each.path for each in references]

    def list_rows(self) -> dict[str, Variable]:
        """The variables panel, by name."""
        return {row.name: row for row in list_variables(self.shell)}

    def plan(self, *names: str, **options: bool) -> ReleasePlan:
        """What a release would do."""
        return plan_release(self.shell, self.hardware, ReleaseRequest(names, **options))

    def release(self, *names: str, **options: bool) -> ReleaseReport:
        """Plan and carry out."""
        return execute_release(self.shell, self.hardware, ReleaseRequest(names, **options))

    def follow(self, cure: Cure) -> None:
        """Run the commands of a cure, as a person would."""
        for line in list_commands(cure):
            magic, *words = shlex.split(line) if line.startswith("%") else [""]
            if not magic:
                result = self.ip.run_cell(line, store_history=False)
                assert result.success, f"{line}: {result.error_in_exec!r}"
                continue
            options = {word[2:]: True for word in words if word.startswith("--")}
            self.release(*(word for word in words if not word.startswith("--")), **options)


@dataclass
class Tracker:
    """Knows every storage that a test made, by torch's own weak references."""

    watched: list[tuple[StorageWeakRef, int]] = field(default_factory=list)

    def track(self, tensor: Any) -> Any:
        """Watch a tensor's storage; the tensor again."""
        storage = tensor.untyped_storage()
        self.watched.append((StorageWeakRef(storage), storage.nbytes()))
        return tensor

    def make(self, n_elements: int) -> Any:
        """A tensor of its own storage, watched."""
        return self.track(torch.ones(n_elements))

    def count_bytes(self) -> int:
        """Bytes of all watched storages that are still there."""
        return sum(n_bytes for reference, n_bytes in self.watched if not reference.expired())


def refuse_to_clone(
    monkeypatch: pytest.MonkeyPatch, *, n_bytes: int, make_error: Callable[[], BaseException]
) -> list[int]:
    """Have the copying of storages of this size fail; return their sizes as it does."""
    clone = torch.UntypedStorage.clone
    failed: list[int] = []

    def clone_others(storage: Any) -> Any:
        if storage.nbytes() == n_bytes:
            failed.append(n_bytes)
            raise make_error()
        return clone(storage)

    monkeypatch.setattr(torch.UntypedStorage, "clone", clone_others)
    return failed
