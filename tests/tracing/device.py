"""A simulated allocator that writes its history down, beside the truth that a replay must find."""

from __future__ import annotations

from array import array
from dataclasses import dataclass

from gpumemwidget.allocator.blocks import SimulatedBlock
from gpumemwidget.allocator.caching import CachingAllocator
from gpumemwidget.allocator.rules import AllocatorSettings
from gpumemwidget.model.devices import Frame, Segment
from gpumemwidget.model.traces import (
    AllocatorRules,
    AllocatorTrace,
    TraceAction,
    TraceEvents,
    TraceNote,
)
from gpumemwidget.tracing.sources import Source, Sources

MIB = 1 << 20
START_US = 1_700_000_000_000_000
#: Large enough for every program.
_TOTAL_BYTES = 1 << 50

#: Files of the traced cell, and of an earlier one.
CELL = "/tmp/ipykernel_7/cell.py"
EARLIER = "/tmp/ipykernel_7/earlier.py"
#: What calls a cell.
MAIN = (Frame("/usr/lib/python3/dist-packages/IPython/core/shell.py", 9, "run_code"),)

#: An entry of the history: action, address, bytes, stream and stack.
Entry = tuple[str, int, int, int, tuple[Frame, ...]]


def at(line: int, *inner: Frame) -> tuple[Frame, ...]:
    """The stack of a line of the cell; what it called is given innermost first."""
    return (*inner, Frame(CELL, line, "<module>"), *MAIN)


def make_sources(text: str, earlier: str = "") -> Sources:
    """A traced cell, In [7], and an earlier one, In [3]."""
    texts = {CELL: text, EARLIER: earlier}
    return Sources(
        Source("In [7]", CELL, "cell", text),
        cells={CELL: 7, EARLIER: 3},
        read=lambda name: texts.get(name, "").splitlines(keepends=True),
    )


@dataclass(frozen=True)
class Moment:
    """What stood after an event that changed something."""

    place: int
    allocated_bytes: int
    reserved_bytes: int
    held_bytes: dict[str, int]
    #: Number of blocks that may be larger than what was asked for, rounded up.
    n_large: int


class Device:
    """One device, whose blocks have owners.

    Args:
        is_expandable: as ``expandable_segments``.
        max_split_bytes: as ``max_split_size_mb``.
    """

    def __init__(self, *, is_expandable: bool = False, max_split_bytes: int | None = None) -> None:
        self.rules = AllocatorRules(is_expandable=is_expandable, max_split_bytes=max_split_bytes)
        self.events: list[Entry] = []
        self.moments: list[Moment] = []
        self.before: tuple[Segment, ...] = ()
        #: The sizes of all blocks that were allocated since the start, by owner.
        self.allocated: dict[str, list[int]] = {}
        settings = AllocatorSettings(max_split_bytes=max_split_bytes, is_expandable=is_expandable)
        self._allocator = CachingAllocator(_TOTAL_BYTES, settings=settings)
        self._allocator.on_event = self._note
        #: Who owns each live block.
        self._owners: dict[SimulatedBlock, str] = {}
        #: Who asks for the block that is being allocated, and what is running.
        self._asking: tuple[str, tuple[Frame, ...]] = ("", ())

    # -- What a program does ------------------------------------------------------------------

    def start(self) -> None:
        """Begin the history: what stands is of before."""
        self.events.clear()
        self.moments.clear()
        self.allocated.clear()
        self._owners = dict.fromkeys(self._owners, "before")
        self.before = self.list_segments()
        self._note_moment()

    def allocate(
        self,
        n_bytes: int,
        owner: str = "",
        frames: tuple[Frame, ...] = (),
        *,
        stream: int = 0,
        pool: int = 0,
    ) -> SimulatedBlock:
        """Take a block for an owner."""
        self._asking = (owner, frames)
        block = self._allocator.allocate(n_bytes, stream=stream, pool_id=(pool, 0))
        self._asking = ("", ())
        self.allocated.setdefault(owner, []).append(block.n_bytes)
        return block

    def free(self, block: SimulatedBlock, *, is_used_elsewhere: bool = False) -> None:
        """Give a block back; what another stream still uses waits."""
        self._allocator.free(block, is_used_elsewhere=is_used_elsewhere)

    def synchronize(self) -> None:
        """Let all that waits be free."""
        self._allocator.synchronize()

    def empty_cache(self) -> None:
        """Give back what holds nothing."""
        self._allocator.empty_cache()

    # -- What is found afterwards -------------------------------------------------------------

    def list_segments(self) -> tuple[Segment, ...]:
        """As the snapshot has them."""
        return self._allocator.list_segments("cuda:0")

    def end(self, *, n_lost: int = 0, is_whole: bool | None = None) -> AllocatorTrace:
        """The history, without its oldest events if some are lost."""
        return make_trace(
            self.events[n_lost:],
            self.before,
            self.list_segments(),
            rules=self.rules,
            is_whole=not n_lost if is_whole is None else is_whole,
            first=n_lost,
        )

    # -- Inside -------------------------------------------------------------------------------

    def _note(
        self,
        action: TraceAction,
        address: int,
        n_bytes: int,
        stream: int,
        block: SimulatedBlock | None,
    ) -> None:
        owner, frames = self._asking
        self.events.append((action, address, n_bytes, stream, frames))
        if block is not None and action is TraceAction.ALLOC:
            self._owners[block] = owner
        elif block is not None and action is TraceAction.FREE_COMPLETED:
            del self._owners[block]
            return  # What is allocated and reserved stays.
        self._note_moment()

    def _note_moment(self) -> None:
        held: dict[str, int] = {}
        n_large = 0
        for block in self._allocator.active_blocks.values():
            if block.state == "active_allocated":
                n_large += not self.rules.is_expandable and block.n_bytes > MIB
                owner = self._owners[block]
                held[owner] = held.get(owner, 0) + block.n_bytes
        self.moments.append(
            Moment(
                place=len(self.events) - 1,
                allocated_bytes=sum(held.values()),
                reserved_bytes=self._allocator.reserved_bytes,
                held_bytes=held,
                n_large=n_large,
            )
        )


def make_trace(
    events: list[Entry],
    before: tuple[Segment, ...] = (),
    after: tuple[Segment, ...] = (),
    *,
    rules: AllocatorRules | None = None,
    is_whole: bool = True,
    first: int = 0,
    notes: tuple[TraceNote, ...] = (),
) -> AllocatorTrace:
    """A trace of events one microsecond apart: action, address, bytes, stream and stack."""
    table: dict[tuple[Frame, ...], int] = {(): 0}
    stacks = array("i", [table.setdefault(frames, len(table)) for *_, frames in events])
    return AllocatorTrace(
        device="cuda:0",
        before=before,
        events=TraceEvents(
            actions=bytes(action for action, *_ in events),
            addresses=array("Q", [each[1] for each in events]),
            sizes=array("q", [each[2] for each in events]),
            times_us=array("q", [START_US + 1 + first + place for place in range(len(events))]),
            streams=array("q", [each[3] for each in events]),
            stacks=stacks,
            stack_table=tuple(table),
        ),
        after=after,
        start_us=START_US,
        end_us=START_US + first + len(events) + 1,
        rules=rules or AllocatorRules(),
        is_whole=is_whole,
        notes=notes,
    )
