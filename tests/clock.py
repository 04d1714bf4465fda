"""A clock that stands still until a test moves it."""

from __future__ import annotations

from gpumemwidget.recording.sampler import Clock


class ManualClock(Clock):
    """Both clocks, moved by hand.

    Args:
        now_s: where the monotonic clock begins.
        wall_s: where the wall clock begins, in seconds since the epoch.
    """

    def __init__(self, now_s: float = 1000.0, wall_s: float = 1_800_000_000.0) -> None:
        self._now_s = now_s
        self._wall_s = wall_s

    def now(self) -> float:
        return self._now_s

    def wall(self) -> float:
        return self._wall_s

    def advance(self, seconds: float) -> None:
        """Let time pass on both clocks."""
        self._now_s += seconds
        self._wall_s += seconds
