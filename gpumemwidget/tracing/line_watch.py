"""Read malloc's count as each line of a cell begins, and add each change to the line that ran.

Python 3.12 and later report lines by ``sys.monitoring``, earlier ones by ``sys.settrace``. Both
share the readings, whose own memory must not show in the figures, and their budget of time; the
files that are followed; and the errors of our own code, which must not become the cell's.
"""

from __future__ import annotations

import inspect
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Sequence
from types import CodeType, FrameType, TracebackType
from typing import Any, TypeAlias

from gpumemwidget.backends.hooks import find_monitoring, take_tool_number
from gpumemwidget.errors import describe_exception, is_our_error, keep_from_cell
from gpumemwidget.model.cells import CellDevice
from gpumemwidget.model.devices import Frame
from gpumemwidget.model.traces import HostLine, HostLines, NoteKind, TraceNote
from gpumemwidget.recording.forks import survive_fork
from gpumemwidget.tracing.sources import IsEntry, Sources

#: Maximum number of files: a cell is one, and one more for each body of a cell magic in it.
_MAX_FILES = 64
#: Time that reading may always take, so that a short cell is read whole: 20,000 calls of functions
#: on Python 3.11.
_GRACE_NS = 25_000_000
#: Reads an error's traceback whatever its class has under that name.
_read_traceback: Callable[[BaseException], TracebackType | None] = vars(BaseException)[
    "__traceback__"
].__get__

#: A file and a line of it; ``None`` while no line of the files runs.
Place: TypeAlias = "tuple[str, int] | None"


class LineReadings:
    """For each line, how the bytes in use changed while it ran.

    Attributes:
        files: the files whose code ran, the cell's own first.
        start_bytes: bytes in use at the first reading.
        changes: change in bytes over all runs of each line.
        events: each change of 4 KiB and more with its line, in order; the first 10,000.
        unread_bytes: change in bytes while lines ran that were not read one by one.
        notes: on what is missing.
        is_unread: whether other lines may have run since the last reading.

    Args:
        read: returns the bytes in use now.
        call_ns: estimated cost of a report of a line, beside the reading itself.
        grace_ns: time that reading may always take.
    """

    def __init__(self, read: Callable[[], int], call_ns: int, grace_ns: int) -> None:
        self._read = read
        self._grace_ns = grace_ns
        self._clock_ns = time.perf_counter_ns
        self.call_ns = call_ns
        self.files: dict[str, None] = {}
        self.place: Place = None
        self.is_unread = False
        self.changes: dict[Place, int] = {}
        self.events: list[tuple[Place, int]] = []
        self.unread_bytes = 0
        self.notes: list[TraceNote] = []
        self.start_bytes = self._last_bytes = 0
        self._start_ns = self._spent_ns = 0

    def start(self) -> None:
        """Begin with the bytes in use now."""
        # The first readings fill caches that later ones find full.
        for _ in range(3):
            self.advance(None)
        self.changes.clear()
        self.events.clear()
        self.unread_bytes = self._spent_ns = 0
        self._start_ns = self._clock_ns()
        self.start_bytes = self._last_bytes = self._read()

    def advance(self, place: Place) -> bool:
        """Add the change to the line that ran until now; from here on ``place`` runs.

        Returns:
            Whether reading has taken too much of the cell's time.
        """
        start_ns = self._clock_ns()
        self._book()
        self.is_unread = False
        self.place = place
        return self.charge(self._clock_ns() - start_ns + self.call_ns)

    def exclude(self, action: Callable[[], object]) -> None:
        """Run an action of ours that takes memory, and leave its bytes out of the figures."""
        start_ns = self._clock_ns()
        self._book()
        action()
        self._last_bytes = self._read()
        self.charge(self._clock_ns() - start_ns)

    def charge(self, cost_ns: int) -> bool:
        """Add time that was spent on the cell; return whether that is more than a tenth by now."""
        self._spent_ns += cost_ns
        return self._spent_ns > self._grace_ns + (self._clock_ns() - self._start_ns) * 0.1

    def _book(self) -> None:
        change = self._read() - self._last_bytes
        if not change:
            return
        self._last_bytes += change
        # Python's own objects come and go by less.
        if abs(change) >= 4096 and len(self.events) < 10_000:
            self.events.append((None if self.is_unread else self.place, change))
            self._last_bytes = self._read()
        if self.is_unread:
            self.unread_bytes += change
        elif self.place in self.changes:
            self.changes[self.place] += change
        else:
            self.changes[self.place] = change
            # The dictionary may have grown.
            self._last_bytes = self._read()


