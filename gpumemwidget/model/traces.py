"""Records of traces: the request, the allocator's events, and the memory of each line of a cell.

The allocator's history gives events, replaying them gives each block's bytes, and each block has
the line that allocated it. The figures add up: on each device the bytes from before the cell, those
that its lines hold and those without a line are together what is allocated, to the byte.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from enum import Enum, IntEnum, auto
from pathlib import Path
from typing import Literal

from gpumemwidget.model.cells import CellRecord, Span
from gpumemwidget.model.devices import Frame, HardwareNote, NamedByWords, PeakIs, Segment
from gpumemwidget.model.ownership import MemoryKind

#: Maximum number of lines that have a layer of their own in a timeline: an eye distinguishes the
#: colours of so many.
MAX_LINE_LAYERS = 8


class TraceAction(IntEnum):
    """The kind of an event in the allocator's history; those that change no memory are the last."""

    ALLOC = 0
    FREE_REQUESTED = 1
    FREE_COMPLETED = 2
    SEGMENT_ALLOC = 3
    SEGMENT_FREE = 4
    SEGMENT_MAP = 5
    SEGMENT_UNMAP = 6
    OOM = 7
    SNAPSHOT = 8

    @property
    def word(self) -> str:
        """The action's name in PyTorch's snapshots: ``free_requested``."""
        return self.name.lower()


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """A trace that somebody asks for, of a cell or of a ``with`` block."""

    device: str | None = None  #: the one device to trace and report; ``None`` for all
    n_lines: int | None = None  #: lines of each source to report; ``None`` for the default
    snapshot: Path | None = None  #: a file to write for PyTorch's own memory viewer


@dataclass(frozen=True, slots=True, eq=False)
class TraceEvents:
    """The events of one device in their order, as columns: a million of them have to fit."""

    actions: bytes  #: Each one is a ``TraceAction``
    addresses: array[int]  #: Type ``Q``; the driver's free bytes for an ``oom``
    #: Type ``q``, in bytes; the requested bytes of an allocation, before rounding.
    sizes: array[int]
    times_us: array[int]  #: Type ``q``: microseconds since the epoch
    streams: array[int]  #: Type ``q``: the stream, as torch numbers it
    #: Type ``i``: the index in ``stack_table``; 0 where there is no stack of Python.
    stacks: array[int]
    stack_table: tuple[tuple[Frame, ...], ...]  #: innermost frame first; the first one is ``()``

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
    """One device's history over a span of time, with the segments at its two ends."""

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
    notes: tuple[TraceNote, ...] = ()


@dataclass(frozen=True, slots=True)
class CallMark:
    """A call that was seen to begin and end while a trace ran: of a module, or of backward."""

    kind: Literal["module", "backward"]
    start_us: int  #: microseconds since the epoch
    end_us: int | None  #: ``None`` where it had not ended
    thread: int
    #: A module's path in the model (``transformer.h.3.mlp``), or the name of its class.
    name: str = ""
    frames: tuple[Frame, ...] = ()  #: the calling stack, innermost first


@dataclass(frozen=True, slots=True)
class LineUse:
    """The memory of one device that one place in the code took, as the allocator counts it."""

    allocated_bytes: int  #: all bytes that were allocated there, however soon they were freed
    net_bytes: int  #: bytes still held at the end
    at_peak_bytes: int
    highest_bytes: int  #: maximum of the bytes held at any moment


@dataclass(frozen=True, slots=True)
class Call:
    """Functions below a line, with the memory that they and their callees allocated for that line.

    Calls of modules that differ in a number alone are added up.
    """

    #: The outermost first; each does nothing but call the next. ``()``: smaller calls together.
    functions: tuple[str, ...]
    filename: str  #: the user's innermost file; ``""`` where all of them are a library's
    line: int
    use: LineUse
    modules: tuple[str, ...] = ()  #: the running modules of the model: ``transformer.h.3.mlp``
    n_calls: int = 1  #: number of calls that are added up here
    calls: tuple[Call, ...] = ()  #: the calls that these make, biggest first


