"""Follow lines with ``sys.settrace`` (before Python 3.12).

The trace function slows all Python code on its thread, so a pause removes it altogether. Only the
thread itself can set it again, so the pause's thread has the interpreter call us there (a *pending
call* of Python's C API). ``sys.gettrace()`` shows our function; where others trace, we don't.

Python 3.11 hangs if a function is called with tracing on, within a pending call, while a further
pending call waits: before entering the function it looks for waiting calls over and over, and none
is run within another one (``DO_TRACING`` in CPython 3.11's Python/ceval.c). So no pending call is
asked for while one of ours waits or runs, and ours calls no function once tracing is on.
"""

from __future__ import annotations

import ctypes
import dis
import sys
import threading
from types import CodeType, FrameType
from typing import Any

from gpumemwidget.tracing.host.line_watch import LineWatch

#: Estimated cost of a call of any Python function while tracing, in nanoseconds.
_CALL_NS = 1200
#: Number of calls whose cost is added at once.
_N_CALLS = 32


class SettraceWatch(LineWatch):
    """Follows lines with ``sys.settrace``."""

    call_ns = 1500
    _is_traced = False
    #: True while a pending call of ours waits or runs.
    _is_asked = False
    _n_calls = 0
    #: In a pause that began in a call of a library: the files' frame that made the call, and the
    #: offset of its instruction.
    _calling: tuple[FrameType, int] | None = None

    def _start(self, frame: FrameType | None) -> str | None:
        if sys.gettrace() is not None:
            return "a debugger or a coverage tool traces this thread"
        # One object, so that it can be compared with ``is``.
        self._ours = self._on_call
        self._pending = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)(self._go_on)
        #: Frames that were running at the start, with the trace functions they had.
        self._entered: list[tuple[FrameType, Any]] = []
        self._is_on = True
        while (frame := self._find_frame(frame)) is not None:
            self._entered.append((frame, frame.f_trace))
            frame = frame.f_back
        self._reader.start()
        self._go_on(None)
        return None

    def _leave(self) -> None:
        if sys.gettrace() is self._ours:
            sys.settrace(None)
        self._is_traced = False
        self._calling = None
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
                self._move(self._find_line(frame))
                return self._on_event if self._is_on else None
            self._n_calls += 1
            if self._n_calls == _N_CALLS:
                self._n_calls = 0
                if self._is_traced and self._reader.charge(_N_CALLS * _CALL_NS):
                    caller = self._find_frame(frame)
                    self._calling = None if caller is None else (caller, caller.f_lasti)
                    self._untrace()
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
                self._move(self._find_line(frame))
            elif event == "return":
                self._move(self._find_line(frame.f_back))
        except RecursionError:
            return self._on_event
        except BaseException as exc:
            if not self._survive(exc):
                raise
        return self._on_event

    # -- Pauses ------------------------------------------------------------------------------------

    def _move(self, line: int) -> None:
        if self._reader.advance(line):
            self._untrace()

    def _untrace(self) -> None:
        self._is_traced = False
        sys.settrace(None)
        self._pause()

    def _resume(self) -> None:
        # Pending calls run on the main thread alone.
        if not self._is_on or self._is_traced or self._is_asked:
            return
        if self._thread_id == threading.main_thread().ident:
            self._is_asked = True
            if ctypes.pythonapi.Py_AddPendingCall(self._pending, None):
                self._is_asked = False  # Python's queue of pending calls is full.

    def _go_on(self, _argument: object) -> int:
        """Set the trace function again; called between two instructions of the thread."""
        is_due = False
        try:
            if self._is_on and sys.gettrace() is not None:
                self._was_displaced = not self._is_traced
            elif self._is_on and not self._is_traced:
                frame = sys._getframe(1)  # noqa: SLF001 - public by its documentation
                self._look_for_entries(frame)
                if self._is_same_call(self._find_frame(frame)):
                    self._reader.is_unread = False
                self._calling = None
                self._reader.exclude(lambda: self._enter(frame))
                self._reader.advance(self._find_line(frame))
                is_due = self._is_traced = True
            self._is_asked = False
            if is_due:
                sys.settrace(self._ours)
        except BaseException as exc:  # noqa: BLE001 - there is nobody to raise it to
            self._is_asked = False
            self._survive(exc)
        return 0

    def _is_same_call(self, frame: FrameType | None) -> bool:
        """Return whether the call that ran when the pause began still runs."""
        if frame is None or self._calling is None or self._calling[0] is not frame:
            return False
        return self._calling[1] == frame.f_lasti and not _is_in_loop(frame.f_code, frame.f_lasti)

    def _look_for_entries(self, frame: FrameType | None) -> None:
        """Add the files of code that began in a pause, the outermost first."""
        frames = []
        while frame is not None:
            frames.append(frame)
            frame = frame.f_back
        for running in reversed(frames):
            self._is_ours(running)

    def _enter(self, frame: FrameType | None) -> None:
        """Follow the frames of the files that are running."""
        while (frame := self._find_frame(frame)) is not None:
            frame.f_trace = self._on_event
            frame = frame.f_back


def _is_in_loop(code: CodeType, offset: int) -> bool:
    """Return whether an instruction may run more than once in one call of its function."""
    jumps = {*dis.hasjrel, *dis.hasjabs}
    return any(
        step.opcode in jumps and step.argval <= offset <= step.offset
        for step in dis.get_instructions(code)
    )
