"""Records of memory checks that have failed: growth, or a peak, beyond what is allowed."""

from __future__ import annotations

from dataclasses import dataclass

from gpumemwidget.model.leaks import Leak


@dataclass(frozen=True, slots=True)
class Holder:
    """Memory of a device, and what keeps it."""

    #: A path with the indexes left out: ``losses[…]'s graph``; of a prediction what it is for.
    name: str
    n_bytes: int


@dataclass(frozen=True, slots=True)
class GrowthOverLimit:
    """More memory in use than before, by more than is allowed."""

    device: str
    growth_bytes: int
    limit_bytes: int
    #: Number of steps that have added it; 0 where no steps were seen.
    n_steps: int
    #: Number of steps before these, which do not count.
    n_warmups: int
    #: The holder that gains a tensor in each step; ``None`` where none is found.
    leak: Leak | None
    #: The largest holders on the device now, biggest first.
    holders: tuple[Holder, ...]


@dataclass(frozen=True, slots=True)
class PeakOverLimit:
    """A peak of a test's allocated memory beyond what is allowed."""

    device: str
    #: Bytes that the test has allocated at once, without those from before it.
    peak_bytes: int
    limit_bytes: int
    #: ``True`` if the test was not run, but its peak predicted.
    is_predicted: bool
    #: The largest holders at a predicted peak, or those that are left after the test.
    holders: tuple[Holder, ...]
