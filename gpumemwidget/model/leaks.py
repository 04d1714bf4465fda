"""Memory that grows: from run to run of a cell, in a loop's steps, by a name bound anew."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from gpumemwidget.model.ownership import Fix


@dataclass(frozen=True, slots=True)
class LeakLine:
    """A line of the user's."""

    source: str  #: ``In [7]``, or the name of a file
    number: int
    text: str


@dataclass(frozen=True, slots=True)
class LeakHolder:
    """An object that keeps memory anew in each run or step."""

    path: str  #: the path, indexes left out: ``history[…]["loss"]'s graph``
    each_bytes: int
    n_storages: int  #: number of storages that each run or step adds here, at least 1
    #: The largest of them: ``float32[64, 151, 1000]``; ``""`` where its shape is not known.
    tensor: str
    in_graph: bool  #: ``True`` if autograd keeps it for a backward
    in_model: bool  #: ``True`` if a module or an optimizer keeps it
    row: str = ""  #: the row of the variables that holds it, for a release; ``""`` for none
    #: The container of an imported module that holds it: ``keeper.KEPT``; ``""`` for none.
    container: str = ""
    module: str = ""  #: the module to import before the container can be named; ``""`` for none
    #: Bytes of the tensors that look at the largest storage, where they are a small part of it.
    slice_bytes: int | None = None
    storage_bytes: int = 0

    @property
    def stem(self) -> str:
        """The path up to the elements of its first container: ``runs[…]`` of ``runs[…].x[…]``."""
        begin, index, _ = self.path.partition("[…]")
        return begin + index


@dataclass(frozen=True, slots=True)
class Leak:
    """Memory that is kept anew in each run of a cell, or in each step of a loop."""

    device: str
    #: The thing that repeats: a ``run`` of the cell, or a ``step`` of a loop in it.
    unit: Literal["run", "step"]
    #: Bytes that each run adds, by the median of the last ones; or each step, by a straight line.
    each_bytes: int
    n_seen: int  #: number of runs or steps in a row that have added some
    holders: tuple[LeakHolder, ...]  #: what keeps it, the largest part first; never empty
    cell: str = ""  #: ``In [7]``
    #: When the cell began that it was seen in, in seconds on the monitor's clock.
    cell_start_s: float = 0.0
    since: int = 0  #: the number of the step that it began after; 0 for runs
    line: LeakLine | None = None
    #: Number of further runs or steps until the device is full; ``None`` where that is not known.
    n_left: int | None = None


@dataclass(frozen=True, slots=True)
class UnexplainedGrowth:
    """Memory that each run of a cell adds, and that no tensor is in."""

    #: ``In [7]``, of the cell's last run.
    cell: str
    device: str
    #: The median of what the last runs have added.
    each_bytes: int
    #: Number of runs in a row that have added some.
    n_runs: int
    #: ``True`` for memory of a GPU that is not PyTorch's.
    is_outside: bool


@dataclass(frozen=True, slots=True)
class FoundLeaks:
    """All memory that grows, with and without tensors."""

    leaks: tuple[Leak, ...]
    unexplained: tuple[UnexplainedGrowth, ...]
    ignored: tuple[str, ...]  #: names and holders that the user has said to ignore


@dataclass(frozen=True, slots=True)
class Rebinding:
    """A name that a cell bound anew, whose old value takes memory beside the new one."""

    name: str
    device: str
    n_bytes: int
    #: The paths that still lead to the old value, each with its fix, or the reference cycle that it
    #: is in.
    holders: tuple[tuple[str, Fix], ...]
    line: int
