"""A device whose allocator writes down its history, beside the truth that the replay must find.

It is written for clarity, apart from what it tests: blocks stand in lists, every moment is kept
whole. It has what ``gpumemwidget.backends.caching`` leaves out: streams, pools, expandable segments
and blocks that wait for another stream.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field

from gpumemwidget.records import Block, Frame, Segment
from gpumemwidget.traces import ACTIONS, AllocatorRules, AllocatorTrace, TraceEvents

MIB = 1 << 20
START_US = 1_700_000_000_000_000


@dataclass(eq=False)
class Piece:
    """A block."""

    address: int
    n_bytes: int
    requested_bytes: int = 0
    state: str = "inactive"
    #: Whom the truth counts it for; ``"before"`` for what stood.
    owner: str = ""
    frames: tuple[Frame, ...] = ()


@dataclass(eq=False)
class Region:
    """A segment, or the mapped part of one that grows."""

    address: int
    n_bytes: int
    pool: tuple[object, ...]
    is_small: bool
    is_expandable: bool
    pieces: list[Piece] = field(default_factory=list)


@dataclass(frozen=True)
class Moment:
    """What stood after an event that changed something."""

    place: int
    allocated_bytes: int
    reserved_bytes: int
    held_bytes: dict[str, int]


class Device:
    """One device.

    Args:
        is_expandable: as ``expandable_segments``.
        max_split_bytes: as ``max_split_size_mb``.
    """

    def __init__(self, *, is_expandable: bool = False, max_split_bytes: int | None = None) -> None:
        self.rules = AllocatorRules(is_expandable=is_expandable, max_split_bytes=max_split_bytes)
        self.regions: list[Region] = []
        self.events: list[tuple[str, int, int, int, tuple[Frame, ...]]] = []
        self.moments: list[Moment] = []
        self.before: tuple[Segment, ...] = ()
        #: All that was allocated since the start, by owner.
        self.allocated: dict[str, list[int]] = {}
        self._next_address = 1 << 40

    # -- What a program does ------------------------------------------------------------------

    def start(self) -> None:
        """Begin the history: what stands is of before."""
        self.events.clear()
        self.moments.clear()
        self.allocated.clear()
        for region in self.regions:
            for piece in region.pieces:
                piece.owner, piece.frames = "before", ()
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
    ) -> Piece:
        """Take a block for an owner."""
        size = max(512, -(-n_bytes // 512) * 512)
        is_small = size <= MIB
        key = (pool, stream, is_small)
        fitting = [
            (piece.n_bytes, region.address, piece.address, region, piece)
            for region in self.regions
            for piece in region.pieces
            if region.pool == key and piece.state == "inactive" and piece.n_bytes >= size
        ]
        if fitting:
            *_, region, piece = min(fitting, key=lambda each: each[:3])
        else:
            region, piece = self._grow(size, key, frames)
        over = piece.n_bytes - size
        if is_small or self.rules.is_expandable:
            is_split = over >= 512
        else:
            limit = self.rules.max_split_bytes
            is_split = over > MIB and (limit is None or size < limit)
        if is_split:
            rest = Piece(piece.address + size, over)
            region.pieces.insert(region.pieces.index(piece) + 1, rest)
            piece.n_bytes = size
        piece.requested_bytes, piece.state = n_bytes, "active_allocated"
        piece.owner, piece.frames = owner, frames
        self.allocated.setdefault(owner, []).append(piece.n_bytes)
        self._note("alloc", piece.address, n_bytes, stream, frames)
        self._note_moment()
        return piece

    def free(self, piece: Piece, *, is_used_elsewhere: bool = False) -> None:
        """Give a block back; what another stream still uses waits."""
        self._note("free_requested", piece.address, piece.requested_bytes, 0, ())
        piece.state = "active_pending_free"
        self._note_moment()
        if not is_used_elsewhere:
            self._complete(piece)

    def synchronize(self) -> None:
        """Let all that waits be free."""
        for region in self.regions:
            for piece in list(region.pieces):
                if piece.state == "active_pending_free":
                    self._complete(piece)

    def empty_cache(self) -> None:
        """Give back what holds nothing."""
        for region in list(self.regions):
            if region.is_expandable:
                self._shrink(region)
            elif len(region.pieces) == 1 and region.pieces[0].state == "inactive":
                self.regions.remove(region)
                self._note("segment_free", region.address, region.n_bytes, 0, ())
                self._note_moment()

    # -- What is found afterwards -------------------------------------------------------------

    def list_segments(self) -> tuple[Segment, ...]:
        """As the snapshot has them."""
        found = []
        for region in self.regions:
            runs: list[list[Piece]] = []
            for piece in region.pieces:
                if runs and runs[-1][-1].address + runs[-1][-1].n_bytes == piece.address:
                    runs[-1].append(piece)
                else:
                    runs.append([piece])
            for run in runs:
                found.append(
                    Segment(
                        device="cuda:0",
                        address=run[0].address,
                        n_bytes=sum(each.n_bytes for each in run),
                        is_private=bool(region.pool[0]),
                        pool_id=(int(bool(region.pool[0])), 0),
                        blocks=tuple(
                            Block(each.address, each.n_bytes, None, each.state, each.frames)
                            for each in run
                        ),
                    )
                )
        return tuple(sorted(found, key=lambda each: each.address))

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

    def _grow(
        self, size: int, key: tuple[object, ...], frames: tuple[Frame, ...]
    ) -> tuple[Region, Piece]:
        is_small = size <= MIB
        if self.rules.is_expandable:
            return self._map(size, key, frames)
        n_bytes = (
            2 * MIB
            if is_small
            else 20 * MIB
            if size < 10 * MIB
            else -(-size // (2 * MIB)) * 2 * MIB
        )
        region = Region(self._next_address, n_bytes, key, is_small, is_expandable=False)
        self._next_address += n_bytes
        region.pieces.append(Piece(region.address, n_bytes))
        self.regions.append(region)
        self._note("segment_alloc", region.address, n_bytes, 0, frames)
        self._note_moment()
        return region, region.pieces[0]

    def _map(
        self, size: int, key: tuple[object, ...], frames: tuple[Frame, ...]
    ) -> tuple[Region, Piece]:
        page = 2 * MIB if key[2] else 20 * MIB
        region = next(
            (each for each in self.regions if each.is_expandable and each.pool == key), None
        )
        if region is None:
            region = Region(self._next_address, 0, key, bool(key[2]), is_expandable=True)
            self._next_address += 1 << 36
            self.regions.append(region)
        last = region.pieces[-1] if region.pieces else None
        start = region.address if last is None else last.address + last.n_bytes
        # What is free at its end grows by whole pages.
        has_room = last is not None and last.state == "inactive"
        missing = size - (last.n_bytes if last is not None and has_room else 0)
        n_bytes = -(-missing // page) * page
        self._note("segment_map", start, n_bytes, 0, frames)
        if last is not None and has_room:
            last.n_bytes += n_bytes
            piece = last
        else:
            piece = Piece(start, n_bytes)
            region.pieces.append(piece)
        region.n_bytes += n_bytes
        self._note_moment()
        return region, piece

    def _shrink(self, region: Region) -> None:
        page = 2 * MIB if region.is_small else 20 * MIB
        for piece in list(region.pieces):
            start = region.address + -(-(piece.address - region.address) // page) * page
            end = region.address + (piece.address + piece.n_bytes - region.address) // page * page
            if piece.state != "inactive" or end <= start:
                continue
            rests = [
                Piece(first, last - first)
                for first, last in (
                    (piece.address, start),
                    (end, piece.address + piece.n_bytes),
                )
                if first < last
            ]
            place = region.pieces.index(piece)
            region.pieces[place : place + 1] = rests
            region.n_bytes -= end - start
            self._note("segment_unmap", start, end - start, 0, ())
            self._note_moment()
        if not region.pieces:
            self.regions.remove(region)

    def _complete(self, piece: Piece) -> None:
        self._note("free_completed", piece.address, piece.requested_bytes, 0, ())
        piece.state = "inactive"
        region = next(each for each in self.regions if piece in each.pieces)
        place = region.pieces.index(piece)
        for other in (place + 1, place - 1):
            if not 0 <= other < len(region.pieces):
                continue
            neighbour = region.pieces[other]
            first, second = sorted((piece, neighbour), key=lambda each: each.address)
            if neighbour.state == "inactive" and first.address + first.n_bytes == second.address:
                region.pieces.remove(neighbour)
                piece.address = first.address
                piece.n_bytes += neighbour.n_bytes

    def _note(
        self, action: str, address: int, n_bytes: int, stream: int, frames: tuple[Frame, ...]
    ) -> None:
        self.events.append((action, address, n_bytes, stream, frames))

    def _note_moment(self) -> None:
        held: dict[str, int] = {}
        for region in self.regions:
            for piece in region.pieces:
                if piece.state == "active_allocated":
                    held[piece.owner] = held.get(piece.owner, 0) + piece.n_bytes
        self.moments.append(
            Moment(
                place=len(self.events) - 1,
                allocated_bytes=sum(held.values()),
                reserved_bytes=sum(each.n_bytes for each in self.regions),
                held_bytes=held,
            )
        )


def make_trace(
    events: list[tuple[str, int, int, int, tuple[Frame, ...]]],
    before: tuple[Segment, ...] = (),
    after: tuple[Segment, ...] = (),
    *,
    rules: AllocatorRules | None = None,
    is_whole: bool = True,
    first: int = 0,
    notes: tuple[str, ...] = (),
) -> AllocatorTrace:
    """A trace of events one microsecond apart: action, address, bytes, stream and stack."""
    table: dict[tuple[Frame, ...], int] = {(): 0}
    stacks = array("i", [table.setdefault(frames, len(table)) for *_, frames in events])
    return AllocatorTrace(
        device="cuda:0",
        before=before,
        events=TraceEvents(
            actions=bytes(ACTIONS.index(action) for action, *_ in events),
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
