"""Read malloc's count as each line of a cell begins, and add each change to the line that ran.

Python 3.12 and later report lines by ``sys.monitoring`` (``monitoring.py``), earlier ones by
``sys.settrace`` (``settrace.py``). Both share this module: the readings, whose own memory must
not show in the figures, and their budget of time; the files that are followed; the pauses; and the
errors of our own code, which must not become the cell's.
"""

from __future__ import annotations

import _thread
import contextvars
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from gpumemwidget.failures import describe_exception
from gpumemwidget.model.traces import NoteKind, TraceNote
from gpumemwidget.recording.forks import survive_fork

#: The folder of the package ``gpumemwidget``.
_PACKAGE = str(Path(__file__).parents[2])
#: Length of a pause in reading, in seconds.
_PAUSE_S = 0.02
#: Maximum lines of a file; line ``n`` of file ``i`` has the number ``i * _MAX_LINES + n``.
_MAX_LINES = 1 << 16
#: Maximum number of files: a cell is one, and one more for each body of a cell magic in it.
_MAX_FILES = 64
#: Share of the cell's time that reading may take.
_SHARE = 0.1
#: Time that reading may always take, so that a short cell is read whole: 20,000 calls of functions
#: on Python 3.11.
_GRACE_NS = 25_000_000

#: Returns whether a frame that begins is that of the code to follow.
IsEntry = Callable[[FrameType], bool]


@dataclass(frozen=True, slots=True)
class LineReadings:
    """The readings of a cell.

    Attributes:
        files: the files whose code ran, the cell's own first.
        start_bytes: bytes in use at the first reading.
        changes: by file and line, the change in bytes over all runs of the line; ``("", 0)`` for
            changes while no line of the files ran.
        unread_bytes: change in bytes while lines ran that were not read one by one.
        unread_lines: the lines that were not read; empty if they are not known.
        n_readings: number of readings.
        notes: on what is missing.
    """

    files: tuple[str, ...]
    start_bytes: int
    changes: dict[tuple[str, int], int]
    unread_bytes: int
    unread_lines: frozenset[tuple[str, int]]
    n_readings: int
    notes: tuple[TraceNote, ...]


class LineReader:
    """Adds up, for each line, how the bytes in use changed while it ran.

    Attributes:
        call_ns: estimated cost of being told of a line, beside the reading itself.
        line: the number of the line that runs; 0 for none of the files'.
        is_unread: whether other lines may have run since the last reading.
        changes: change in bytes, by the line's number.
        unread_bytes: change in bytes while lines ran that were not read one by one.

    Args:
        read: returns the bytes in use now.
        clock_ns: nanoseconds that never go back.
    """

    def __init__(
        self, read: Callable[[], int], *, clock_ns: Callable[[], int] = time.perf_counter_ns
    ) -> None:
        self._read = read
        self._clock_ns = clock_ns
        self.call_ns = 0
        self.line = 0
        self.is_unread = False
        self.changes: dict[int, int] = {}
        self.unread_bytes = 0
        self.n_readings = 0
        self.start_bytes = self._last_bytes = 0
        self._start_ns = self._spent_ns = 0

    def start(self) -> None:
        """Begin with the bytes in use now."""
        # The first readings fill caches that later ones find full.
        for _ in range(3):
            self.advance(0)
        self.changes.clear()
        self.unread_bytes = self.n_readings = self._spent_ns = 0
        self._start_ns = self._clock_ns()
        self.start_bytes = self._last_bytes = self._read()

    def advance(self, line: int) -> bool:
        """Add the change to the line that ran until now; from here on ``line`` runs.

        Returns:
            Whether reading has taken too much of the cell's time.
        """
        start_ns = self._clock_ns()
        self._book()
        self.is_unread = False
        self.line = line
        self.n_readings += 1
        end_ns = self._clock_ns()
        return self._spend(end_ns - start_ns + self.call_ns, end_ns)

    def is_over_budget(self) -> bool:
        """Return whether reading has taken too much of the cell's time; from any thread."""
        return self._is_over(self._clock_ns())

    def charge(self, cost_ns: int) -> bool:
        """Add time that passed without a reading; return whether it is too much."""
        return self._spend(cost_ns, self._clock_ns())

    def exclude(self, action: Callable[[], object]) -> None:
        """Run an action of ours that takes memory, and leave its bytes out of the figures."""
        start_ns = self._clock_ns()
        self._book()
        action()
        self._last_bytes = self._read()
        end_ns = self._clock_ns()
        self._spend(end_ns - start_ns, end_ns)

    def _book(self) -> None:
        change = self._read() - self._last_bytes
        if not change:
            return
        self._last_bytes += change
        if self.is_unread:
            self.unread_bytes += change
        elif self.line in self.changes:
            self.changes[self.line] += change
        else:
            self.changes[self.line] = change
            # The dictionary may have grown.
            self._last_bytes = self._read()

    def _spend(self, cost_ns: int, now_ns: int) -> bool:
        self._spent_ns += cost_ns
        return self._is_over(now_ns)

    def _is_over(self, now_ns: int) -> bool:
        return self._spent_ns > _GRACE_NS + (now_ns - self._start_ns) * _SHARE


