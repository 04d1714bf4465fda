"""What is measured and said, as frozen records: the words that all layers share.

Hardware gives readings, the core turns them into records, the report draws them. Bytes and seconds
throughout. ``None`` is "unknown", never 0. A device is named as PyTorch names it (``"cuda:0"``),
and the process's own memory is ``"host"``.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

__all__ = [
    "HOST",
    "Block",
    "CellDevice",
    "CellRecord",
    "DeviceAccount",
    "DeviceInfo",
    "DeviceReport",
    "DeviceUse",
    "Explanation",
    "Frame",
    "Holder",
    "Holding",
    "IPythonReference",
    "MemoryAccount",
    "MemoryKind",
    "Owned",
    "PeakIs",
    "Reading",
    "ReleaseMove",
    "ReleasePlan",
    "ReleaseReport",
    "ReleaseStep",
    "RestorePlan",
    "RestoreReport",
    "Sample",
    "Segment",
    "Span",
    "Status",
    "crosses_budget",
]

#: The name of the process's own memory among the devices.
HOST = "host"

#: So much of a resident size says nothing: our own samples move it by kilobytes.
_RESIDENT_SLACK_BYTES = 1024**2

#: How far a peak can be trusted. ``exact``: the high-water mark itself. ``at least``: the mark was
#: cut short (reset behind our back, or the span began before we did). ``sampled``: the highest of
#: what was seen at intervals.
PeakIs = Literal["exact", "at least", "sampled"]

#: How a cell ended.
Status = Literal["ok", "error", "interrupted"]


@dataclass(frozen=True, slots=True)
class DeviceInfo:
    """What a device is: the part that does not change while the process lives."""

    device: str
    #: ``"NVIDIA H200"``; for the host ``"host memory"``.
    name: str
    #: The whole device's memory; for the host the machine's, or its cgroup's limit.
    total_bytes: int | None
    #: This process's cap below ``total_bytes``, where one is set.
    limit_bytes: int | None = None
    uuid: str | None = None


@dataclass(frozen=True, slots=True)
class Reading:
    """The counters of one device at one moment.

    On CUDA these are the caching allocator's own. On the host *allocated* is what malloc has handed
    out and *reserved* is the resident size.
    """

    device: str
    allocated_bytes: int | None
    reserved_bytes: int | None
    #: High-water marks since the span began (see ``MemoryBackend.start_span``).
    allocated_peak_bytes: int | None = None
    reserved_peak_bytes: int | None = None
    #: What kind of figure the two marks are; ``None`` where there is no mark.
    peak_is: PeakIs | None = None
    #: Running totals since the process began.
    num_alloc_retries: int | None = None
    num_ooms: int | None = None


@dataclass(frozen=True, slots=True)
class Sample:
    """The readings of all devices at one moment of the session's clock."""

    #: Seconds on the monitor's clock (``Monitor.clock``).
    time_s: float
    readings: tuple[Reading, ...]


@dataclass(frozen=True, slots=True)
class DeviceUse:
    """The whole device at one moment, other processes too, as its driver tells it."""

    device: str
    used_bytes: int | None
    free_bytes: int | None
    total_bytes: int | None
    #: How busy the device is, 0 to 100.
    utilization_percent: int | None = None
    #: What the driver keeps to itself, which ``used_bytes`` does not hold; ``None``: it is not told
    #: (drivers before 510), and ``used_bytes`` holds it.
    driver_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class DeviceReport:
    """One device in ``%memstat``: its counters now, and the whole device if a driver tells it."""

    info: DeviceInfo
    #: ``None`` where the user has not touched the device, so nothing of it was read.
    reading: Reading | None
    use: DeviceUse | None
    #: One plain sentence where something could not be read.
    note: str | None = None


@dataclass(frozen=True, slots=True)
class Span:
    """One counter over a cell, in bytes."""

    before_bytes: int | None
    after_bytes: int | None
    peak_bytes: int | None

    @property
    def change_bytes(self) -> int | None:
        """After less before; ``None`` where either is unknown."""
        if self.before_bytes is None or self.after_bytes is None:
            return None
        return self.after_bytes - self.before_bytes

    @property
    def rise_bytes(self) -> int | None:
        """How far the peak stood above the start; ``None`` where either is unknown."""
        if self.before_bytes is None or self.peak_bytes is None:
            return None
        return self.peak_bytes - self.before_bytes


