"""Stacks of Python out of torch's dictionaries: each frame and each stack once.

A history of a million events has some hundred stacks. Torch gives the same dictionary for the same
frame, so that most stacks are known by the identities of their frames, without a look into them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from gpumemwidget.records import Frame

__all__ = ["StackTable"]

#: Frames of C++, which a history has where it was asked for them, end in these.
_FOREIGN_ENDINGS = ("??", ".c", ".cc", ".cpp", ".cu", ".h", ".hpp", ".cuh", ".so")
#: Where frames are not shared, no identity is met twice: then they are not kept for long.
_MAX_KNOWN = 200_000

RawStack = Sequence[Mapping[str, Any]]


class StackTable:
    """Numbers stacks in the order in which they are met; 0 is the empty one."""

    def __init__(self) -> None:
        self.stacks: list[tuple[Frame, ...]] = [()]
        self._places: dict[tuple[Frame, ...], int] = {(): 0}
        self._frames: dict[Frame, Frame] = {}
        #: By the identities of the frames' dictionaries, which are kept so that these stay theirs.
        self._known: dict[tuple[int, ...], int] = {(): 0}
        self._parsed: dict[int, tuple[object, Frame | None]] = {}

    def find(self, stack: RawStack) -> tuple[Frame, ...]:
        """The frames of Python, innermost first."""
        return self.stacks[self.place([stack])[0]]

    def place(self, stacks: Iterable[RawStack]) -> list[int]:
        """Each stack's number."""
        known = self._known
        raw = list(stacks)
        keys = [tuple(map(id, stack)) for stack in raw]
        places = [known.get(key, -1) for key in keys]
        if -1 in places:
            for index, place in enumerate(places):
                if place < 0:
                    places[index] = self._add(keys[index], raw[index])
            if len(self._parsed) > _MAX_KNOWN:
                self._parsed.clear()
                known.clear()
                known[()] = 0
        return places

    def place_frames(self, frames: tuple[Frame, ...]) -> int:
        """The number of a stack that is already made of records."""
        place = self._places.get(frames)
        if place is None:
            place = self._places[frames] = len(self.stacks)
            self.stacks.append(frames)
        return place

    def _add(self, key: tuple[int, ...], raw: RawStack) -> int:
        place = self._known.get(key)
        if place is None:
            found = map(self._parse, raw)
            place = self.place_frames(tuple(each for each in found if each is not None))
            self._known[key] = place
        return place

    def _parse(self, raw: Mapping[str, Any]) -> Frame | None:
        known = self._parsed.get(id(raw))
        if known is None:
            frame = None
            if not raw["filename"].endswith(_FOREIGN_ENDINGS):
                frame = Frame(raw["filename"], raw["line"], raw["name"])
                frame = self._frames.setdefault(frame, frame)
            known = self._parsed[id(raw)] = (raw, frame)
        return known[1]
