"""The records of whole devices: who has what of one, and what this process may take of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from gpumemwidget.errors import BadInputError
from gpumemwidget.records import DeviceInfo, DeviceUse, MemoryKind, Reading, Segment

__all__ = [
    "EVERY_GPU",
    "MOST_CHILDREN",
    "Bridge",
    "BridgePart",
    "Budget",
    "ChildProcess",
    "DeviceState",
    "Limit",
    "MapBlock",
    "MapSegment",
    "PartKey",
    "PinnedUse",
    "ProcessUse",
    "SegmentMap",
    "check_device_name",
    "name_type",
]

#: Stands for a device where something holds for each GPU.
EVERY_GPU = "every GPU"

#: Of more children those with most host memory are told.
MOST_CHILDREN = 256


@dataclass(frozen=True, slots=True)
class ProcessUse:
    """A process on a device, and what it takes there, as the driver tells it."""

    pid: int
    #: ``python train.py``; ``None`` where it can't be seen from here, as from within a container.
    name: str | None
    #: ``child``: below this process, by the tree of processes; also what it left behind there.
    relation: Literal["own", "child", "other"]
    #: ``None`` where the driver gives no bytes (Windows), or has no permission to.
    n_bytes: int | None


@dataclass(frozen=True, slots=True)
class ChildProcess:
    """A process below this one: a worker of a DataLoader, a rank that a cell has launched."""

    pid: int
    #: The process above it.
    parent_pid: int
    #: What it runs, in some 60 characters: ``python train.py --lr 0.1``.
    name: str
    #: Its resident size, shared pages included; ``None`` where it can't be read.
    resident_bytes: int | None
    #: What it takes of each device on which the driver lists it.
    devices: tuple[tuple[str, int | None], ...] = ()


@dataclass(frozen=True, slots=True)
class PinnedUse:
    """Pinned host memory, as PyTorch's own allocator for it counts it."""

    #: Held by tensors, or still used by a copy that runs; as blocks, which are rounded up. ``None``
    #: where PyTorch does not count what is freed (before 2.13).
    allocated_bytes: int | None
    #: What the allocator has from the system, its cache included.
    reserved_bytes: int
    #: Since the user's last reset of these.
    allocated_peak_bytes: int | None = None
    reserved_peak_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class DeviceState:
    """All that was read of one device at one moment, as far as there is one."""

    info: DeviceInfo
    #: ``None`` where the user has not touched the device, so nothing of it was read.
    reading: Reading | None
    #: ``None`` where no driver tells.
    use: DeviceUse | None
    #: Who is on it: this process first, then the children, each biggest first. ``None`` where the
    #: driver does not tell.
    processes: tuple[ProcessUse, ...] | None
    #: ``()`` where the allocator does not tell.
    segments: tuple[Segment, ...] = ()
    #: Of the host alone; ``None`` where PyTorch has none or has not been used so.
    pinned: PinnedUse | None = None
    #: Whether the counters stood still while the rest was read: else the parts may not fit.
    is_at_one_moment: bool = True
    #: Whether a child would be known among the processes: else any of the others may be one.
    are_children_told: bool = True
    #: Sentences on what could not be read, and why.
    notes: tuple[str, ...] = ()


# -- The bridge ------------------------------------------------------------------------------------

#: What a part of a device's memory is:
#:
#: - ``allocated``: held by tensors and by what else asks PyTorch's allocator; parts: ``kind``
#: - ``kind``: what that is for (``BridgePart.kind``), as it was requested; ``unnamed``: of these
#:   what no name, module or running function leads to
#: - ``rounding``: allocated beyond what was requested
#: - ``pending``: freed, but another stream may still use it
#: - ``releasable``: reserved, unallocated, and given back by ``empty_cache``
#: - ``fragmented``: reserved and unallocated, beside blocks that are in use
#: - ``pools``: reserved and unallocated in pools of CUDA graphs and of ``MemPool``
#: - ``outside``: this process's, but not PyTorch's allocator's: the context, libraries
#: - ``children``: processes below this one; parts: ``process``
#: - ``others``: other processes; parts: ``process``
#: - ``unlisted``: in use, and of no process that the driver lists
#: - ``driver``: reserved by the driver
#: - ``free``
#: - ``cached`` (the host): resident, and not handed out by malloc
#: - ``rest``: what several of these are together (``BridgePart.merged``), where they can't be told
#:   apart
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
class BridgePart:
    """One part of a device's memory."""

    key: PartKey
    n_bytes: int
    #: Of ``kind``.
    kind: MemoryKind | None = None
    #: Of ``process``.
    process: ProcessUse | None = None
    #: What it stands for, where these can't be told apart.
    merged: tuple[PartKey, ...] = ()
    #: What it is made of; together they are it.
    parts: tuple[BridgePart, ...] = ()


