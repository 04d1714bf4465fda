"""The line whose backward was running when autograd's threads allocated.

Where calls were seen to begin and end, that is known. Else it is inferred from what ran before and
after, and each inference is counted, so that it can be said.
"""

from __future__ import annotations

import bisect
import re
from collections.abc import Iterable, Sequence
from typing import Literal, TypeAlias

from gpumemwidget.libraries import is_library
from gpumemwidget.measure.sources import Sources
from gpumemwidget.measure.stacks import Stack, find_backward
from gpumemwidget.records import Frame
from gpumemwidget.traces import CallMark

__all__ = ["Backwards", "Inference"]

#: How a line was found. ``call``: the call was seen to run. ``begun``: what ran last had gone into
#: a backward. ``source``: it is the only line with such a call that can have run. ``last``: nothing
#: of this; it is the line that was seen last.
Inference = Literal["call", "begun", "source", "last"]
_Caller: TypeAlias = "tuple[tuple[Frame, ...], Inference]"

_CALL = re.compile(r"\b(?:backward|grad)\s*\(")
_DEFINITION = re.compile(r"\s*(?:def|class|async|@|#)\b")


class Backwards:
    """Finds who called backward.

    Args:
        marks: calls that were seen to begin and end, of any kind.
        sources: which frames are whose, with their text.
    """

    def __init__(self, marks: Iterable[CallMark], sources: Sources) -> None:
        self._sources = sources
        # What a checkpoint calls on autograd's own thread runs within another one.
        self._marks = sorted(
            (each for each in marks if each.kind == "backward" and self._is_callers(each)),
            key=lambda each: each.start_us,
        )
        self._starts = [each.start_us for each in self._marks]
        self._inferred: dict[tuple[int, int], _Caller | None] = {}

    def find_call(self, time_us: int) -> tuple[Frame, ...] | None:
        """The stack below a backward that was seen to run at a time: the one begun last."""
        place = bisect.bisect_right(self._starts, time_us)
        # They are as deep as threads that run one at the same time, seldom more than one.
        for each in reversed(self._marks[max(0, place - 16) : place]):
            if each.end_us is None or time_us <= each.end_us:
                return each.frames
        return None

    def infer(
        self, last: Stack | None, following: Stack | None
    ) -> tuple[tuple[Frame, ...], Inference] | None:
        """The stack of the call, from the cell's stacks that were seen before and after.

        Returns:
            ``None`` where nothing of the cell's was seen before.
        """
        if last is None:
            return None
        key = (id(last), id(following))
        if key not in self._inferred:
            self._inferred[key] = self._infer(last, following)
        return self._inferred[key]

    def _infer(self, last: Stack, following: Stack | None) -> _Caller:
        begun = find_backward(last)
        if begun is not None:
            return last.frames[begun:], "begun"
        users = [
            place
            for place, each in enumerate(last.frames[: last.n_inside + 1])
            if self._sources.find_line(each) is not None or not is_library(each.filename)
        ]
        for place in users:
            frame = last.frames[place]
            after = _find_same_call(last.frames, place, following)
            lines = self._find_calls(frame, after)
            if len(lines) > 1:
                break
            if lines:
                caller = Frame(frame.filename, lines[0], frame.function)
                return (caller, *last.frames[place + 1 :]), "source"
        return last.frames[users[0] :], "last"

    def _find_calls(self, frame: Frame, after: Frame | None) -> list[int]:
        """The lines with such a call between where a function was and where it went on.

        Both in the numbers of the frame's file.
        """
        line = self._sources.find_line(frame)
        offset = 0 if line is None else line - frame.line
        lines = self._sources.read_lines(frame.filename)
        first, last = _find_body(lines, frame.line + offset, frame.function)
        start = frame.line + offset
        end = last if after is None else after.line + offset
        numbers: Sequence[int] = range(start, end + 1)
        if end < start or (after is not None and end == start and not _has_call(lines, start)):
            # It went round a loop.
            numbers = [*range(first, end + 1), *range(max(start, end + 1), last + 1)]
        return [each - offset for each in numbers if _has_call(lines, each)]

    def _is_callers(self, mark: CallMark) -> bool:
        return bool(mark.frames) and (
            any(self._sources.find_line(each) is not None for each in mark.frames)
            or mark.frames[-1].function == "_bootstrap"
        )


def _find_same_call(frames: Sequence[Frame], place: int, following: Stack | None) -> Frame | None:
    """The frame of the same call in a later stack; ``None`` where that has ended."""
    if following is None:
        return None
    later = following.frames
    other = len(later) - (len(frames) - place)
    if other < 0 or later[other + 1 :] != tuple(frames[place + 1 :]):
        return None
    found, frame = later[other], frames[place]
    is_same = (found.filename, found.function) == (frame.filename, frame.function)
    return found if is_same else None


def _find_body(lines: Sequence[str], number: int, function: str) -> tuple[int, int]:
    """The first and the last line of the function that a line is in; of a cell all of them."""
    if function == "<module>" or not 0 < number <= len(lines):
        return 1, len(lines)
    definition = re.compile(rf"\s*(?:async\s+)?def\s+{re.escape(function)}\b")
    first = number
    while first > 1 and not definition.match(lines[first - 1]):
        first -= 1
    indent = len(lines[first - 1]) - len(lines[first - 1].lstrip())
    last = number
    while last < len(lines):
        text = lines[last]
        if text.strip() and len(text) - len(text.lstrip()) <= indent:
            break
        last += 1
    return first, last


def _has_call(lines: Sequence[str], number: int) -> bool:
    if not 0 < number <= len(lines):
        return False
    text = lines[number - 1].partition("#")[0]
    return _CALL.search(text) is not None and _DEFINITION.match(text) is None
