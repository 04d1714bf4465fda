"""Memory that grows: from run to run of a cell, in a loop's steps, by a name bound anew."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from gpumemwidget.model.ownership import Fix


@dataclass(frozen=True, slots=True)
class LeakLine:
    """A line of the user's."""

    #: ``In[7]``, or the name of a file.
    source: str
    #: From 1.
    number: int
    text: str


@dataclass(frozen=True, slots=True)
class LeakHolder:
    """An object that keeps memory anew in each run or step."""

    #: The path, indexes left out: ``history[…]["loss"]'s graph``.
    path: str
    #: Bytes that each run or step adds here.
    each_bytes: int
    #: Number of storages that each run or step adds here, at least 1.
    n_storages: int
    #: The largest of them: ``float32[64, 151, 1000]``; ``""`` where its shape is not known.
    tensor: str
    #: ``True`` if autograd keeps it for a backward.
    in_graph: bool
    #: ``True`` if a module or an optimizer keeps it.
    in_model: bool
    #: The row of the variables that holds it, for a release; ``""`` for none.
    row: str = ""
    #: The container of an imported module that holds it: ``keeper.KEPT``; ``""`` for none.
    container: str = ""
    #: The module to import before the container can be named; ``""`` for none.
    module: str = ""
    #: Bytes of the tensors that look at the largest storage, where they are a small part of it.
    slice_bytes: int | None = None
    #: Bytes of the largest storage.
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
    #: Number of runs or steps in a row that have added some.
    n_seen: int
    #: What keeps it, the largest part first; never empty.
    holders: tuple[LeakHolder, ...]
    #: ``In[7]``.
    cell: str = ""
    #: When the cell began that it was seen in, in seconds on the monitor's clock.
    cell_start_s: float = 0.0
    #: The number of the step that it began after; 0 for runs.
    since: int = 0
    #: The line that adds it; ``None`` where it is not known.
    line: LeakLine | None = None
    #: Number of further runs or steps until the device is full; ``None`` where that is not known.
    n_left: int | None = None


@dataclass(frozen=True, slots=True)
class UnexplainedGrowth:
    """Memory that each run of a cell adds, and that no tensor is in."""

    #: ``In[7]``, of the cell's last run.
    cell: str
    device: str
    #: The median of what the last runs have added.
    each_bytes: int
    #: Number of runs in a row that have added some.
    n_runs: int
    #: ``True`` for memory of a GPU that is not PyTorch's.
    is_outside: bool


@dataclass(frozen=True, slots=True)
class Rebinding:
    """A name that a cell bound anew, whose old value takes memory beside the new one."""

    name: str
    device: str
    #: The bytes of the old value.
    n_bytes: int
    #: The paths that still lead to the old value, each with its fix, or the reference cycle that it
    #: is in.
    holders: tuple[tuple[str, Fix], ...]
    #: The cell's line that binds the name anew.
    line: int


# -- Checks that have failed -----------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class CheckedHolder:
    """Memory of a device, and what keeps it."""

    #: A path with the indexes left out: ``losses[…]'s graph``; of a prediction what it is for.
    name: str
    n_bytes: int


@dataclass(frozen=True, slots=True)
class GrowthOverLimit:
    """More memory in use than before, by more than is allowed."""

    device: str
    growth_bytes: int
    limit_bytes: int
    #: Number of steps that have added it; 0 where no steps were seen.
    n_steps: int
    #: Number of steps before these, which do not count.
    n_warmups: int
    #: The holder that gains a tensor in each step; ``None`` where none is found.
    leak: Leak | None
    #: The largest holders on the device now, biggest first.
    holders: tuple[CheckedHolder, ...]


@dataclass(frozen=True, slots=True)
class PeakOverLimit:
    """A peak of a test's allocated memory beyond what is allowed."""

    device: str
    #: Bytes that the test has allocated at once, without those from before it.
    peak_bytes: int
    limit_bytes: int
    #: ``True`` if the test was not run, but its peak predicted.
    is_predicted: bool
    #: The largest holders at a predicted peak, or those that are left after the test.
    holders: tuple[CheckedHolder, ...]