def crosses_budget(
    device: str, n_bytes: int, *, budget_bytes: int, start_bytes: int | None
) -> bool:
    """Whether a cell that has so much on a device goes beyond what it is allowed.

    A cell that begins beyond it is over only once it rises above what stood at its start.

    Args:
        device: the device.
        n_bytes: what the cell has, or had at its peak.
        budget_bytes: what it is allowed.
        start_bytes: what stood at its start.
    """
    # A resident size moves by itself, in every cell.
    slack_bytes = _RESIDENT_SLACK_BYTES if device == HOST else 0
    return n_bytes > budget_bytes and (start_bytes is None or n_bytes > start_bytes + slack_bytes)


@dataclass(frozen=True, slots=True)
class CellDevice:
    """What one cell did to one device."""

    device: str
    allocated: Span
    reserved: Span
    #: What kind of figure the peaks are; ``None`` where neither is known.
    peak_is: PeakIs | None
    #: How often the allocator had to free its cache and try again, and ran out, during the cell.
    num_alloc_retries: int | None
    num_ooms: int | None
    #: What the cell was allowed to have (``%membudget``), where that was set.
    budget_bytes: int | None = None
    #: What it had when its budget interrupted it; ``None`` where that did not happen.
    stopped_at_bytes: int | None = None

    @property
    def budgeted(self) -> Span:
        """What the budget is for: *allocated*; of the host, where that has no peak, *resident*."""
        return self.reserved if self.device == HOST else self.allocated

    @property
    def is_over_budget(self) -> bool:
        """Whether the cell is known to have crossed its budget, by its peak."""
        span = self.budgeted
        if self.budget_bytes is None or span.peak_bytes is None:
            return False
        return crosses_budget(
            self.device,
            span.peak_bytes,
            budget_bytes=self.budget_bytes,
            start_bytes=span.before_bytes,
        )


@dataclass(frozen=True, slots=True)
class CellRecord:
    """One cell that a person ran."""

    #: The number in ``In [n]``; ``None`` where IPython gave none.
    execution_count: int | None
    #: The front end's id of the cell; ``None`` in a terminal.
    cell_id: str | None
    #: The first line that is not blank, shortened to 120 characters.
    first_line: str
    #: Seconds since the epoch, UTC.
    started_at: float
    #: Seconds on the monitor's clock, to place the cell in the plot.
    start_s: float
    duration_s: float
    status: Status
    devices: tuple[CellDevice, ...]


# -- The allocator's state -------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Frame:
    """A line of Python that was running when a block was allocated."""

    filename: str
    line: int
    function: str


@dataclass(frozen=True, slots=True)
class Block:
    """A piece of a segment, as the caching allocator's snapshot has it."""

    address: int
    #: As the allocator counts it: what was asked for, rounded up, and what was not split off.
    n_bytes: int
    #: What was asked for; ``None`` where this release of torch does not tell.
    requested_bytes: int | None
    #: ``active_pending_free``: freed, but another stream may still be using it.
    state: Literal["active_allocated", "active_pending_free", "inactive"]
    #: Where it was allocated, innermost first; ``()`` where no history was recorded.
    frames: tuple[Frame, ...] = ()


@dataclass(frozen=True, slots=True)
class Segment:
    """One allocation from the driver, with its blocks in the order of their addresses."""

    device: str
    address: int
    n_bytes: int
    #: True where it belongs to a pool of its own: a CUDA graph's, or a ``MemPool``.
    is_private: bool
    #: The pool, as torch names it; ``(0, 0)`` is the common one.
    pool_id: tuple[int, int]
    blocks: tuple[Block, ...]
    #: Whether it grows (``expandable_segments``): then free pieces within it are given back too.
    is_expandable: bool = False
    #: For requests up to 1 MiB; ``None`` where this release of torch does not tell.
    is_small: bool | None = None


# -- Who holds what, and its release ---------------------------------------------------------------

#: What memory is for. ``tensor`` is a plain one, ``other`` is no tensor's (on the host: Python's
#: own objects and libraries), ``unknown`` is what nothing could be found about.
MemoryKind = Literal[
    "parameter",
    "gradient",
    "optimizer state",
    "buffer",
    "saved for backward",
    "tensor",
    "cuBLAS workspace",
    "CUDA-graph pool",
    "compile cache",
    "other",
    "unknown",
]


