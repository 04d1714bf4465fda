"""One pattern of the zoo: cells that leave memory behind, and what must come of a release.

The cells are those of a notebook, parted by ``# %%``. They find ``torch``, ``nn`` and ``device``
in their namespace: the same pattern runs on the host and on a GPU.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from textwrap import dedent
from typing import Literal

import torch

__all__ = ["KIB", "NO_NAME", "Pattern"]

KIB = 1024
#: Asks for what no name leads to.
NO_NAME = "no name"


@dataclass(frozen=True, slots=True)
class Pattern:
    """What somebody reported, in a few lines."""

    #: What it is called in tests: ``total-loss``.
    id: str
    #: As the table in docs/zoo.md has it, in Markdown.
    title: str
    #: A report of it.
    link: str
    source: str
    #: The rows that are released.
    names: tuple[str, ...]
    #: Bytes of the storages that must go with them, no less and no more.
    frees: int
    #: Who must be named, by their paths; ``*`` stands for anything.
    owners: tuple[str, ...]
    #: What the names hold, where not all of it goes with them: something else holds it too.
    keeps: int = 0
    #: Why the plan promises less than what goes, on the host and on a GPU; it must not promise all
    #: of it then.
    plans_less_because: str = ""
    plans_less_on_gpu_because: str = ""
    #: What is asked about; the first of the names where it is empty.
    asked: str = ""
    #: Options of the release: ``out``, ``exceptions``.
    options: tuple[str, ...] = ()
    #: Where it is another figure on a GPU: what others hold is moved to the CPU in place there.
    frees_on_gpu: int | None = None
    #: ``any``, or the one kind of device that it runs on.
    runs_on: Literal["any", "cpu", "cuda"] = "any"
    #: Whether it is host memory that is kept, though a GPU is needed (pinned memory).
    is_on_host: bool = False
    #: Whether it is no tensor's: all that the allocator has handed out since must go.
    is_counted_by_allocator: bool = False
    #: Why the release is refused: a part of what it says.
    stops: str = ""
    #: What a person is told to run, after which all that is kept goes with the names.
    cut: str = ""
    #: Modules that the cells import, by name.
    modules: tuple[tuple[str, str], ...] = ()
    #: Cells (from 1) that are run without a watch on what they make: they compile or capture.
    unwatched: tuple[int, ...] = ()
    #: A last cell that undoes what would reach into other patterns.
    end: str = ""
    #: True if what autograd has saved matters, of which PyTorch 2.4 tells nothing.
    needs_saved: bool = False
    #: The oldest Python that has what the cells use.
    python: tuple[int, int] = (3, 10)

    @property
    def cells(self) -> tuple[str, ...]:
        """What is run, cell by cell."""
        return tuple(cell.strip() for cell in dedent(self.source).split("# %%"))

    @property
    def question(self) -> str:
        """What is asked about."""
        return self.asked or self.names[0]

    def runs_here(self, device: str) -> bool:
        """Whether it runs on this device (``cpu``, ``cuda``), this Python and this PyTorch."""
        if self.needs_saved and not hasattr(torch._C._autograd.SavedTensor, "data"):
            return False
        return self.runs_on in {"any", device} and sys.version_info >= self.python

    def keeps_on(self, device: str) -> int:
        """The bytes that the pattern keeps on this device."""
        return self.keeps or self.frees_on(device)

    def frees_on(self, device: str) -> int:
        """The bytes that must go on this device."""
        if device == "cuda" and self.frees_on_gpu is not None:
            return self.frees_on_gpu
        return self.frees
