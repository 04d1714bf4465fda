"""Tells in lots which objects lead to no memory, so that a walk need not enter them.

Of a process's objects most are containers of numbers and text. To follow each of them by itself
costs some microseconds; to ask the collector what a lot of them refers to, level by level, a
fraction of that, since each level is one call for all.
"""

from __future__ import annotations

import gc
from collections.abc import Sequence

from gpumemwidget.owners.hidden import HiddenHolders
from gpumemwidget.owners.kinds import KindFinder

__all__ = ["DeadEnds"]

#: So many objects are asked about at once; so far down, and so many on each level.
_LOT = 32
_MOST_LEVELS, _MOST_ON_LEVEL = 6, 1024
#: When so many of a lot were found to lead on, one after the other, the rest is entered unasked: as
#: of a list of records that have a tensor each.
_ENOUGH = 3
#: What most containers end in.
_SIMPLE = (int, str, float, bool, bytes, type(None))


class DeadEnds:
    """Finds objects that end in numbers and text.

    Args:
        kind_finder: tells plain objects from others.
        hidden: tells the holders that the collector does not know.
    """

    def __init__(self, kind_finder: KindFinder, hidden: HiddenHolders) -> None:
        self._kind_finder = kind_finder
        self._hidden = hidden
        for cls in _SIMPLE:
            kind_finder.find(cls)

    def find(self, targets: Sequence[object]) -> set[int]:
        """Those of these plain objects, by id, that surely lead nowhere; others may do so too."""
        found: set[int] = set()
        for start in range(0, len(targets), _LOT):
            lot = targets[start : start + _LOT]
            if self._lead_nowhere(lot):
                found.update(map(id, lot))
            elif len(lot) > 1:
                self._find_alone(lot, found)
        return found

    def _find_alone(self, lot: Sequence[object], found: set[int]) -> None:
        n_leading = 0
        for each in lot:
            # Most of what a module has is empty: its tables of hooks.
            if not gc.get_referents(each):
                found.add(id(each))
            elif n_leading < _ENOUGH:
                if self._lead_nowhere((each,)):
                    found.add(id(each))
                    n_leading = 0
                else:
                    n_leading += 1

    def _lead_nowhere(self, level: Sequence[object]) -> bool:
        """Whether containers within containers end in numbers and text."""
        finder = self._kind_finder
        for _ in range(_MOST_LEVELS):
            parts = gc.get_referents(*level)
            level = list(filter(gc.is_tracked, parts))
            if not finder.are_known_plain(parts) and (
                not finder.are_plain(level) or self._hidden.are_any(parts)
            ):
                return False
            if not level:
                return True
            if len(level) > _MOST_ON_LEVEL:
                return False
        return False