class LineWatch(ABC):
    """Follows one cell, or one ``with`` block, line by line.

    Args:
        read: returns the bytes in use now.
        on_interrupt: called for a Ctrl-C that landed in our own code: it sends another.
        grace_ns: time that reading may always take, also of a short cell.
    """

    #: Estimated cost of a report of a line, beside the reading itself.
    call_ns: int

    def __init__(
        self,
        read: Callable[[], int],
        *,
        on_interrupt: Callable[[], None],
        grace_ns: int = _GRACE_NS,
    ) -> None:
        self._readings = LineReadings(read, self.call_ns, grace_ns)
        self._on_interrupt = on_interrupt
        self._thread_id = threading.get_ident()
        #: The files that are followed.
        self._files = self._readings.files
        self._is_entry: IsEntry = lambda _: False
        self._is_on = False
        #: The ``id`` of the frame with which following ends; the frame would keep its locals alive.
        self._last_frame: int | None = None
        survive_fork(self)

    @property
    def is_on(self) -> bool:
        """True from ``start`` until ``stop``, or until following has ended by itself."""
        return self._is_on

    def start(
        self, where: IsEntry | FrameType, *, also: Sequence[str] = (), outlives_frame: bool = False
    ) -> bool:
        """Begin to follow files on this thread; return ``False`` where another tool does so.

        Args:
            where: a frame that is running in the file; or a function that returns whether a frame
                that begins is one whose file to follow.
            also: further files to follow; of very many, the last ones.
            outlives_frame: go on until ``stop`` when the frame has ended. Otherwise following ends
                as the frame returns or an exception leaves it. Before Python 3.12 the frame of a
                generator or a coroutine is always outlived, for it yields as it returns.
        """
        also = also[-(_MAX_FILES - 1) :]
        if not isinstance(where, FrameType):
            self._is_entry = where
            self._files.update(dict.fromkeys(also))
            return self._start(None)
        self._files.update(dict.fromkeys((where.f_code.co_filename, *also)))
        if not outlives_frame:
            self._last_frame = id(where)
        return self._start(where)

    def stop(self) -> LineReadings:
        """Remove all hooks, and return the readings. May be called twice."""
        if self._is_on:
            if self._is_displaced():
                self._readings.notes.append(TraceNote(NoteKind.LINES_UNREAD))
                self._readings.is_unread = True
            self._readings.advance(None)
            self._end()
        return self._readings

    def reset_after_fork(self) -> None:
        """Stop following in a forked child."""
        self._end()

    @abstractmethod
    def _start(self, frame: FrameType | None) -> bool:
        """Begin to follow, if that is possible; ``frame`` and those that called it run already."""

    @abstractmethod
    def _leave(self) -> None:
        """Remove all hooks."""

    def _is_displaced(self) -> bool:
        """Return whether another tool has taken our place just now."""
        return False

    def _end(self) -> None:
        if self._is_on:
            self._is_on = False
            self._leave()

    # -- Files and lines ---------------------------------------------------------------------------

    def _find_place(self, frame: FrameType | None) -> Place:
        """Return the innermost line of the files, from ``frame`` outwards."""
        frame = self._find_frame(frame)
        return None if frame is None else (frame.f_code.co_filename, frame.f_lineno or 0)

    def _find_frame(self, frame: FrameType | None) -> FrameType | None:
        while frame is not None and frame.f_code.co_filename not in self._files:
            frame = frame.f_back
        return frame

    def _is_ours(self, frame: FrameType) -> bool:
        filename = frame.f_code.co_filename
        if filename in self._files:
            return True
        if len(self._files) >= _MAX_FILES or not self._is_entry(frame):
            return False
        self._files[filename] = None
        return True

    # -- Errors ------------------------------------------------------------------------------------

    def _guard(self, callback: Callable[..., Any]) -> Callable[..., Any]:
        return keep_from_cell(callback, self._survive)

    def _survive(self, exc: BaseException) -> bool:
        """Keep an error of our own code from the cell; return ``False`` if it is the cell's."""
        if isinstance(exc, KeyboardInterrupt):
            self._on_interrupt()
            return True
        if not is_our_error(exc):
            return False
        if isinstance(exc, Exception):
            self._readings.notes.append(TraceNote(NoteKind.FAILED, describe_exception(exc)))
        self._end()
        return True


