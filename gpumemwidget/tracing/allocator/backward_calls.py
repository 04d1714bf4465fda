"""Find the line whose backward was running when autograd's threads allocated.

The line is known where calls of backward were seen to begin and end. Else it is inferred from the
cell's stacks before and after; callers count the inferences, so that the report can say so.
"""

from __future__ import annotations

import bisect
import re
from collections.abc import Iterable, Sequence
from typing import TypeAlias

from gpumemwidget.model.segments import Frame
from gpumemwidget.model.traces import CallMark, NoteKind
from gpumemwidget.tracing.allocator.stacks import THREAD, Stack, find_backward
from gpumemwidget.tracing.sources import Sources, is_library

#: The stack of a caller, and how it was inferred.
InferredCaller: TypeAlias = "tuple[tuple[Frame, ...], NoteKind]"

_CALL = re.compile(r"\b(?:backward|grad)\s*\(")
_DEFINITION = re.compile(r"\s*(?:def|class|async|@|#)\b")
#: Number of calls to search back: as deep as threads run one at the same time, mostly one.
_MAX_NESTED = 16


class BackwardCalls:
    """The calls of backward while a trace ran.

    Args:
        marks: calls that were seen to begin and end, of any kind.
        sources: which frames are whose, with their text.
    """

    def __init__(self, marks: Iterable[CallMark], sources: Sources) -> None:
        self._sources = sources
        # A backward that a checkpoint calls on autograd's own thread runs within another one.
        self._marks = sorted(
            (mark for mark in marks if mark.kind == "backward" and self._is_users(mark)),
            key=lambda mark: mark.start_us,
        )
        self._starts = [mark.start_us for mark in self._marks]
        self._inferred: dict[tuple[int, int], InferredCaller] = {}

    def find(self, time_us: int) -> tuple[Frame, ...] | None:
        """Return the stack of the call that was seen to run at a time; the one begun last."""
        place = bisect.bisect_right(self._starts, time_us)
        for mark in reversed(self._marks[max(0, place - _MAX_NESTED) : place]):
            if mark.end_us is None or time_us <= mark.end_us:
                return mark.frames
        return None

    def infer(self, last: Stack | None, following: Stack | None) -> InferredCaller | None:
        """Infer the stack of the call from the cell's stacks that were seen before and after.

        Returns:
            ``None`` if no stack of the cell was seen before.
        """
        if last is None:
            return None
        key = (id(last), id(following))
        if key not in self._inferred:
            self._inferred[key] = self._infer(last, following)
        return self._inferred[key]

    def _infer(self, last: Stack, following: Stack | None) -> InferredCaller:
        begun = find_backward(last)
        if begun is not None:
            return last.frames[begun:], NoteKind.BACKWARD_BEGUN
        users = [
            place
            for place, frame in enumerate(last.frames[: last.n_inside + 1])
            if self._sources.find_line(frame) is not None or not is_library(frame.filename)
        ]
        for place in users:
            frame = last.frames[place]
            after = _find_same_call(last.frames, place, following)
            lines = self._find_calls(frame, after)
            if len(lines) > 1:
                break
            if lines:
                caller = Frame(frame.filename, lines[0], frame.function)
                return (caller, *last.frames[place + 1 :]), NoteKind.BACKWARD_IN_SOURCE
        return last.frames[users[0] :], NoteKind.BACKWARD_AFTER_LINE

    def _find_calls(self, frame: Frame, after: Frame | None) -> list[int]:
        """Return the lines with such a call between two positions in one function.

        Line numbers are those of the frame's file.

        Args:
            frame: where the function was.
            after: where it went on; ``None`` if it was not seen again.
        """
        line = self._sources.find_line(frame)
        offset = 0 if line is None else line - frame.line
        lines = self._sources.read_lines(frame.filename)
        first, last = _find_body(lines, frame.line + offset, frame.function)
        start = frame.line + offset
        end = last if after is None else after.line + offset
        numbers: Sequence[int] = range(start, end + 1)
        if end < start or (after is not None and end == start and not _has_call(lines, start)):
            # The function went round a loop.
            numbers = [*range(first, end + 1), *range(max(start, end + 1), last + 1)]
        return [number - offset for number in numbers if _has_call(lines, number)]

    def _is_users(self, mark: CallMark) -> bool:
        return bool(mark.frames) and (
            any(self._sources.find_line(frame) is not None for frame in mark.frames)
            or mark.frames[-1].function == THREAD
        )


def _find_same_call(frames: Sequence[Frame], place: int, following: Stack | None) -> Frame | None:
    """Return the frame of the same call in a later stack; ``None`` if the call has ended."""
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
    """Return the first and last line of the function around a line; of a cell all lines."""
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