class LineWatch(ABC):
    """Follows one cell, or one ``with`` block, line by line.

    Args:
        read: returns the bytes in use now.
        on_interrupt: called for a Ctrl-C that landed in our own code: it sends another.
        clock_ns: nanoseconds that never go back.
    """

    #: Estimated cost of being told of a line, beside the reading itself.
    call_ns: int

    def __init__(
        self,
        read: Callable[[], int],
        *,
        on_interrupt: Callable[[], None],
        clock_ns: Callable[[], int] = time.perf_counter_ns,
    ) -> None:
        self._reader = LineReader(read, clock_ns=clock_ns)
        self._reader.call_ns = self.call_ns
        self._on_interrupt = on_interrupt
        self._thread_id = threading.get_ident()
        #: The files that are followed, and the number of each file's line 0.
        self._files: dict[str, int] = {}
        self._is_entry: IsEntry | None = None
        self._is_on = False
        #: Numbers of lines that ran in a pause, as far as they are known.
        self._unread: set[int] = set()
        #: The error of our own code that ended the reading.
        self._failure: Exception | None = None
        #: True if the files' code was seen to run on other threads too.
        self._saw_threads = False
        #: True if another tool took our place.
        self._was_displaced = False
        # A plain lock takes no memory while a thread waits for it.
        self._stopped = _thread.allocate_lock()
        self._pause_thread: threading.Thread | None = None
        survive_fork(self)

    def start_at(self, is_entry: IsEntry) -> str | None:
        """Follow the file of each code for which ``is_entry`` holds, on this thread.

        Returns:
            Why that can't be done, in a few words; ``None`` where it is.
        """
        self._is_entry = is_entry
        return self._start(None)

    def start_in(self, frame: FrameType) -> str | None:
        """Follow the file of a frame that is running on this thread; see ``start_at``."""
        self._add_file(frame.f_code.co_filename)
        return self._start(frame)

    def stop(self) -> LineReadings:
        """Remove all hooks, and return the readings. May be called twice."""
        reader = self._reader
        if self._is_on:
            self._was_displaced |= self._is_displaced()
            reader.is_unread |= self._was_displaced
            reader.advance(0)
        self._end()
        return LineReadings(
            files=tuple(self._files),
            start_bytes=reader.start_bytes,
            changes={self._locate(line): n for line, n in reader.changes.items()},
            unread_bytes=reader.unread_bytes,
            unread_lines=frozenset(map(self._locate, self._unread)),
            n_readings=reader.n_readings,
            notes=tuple(self._list_notes()),
        )

    def reset_after_fork(self) -> None:
        """Stop following in a forked child."""
        self._pause_thread = None
        if self._is_on:
            self._is_on = False
            self._leave()

    @abstractmethod
    def _start(self, frame: FrameType | None) -> str | None:
        """Begin to follow; ``frame`` and those that called it run already."""

    @abstractmethod
    def _leave(self) -> None:
        """Remove all hooks."""

    @abstractmethod
    def _resume(self) -> None:
        """End the pause, if there is one; called on a thread of its own."""

    def _is_displaced(self) -> bool:
        """Return whether another tool has taken our place just now."""
        return False

    # -- Files and lines ---------------------------------------------------------------------------

    def _add_file(self, filename: str) -> None:
        if len(self._files) < _MAX_FILES:
            self._files[filename] = len(self._files) * _MAX_LINES

    def _count(self, filename: str, line: int | None) -> int:
        """Return the number of a line; 0 for none."""
        return self._files[filename] + line if line and line < _MAX_LINES else 0

    def _locate(self, number: int) -> tuple[str, int]:
        file, line = divmod(number, _MAX_LINES)
        return (list(self._files)[file], line) if line else ("", 0)

    def _find_line(self, frame: FrameType | None) -> int:
        """Return the number of the innermost line of the files, from ``frame`` outwards, or 0."""
        frame = self._find_frame(frame)
        return 0 if frame is None else self._count(frame.f_code.co_filename, frame.f_lineno)

    def _find_frame(self, frame: FrameType | None) -> FrameType | None:
        while frame is not None and frame.f_code.co_filename not in self._files:
            frame = frame.f_back
        return frame

    def _is_ours(self, frame: FrameType) -> bool:
        """Return whether a frame that begins is of the files."""
        filename = frame.f_code.co_filename
        if filename in self._files:
            return True
        if self._is_entry is None or not self._is_entry(frame):
            return False
        self._add_file(filename)
        return filename in self._files

    # -- Pauses ------------------------------------------------------------------------------------

    def _pause(self) -> None:
        """Begin a pause: lines may run unread until its end."""
        self._reader.is_unread = True
        if self._pause_thread is None:
            self._reader.exclude(self._start_pauses)

    def _start_pauses(self) -> None:
        self._stopped.acquire()
        context = contextvars.copy_context()
        self._pause_thread = threading.Thread(
            target=context.run, args=(self._end_pauses,), name="gpumemwidget-lines", daemon=True
        )
        self._pause_thread.start()

    def _end_pauses(self) -> None:
        while not self._stopped.acquire(timeout=_PAUSE_S):
            # A single reading may take longer than one pause makes up for.
            if self._reader.is_over_budget():
                continue
            try:
                self._resume()
            except Exception as exc:  # noqa: BLE001 - told with what was read
                self._note_failure(exc)
                return

    def _end(self) -> None:
        thread, self._pause_thread = self._pause_thread, None
        if thread is not None:
            self._stopped.release()
            thread.join()
        if self._is_on:
            self._is_on = False
            self._leave()

    # -- Errors ------------------------------------------------------------------------------------

    def _survive(self, exc: BaseException) -> bool:
        """Keep an error of our own code from the cell; return ``False`` if it is the cell's."""
        if isinstance(exc, RecursionError):
            return True  # The cell is about to meet it itself.
        if isinstance(exc, KeyboardInterrupt):
            self._on_interrupt()
            return True
        traceback = exc.__traceback__
        while traceback is not None and traceback.tb_next is not None:
            traceback = traceback.tb_next
        if traceback is not None and not traceback.tb_frame.f_code.co_filename.startswith(_PACKAGE):
            return False  # Raised by a signal handler of the user's.
        if isinstance(exc, Exception):
            self._note_failure(exc)
        self._end()
        return True

    def _note_failure(self, exc: Exception) -> None:
        # The traceback's frames hold the cell's.
        self._failure = exc.with_traceback(None)

    def _list_notes(self) -> list[TraceNote]:
        notes = []
        if self._failure is not None:
            notes.append(TraceNote(NoteKind.READING_FAILED, describe_exception(self._failure)))
        elif self._was_displaced:
            notes.append(TraceNote(NoteKind.TRACING_REPLACED))
        if self._saw_threads:
            notes.append(TraceNote(NoteKind.OTHER_THREADS))
        return notes
