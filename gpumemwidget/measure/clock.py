"""Time as the measurements see it, behind a seam, so that tests set it and nothing sleeps."""

from __future__ import annotations

import time
from typing import Protocol

__all__ = ["Clock", "SystemClock"]


class Clock(Protocol):
    """Two clocks: one to measure with, one to name a moment with."""

    def now(self) -> float:
        """Seconds that never go back, from an arbitrary start."""
        ...

    def wall(self) -> float:
        """Seconds since the epoch, UTC; may jump when the machine's clock is set."""
        ...


class SystemClock:
    """The machine's own clocks."""

    def now(self) -> float:
        """Seconds of the monotonic clock with the best resolution there is."""
        return time.perf_counter()

    def wall(self) -> float:
        """Seconds since the epoch, UTC."""
        return time.time()
