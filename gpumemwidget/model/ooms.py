"""Out-of-memory errors: the state of the device, and the remedies."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Literal

from gpumemwidget.model.breakdowns import Breakdown
from gpumemwidget.model.devices import HOST, DeviceState, Frame
from gpumemwidget.model.ownership import Owned
from gpumemwidget.model.predictions import PredictedRemedy


@dataclass(frozen=True, slots=True)
class OomEvent:
    """The state of a device when an allocation failed, before anything was unwound."""

    state: DeviceState
    #: The bytes that were asked for; ``None`` where the error does not say.
    requested_bytes: int | None = None
    largest_free_block_bytes: int | None = None
    cached_bytes: int | None = None  #: reserved bytes that ``empty_cache`` can give back
    frames: tuple[Frame, ...] = ()

    @property
    def device(self) -> str:
        """The name of the device."""
        return self.state.info.device

    @property
    def allocated_bytes(self) -> int | None:
        """Bytes that PyTorch's allocator, or malloc on the host, had handed out."""
        return None if self.state.reading is None else self.state.reading.allocated_bytes

    @property
    def reserved_bytes(self) -> int | None:
        """Bytes that PyTorch's allocator had reserved; on the host the resident size."""
        return None if self.state.reading is None else self.state.reading.reserved_bytes

    @property
    def device_free_bytes(self) -> int | None:
        """Bytes of the whole device that nobody used."""
        return None if self.state.use is None else self.state.use.free_bytes

    @property
    def device_total_bytes(self) -> int | None:
        """Bytes of the whole device, with what the driver keeps for itself."""
        use = self.state.use
        total_bytes = None if use is None else use.total_bytes
        return self.state.info.total_bytes if total_bytes is None else total_bytes

    @property
    def limit_bytes(self) -> int | None:
        """The limit of this process, where one is set."""
        return self.state.info.limit_bytes

    @property
    def unallocated_bytes(self) -> int | None:
        """Bytes that are reserved but unallocated."""
        if self.allocated_bytes is None or self.reserved_bytes is None:
            return None
        return self.reserved_bytes - self.allocated_bytes

    @property
    def room_bytes(self) -> int | None:
        """Bytes that could be had: those that are free, or those that a limit leaves of them."""
        free, limit, taken = self.device_free_bytes, self.limit_bytes, self.reserved_bytes
        if limit is None or taken is None:
            return free
        left = max(limit - taken, 0)
        return left if free is None else min(left, free)

    @property
    def is_fragmented(self) -> bool:
        """True if the unallocated reserved bytes would have been enough in one piece.

        The room beside them counts too, which growing segments would take in.
        """
        free, largest = self.unallocated_bytes, self.largest_free_block_bytes
        if free is None or largest is None or self.device == HOST:
            return False
        if self.requested_bytes is None:
            return 2 * largest < free
        return largest < self.requested_bytes <= free + (self.room_bytes or 0)


class RemedyKind(Enum):
    """The kind of a remedy: a release, a setting, or a change to the cell."""

    LAST_EXCEPTION = "last exception"
    OUT = "out"
    NAMES = "names"
    GRADIENTS = "gradients"
    CACHED_BLOCKS = "cached blocks"
    LIBRARY_CACHES = "library caches"
    EXPANDABLE_SEGMENTS = "expandable segments"
    LIMIT = "limit"
    OTHER_PROCESSES = "other processes"
    SMALLER_BATCH = "smaller batch"
    NO_GRAD = "no_grad"
    CHECKPOINTING = "checkpointing"


@dataclass(frozen=True, slots=True)
class Remedy:
    """Something that frees memory on the device that ran out, or makes do with less of it."""

    kind: RemedyKind
    gives_bytes: int | None  #: bytes that it frees on that device; ``None`` if that is not known
    #: ``at most`` and ``about``: the figure is a bound or an estimate.
    gives_is: Literal["exact", "at least", "at most", "about"]
    names: tuple[str, ...] = ()  #: for ``NAMES``: the variables
    #: For ``NAMES``: true if a module or an optimizer is released with them.
    loses_training_state: bool = False

    @property
    def can_do(self) -> bool:
        """True if a button can carry it out."""
        return self.kind in (
            RemedyKind.LAST_EXCEPTION,
            RemedyKind.OUT,
            RemedyKind.NAMES,
            RemedyKind.CACHED_BLOCKS,
        )

    @property
    def rank(self) -> tuple[bool, bool, bool, int]:
        """The key to sort by: most bytes first, then unknown ones.

        What ends other processes comes after one's own, and loss of training state last.
        """
        is_others = self.kind is RemedyKind.OTHER_PROCESSES
        unknown = self.gives_bytes is None
        return self.loses_training_state, is_others, unknown, -(self.gives_bytes or 0)


@dataclass(frozen=True, slots=True)
class OomCard:
    """Why a cell ran out of memory, and the ways out. It holds no object of the user's."""

    event: OomEvent
    execution_count: int | None
    #: The line of the user's that asked for it: ``In [7], line 3``; ``None`` where it is not known.
    place: str | None
    text: str
    #: The function of a library that asked for it: ``torch.nn.functional.linear``.
    function: str | None
    #: The biggest owners on that device, at most ten, biggest first, as rows of the account.
    owners: tuple[Owned, ...]
    #: Bytes of all owners on the device; ``None`` where no account was taken.
    owned_bytes: int | None
    ways: tuple[Remedy, ...]  #: In the order of their ranks
    #: The whole device in parts; ``None`` where not even its total is known.
    breakdown: Breakdown | None = None
    n_caught: int = 0  #: OOMs in the same cell that its code caught
    notes: tuple[str, ...] = ()  #: sentences on what could not be found out
    predicted: tuple[PredictedRemedy, ...] = ()

    @property
    def listed_ways(self) -> tuple[Remedy, ...]:
        """The ways as the card lists them: estimated changes to the cell give way to predicted."""
        if not self.predicted:
            return self.ways
        # Changes to the cell, which a prediction knows better than an estimate from the owners.
        better_known = (
            RemedyKind.SMALLER_BATCH,
            RemedyKind.NO_GRAD,
            RemedyKind.CHECKPOINTING,
            RemedyKind.EXPANDABLE_SEGMENTS,
        )
        return tuple(way for way in self.ways if way.kind not in better_known)
