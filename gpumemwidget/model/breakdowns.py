"""A device's memory in parts that add up, and the map of its segments."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import auto
from typing import Literal

from gpumemwidget.model.devices import LibraryUse, NamedByWords, ProcessUse, Segment
from gpumemwidget.model.ownership import BlockNames, MemoryKind

#: Kinds of parts of a device's memory.
PartKey = Literal[
    "allocated",  # held by tensors and by what else asks PyTorch's allocator; parts: ``kind``
    "kind",  # allocated for one purpose (``BreakdownPart.kind``), without rounding
    "unnamed",  # allocated, and what for is not known: the kind ``unknown`` of an account
    "rounding",  # allocated beyond what was requested
    "pending",  # freed, but another stream may still use it
    "releasable",  # reserved, unallocated, and given back by ``empty_cache``
    "fragmented",  # reserved and unallocated, beside blocks that are in use
    "pools",  # reserved and unallocated in pools of CUDA graphs and of ``MemPool``
    # This process's, but not its allocator's; parts: ``library``, ``library cache``, ``context``.
    "outside",
    "library",  # the memory of another library's arrays (``BreakdownPart.library``)
    "library cache",  # the memory that another library keeps for later
    "context",  # the CUDA context, and the memory of libraries that don't report it
    "children",  # processes below this one; parts: ``process``
    "others",  # other processes; parts: ``process``
    "process",
    "unlisted",  # in use by no process that the driver lists
    "driver",  # reserved by the driver
    "free",
    "cached",  # on the host: resident, and not handed out by malloc
    "rest",  # several parts together (``BreakdownPart.merged``), where they can't be separated
]


@dataclass(frozen=True, slots=True)
class BreakdownPart:
    """One part of a device's memory, and the kind, the process or the library that it is of."""

    key: PartKey
    n_bytes: int
    kind: MemoryKind | None = None
    process: ProcessUse | None = None
    library: LibraryUse | None = None
    merged: tuple[PartKey, ...] = ()  #: the parts that a part ``rest`` has together
    #: Smaller parts that add up to this part, where they are known.
    parts: tuple[BreakdownPart, ...] = ()


class BreakdownDoubt(NamedByWords):
    """Why parts of a breakdown are merged, or may not be exact."""

    #: Figures do not fit together: memory was taken or freed while the device was read, or they
    #: count some memory twice, or some that is not resident.
    FIGURES_DIFFER = auto()
    #: The driver knows nothing of the whole device; the total of one in use is PyTorch's.
    NO_DRIVER = auto()
    #: The allocator does not list its segments, or not those that the counters count.
    SEGMENTS_UNKNOWN = auto()
    OWNERS_DIFFER = auto()  #: the owners that were found do not add up to what is allocated
    OWNERS_INCOMPLETE = auto()
    #: The driver does not list all processes with their bytes, or under other pids than here.
    NOT_LISTED = auto()


@dataclass(frozen=True, slots=True)
class Breakdown:
    """A device's memory in parts that are all of it, to the byte."""

    device: str
    name: str
    total_bytes: int
    parts: tuple[BreakdownPart, ...]  #: None is negative, and together they are ``total_bytes``
    #: PyTorch's own figures, where it uses the device.
    allocated_bytes: int | None
    reserved_bytes: int | None
    #: The driver's figure, as ``nvidia-smi`` shows it, without the driver's own part.
    used_bytes: int | None
    #: The limit of what this process may reserve, and the budget of a cell, where these are set.
    limit_bytes: int | None = None
    budget_bytes: int | None = None
    largest_free_block_bytes: int | None = None
    has_expandable: bool = False
    pinned_bytes: int | None = None
    #: Bytes that PyTorch has reserved and that have no memory of the device behind them: at least
    #: so many, and no part of the device's. Its other memory is then one part with the context.
    asleep_bytes: int = 0
    #: Libraries of this process that may have memory and don't say how much.
    silent_libraries: tuple[str, ...] = ()
    driver_failure: str = ""  #: the driver's words on why nothing is known; ``""`` where it is
    #: True if the device's memory is the host's.
    is_shared: bool = False
    doubts: tuple[BreakdownDoubt, ...] = ()


@dataclass(frozen=True, slots=True)
class SegmentMap:
    """All of a device's segments, the largest first, and what is known of their blocks."""

    device: str
    segments: tuple[Segment, ...]
    #: Kind and owner of the allocated blocks; ``None`` if no account was taken.
    names: BlockNames | None = None
    #: The line that allocated a block, by its address, where that was recorded: ``In [7], line 3``.
    lines: Mapping[int, str] = field(default_factory=dict)

    @property
    def reserved_bytes(self) -> int:
        """The bytes of all segments."""
        return sum(segment.n_bytes for segment in self.segments)
