"""Records of traces: the request, the allocator's events, and the memory of each line of a cell.

The allocator's history gives events, replaying them gives each block's bytes, and each block has
the line that allocated it. The figures add up: on each device the bytes from before the cell, those
that its lines hold and those without a line are together what is allocated, to the byte.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Literal

from gpumemwidget.model.cells import CellRecord, Span
from gpumemwidget.model.devices import Frame, HardwareNote, PeakIs, Segment
from gpumemwidget.model.ownership import MemoryKind

#: Kinds of events; ``TraceEvents.actions`` has their indices.
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


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """A trace that somebody asks for, of a cell or of a ``with`` block.

    Attributes:
        device: the one device to trace and report; ``None`` for all.
        n_lines: lines of each source that the report shows; ``None`` for its default.
        snapshot: a file to write for PyTorch's own memory viewer.
    """

    device: str | None = None
    n_lines: int | None = None
    snapshot: Path | None = None


@dataclass(frozen=True, slots=True, eq=False)
class TraceEvents:
    """The events of one device in their order, as columns: a million of them have to fit."""

    #: The index of each event's kind in ``ACTIONS``.
    actions: bytes
    #: Type ``Q``; the driver's free bytes for an ``oom``.
    addresses: array[int]
    #: Type ``q``, in bytes; the requested bytes of an allocation, before rounding.
    sizes: array[int]
    #: Type ``q``: microseconds since the epoch.
    times_us: array[int]
    #: Type ``q``: the stream, as torch numbers it.
    streams: array[int]
    #: Type ``i``: the index in ``stack_table``; 0 where there is no stack of Python.
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
    #: False if the oldest events were dropped, or somebody else set the history meanwhile.
    is_whole: bool = True
    #: True if the trace ends before the cell did, as the user began a history of their own.
    ends_early: bool = False
    notes: tuple[TraceNote, ...] = ()


@dataclass(frozen=True, slots=True)
class CallMark:
    """A call that was seen to begin and end while a trace ran: of a module, or of backward."""

    kind: Literal["module", "backward"]
    #: Microseconds since the epoch; ``None`` where it had not ended.
    start_us: int
    end_us: int | None
    #: The thread's ident.
    thread: int
    #: A module's path in the model (``transformer.h.3.mlp``), or the name of its class.
    name: str = ""
    #: The calling stack, innermost first.
    frames: tuple[Frame, ...] = ()


@dataclass(frozen=True, slots=True)
class LineUse:
    """The memory of one device that one place in the code took, as the allocator counts it."""

    #: All bytes that were allocated there, however soon they were freed.
    allocated_bytes: int
    #: Bytes still held at the end.
    net_bytes: int
    #: Bytes held when the device's peak was reached.
    at_peak_bytes: int
    #: Maximum of the bytes held at any moment.
    highest_bytes: int


@dataclass(frozen=True, slots=True)
class Call:
    """Functions below a line, with the memory that they and their callees allocated for that line.

    Attributes:
        functions: the outermost first; each does nothing but call the next. ``()`` for smaller
            calls, taken together.
        filename: the user's innermost file; ``""`` where all of them are a library's.
        line: the line in that file.
        use: what was allocated there.
        modules: the running modules of the model, where they are known: ``transformer.h.3.mlp``.
            There are several where calls of modules that differ in a number alone are added up.
        n_calls: number of calls that are added up here.
        calls: the calls that these make, biggest first.
    """

    functions: tuple[str, ...]
    filename: str
    line: int
    use: LineUse
    modules: tuple[str, ...] = ()
    n_calls: int = 1
    calls: tuple[Call, ...] = ()


@dataclass(frozen=True, slots=True)
class SourceLine:
    """A line of source, and the memory that it took."""

    line: int
    text: str
    #: ``None`` for a line that allocated nothing.
    use: LineUse | None = None
    calls: tuple[Call, ...] = ()


@dataclass(frozen=True, slots=True)
class SourceUnit:
    """A cell's or file's lines.

    In the traced cell (the first unit) each byte belongs to one line: the innermost line of the
    cell that was running. Other units show the same bytes, by the innermost line of the unit.
    """

    #: ``In[7]``, ``train.py``.
    name: str
    filename: str
    kind: Literal["cell", "earlier cell", "file"]
    #: All lines of the traced cell; in other units lines that allocated, and lines around them.
    lines: tuple[SourceLine, ...]


class Origin(Enum):
    """The origin of memory, seen from the traced cell."""

    BEFORE_CELL = "before the cell"
    #: At one line of the cell.
    LINE = "line"
    #: At lines of the cell that have no layer of their own.
    OTHER_LINES = "other lines"
    #: While the cell ran, but at none of its lines.
    OUTSIDE_LINES = "outside the lines"


@dataclass(frozen=True, slots=True)
class Layer:
    """One band of the timeline.

    Attributes:
        origin: where its memory was allocated.
        text: the line's text; ``""`` if it is no line's.
        line: the line's number; ``None`` if it is no line's.
        held_bytes: one for each of the timeline's moments.
    """

    origin: Origin
    text: str
    line: int | None
    held_bytes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Timeline:
    """One device over the cell, at every event or as many of them as the eye can see apart.

    Where moments were left out, each stretch keeps its highest and its lowest of allocated and of
    reserved. The layers, from the bottom up, add up to allocated at every moment.
    """

    #: Seconds since the cell's start, ascending; of a prediction numbers of operators.
    times_s: tuple[float, ...]
    allocated_bytes: tuple[int, ...]
    reserved_bytes: tuple[int, ...]
    layers: tuple[Layer, ...]
    #: The index of the moment with the most allocated.
    peak: int
    #: The unit of ``times_s``: a prediction has no clock.
    unit: Literal["seconds", "operators"] = "seconds"


@dataclass(frozen=True, slots=True)
class PeakPart:
    """The blocks of one line, kind and owner that were in use at the peak.

    Attributes:
        origin: where they were allocated; never ``OTHER_LINES``.
        line: the line's number; ``None`` if they are no line's.
        kind: what they are for; ``freed since``: they are gone, so that is not known.
        owner: the path of a name that still leads to them.
    """

    origin: Origin
    line: int | None
    kind: MemoryKind | Literal["freed since"]
    owner: str | None
    n_bytes: int
    n_blocks: int


class NoteKind(Enum):
    """The subject of a note on a trace, with the figures that it has."""

    #: A history of the user's was running, and was used.
    HISTORY_IS_USERS = "history is users"
    #: The cell started or stopped a history, or set one of its own, at which the trace ends.
    HISTORY_WAS_SET = "history was set"
    #: What stood at a snapshot file's start was worked out from its end.
    START_WORKED_OUT = "start worked out"
    #: Calls of modules are not seen: PyTorch's functions are other ones, or other tools use
    #: ``sys.monitoring``.
    CALLS_UNSEEN = "calls unseen"
    #: The host's lines are not read, or not to the end: another tool traces the thread, or has
    #: ``sys.monitoring``.
    LINES_UNREAD = "lines unread"
    #: The malloc of this process does not count what is in use.
    MALLOC_UNREAD = "malloc unread"
    #: Part of the trace failed with the error in ``text``.
    FAILED = "failed"
    #: No snapshot was written, as no GPU was traced.
    NO_SNAPSHOT = "no snapshot"
    #: The counters (``n_bytes``) and the history (``history_bytes``) differ before the cell, after
    #: it, or at its peak; ``text`` is ``allocated`` or ``reserved``.
    COUNTERS_DIFFER = "counters differ"
    #: Events are missing, mostly the oldest: lines are complete from ``seconds`` on.
    EVENTS_MISSING = "events missing"
    #: The peak (``n_bytes``) came before the first known event; the lines of the peak are those of
    #: the highest moment since (``history_bytes``).
    PEAK_NOT_IN_EVENTS = "peak not in events"
    #: The replay does not end with the blocks at the end.
    REPLAY_DIFFERS = "replay differs"
    #: ``n_bytes`` of autograd's threads were attributed to the line last seen before.
    BACKWARD_INFERRED = "backward inferred"
    #: The history has no stacks.
    NO_STACKS = "no stacks"


@dataclass(frozen=True, slots=True)
class TraceNote:
    """Something that was inferred in a trace, or is missing.

    Attributes:
        kind: the subject, which says what the other fields are.
    """

    kind: NoteKind
    text: str = ""
    n_bytes: int | None = None
    history_bytes: int | None = None
    seconds: float | None = None


@dataclass(frozen=True, slots=True)
class DeviceTrace:
    """The memory of one device over a traced cell, by lines."""

    device: str
    allocated: Span
    reserved: Span
    #: How exact the peaks are, which come from the counters where events are missing.
    peak_is: PeakIs | None
    timeline: Timeline
    #: The traced cell first, then earlier cells and files, biggest first.
    units: tuple[SourceUnit, ...]
    #: Memory from before the cell; its ``allocated_bytes`` are all of that.
    before: LineUse
    #: Memory of no known line.
    unplaced: LineUse
    #: Biggest first; together all that was allocated at the peak.
    peak: tuple[PeakPart, ...]
    n_events: int
    notes: tuple[TraceNote, ...] = ()


@dataclass(frozen=True, slots=True)
class HostLine:
    """A line of source, and how malloc's count changed while it ran."""

    line: int
    text: str
    #: The change over all runs of the line, freed bytes of other lines included.
    net_bytes: int


@dataclass(frozen=True, slots=True)
class HostLines:
    """The change of the host's memory by the lines of a traced cell.

    malloc keeps no history, but its count can be read as each line begins: the difference belongs
    to the line that ran. So there is no peak here, and nothing says which line's memory a free was
    of. ``before_bytes``, all lines, ``outside_bytes`` and ``unread_bytes`` add up to
    ``after_bytes``.
    """

    #: All lines of a cell; in a file lines that changed something, and lines around them.
    lines: tuple[HostLine, ...]
    #: malloc's count at both ends.
    before_bytes: int
    after_bytes: int
    #: The change while none of these lines ran.
    outside_bytes: int
    #: The change by lines that were not read one by one, as that would have slowed the cell.
    unread_bytes: int
    notes: tuple[TraceNote, ...] = ()


@dataclass(frozen=True, slots=True)
class CellTrace:
    """A traced cell, or a traced ``with`` block."""

    record: CellRecord
    #: Devices whose allocator keeps a history, as far as asked for.
    devices: tuple[DeviceTrace, ...]
    #: ``None`` where the host's lines were not read.
    host: HostLines | None = None
    #: Reasons why there are no lines.
    notes: tuple[TraceNote | HardwareNote, ...] = ()