@dataclass(frozen=True, slots=True)
class Owned:
    """A line of the account: one storage, or a piece of memory that is no tensor's."""

    device: str
    #: As the allocator counts it, so that the lines of a device add up to what is allocated.
    n_bytes: int
    kind: MemoryKind
    #: The path a person would type, in pieces: ``("model", ".layers", "[0]", ".weight")``. Where no
    #: name leads to it, the words that say what it is, as one piece.
    steps: tuple[str, ...]
    #: Where the path begins. ``module``: a global of an imported library; ``thread``: a variable of
    #: a function that is running; ``nowhere``: no name leads to it.
    root: Literal["name", "out", "exception", "module", "thread", "nowhere"]
    #: The rows (``Holding.name``) that hold it, that of the path first.
    rows: tuple[str, ...] = ()
    #: True where something that is not one of the rows holds it as well.
    held_elsewhere: bool = False
    #: The line that allocated it, where a history was recorded: ``In[7], line 3``.
    allocated_at: str | None = None
    #: How much of it is beyond what was asked for; ``None`` where that is not known.
    rounding_bytes: int | None = None

    @property
    def owner(self) -> str:
        """The path as one text."""
        return "".join(self.steps)


@dataclass(frozen=True, slots=True)
class DeviceAccount:
    """Who owns what is allocated on one device."""

    device: str
    #: The allocator's own figure, read with the walk; ``None`` where it can't be had.
    allocated_bytes: int | None
    #: Biggest first. Together they are ``allocated_bytes``, where that is known.
    owned: tuple[Owned, ...]

    @property
    def unknown_bytes(self) -> int:
        """What nothing could be found about."""
        return sum(each.n_bytes for each in self.owned if each.kind == "unknown")

    def sum_kinds(self) -> tuple[tuple[MemoryKind, int], ...]:
        """Bytes of each kind, biggest first."""
        sums: dict[MemoryKind, int] = {}
        for each in self.owned:
            sums[each.kind] = sums.get(each.kind, 0) + each.n_bytes
        return tuple(sorted(sums.items(), key=lambda item: (-item[1], item[0])))


@dataclass(frozen=True, slots=True)
class MemoryAccount:
    """The account of owners: every allocated byte of every device, once."""

    devices: tuple[DeviceAccount, ...]
    #: The same walk's rows, as the variables panel shows them.
    holdings: tuple[Holding, ...]
    #: False where the walk stopped at its budget of time: then more is named than is known.
    is_complete: bool
    duration_s: float
    #: Sentences on what could not be read.
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Holder:
    """One path by which memory is held, and how to cut it."""

    #: ``trainer.model.fc.weight``, ``Out[3][0]``, ``last exception: train() line 12: batch``.
    path: str
    root: Literal["name", "out", "exception", "module", "thread", "nowhere"]
    #: What a person does about it: ``del trainer.model``, ``%memrelease --out``.
    cut: str
    #: What of the memory in question this path holds, for each device.
    held_bytes: tuple[tuple[str, int], ...]


@dataclass(frozen=True, slots=True)
class Explanation:
    """Why some memory is still there."""

    #: What was asked about: ``x``, ``model.layers[0].weight``, ``no name``.
    name: str
    #: ``tensor``, ``module``, …; the class's qualified name.
    kind: str
    type_name: str
    #: What it holds, for each device, biggest first.
    held_bytes: tuple[tuple[str, int], ...]
    #: What would go if the name alone were released.
    frees_bytes: tuple[tuple[str, int], ...]
    #: What holds it, the most first; paths alike but for an index are one holder.
    holders: tuple[Holder, ...]
    #: Paths beyond those shown.
    n_more: int = 0
    is_complete: bool = True


@dataclass(frozen=True, slots=True)
class Holding:
    """What one name (or ``Out``, or the last exception) holds: a row of the variables panel."""

    #: What the user would type or tick: ``model``, ``Out[7]``, ``last exception``.
    name: str
    root: Literal["name", "out", "exception"]
    #: ``tensor``, ``view``, ``parameter``, ``module``, ``optimizer``, ``container``, ``object``.
    kind: str
    #: The class's qualified name, for the tooltip.
    type_name: str
    shape: tuple[int, ...] | None
    dtype: str | None
    #: Bytes of the distinct storages reached, for each device, biggest first.
    held_bytes: tuple[tuple[str, int], ...]
    #: What goes away if exactly this is released, for each device.
    frees_bytes: tuple[tuple[str, int], ...]
    #: Names of other rows that reach some of the same storages.
    shared_with: tuple[str, ...] = ()
    #: True where something that is not one of the rows holds part of it as well.
    held_elsewhere: bool = False
    #: True where the walk stopped at its budget of time: it holds this much or more.
    is_at_least: bool = False


