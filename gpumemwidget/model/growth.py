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
class Leak:
    """Memory that is kept anew in each run of a cell, or in each step of a loop."""

    device: str
    #: The thing that repeats: a ``run`` of the cell, or a ``step`` of a loop in it.
    unit: Literal["run", "step"]
    #: Bytes that each run adds, by the median of the last ones; or each step, by a straight line.
    each_bytes: int
    #: Number of runs or steps in a row that have added some.
    n_seen: int
    #: The path of what keeps it, indexes left out: ``history[…]["loss"]'s graph``.
    holder: str
    #: Number of storages that each run or step has added, at least 1.
    n_storages: int
    #: The largest of them: ``float32[64, 151, 1000]``; ``""`` where its shape is not known.
    tensor: str
    #: ``True`` if autograd keeps it for a backward.
    in_graph: bool
    #: ``True`` if a module or an optimizer keeps it.
    in_model: bool
    #: The row of the variables that holds it, for a release; ``""`` for none.
    row: str = ""
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
class Rebinding:
    """Names that a cell bound anew, whose old values took memory beside the new ones."""

    names: tuple[str, ...]
    device: str
    #: The bytes of the value that is still there; or those by which the cell's peak was higher.
    n_bytes: int
    #: The paths that still lead to the old value, each with its fix; ``()`` where it is gone.
    holders: tuple[tuple[str, Fix], ...] = ()
    #: The line of the cell before which the names could have been deleted; 0 with holders.
    line: int = 0
