"""Follow lines with ``sys.monitoring`` (Python 3.12 and later).

Events are switched on for the files' own code alone. Once reading has cost too much of the cell's
time, a pause begins: lines run unread, and one that runs often in the pause is switched off, so
that a hot loop goes on at full speed. The pause ends at the next event for which the cell can
afford reading again. Neither tracebacks nor ``sys.gettrace`` show any of it. Two events come from
all code: a function's first start, by which the files' code is found, and an exception that leaves
a function, which can't be switched on for single code objects.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from threading import get_ident
from types import CodeType, FrameType, TracebackType
from typing import Any

from gpumemwidget.tracing.host.line_watch import LineWatch, Place

#: Reads an error's traceback whatever its class has under that name.
_read_traceback: Callable[[BaseException], TracebackType | None] = vars(BaseException)[
    "__traceback__"
].__get__
#: Maximum number of code objects under the files' names.
_MAX_CODES = 10_000
#: Number of times that a line runs in a pause before it is switched off.
_MAX_PAUSED_RUNS = 100


class MonitoringWatch(LineWatch):
    """Follows lines with ``sys.monitoring``."""

    call_ns = 600
    _is_paused = False

    def _start(self, frame: FrameType | None) -> str | None:
        self._monitoring = monitoring = getattr(sys, "monitoring")  # noqa: B009 - unknown before 3.12
        self._codes: list[CodeType] = []
        # Numbers that are reserved for no kind of tool.
        free = [tool for tool in (4, 3) if monitoring.get_tool(tool) is None]
        if not free:
            return "other tools have taken all places of sys.monitoring"
        self._tool = free[0]
        monitoring.use_tool_id(self._tool, "gpumemwidget")
        self._is_on = True
        events = monitoring.events
        self._callbacks = {
            events.PY_START: self._on_start,
            events.PY_UNWIND: self._on_unwind,
            events.LINE: self._follow(lambda code, line, _: (code.co_filename, line)),
            events.PY_RESUME: self._follow(_find_resumed),
            events.PY_RETURN: self._follow(self._find_caller),
            events.PY_YIELD: self._follow(self._find_caller),
        }
        self._local = events.LINE | events.PY_RETURN | events.PY_YIELD | events.PY_RESUME
        for event, callback in self._callbacks.items():
            monitoring.register_callback(self._tool, event, callback)
        self._reader.start()
        place = self._find_place(frame)
        while (frame := self._find_frame(frame)) is not None:
            self._add(frame.f_code)
            frame = frame.f_back
        monitoring.set_events(self._tool, events.PY_START | events.PY_UNWIND)
        self._reader.advance(place)
        return None

    def _leave(self) -> None:
        monitoring, tool = self._monitoring, self._tool
        monitoring.set_events(tool, 0)
        for code in self._codes:
            monitoring.set_local_events(tool, code, 0)
        self._codes.clear()
        for event in self._callbacks:
            monitoring.register_callback(tool, event, None)
        monitoring.free_tool_id(tool)
        self._callbacks.clear()

    def _add(self, code: CodeType) -> None:
        if len(self._codes) < _MAX_CODES:
            self._codes.append(code)
            self._monitoring.set_local_events(self._tool, code, self._local)

    # -- Called by the interpreter ----------------------------------------------------------------

    def _follow(
        self, find_place: Callable[[CodeType, Any, FrameType], Place]
    ) -> Callable[..., Any]:
        """Return the callback of an event; ``find_place`` tells which line runs from then on."""

        def on_event(code: CodeType, argument: Any, _value: object = None) -> Any:
            if get_ident() != self._thread_id:
                self._saw_threads = True
                return None
            try:
                frame = sys._getframe(1)  # noqa: SLF001 - public by its documentation
                return self._move(find_place(code, argument, frame))
            except RecursionError:
                # The cell is about to meet it itself, and there is no room for further calls.
                return None
            except BaseException as exc:
                if not self._survive(exc):
                    raise
            return None

        return on_event

    def _find_caller(self, _code: CodeType, _offset: int, frame: FrameType) -> Place:
        return self._find_place(frame.f_back)

    def _on_start(self, code: CodeType, _offset: int) -> Any:
        """Follow a function's code if it is of the files; called at its first start."""
        try:
            if get_ident() != self._thread_id:
                self._saw_threads |= code.co_filename in self._files
                return None if code.co_filename in self._files else self._monitoring.DISABLE
            if self._is_ours(sys._getframe(1)):  # noqa: SLF001 - public by its documentation
                self._reader.exclude(lambda: self._add(code))
        except RecursionError:
            return None
        except BaseException as exc:
            if not self._survive(exc):
                raise
        return self._monitoring.DISABLE

    def _on_unwind(self, code: CodeType, _offset: int, error: BaseException) -> None:
        """Go on with the caller's line when an exception leaves a function of the files."""
        if code.co_filename not in self._files:
            return
        try:
            # Python can't switch this event off, so a pause is observed here.
            if self._is_paused and isinstance(error, Exception):
                return
            _forget_us(error)
            if get_ident() == self._thread_id:
                frame = sys._getframe(1)  # noqa: SLF001 - public by its documentation
                self._move(self._find_place(frame.f_back))
        except RecursionError:
            return
        except BaseException as exc:
            if not self._survive(exc):
                raise

    def _move(self, place: Place) -> Any:
        reader = self._reader
        if self._is_paused and not reader.charge(self.call_ns):
            reader.exclude(self._end_pause)
        if not self._is_paused and not reader.advance(place):
            return None
        reader.is_unread = self._is_paused = True
        n_runs = self._unread[place] = self._unread.get(place, 0) + 1
        return self._monitoring.DISABLE if n_runs > _MAX_PAUSED_RUNS else None

    def _end_pause(self) -> None:
        self._is_paused = False
        self._unread = dict.fromkeys(self._unread, 0)
        for code in self._codes:
            self._monitoring.set_local_events(self._tool, code, 0)
            self._monitoring.set_local_events(self._tool, code, self._local)


def _find_resumed(code: CodeType, _offset: int, frame: FrameType) -> tuple[str, int]:
    return code.co_filename, frame.f_lineno


def _forget_us(error: BaseException) -> None:
    """Take our own frame off a traceback's end.

    A Ctrl-C is raised where Python next looks for signals, which may be our first instruction,
    before we can catch it.
    """
    traceback = _read_traceback(error)
    last = None if traceback is None else traceback.tb_next
    if traceback is not None and last is not None and last.tb_frame.f_code.co_filename == __file__:
        traceback.tb_next = None
