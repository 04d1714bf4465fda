"""The caching allocator's segments, and the blocks that they are cut into."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


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
    #: The size that the allocator counts: the requested bytes, rounded up, and a rest too small to
    #: be split off.
    n_bytes: int
    #: The bytes that were asked for; ``None`` where this release of torch does not tell.
    requested_bytes: int | None
    #: ``active_pending_free``: freed, but another stream may still be using it.
    state: Literal["active_allocated", "active_pending_free", "inactive"]
    #: The stack that allocated the block, innermost first; ``()`` where no history was recorded.
    frames: tuple[Frame, ...] = ()


@dataclass(frozen=True, slots=True)
class Segment:
    """One allocation from the driver, with its blocks in the order of their addresses."""

    device: str
    address: int
    n_bytes: int
    #: True if the segment belongs to a private pool: a CUDA graph's, or a ``MemPool``.
    is_private: bool
    #: The pool's id in torch; ``(0, 0)`` is the common pool.
    pool_id: tuple[int, int]
    blocks: tuple[Block, ...]
    #: Size of the pages of a segment that grows (``expandable_segments``), of which free ones are
    #: given back one by one; ``None`` for all other segments.
    page_bytes: int | None = None
