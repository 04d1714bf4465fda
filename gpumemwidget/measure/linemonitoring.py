"""The lines that run, from ``sys.monitoring`` (Python 3.12 and later).

Its events are switched on for the file's own code alone, and off again line by line where reading
them is too dear. Nothing of it is seen in tracebacks or by ``sys.gettrace``. Two events are told of
all code: each function's first start, by which the file's code is found, and that an exception
leaves a function, which can be had no other way.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable
from threading import get_ident
from types import CodeType, FrameType, TracebackType
from typing import Any

from gpumemwidget.measure.linehooks import LineHooks

__all__ = ["MonitoringHooks"]

#: Without what a class of the user's may have in its place.
_read_traceback: Callable[[BaseException], TracebackType | None] = vars(BaseException)[
    "__traceback__"
].__get__
#: Code beyond so much under the file's name is not read.
_MOST_CODES = 10_000


class MonitoringHooks(LineHooks):
    """By ``sys.monitoring``."""

    call_ns = 600
    _codes: list[CodeType]
    _tool = 0

    def _start(self, frame: FrameType | None) -> str | None:
        self._monitoring = monitoring = getattr(sys, "monitoring")  # noqa: B009 - unknown before 3.12
        self._codes = []
        #: Lines that were off once, and whether any is now.
        self._hot: set[int] = set()
        self._is_thin = False
        # Those that no kind of tool is meant to take.
        free = [tool for tool in (4, 3) if monitoring.get_tool(tool) is None]
        if not free:
            return "other tools use sys.monitoring, and have left no place"
        self._tool = free[0]
        monitoring.use_tool_id(self._tool, "gpumemwidget")
        self._is_on = True
        events = monitoring.events
        self._disable = monitoring.DISABLE
        self._local = events.LINE | events.PY_RETURN | events.PY_YIELD | events.PY_RESUME
        for event, callback in (
            (events.PY_START, self._on_start),
            (events.PY_UNWIND, self._on_unwind),
            (events.LINE, self._on_line),
            (events.PY_RETURN, self._on_leave),
            (events.PY_YIELD, self._on_leave),
            (events.PY_RESUME, self._on_resume),
        ):
            monitoring.register_callback(self._tool, event, callback)
        self._reader.start()
        line = self._find_line(frame)
        while frame is not None:
            if frame.f_code.co_filename in self._files:
                self._add(frame.f_code)
            frame = frame.f_back
        monitoring.set_events(self._tool, events.PY_START | events.PY_UNWIND)
        self._reader.advance(line)
        return None

    def _leave(self) -> None:
        monitoring, tool = self._monitoring, self._tool
        monitoring.set_events(tool, 0)
        for code in self._codes:
            monitoring.set_local_events(tool, code, 0)
        self._codes.clear()
        events = monitoring.events
        for event in (
            *(events.PY_START, events.PY_UNWIND, events.LINE),
            *(events.PY_RETURN, events.PY_YIELD, events.PY_RESUME),
        ):
            monitoring.register_callback(tool, event, None)
        monitoring.free_tool_id(tool)

    def _resume(self) -> None:
        if not self._is_on:
            return
        # From C, so that no other thread comes in between: a line that ran while all are off would
        # be taken for one of those that were off before.
        codes = [code for code in self._codes for _ in range(2)]
        masks = [0, self._local] * (len(codes) // 2)
        deque(
            map(self._monitoring.set_local_events, [self._tool] * len(codes), codes, masks),
            maxlen=0,
        )
        self._is_thin = False

    def _add(self, code: CodeType) -> None:
        if len(self._codes) < _MOST_CODES:
            self._codes.append(code)
            self._monitoring.set_local_events(self._tool, code, self._local)

    # -- What the interpreter calls ----------------------------------------------------------------

    def _on_start(self, code: CodeType, _offset: int) -> Any:
        """Any function begins for the first time."""
        try:
            if get_ident() != self._thread:
                self.saw_threads |= code.co_filename in self._files
                return None if code.co_filename in self._files else self._disable
            if self._is_ours(sys._getframe(1)):  # noqa: SLF001 - public by its documentation
                self._reader.exclude(lambda: self._add(code))
        except RecursionError:
            # The code is about to meet it itself. There is no room to ask what to do about it.
            return None
        except BaseException as exc:
            if not self._survive(exc):
                raise
        return self._disable

    def _on_line(self, code: CodeType, line: int) -> Any:
        try:
            if get_ident() != self._thread:
                self.saw_threads = True
                return None
            return self._move(self._place(code.co_filename, line))
        except RecursionError:
            return None
        except BaseException as exc:
            if not self._survive(exc):
                raise
        return None

    def _on_leave(self, _code: CodeType, _offset: int, _value: object) -> Any:
        """A function of the file returns or yields."""
        try:
            if get_ident() != self._thread:
                self.saw_threads = True
                return None
            return self._move(self._find_line(sys._getframe(1).f_back))  # noqa: SLF001 - as above
        except RecursionError:
            return None
        except BaseException as exc:
            if not self._survive(exc):
                raise
        return None

    def _on_resume(self, code: CodeType, _offset: int) -> Any:
        """A generator of the file goes on."""
        try:
            if get_ident() != self._thread:
                self.saw_threads = True
                return None
            line = sys._getframe(1).f_lineno  # noqa: SLF001 - as above
            return self._move(self._place(code.co_filename, line))
        except RecursionError:
            return None
        except BaseException as exc:
            if not self._survive(exc):
                raise
        return None

    def _on_unwind(self, code: CodeType, _offset: int, error: BaseException) -> None:
        """An exception leaves a function, any function."""
        if code.co_filename not in self._files:
            return
        try:
            # It can't be switched off by itself, so that a pause is kept here.
            if self._reader.is_gap and isinstance(error, Exception):
                return
            _forget_us(error)
            if get_ident() == self._thread:
                self._move(self._find_line(sys._getframe(1).f_back))  # noqa: SLF001 - as above
        except RecursionError:
            return
        except BaseException as exc:
            if not self._survive(exc):
                raise

    def _move(self, line: int) -> Any:
        if self._reader.advance(line):
            self._hot.add(line)
            self._is_thin = True
            self._reader.open_gap()
            self._pauses.ask()
            return self._disable
        if self._is_thin and line in self._hot:
            # Lines beside it, of the same loop, may be off.
            self._reader.open_gap()
        return None


def _forget_us(error: BaseException) -> None:
    """Take our own frame off a traceback's end.

    A Ctrl-C that comes while a line runs is raised where Python looks for signals next: that may be
    the first instruction of ours, before we can catch it.
    """
    traceback = _read_traceback(error)
    last = None if traceback is None else traceback.tb_next
    if traceback is not None and last is not None and last.tb_frame.f_code.co_filename == __file__:
        traceback.tb_next = None
