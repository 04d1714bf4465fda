"""What a traced cell did to memory, line by line, and what an OOM met: as frozen records.

The allocator's history gives events, replaying them gives each block's bytes, and each block has
the line that allocated it. What is said here adds up: on each device what stood before the cell,
what its lines hold and what has no place are together what is allocated, to the byte.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from gpumemwidget.devices import ProcessUse
from gpumemwidget.records import HOST, CellRecord, Frame, MemoryKind, Owned, PeakIs, Segment, Span

__all__ = [
    "ACTIONS",
    "AllocatorRules",
    "AllocatorTrace",
    "BlockNames",
    "Call",
    "CallMark",
    "CellTrace",
    "DeviceTrace",
    "Layer",
    "LineUse",
    "OomCard",
    "OomEvent",
    "PeakPart",
    "SourceLine",
    "SourceUnit",
    "Timeline",
    "TraceEvents",
    "WayOut",
]

# -- What the allocator noted ----------------------------------------------------------------------

#: What an event may be; ``TraceEvents.actions`` has its place in here.
ACTIONS = (
    "alloc",
    "free_requested",
    "free_completed",
    "segment_alloc",
    "segment_free",
    "segment_map",
    "segment_unmap",
    "oom",
    "snapshot",
)


@dataclass(frozen=True, slots=True, eq=False)
class TraceEvents:
    """The events of one device in their order, as columns: a million of them have to fit."""

    #: For each event its place in ``ACTIONS``.
    actions: bytes
    #: Type ``Q``; of an ``oom`` what the driver said is free.
    addresses: array[int]
    #: Type ``q``, in bytes: of an allocation what was asked for, before rounding.
    sizes: array[int]
    #: Type ``q``: microseconds since the epoch.
    times_us: array[int]
    #: Type ``q``: the stream, as torch numbers it.
    streams: array[int]
    #: Type ``i``: the place in ``stack_table``; 0 where there is no stack of Python.
    stacks: array[int]
    #: Innermost frame first; the first one is ``()``.
    stack_table: tuple[tuple[Frame, ...], ...]

    def __len__(self) -> int:
        return len(self.actions)


@dataclass(frozen=True, slots=True)
class AllocatorRules:
    """How the caching allocator rounds and splits, as far as its settings change that."""

    #: Blocks from this on are never split; ``None`` without such a limit.
    max_split_bytes: int | None = None
    #: ``expandable_segments``: then what remains of a block is always split off.
    is_expandable: bool = False
    #: ``roundup_power2_divisions``: from so many bytes on, so many steps to a power of two (0 or 1:
    #: none), by ascending bytes.
    roundup_divisions: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True, slots=True, eq=False)
class AllocatorTrace:
    """One device's history over a span of time, with what stood at its two ends."""

    device: str
    before: tuple[Segment, ...]
    events: TraceEvents
    after: tuple[Segment, ...]
    #: Microseconds since the epoch, on the clock of the events.
    start_us: int
    end_us: int
    rules: AllocatorRules = field(default_factory=AllocatorRules)
    #: False where the ring lost the oldest events, or the history was touched meanwhile.
    is_whole: bool = True
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class CallMark:
    """A call that was seen to begin and end while a trace ran: of a module, or of backward."""

    kind: Literal["module", "backward"]
    #: Microseconds since the epoch; ``None`` where it had not ended.
    start_us: int
    end_us: int | None
    #: The thread's ident.
    thread: int
    #: Of a module its path in the model (``transformer.h.3.mlp``), or its class's name.
    name: str = ""
    #: Where it was called from, innermost first.
    frames: tuple[Frame, ...] = ()


# -- What it comes to ------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class LineUse:
    """What one place in the code did to one device's memory; bytes as the allocator counts them."""

    #: All that was allocated there, however soon it went.
    allocated_bytes: int
    n_allocs: int
    #: What of it is still held at the end. The host has no history of single blocks: there it is
    #: inferred from the sizes which line's memory was given back.
    net_bytes: int
    #: What of it was held when the device's peak was reached.
    at_peak_bytes: int
    #: The most of it that was held at any moment.
    highest_bytes: int