@dataclass(frozen=True, slots=True)
class SourceLine:
    """A line of source, and the memory that it took."""

    line: int
    text: str
    use: LineUse | None = None  #: ``None`` for a line that allocated nothing
    calls: tuple[Call, ...] = ()


@dataclass(frozen=True, slots=True)
class SourceUnit:
    """A cell's or file's lines.

    In the traced cell (the first unit) each byte belongs to one line: the innermost line of the
    cell that was running. Other units show the same bytes, by the innermost line of the unit.
    """

    name: str  #: ``In [7]``, ``train.py``
    filename: str
    kind: Literal["cell", "earlier cell", "file"]
    #: All lines of the traced cell; in other units lines that allocated, and lines around them.
    lines: tuple[SourceLine, ...]


class Origin(Enum):
    """The origin of memory, seen from the traced cell."""

    BEFORE_CELL = "before the cell"
    LINE = "line"  #: at one line of the cell
    OTHER_LINES = "other lines"  #: at lines of the cell that have no layer of their own
    OUTSIDE_LINES = "outside the lines"  #: while the cell ran, but at none of its lines


@dataclass(frozen=True, slots=True)
class Layer:
    """One band of the timeline."""

    origin: Origin
    text: str  #: the line's text; ``""`` if it is no line's
    line: int | None
    held_bytes: tuple[int, ...]  #: one for each of the timeline's moments


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
    peak: int
    unit: Literal["seconds", "operators"] = "seconds"


@dataclass(frozen=True, slots=True)
class PeakPart:
    """The blocks of one line, kind and owner that were in use at the peak."""

    origin: Origin  #: never ``OTHER_LINES``
    line: int | None
    kind: MemoryKind | Literal["freed since"]
    owner: str | None  #: the path of a name that still leads to them
    n_bytes: int
    n_blocks: int


class NoteKind(NamedByWords):
    """The subject of a note on a trace, with the figures that it has."""

    HISTORY_IS_USERS = auto()  #: a history of the user's was running, and was used
    #: The cell started or stopped a history, or set one of its own, which drops our events.
    HISTORY_WAS_SET = auto()
    START_WORKED_OUT = auto()  #: the start of a snapshot file was worked out from its end
    #: Calls of modules are not seen: PyTorch's functions are other ones, or other tools use
    #: ``sys.monitoring``.
    CALLS_UNSEEN = auto()
    #: The host's lines are not read, or not to the end: another tool traces the thread, or has
    #: ``sys.monitoring``.
    LINES_UNREAD = auto()
    MALLOC_UNREAD = auto()
    FAILED = auto()  #: part of the trace failed with the error in ``text``
    NO_SNAPSHOT = auto()
    #: The counters (``n_bytes``) and the history (``history_bytes``) differ before the cell, after
    #: it, or at its peak; ``text`` is ``allocated`` or ``reserved``.
    COUNTERS_DIFFER = auto()
    #: Events are missing, mostly the oldest: lines are complete from ``seconds`` on.
    EVENTS_MISSING = auto()
    #: The peak (``n_bytes``) came before the first known event; the lines of the peak are those of
    #: the highest moment since (``history_bytes``).
    PEAK_NOT_IN_EVENTS = auto()
    REPLAY_DIFFERS = auto()  #: the replay does not end with the blocks at the end
    #: ``n_bytes`` of autograd's threads were attributed to the line last seen before.
    BACKWARD_INFERRED = auto()
    NO_STACKS = auto()


@dataclass(frozen=True, slots=True)
class TraceNote:
    """Something inferred in a trace, or missing; the kind says what the other fields are."""

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
    before: LineUse  #: memory from before the cell; its ``allocated_bytes`` are all of that
    unplaced: LineUse
    peak: tuple[PeakPart, ...]  #: biggest first; together all that was allocated at the peak
    n_events: int
    notes: tuple[TraceNote, ...] = ()


@dataclass(frozen=True, slots=True)
class HostLine:
    """A line of source, and how malloc's count changed while it ran."""

    line: int
    text: str
    net_bytes: int  #: the change over all runs of the line, freed bytes of other lines included


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
    host: HostLines | None = None  #: ``None`` where the host's lines were not read
    notes: tuple[TraceNote | HardwareNote, ...] = ()  #: reasons why there are no lines
