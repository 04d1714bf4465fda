"""Follow lines with ``sys.settrace`` (before Python 3.12).

The trace function slows all Python code on its thread. Once that has cost too much of the cell's
time it is taken away, and the rest of the cell is not read line by line. ``sys.gettrace()`` shows
our function; where others trace, we don't.
"""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any

from gpumemwidget.tracing.host.line_watch import LineWatch, Place

#: Estimated cost of a call of any Python function while tracing, in nanoseconds.
_CALL_NS = 1200
#: Number of calls whose cost is added at once.
_N_CALLS = 32


class SettraceWatch(LineWatch):
    """Follows lines with ``sys.settrace``."""

    call_ns = 1500
    _is_traced = False
    _n_calls = 0

    def _start(self, frame: FrameType | None) -> str | None:
        if sys.gettrace() is not None:
            return "a debugger or a coverage tool traces this thread"
        # One object, so that it can be compared with ``is``.
        self._ours = self._on_call
        #: Frames that were running at the start, with the trace functions they had.
        self._entered: list[tuple[FrameType, Any]] = []
        self._reader.start()
        place = self._find_place(frame)
        while (frame := self._find_frame(frame)) is not None:
            self._entered.append((frame, frame.f_trace))
            frame.f_trace = self._on_event
            frame = frame.f_back
        self._is_on = self._is_traced = True
        self._reader.advance(place)
        sys.settrace(self._ours)
        return None

    def _leave(self) -> None:
        if sys.gettrace() is self._ours:
            sys.settrace(None)
        self._is_traced = False
        for frame, trace in self._entered:
            frame.f_trace = trace
        self._entered.clear()

    def _is_displaced(self) -> bool:
        return self._is_traced and sys.gettrace() is not self._ours

    # -- Called by the interpreter ----------------------------------------------------------------

    def _on_call(self, frame: FrameType, _event: str, _argument: object) -> Any:
        """Follow a function that begins, or a generator that goes on, if it is of the files."""
        try:
            if self._is_ours(frame):
                self._move(self._find_place(frame))
                return self._on_event if self._is_on else None
            self._n_calls += 1
            if self._n_calls == _N_CALLS:
                self._n_calls = 0
                if self._is_traced and self._reader.charge(_N_CALLS * _CALL_NS):
                    self._stop_tracing()
        except RecursionError:
            # The cell is about to meet it itself, and there is no room for further calls.
            return None
        except BaseException as exc:
            if not self._survive(exc):
                raise
        return None

    def _on_event(self, frame: FrameType, event: str, _argument: object) -> Any:
        """Read when a line of the files begins, or one of their functions is left."""
        if not self._is_traced:
            return None
        try:
            if event == "line":
                self._move(self._find_place(frame))
            elif event == "return":
                self._move(self._find_place(frame.f_back))
        except RecursionError:
            return self._on_event
        except BaseException as exc:
            if not self._survive(exc):
                raise
        return self._on_event

    def _move(self, place: Place) -> None:
        if self._reader.advance(place):
            self._stop_tracing()

    def _stop_tracing(self) -> None:
        self._is_traced = False
        sys.settrace(None)
        self._reader.is_unread = True