@dataclass(frozen=True, slots=True)
class Call:
    """A function below a line, with what it and those below it allocated for that line."""

    function: str
    filename: str
    line: int
    use: LineUse
    #: The module of the model that was running, where it is known: ``transformer.h.3.mlp``.
    module: str | None = None
    #: Biggest first.
    calls: tuple[Call, ...] = ()


@dataclass(frozen=True, slots=True)
class SourceLine:
    """A line of source, and what it did."""

    line: int
    text: str
    #: ``None`` where it allocated nothing.
    use: LineUse | None = None
    calls: tuple[Call, ...] = ()


@dataclass(frozen=True, slots=True)
class SourceUnit:
    """A cell's or file's lines.

    Of the traced cell (the first unit) each byte belongs to one line: the innermost one of the
    cell's that was running. The other units are views of the same bytes: what their functions
    allocated, by the innermost line of theirs.
    """

    #: ``In[7]``, ``train.py``.
    name: str
    filename: str
    kind: Literal["cell", "earlier cell", "file"]
    #: Of the traced cell all lines; of others those that allocated, with the lines around them.
    lines: tuple[SourceLine, ...]


@dataclass(frozen=True, slots=True)
class Layer:
    """One band of the timeline."""

    #: ``line 3``, ``before the cell``, ``other lines``, ``no line``.
    label: str
    #: The line's text, for the pointer; ``""`` where it is no line's.
    text: str
    #: The unit and line, where it is one line's.
    unit: str | None
    line: int | None
    #: One for each of the timeline's moments.
    held_bytes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Timeline:
    """One device over the cell, at every event or as many of them as the eye can tell apart.

    Where moments were left out, each stretch keeps its highest and its lowest of allocated and of
    reserved. The layers, from the bottom up, add up to allocated at every moment.
    """

    #: Seconds since the cell's start, ascending.
    times_s: tuple[float, ...]
    allocated_bytes: tuple[int, ...]
    #: ``None`` where it is not known.
    reserved_bytes: tuple[int | None, ...]
    layers: tuple[Layer, ...]
    #: The place of the moment with the most allocated.
    peak: int
    #: Moments before thinning.
    n_moments: int


@dataclass(frozen=True, slots=True)
class PeakPart:
    """What some storages held when the peak was reached: those of one line, kind and name."""

    #: ``line 3``, ``before the cell``, ``no line``.
    place: str
    unit: str | None
    line: int | None
    #: ``freed since``: it is gone, so what it was is not known.
    kind: MemoryKind | Literal["freed since"]
    #: The path of a name that still leads to it.
    owner: str | None
    n_bytes: int
    n_blocks: int


@dataclass(frozen=True, slots=True)
class DeviceTrace:
    """What the cell's lines did to one device."""

    device: str
    #: ``history``: the allocator's own events. ``lines``: bytes in use, read at each line.
    source: Literal["history", "lines"]
    allocated: Span
    reserved: Span
    #: What kind of figure the peaks are: from the counters where the events are not whole.
    peak_is: PeakIs | None
    timeline: Timeline | None
    #: The traced cell first, then earlier cells and files, biggest first.
    units: tuple[SourceUnit, ...]
    #: What stood before the cell: of ``allocated_bytes`` all of it.
    before: LineUse
    #: What no line can be named for.
    unplaced: LineUse
    #: Biggest first; together what was allocated at the peak.
    peak: tuple[PeakPart, ...]
    n_events: int
    #: Seconds since the cell's start from when on no event is missing; ``None`` if none is.
    complete_since_s: float | None = None
    #: Sentences on what is inferred or missing.
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class CellTrace:
    """A traced cell, or a traced ``with`` block."""

    record: CellRecord
    #: Those whose lines are told, as far as asked for.
    devices: tuple[DeviceTrace, ...]
    #: Why lines are not told, where they are not.
    notes: tuple[str, ...] = ()


