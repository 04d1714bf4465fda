"""The lines that run, from ``sys.settrace`` (before Python 3.12).

It slows all Python code on its thread, so that it is taken off altogether in a pause. Only the
thread itself can put it on again, so the pause's thread has the interpreter call us there. While
it is on, ``sys.gettrace()`` tells of it; where somebody else traces, we don't.
"""

from __future__ import annotations

import ctypes
import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

from gpumemwidget.measure.linehooks import LineHooks

__all__ = ["SettraceHooks"]

#: What a call of any Python function, and its lines, cost more while it is on, by estimate.
_CALL_NS = 1200
#: Calls on end that are charged at once.
_N_CALLS = 32


class SettraceHooks(LineHooks):
    """By ``sys.settrace``."""

    call_ns = 1500
    _is_traced = False
    _paused_in_call = False
    _n_calls = 0
    _was_displaced = False

    @property
    def was_displaced(self) -> bool:
        """Whether somebody else has taken our place since."""
        return self._was_displaced

    def _start(self, frame: FrameType | None) -> str | None:
        if sys.gettrace() is not None:
            return "a debugger or a coverage tool traces this thread"
        # One object, so that we know it again.
        self._ours = self._on_call
        self._local = self._on_event
        call = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)
        self._pending, self._looking = call(self._go_on), call(self._see_line)
        #: Frames that ran before us and outlast us, with the trace functions they had.
        self._entered: list[tuple[FrameType, Any]] = []
        self._is_on = True
        while frame is not None:
            if frame.f_code.co_filename in self._files:
                self._entered.append((frame, frame.f_trace))
            frame = frame.f_back
        self._reader.start()
        self._go_on(None)
        return None

    def _leave(self) -> None:
        if sys.gettrace() is self._ours:
            sys.settrace(None)
        elif self._is_traced:
            self._was_displaced = True
        self._is_traced = False
        for frame, trace in self._entered:
            frame.f_trace = trace
        self._entered.clear()

    def _enter(self, frame: FrameType | None) -> None:
        """Follow the frames of the file that are running."""
        while frame is not None:
            if frame.f_code.co_filename in self._files:
                frame.f_trace = self._local
            frame = frame.f_back

    def _look_for_entries(self, frame: FrameType | None) -> None:
        """Take in the files of code that began in a pause, the outermost first."""
        frames = []
        while frame is not None:
            frames.append(frame)
            frame = frame.f_back
        for each in reversed(frames):
            self._is_ours(each)

    def _trace(self) -> None:
        self._is_traced = True
        sys.settrace(self._ours)

    # -- What the interpreter calls ----------------------------------------------------------------

    def _on_call(self, frame: FrameType, _event: str, _argument: object) -> Any:
        """Any function begins, or a generator goes on."""
        try:
            if self._is_ours(frame):
                self._move(self._place(frame.f_code.co_filename, frame.f_lineno))
                return self._local if self._is_on else None
            self._n_calls += 1
            if self._n_calls == _N_CALLS:
                self._n_calls = 0
                if self._is_traced and self._reader.charge(_N_CALLS * _CALL_NS):
                    self._pause(in_call=True)
        except RecursionError:
            # The code is about to meet it itself. There is no room to ask what to do about it.
            return None
        except BaseException as exc:
            if not self._survive(exc):
                raise
        return None

    def _on_event(self, frame: FrameType, event: str, _argument: object) -> Any:
        """A line of the file begins, or one of its functions is left."""
        if not self._is_traced:
            return None
        try:
            if event == "line":
                self._move(self._place(frame.f_code.co_filename, frame.f_lineno))
            elif event == "return":
                self._move(self._find_line(frame.f_back))
        except RecursionError:
            return self._local
        except BaseException as exc:
            if not self._survive(exc):
                raise
        return self._local

    # -- Pauses ------------------------------------------------------------------------------------

    def _move(self, line: int) -> None:
        if self._reader.advance(line):
            self._pause()

    def _pause(self, *, in_call: bool = False) -> None:
        self._is_traced = False
        self._paused_in_call = in_call
        sys.settrace(None)
        self._reader.open_gap()
        if threading.get_ident() == threading.main_thread().ident:
            self._pauses.ask()
        # Elsewhere nobody could put it on again.

    def _resume(self) -> None:
        if self._is_on:
            ctypes.pythonapi.Py_AddPendingCall(self._pending, None)

    def _go_on(self, _argument: object) -> int:
        """Put it on again; between two instructions of whatever the thread runs."""
        try:
            if self._is_on and sys.gettrace() is not None:
                self._was_displaced = not self._is_traced
            elif self._is_on and not self._is_traced:
                frame = sys._getframe(1)  # noqa: SLF001 - public by its documentation
                self._look_for_entries(frame)
                line = self._find_line(frame)
                if self._paused_in_call:
                    # The line went on until a moment ago.
                    self._reader.drop_gap()
                self._reader.exclude(lambda: self._enter(frame))
                self._trace()
                self._reader.advance(line)
        except BaseException as exc:  # noqa: BLE001 - there is nobody to raise it to
            self._survive(exc)
        return 0

    def _find_look(self) -> Callable[[], bool]:
        return self._look

    def _look(self) -> bool:
        """A line that has called a library and goes on: what comes is its own, until it ends."""
        needed = self._is_on and self._paused_in_call and not self._is_traced
        if needed:
            ctypes.pythonapi.Py_AddPendingCall(self._looking, None)
        return needed

    def _see_line(self, _argument: object) -> int:
        """Within such a pause, on the thread that is read: has the line ended?"""
        try:
            if self._is_on and self._paused_in_call and not self._is_traced:
                frame = sys._getframe(1)  # noqa: SLF001 - as above
                line = self._find_line(frame)
                if line != self._reader.line:
                    self._reader.drop_gap()
                    self._reader.advance(line)
                    self._reader.open_gap()
                    self._paused_in_call = frame.f_code.co_filename not in self._files
        except BaseException as exc:  # noqa: BLE001 - there is nobody to raise it to
            self._survive(exc)
        return 0
