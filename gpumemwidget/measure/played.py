"""What each event of the allocator's history did: the bytes of its block, and when that ended."""

from __future__ import annotations

from array import array
from dataclasses import dataclass

from gpumemwidget.records import Frame
from gpumemwidget.traces import ACTIONS, TraceEvents

__all__ = [
    "ALLOC",
    "FREE_COMPLETED",
    "FREE_REQUESTED",
    "SEGMENT_ALLOC",
    "SEGMENT_FREE",
    "SEGMENT_MAP",
    "SEGMENT_UNMAP",
    "UNSIZED",
    "Played",
    "Standing",
]

ALLOC = ACTIONS.index("alloc")
FREE_REQUESTED = ACTIONS.index("free_requested")
FREE_COMPLETED = ACTIONS.index("free_completed")
SEGMENT_ALLOC = ACTIONS.index("segment_alloc")
SEGMENT_FREE = ACTIONS.index("segment_free")
SEGMENT_MAP = ACTIONS.index("segment_map")
SEGMENT_UNMAP = ACTIONS.index("segment_unmap")
#: What changes nothing, and may have asked for any size.
UNSIZED = frozenset((ACTIONS.index("oom"), ACTIONS.index("snapshot")))


@dataclass(slots=True, eq=False)
class Standing:
    """A block that stood when the first event came."""

    address: int
    n_bytes: int
    #: The place of the event that freed it; -1 where it still stands.
    end: int = -1
    #: Whether it is known to be of before the cell.
    is_before: bool = True
    #: Of one that was allocated in the cell, by an event that is lost: where.
    frames: tuple[Frame, ...] = ()


@dataclass(frozen=True, slots=True, eq=False)
class Played:
    """Events with what each of them did; the columns are as long as the events."""

    events: TraceEvents
    standing: tuple[Standing, ...]
    #: Type ``q``, in bytes: by how much allocated, and reserved, rose.
    changes: array[int]
    reserved_changes: array[int]
    #: Type ``i``: of an allocation the place of the event that freed it, -1 where it still stands.
    #: Of a free the place of its allocation; -2, -3, … for the first, second, … that stood.
    partners: array[int]
    start_allocated_bytes: int
    start_reserved_bytes: int