@dataclass(frozen=True, slots=True)
class ReleaseMove:
    """One thing that a plan moves to the CPU in place, because somebody keeps it."""

    #: What it is, as a path: ``model``, ``history[3]``.
    path: str
    kind: str
    device: str
    n_bytes: int
    #: Why it is moved instead of dropped: ``"kept"``, ``"also held by trainer"``.
    reason: str


@dataclass(frozen=True, slots=True)
class IPythonReference:
    """A reference of IPython's own that a plan drops: ``Out[3]``, ``_``, ``sys.last_value``."""

    path: str


@dataclass(frozen=True, slots=True)
class ReleasePlan:
    """What a release would do, before anything is changed."""

    names: tuple[str, ...]
    keep: bool
    moves: tuple[ReleaseMove, ...]
    drops: tuple[IPythonReference, ...]
    #: Allocated bytes that will go, for each device.
    frees_bytes: tuple[tuple[str, int], ...]
    #: Host memory that the moves need, and what there is.
    host_needed_bytes: int
    host_available_bytes: int | None
    #: Why the plan may not be executed, in one line; ``None`` where it may.
    refusal: str | None = None
    #: Sentences on what will remain, and why.
    remains: tuple[str, ...] = ()
    #: Whether all displayed values, and the last exception, go too.
    out: bool = False
    exceptions: bool = False
    #: Whether cuBLAS's workspaces, and what torch.compile made, go too; what that costs.
    cublas: bool = False
    compile_caches: bool = False
    costs: tuple[str, ...] = ()
    #: Whether the gradients of all that the names lead to go too, and how many these are.
    grads: bool = False
    n_grads: int = 0


@dataclass(frozen=True, slots=True)
class ReleaseStep:
    """One step of a release as it was carried out."""

    #: ``move to CPU``, ``set to None``, ``set gradients to None`` (where asked for), ``drop
    #: IPython's references``, ``clear caches`` (where asked for), ``gc.collect``, ``empty_cache``.
    name: str
    #: What it did, in a few words: ``"3 tensors, 1.20 GiB"``; why it was skipped or failed.
    detail: str
    status: Literal["done", "skipped", "failed", "not reached"]
    #: Fall of the allocated and of the reserved bytes over the step, for each device; negative
    #: where they rose (the host, when something moves there).
    allocated_freed_bytes: tuple[tuple[str, int], ...] = ()
    reserved_freed_bytes: tuple[tuple[str, int], ...] = ()
    duration_s: float = 0.0
    #: What the plan has go with this step. What is in a cycle goes with ``gc.collect`` instead.
    planned_bytes: tuple[tuple[str, int], ...] = ()


@dataclass(frozen=True, slots=True)
class RestorePlan:
    """What would be brought back from the CPU, before anything is changed."""

    names: tuple[str, ...]
    #: Their ``device`` is where each goes, which is where it was.
    moves: tuple[ReleaseMove, ...]
    #: What each device must have room for, and what it has, where that is known.
    needs_bytes: tuple[tuple[str, int], ...]
    available_bytes: tuple[tuple[str, int], ...]
    #: Why the plan may not be executed, in one line; ``None`` where it may.
    refusal: str | None = None
    #: Sentences on what can't be brought back, and why.
    remains: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class RestoreReport:
    """What was brought back, measured."""

    plan: RestorePlan
    #: In a few words: ``"3 tensors, 1.20 GiB"``.
    detail: str
    before: tuple[Reading, ...]
    after: tuple[Reading, ...]
    duration_s: float
    #: Why it stopped, in one line; everything is as it was then. ``None`` where it went through.
    stopped: str | None = None
    remains: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class ReleaseReport:
    """What a release did, measured."""

    plan: ReleasePlan
    steps: tuple[ReleaseStep, ...]
    before: tuple[Reading, ...]
    after: tuple[Reading, ...]
    #: Measured over all steps, for each device.
    allocated_freed_bytes: tuple[tuple[str, int], ...]
    reserved_freed_bytes: tuple[tuple[str, int], ...]
    #: Sentences on what still holds what was not freed.
    remains: tuple[str, ...] = ()
    #: Where and why it stopped, in one line; ``None`` where it went through.
    stopped: str | None = None
    notes: tuple[str, ...] = field(default=())
