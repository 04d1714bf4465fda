"""Recorded cells: what each did to the memory of each device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from gpumemwidget.model.devices import HOST, PeakIs

#: How a cell ended.
Status = Literal["ok", "error", "interrupted"]

#: Change in bytes of a resident size, or of a process's memory outside PyTorch, that is not worth
#: reporting: samples alone move it by some.
_SLACK_BYTES = 1024**2

#: Figures of a cell by which the ledger can be sorted.
LedgerSort = Literal["change", "peak", "rise", "time"]


@dataclass(frozen=True, slots=True)
class Span:
    """One counter over a cell, in bytes."""

    before_bytes: int | None
    after_bytes: int | None
    peak_bytes: int | None

    @property
    def change_bytes(self) -> int | None:
        """The bytes after the cell less those before; ``None`` where either is unknown."""
        if self.before_bytes is None or self.after_bytes is None:
            return None
        return self.after_bytes - self.before_bytes

    @property
    def rise_bytes(self) -> int | None:
        """The peak less the bytes before the cell; ``None`` where either is unknown."""
        if self.before_bytes is None or self.peak_bytes is None:
            return None
        return self.peak_bytes - self.before_bytes


@dataclass(frozen=True, slots=True)
class CellDevice:
    """The memory of one device over one cell."""

    device: str
    allocated: Span
    reserved: Span
    peak_is: PeakIs | None
    #: Number of times in the cell that the allocator freed its cache to try again, and ran out.
    num_alloc_retries: int | None
    num_ooms: int | None
    budget_bytes: int | None = None
    #: What this process has of the GPU beside what PyTorch has reserved, by the driver: the CUDA
    #: context, other libraries. Its peak is the highest of the cell's start, its end, and the
    #: samples while the dashboard was open. ``None`` where the driver doesn't know.
    outside: Span | None = None
    #: The peak of allocated that ``%%memfit`` predicted for the cell, where it did.
    predicted_peak_bytes: int | None = None

    @property
    def peak_counter(self) -> Span:
        """The counter that has a peak: *allocated*; on the host, which has none, *resident*."""
        return self.reserved if self.device == HOST else self.allocated

    @property
    def outside_change_bytes(self) -> int:
        """The change of what is outside PyTorch; 0 where it is small or unknown."""
        change_bytes = None if self.outside is None else self.outside.change_bytes
        return change_bytes or 0 if abs(change_bytes or 0) >= _SLACK_BYTES else 0

    @property
    def has_outside_peak(self) -> bool:
        """True if 64 MiB more was outside PyTorch during the cell than at its start and its end."""
        if self.outside is None or self.outside.peak_bytes is None:
            return False
        ends_bytes = max(self.outside.before_bytes or 0, self.outside.after_bytes or 0)
        return self.outside.peak_bytes - ends_bytes >= 64 * 1024**2

    @property
    def has_moved_outside(self) -> bool:
        """True if the cell changed what is outside PyTorch, or took much of it for a while."""
        return self.outside_change_bytes != 0 or self.has_outside_peak

    @property
    def is_over_budget(self) -> bool:
        """True if the cell is known to have crossed its budget, by its peak.

        A cell that starts beyond its budget crosses it only by rising above the bytes at its start.
        """
        span = self.peak_counter
        if self.budget_bytes is None or span.peak_bytes is None:
            return False
        # A resident size moves by itself, in every cell.
        slack_bytes = _SLACK_BYTES if self.device == HOST else 0
        return span.peak_bytes > self.budget_bytes and (
            span.before_bytes is None or span.peak_bytes > span.before_bytes + slack_bytes
        )


@dataclass(frozen=True, slots=True)
class CellRecord:
    """One cell that a person ran."""

    execution_count: int | None  #: the number in ``In [n]``; ``None`` where IPython gave none
    cell_id: str | None  #: the front end's id of the cell; ``None`` in a terminal
    first_line: str  #: the first line that is not blank, shortened to 120 characters
    started_at: float  #: seconds since the epoch, UTC
    start_s: float  #: seconds on the monitor's clock, to place the cell in the plot
    duration_s: float
    status: Status
    devices: tuple[CellDevice, ...]
    #: True if the cell has only gpumemwidget's own magics, none of which moves or frees memory.
    is_only_own_magics: bool = False
