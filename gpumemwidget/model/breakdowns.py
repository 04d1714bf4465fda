"""A device's memory in parts that add up, and the map of its segments."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Literal

from gpumemwidget.model.devices import LibraryUse, ProcessUse, Segment
from gpumemwidget.model.ownership import BlockNames, MemoryKind

#: Kinds of parts of a device's memory:
#:
#: - ``allocated``: held by tensors and by what else asks PyTorch's allocator; parts: ``kind``
#: - ``kind``: allocated for one purpose (``BreakdownPart.kind``), without rounding; ``unnamed``:
#:   allocated, and no name, module or running function leads to it
#: - ``rounding``: allocated beyond what was requested
#: - ``pending``: freed, but another stream may still use it
#: - ``releasable``: reserved, unallocated, and given back by ``empty_cache``
#: - ``fragmented``: reserved and unallocated, beside blocks that are in use
#: - ``pools``: reserved and unallocated in pools of CUDA graphs and of ``MemPool``
#: - ``outside``: this process's, but not PyTorch's allocator's; parts: ``library``, ``library
#:   cache``, ``context``
#: - ``library``: what the arrays of another library are in (``BreakdownPart.library``)
#: - ``library cache``: what another library keeps for later
#: - ``context``: the CUDA context, and what libraries have that don't say it
#: - ``children``: processes below this one; parts: ``process``
#: - ``others``: other processes; parts: ``process``
#: - ``unlisted``: in use by no process that the driver lists
#: - ``driver``: reserved by the driver
#: - ``free``
#: - ``cached`` (the host): resident, and not handed out by malloc
#: - ``rest``: several parts together (``BreakdownPart.merged``), where they can't be
#:   separated
PartKey = Literal[
    "allocated",
    "kind",
    "unnamed",
    "rounding",
    "pending",
    "releasable",
    "fragmented",
    "pools",
    "outside",
    "library",
    "library cache",
    "context",
    "children",
    "others",
    "process",
    "unlisted",
    "driver",
    "free",
    "cached",
    "rest",
]


@dataclass(frozen=True, slots=True)
class BreakdownPart:
    """One part of a device's memory."""

    key: PartKey
    n_bytes: int
    #: The purpose of a part ``kind``.
    kind: MemoryKind | None = None
    #: The process of a part ``process``.
    process: ProcessUse | None = None
    #: The library of a part ``library`` or ``library cache``.
    library: LibraryUse | None = None
    #: The parts that a part ``rest`` has together.
    merged: tuple[PartKey, ...] = ()
    #: Smaller parts that add up to this part, where they are known.
    parts: tuple[BreakdownPart, ...] = ()


class BreakdownDoubt(Enum):
    """Why parts of a breakdown are merged, or may not be exact."""

    #: Figures do not fit together: memory was taken or freed while the device was read, or they
    #: count some memory twice, or some that is not resident.
    FIGURES_DIFFER = auto()
    #: The driver knows nothing of the whole device; the total of one in use is PyTorch's.
    NO_DRIVER = auto()
    #: The allocator does not list its segments, or not those that the counters count.
    SEGMENTS_UNKNOWN = auto()
    #: The owners that were found do not add up to what is allocated.
    OWNERS_DIFFER = auto()
    #: The account ran out of time.
    OWNERS_INCOMPLETE = auto()
    #: The driver does not list all processes with their bytes, or under other pids than here.
    NOT_LISTED = auto()


@dataclass(frozen=True, slots=True)
class Breakdown:
    """A device's memory in parts that are all of it, to the byte."""

    device: str
    #: The device's own: ``NVIDIA H200``.
    name: str
    total_bytes: int
    #: None is negative, and together they are ``total_bytes``.
    parts: tuple[BreakdownPart, ...]
    #: PyTorch's own figures, where it uses the device.
    allocated_bytes: int | None
    reserved_bytes: int | None
    #: The driver's figure, as ``nvidia-smi`` shows it, without the driver's own part.
    used_bytes: int | None
    #: The limit of what this process may reserve, and the budget of a cell, where these are set.
    limit_bytes: int | None = None
    budget_bytes: int | None = None
    #: The largest block that is reserved but unallocated, outside of private pools.
    largest_free_block_bytes: int | None = None
    #: True if segments grow there (``expandable_segments``).
    has_expandable: bool = False
    #: Bytes of pinned host memory; ``None`` where there is none.
    pinned_bytes: int | None = None
    #: Libraries of this process that may have memory and don't say how much.
    silent_libraries: tuple[str, ...] = ()
    #: The driver's words on why nothing is known; ``""`` where it is.
    driver_failure: str = ""
    doubts: tuple[BreakdownDoubt, ...] = ()


@dataclass(frozen=True, slots=True)
class SegmentMap:
    """All of a device's segments, the largest first, and what is known of their blocks."""

    device: str
    segments: tuple[Segment, ...]
    #: Kind and owner of the allocated blocks; ``None`` if no account was taken.
    names: BlockNames | None = None
    #: The line that allocated a block, by its address, where that was recorded: ``In[7], line 3``.
    lines: Mapping[int, str] = field(default_factory=dict)

    @property
    def reserved_bytes(self) -> int:
        """The bytes of all segments."""
        return sum(segment.n_bytes for segment in self.segments)