# -- Out of memory ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class OomEvent:
    """What stood when an allocation failed, before anything was unwound."""

    device: str
    #: What was asked for; ``None`` where the error does not say.
    requested_bytes: int | None
    allocated_bytes: int | None
    reserved_bytes: int | None
    #: The largest free block in what is reserved; with the sum of all, how it is fragmented.
    largest_free_block_bytes: int | None
    #: The whole device, other processes too.
    device_free_bytes: int | None
    device_total_bytes: int | None
    #: This process's cap, where one is set.
    limit_bytes: int | None
    #: What other processes take, those below this one too; ``None`` where the driver does not tell.
    others_bytes: int | None
    #: What this process takes outside of PyTorch's allocator; ``None`` where it is not known.
    outside_bytes: int | None
    #: The Python stack, innermost first.
    frames: tuple[Frame, ...] = ()
    #: What of it is in segments without a block in use, which ``empty_cache`` can give back.
    cached_bytes: int | None = None
    #: On the host what of this process counts against its limit: all addresses that it has.
    addresses_bytes: int | None = None
    #: Who the other processes are, as the driver lists them, the biggest first.
    others: tuple[ProcessUse, ...] = ()
    #: In use and of no process that the driver lists; ``None``: it may be among the others'.
    unlisted_bytes: int | None = None

    @property
    def unallocated_bytes(self) -> int | None:
        """Reserved but unallocated."""
        if self.allocated_bytes is None or self.reserved_bytes is None:
            return None
        return self.reserved_bytes - self.allocated_bytes

    @property
    def room_bytes(self) -> int | None:
        """What there was to be had: what is free, or what a limit leaves of it."""
        free, limit = self.device_free_bytes, self.limit_bytes
        taken = self.addresses_bytes if self.device == HOST else self.reserved_bytes
        if limit is None or taken is None:
            return free
        left = max(limit - taken, 0)
        return left if free is None else min(left, free)

    @property
    def is_fragmented(self) -> bool:
        """Whether what is reserved but unallocated would have done, were it in one piece.

        With the room beside it, that is, which segments that grow would take in.
        """
        free, largest = self.unallocated_bytes, self.largest_free_block_bytes
        if free is None or largest is None or self.device == HOST:
            return False
        if self.requested_bytes is None:
            return 2 * largest < free
        return largest < self.requested_bytes <= free + (self.room_bytes or 0)


@dataclass(frozen=True, slots=True)
class WayOut:
    """Something that gives memory back, or needs less of it."""

    kind: Literal[
        "last exception",
        "out",
        "names",
        "gradients",
        "cached blocks",
        "expandable segments",
        "limit",
        "other processes",
        "smaller batch",
        "no_grad",
        "checkpointing",
        "lower precision",
    ]
    #: What to do, in a few words.
    text: str
    #: What it would give, on the device that ran out; ``None`` where that is not known.
    gives_bytes: int | None
    #: ``at most`` and ``about``: what is said is a bound or an estimate.
    gives_is: Literal["exact", "at least", "at most", "about"]
    #: What a person types for it; ``None`` where it is no single line.
    command: str | None = None
    #: Whether we can do it: then there is a button.
    can_do: bool = False
    #: Of ``names``: the variables.
    names: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class OomCard:
    """Why a cell ran out of memory, and the ways out. It holds no object of the user's."""

    event: OomEvent
    execution_count: int | None
    #: The line of the user's that asked for it: ``In[7], line 3``; ``None`` where it is not known.
    place: str | None
    #: That line's text.
    text: str
    #: The function of a library that asked for it: ``torch.nn.functional.linear``.
    function: str | None
    #: The biggest owners on that device, at most ten, biggest first, as rows of the account.
    owners: tuple[Owned, ...]
    #: What all owners together hold there; ``None`` where the account was not taken.
    owned_bytes: int | None
    ways: tuple[WayOut, ...]
    #: Kinds and their bytes on that device, biggest first.
    kinds: tuple[tuple[MemoryKind, int], ...] = ()
    #: OOMs in the same cell that its code caught.
    n_caught: int = 0
    #: Sentences on what could not be found out.
    notes: tuple[str, ...] = ()


#: For each block's address, on one device: what it is for, and the path that leads to it.
BlockNames = Mapping[int, tuple[MemoryKind, str]]