class SettraceWatch(LineWatch):
    """Follows lines with ``sys.settrace``.

    The trace function slows all Python code on its thread. Once that has cost too much of the
    cell's time it is taken away, and the rest of the cell is not read line by line.
    ``sys.gettrace()`` shows our function; where others trace, we don't.
    """

    call_ns = 1500
    _is_traced = False
    _n_calls = 0

    def _start(self, frame: FrameType | None) -> bool:
        if sys.gettrace() is not None:
            return False
        # One object each, so that they can be compared with ``is``.
        self._ours, self._local = self._guard(self._on_call), self._guard(self._on_event)
        may_yield = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR
        if frame is not None and frame.f_code.co_flags & may_yield:
            self._last_frame = None
        self._readings.start()
        place = self._find_place(frame)
        while (frame := self._find_frame(frame)) is not None:
            frame.f_trace = self._local
            frame = frame.f_back
        self._is_on = self._is_traced = True
        self._readings.advance(place)
        sys.settrace(self._ours)
        return True

    def _leave(self) -> None:
        self._is_traced = False
        if sys.gettrace() is self._ours:
            sys.settrace(None)
        frame: FrameType | None = sys._getframe()  # noqa: SLF001 - public by its documentation
        while frame is not None:
            if frame.f_trace is self._local:
                frame.f_trace = None
            frame = frame.f_back

    def _is_displaced(self) -> bool:
        return self._is_traced and sys.gettrace() is not self._ours

    # -- Called by the interpreter ----------------------------------------------------------------

    def _on_call(self, frame: FrameType, _event: str, _argument: object) -> Any:
        """Follow a function that begins, or a generator that goes on, if it is of the files."""
        if self._is_ours(frame):
            self._move(self._find_place(frame))
            return self._local
        self._n_calls += 1
        if self._n_calls == 32:
            self._n_calls = 0
            # Each call of any Python function costs some 1,200 ns while tracing.
            if self._is_traced and self._readings.charge(32 * 1200):
                self._stop_tracing()
        return None

    def _on_event(self, frame: FrameType, event: str, _argument: object) -> None:
        """Read when a line of the files begins, or one of their functions is left."""
        if self._is_traced and event == "line":
            self._move(self._find_place(frame))
        elif event == "return" and id(frame) == self._last_frame:
            self.stop()
        elif self._is_traced and event == "return":
            self._move(self._find_place(frame.f_back))

    def _move(self, place: Place) -> None:
        if self._readings.advance(place):
            self._stop_tracing()

    def _stop_tracing(self) -> None:
        self._leave()
        self._readings.is_unread = True


class MonitoringWatch(LineWatch):
    """Follows lines with ``sys.monitoring``.

    Events are switched on for the files' own code alone. Once reading has cost too much of the
    cell's time, a pause begins: lines run unread, and one that runs often in the pause is switched
    off, so that a hot loop goes on at full speed. The pause ends at the next event for which the
    cell can afford reading again. Neither tracebacks nor ``sys.gettrace`` show any of it. Two
    events come from all code: a function's first start, by which the files' code is found, and an
    exception that leaves a function, which can't be switched on for single code objects.
    """

    call_ns = 600
    _is_paused = False

    def _start(self, frame: FrameType | None) -> bool:
        self._monitoring = monitoring = find_monitoring()
        self._codes: list[CodeType] = []
        #: How often each line has run in the present pause.
        self._paused_runs: dict[Place, int] = {}
        tool = take_tool_number("gpumemwidget")
        if tool is None:
            return False
        self._tool = tool
        self._last_code = None if frame is None else frame.f_code
        self._is_on = True
        events = monitoring.events
        self._callbacks: dict[int, Callable[..., Any]] = {
            events.PY_START: self._on_start,
            events.PY_UNWIND: self._on_unwind,
            events.LINE: self._on_line,
            events.PY_RESUME: self._on_resume,
            events.PY_RETURN: self._on_return,
            events.PY_YIELD: self._on_yield,
        }
        self._local = events.LINE | events.PY_RETURN | events.PY_YIELD | events.PY_RESUME
        for event, callback in self._callbacks.items():
            monitoring.register_callback(self._tool, event, self._guard(callback))
        self._readings.start()
        place = self._find_place(frame)
        while (frame := self._find_frame(frame)) is not None:
            self._add(frame.f_code)
            frame = frame.f_back
        monitoring.set_events(self._tool, events.PY_START | events.PY_UNWIND)
        self._readings.advance(place)
        return True

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
        if len(self._codes) < 10_000:
            self._codes.append(code)
            self._monitoring.set_local_events(self._tool, code, self._local)

    # -- Called by the interpreter ----------------------------------------------------------------

    def _on_line(self, code: CodeType, line: int) -> Any:
        return self._move((code.co_filename, line))

    def _on_resume(self, _code: CodeType, _offset: int) -> Any:
        return self._move(self._find_place(_find_running()))

    def _on_return(self, code: CodeType, _offset: int, _value: object) -> Any:
        frame = _find_running()
        if id(frame) == self._last_frame:
            self.stop()
            return None
        answer = self._move(self._find_place(frame.f_back))
        # The place where the last frame will return must go on being reported.
        return None if code is self._last_code else answer

    def _on_yield(self, _code: CodeType, _offset: int, _value: object) -> Any:
        return self._move(self._find_place(_find_running().f_back))

    def _on_start(self, code: CodeType, _offset: int) -> Any:
        """Follow a function's code if it is of the files; called at its first start."""
        if threading.get_ident() != self._thread_id:
            return None if code.co_filename in self._files else self._monitoring.DISABLE
        if self._is_ours(_find_running()):
            self._readings.exclude(lambda: self._add(code))
        return self._monitoring.DISABLE

    def _on_unwind(self, code: CodeType, _offset: int, error: BaseException) -> None:
        """Go on with the caller's line when an exception leaves a function of the files."""
        if code.co_filename not in self._files:
            return
        if id(_find_running()) == self._last_frame:
            _forget_us(error)
            self.stop()
            return
        # Python can't switch this event off, so a pause is observed here.
        if self._is_paused and isinstance(error, Exception):
            return
        _forget_us(error)
        self._move(self._find_place(_find_running().f_back))

    def _move(self, place: Place) -> Any:
        if threading.get_ident() != self._thread_id:
            return None
        readings = self._readings
        if self._is_paused and not readings.charge(readings.call_ns):
            readings.exclude(self._end_pause)
        if not self._is_paused and not readings.advance(place):
            return None
        readings.is_unread = self._is_paused = True
        n_runs = self._paused_runs[place] = self._paused_runs.get(place, 0) + 1
        return self._monitoring.DISABLE if n_runs > 100 else None

    def _end_pause(self) -> None:
        self._is_paused = False
        self._paused_runs.clear()
        for code in self._codes:
            self._monitoring.set_local_events(self._tool, code, 0)
            self._monitoring.set_local_events(self._tool, code, self._local)


