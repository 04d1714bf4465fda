"""Distinguish steady growth from levels that go up and down, or rise and stop."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import linear_regression

#: The least growth that is worth a person's time: of a loop in all, and of a cell in each run.
MIN_GROWTH_BYTES = 1 << 20

#: Number of steps in a row that must have grown.
MIN_STEPS = 10

#: How far a level may be from a straight line, as a share of the rise. Batches of different
#: lengths scatter around it; a level that rises and stops is off by more.
_MAX_OFF = 0.15


@dataclass(frozen=True, slots=True)
class Trend:
    """Steady growth.

    Attributes:
        each_bytes: bytes that each step adds, by the line through the levels.
        since: the number of the step that it began after.
        n_steps: how many steps it has lasted.
        rise_bytes: bytes that were added in all.
    """

    each_bytes: int
    since: int
    n_steps: int
    rise_bytes: int


class Levels:
    """The memory in use at the ends of a loop's steps, in bounded space; ``n_added`` were read."""

    def __init__(self) -> None:
        self.n_added = 0
        self._stride = 1
        self._kept: list[tuple[int, int]] = []
        self._last: tuple[int, int] | None = None

    @property
    def has_risen(self) -> bool:
        """True once the last of enough levels is above the first by what is worth reporting."""
        rise_bytes = 0 if self._last is None else self._last[1] - self._kept[0][1]
        return self.n_added >= MIN_STEPS and rise_bytes >= MIN_GROWTH_BYTES

    def add(self, number: int, n_bytes: int) -> None:
        """Keep the bytes in use at the end of a step, by its number; steps may be left out."""
        self._last = number, n_bytes
        if self.n_added % self._stride == 0:
            self._kept.append(self._last)
        self.n_added += 1
        # In bounded space: of more, every second one goes.
        if len(self._kept) == 128:
            self._kept = self._kept[::2]
            self._stride *= 2

    def add_last(self, number: int, n_bytes: int) -> None:
        """Keep the level after the last step if growth went on at the same rate until then.

        Otherwise it has ended, or what came after the steps has changed the level.
        """
        trend = self.find_trend()
        if trend is None or self._last is None or number <= self._last[0]:
            return
        expected_bytes = self._last[1] + trend.each_bytes * (number - self._last[0])
        rise_bytes = trend.each_bytes * (number - trend.since)
        if abs(n_bytes - expected_bytes) <= _MAX_OFF * rise_bytes:
            self._last = number, n_bytes

    def find_trend(self) -> Trend | None:
        """Return the growth that lasts until now, from as early on as it is steady; or ``None``."""
        kept = self._kept
        if self._last is not None and self._last != kept[-1]:
            kept = [*kept, self._last]
        numbers = [number for number, _ in kept]
        levels = [n_bytes for _, n_bytes in kept]
        if not levels or levels[-1] - min(levels) < MIN_GROWTH_BYTES:
            return None
        # From all levels on, each time leaving out the first fifth: warm-up is at the beginning.
        start = 0
        while len(numbers) - start >= MIN_STEPS:
            slope = _find_slope(numbers[start:], levels[start:])
            if slope is not None:
                n_steps = numbers[-1] - numbers[start]
                return Trend(round(slope), numbers[start], n_steps, round(slope * n_steps))
            start += max(1, (len(numbers) - start) // 5)
        return None


def _find_slope(numbers: Sequence[int], levels: Sequence[int]) -> float | None:
    """Return the bytes that a step adds; ``None`` unless levels rise straight, and enough."""
    slope, base = linear_regression(numbers, levels)
    rise = slope * (numbers[-1] - numbers[0])
    if rise < MIN_GROWTH_BYTES:
        return None
    off = max(
        abs(level - base - slope * number) for number, level in zip(numbers, levels, strict=True)
    )
    return slope if off <= _MAX_OFF * rise else None
