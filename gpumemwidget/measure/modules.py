"""The modules of a model that were running at a moment, from the calls that were seen."""

from __future__ import annotations

import math
from collections.abc import Iterable

from gpumemwidget.traces import CallMark

__all__ = ["RunningModules"]


class RunningModules:
    """Follows the calls of modules through time.

    Args:
        marks: calls that were seen to begin and end, of any kind.
    """

    def __init__(self, marks: Iterable[CallMark]) -> None:
        # Of those that begin in the same microsecond the one that ends last is around the others.
        self._coming = sorted(
            (each for each in marks if each.kind == "module"),
            key=lambda each: (each.start_us, -math.inf if each.end_us is None else -each.end_us),
        )[::-1]
        self._threads: dict[int, list[CallMark]] = {}
        self._found: dict[int, tuple[str, ...]] = {}
        self._time_us = 0

    def __bool__(self) -> bool:
        return bool(self._coming or self._threads)

    def find(self, time_us: int, n_calls: int) -> tuple[str, ...]:
        """The names of the modules that a stack passes through, the outermost first.

        Args:
            time_us: when; never earlier than the last time it was asked.
            n_calls: how many calls of modules that stack has.

        Returns:
            ``()`` where it can't be told.
        """
        if time_us != self._time_us:
            self._time_us = time_us
            if self._advance(time_us):
                self._found.clear()
        if n_calls not in self._found:
            self._found[n_calls] = self._find(n_calls)
        return self._found[n_calls]

    def _find(self, n_calls: int) -> tuple[str, ...]:
        for running in self._threads.values():
            marks = list(running)
            # A clock of microseconds does not tell what ended from what began in the same one.
            while len(marks) > n_calls and self._time_us in (marks[-1].start_us, marks[-1].end_us):
                marks.pop()
            if len(marks) == n_calls:
                return tuple([each.name for each in marks])
        return ()

    def _advance(self, time_us: int) -> bool:
        """Begin and end what began and ended up to a time; whether anything did."""
        has_changed = False
        while self._coming and self._coming[-1].start_us <= time_us:
            mark = self._coming.pop()
            running = self._threads.setdefault(mark.thread, [])
            while running and _has_ended(running[-1], mark.start_us, is_next=True):
                running.pop()
            running.append(mark)
            has_changed = True
        for running in self._threads.values():
            while running and _has_ended(running[-1], time_us, is_next=False):
                running.pop()
                has_changed = True
        return has_changed


def _has_ended(mark: CallMark, time_us: int, *, is_next: bool) -> bool:
    if mark.end_us is None:
        return False
    return mark.end_us < time_us or (is_next and mark.end_us == time_us > mark.start_us)