def _find_running() -> FrameType:
    """Return the cell's frame, below our callback and the one that guards it."""
    return sys._getframe(3)  # noqa: SLF001 - public by its documentation


def _forget_us(error: BaseException) -> None:
    """Take our own frame off a traceback's end.

    A Ctrl-C is raised where Python next looks for signals, which may be our first instruction,
    before we can catch it.
    """
    traceback = _read_traceback(error)
    last = None if traceback is None else traceback.tb_next
    if traceback is not None and last is not None and last.tb_frame.f_code.co_filename == __file__:
        traceback.tb_next = None


def watch_lines(
    read: Callable[[], int], *, on_interrupt: Callable[[], None], grace_ns: int = _GRACE_NS
) -> LineWatch:
    """Return the ``LineWatch`` for this release of Python."""
    kind = MonitoringWatch if sys.version_info >= (3, 12) else SettraceWatch
    return kind(read, on_interrupt=on_interrupt, grace_ns=grace_ns)


def describe_lines(
    readings: LineReadings, sources: Sources, cell: CellDevice | None = None
) -> HostLines:
    """Return the changes by the lines of the traced source.

    Args:
        readings: the readings at the lines.
        sources: the cell, or the file that the ``with`` block is in, and its parts.
        cell: the host in the cell's record; ``None`` where its end could not be read.
    """
    source = sources.traced

    def number(place: Place) -> int:
        return 0 if place is None else sources.find_line(Frame(*place, "")) or 0

    changes: Counter[int] = Counter()
    for place, n_bytes in readings.changes.items():
        changes[number(place)] += n_bytes
    read_bytes = changes.total() + readings.unread_bytes
    del changes[0]
    before_bytes = None if cell is None else cell.allocated.before_bytes
    after_bytes = None if cell is None else cell.allocated.after_bytes
    if before_bytes is None:
        before_bytes = readings.start_bytes
    if after_bytes is None:
        after_bytes = readings.start_bytes + read_bytes
    return HostLines(
        lines=tuple(
            HostLine(line, text, changes[line])
            for line, text in source.list_shown(
                line for line, n_bytes in changes.items() if n_bytes
            )
        ),
        before_bytes=before_bytes,
        after_bytes=after_bytes,
        # Includes the few bytes between our first and last readings and those of the record.
        outside_bytes=after_bytes - before_bytes - changes.total() - readings.unread_bytes,
        unread_bytes=readings.unread_bytes,
        notes=tuple(readings.notes),
    )