@dataclass(frozen=True, slots=True)
class Bridge:
    """A device's memory in parts that are all of it, to the byte."""

    device: str
    #: The device's own: ``NVIDIA H200``.
    name: str
    total_bytes: int
    #: In the order in which they stand; none is negative, together they are ``total_bytes``.
    parts: tuple[BridgePart, ...]
    #: PyTorch's own figures, where it has any there.
    allocated_bytes: int | None
    reserved_bytes: int | None
    #: The driver's, as ``nvidia-smi`` shows it: what is reserved by the driver not included.
    used_bytes: int | None
    #: The most that this process may reserve, and that a cell may allocate, where these are set.
    limit_bytes: int | None = None
    budget_bytes: int | None = None
    #: Of what is reserved but unallocated, outside of the pools.
    largest_free_block_bytes: int | None = None
    #: Whether segments grow there (``expandable_segments``).
    has_expandable: bool = False
    pinned: PinnedUse | None = None
    #: Sentences on what is merged or does not fit, and why.
    notes: tuple[str, ...] = ()

    @property
    def may_hide_children(self) -> bool:
        """Whether this notebook's children can't be told from others on the device."""
        return any("children" in part.merged for part in self.parts)


# -- The map of segments ---------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class MapBlock:
    """A block where it lies in its segment."""

    #: From the segment's first byte.
    offset_bytes: int
    n_bytes: int
    requested_bytes: int | None
    state: Literal["active_allocated", "active_pending_free", "inactive"]
    #: What it is for; ``None`` where it is not allocated, or nobody was asked.
    kind: MemoryKind | None = None
    #: The path that a person would type for it; ``""`` where no name leads to it.
    owner: str = ""
    #: The line that allocated it, where that was recorded: ``In[7], line 3``.
    allocated_at: str = ""


@dataclass(frozen=True, slots=True)
class MapSegment:
    """A segment with its blocks, side by side from its first byte to its last."""

    address: int
    n_bytes: int
    is_private: bool
    is_expandable: bool
    #: For requests up to 1 MiB; ``None`` where this release of torch does not tell.
    is_small: bool | None
    blocks: tuple[MapBlock, ...]


@dataclass(frozen=True, slots=True)
class SegmentMap:
    """All of a device's segments, the largest first."""

    device: str
    reserved_bytes: int
    allocated_bytes: int
    #: What lies unallocated beside blocks in use, and so is not given back; ``None``: not known.
    fragmented_bytes: int | None
    largest_free_block_bytes: int
    segments: tuple[MapSegment, ...]


# -- Limits ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Limit:
    """The most that this process may reserve on a device; the allocator holds it."""

    device: str
    #: ``None``: there is none but the device itself; or, of a device in use without a total here,
    #: PyTorch does not tell.
    limit_bytes: int | None
    #: What the whole is, as PyTorch sees it; ``None`` where the device is not in use yet.
    total_bytes: int | None
    reserved_bytes: int | None
    #: Of what is reserved, what ``empty_cache`` can give back.
    releasable_bytes: int | None = None
    #: The device is not in use yet: it is set as soon as it is.
    is_waiting: bool = False
    #: Of one that waits, where it was given so: the share of the whole, which is not known yet.
    share: float | None = None
    #: Of what is reserved, outside of pools of their own: what a request may be and need no more.
    largest_free_block_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class Budget:
    """What a cell may have allocated on a device before it is warned of."""

    #: ``EVERY_GPU``: on each by itself, also on those that come into use later. Of the host it is
    #: the resident size that counts.
    device: str
    budget_bytes: int
    #: Whether the cell that crosses it is interrupted.
    stops: bool = False


# -- Their names -----------------------------------------------------------------------------------

#: A class of the user's may answer for its name with code of theirs.
_NAME: Any = vars(type)["__name__"]


def name_type(value: object) -> str:
    """What somebody gave, by its class: nothing of the object itself is asked."""
    name: str = _NAME.__get__(type(value))
    return name


def check_device_name(device: object) -> None:
    """Refuse what is no name, as a number or a ``torch.device``, before it is compared.

    Args:
        device: what somebody gave; ``None`` is not refused.

    Raises:
        BadInputError: it is no text.
    """
    if device is not None and type(device) is not str:
        raise BadInputError(
            f"device is a name such as 'cuda:0', and not of type {name_type(device)}: "
            "%memstat lists them"
        )
