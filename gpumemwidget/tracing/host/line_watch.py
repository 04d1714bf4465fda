"""Read malloc's count as each line of a cell begins, and add each change to the line that ran.

Python 3.12 and later report lines by ``sys.monitoring`` (``monitoring.py``), earlier ones by
``sys.settrace`` (``settrace.py``). Both share this module: the readings, whose own memory must
not show in the figures, and their budget of time; the files that are followed; and the errors of
our own code, which must not become the cell's.
"""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import TypeAlias

from gpumemwidget.errors import describe_exception
from gpumemwidget.model.traces import NoteKind, TraceNote
from gpumemwidget.recording.forks import survive_fork

#: The folder of the package ``gpumemwidget``.
_PACKAGE = str(Path(__file__).parents[2])
#: Maximum number of files: a cell is one, and one more for each body of a cell magic in it.
_MAX_FILES = 64
#: Share of the cell's time that reading may take.
_SHARE = 0.1
#: Time that reading may always take, so that a short cell is read whole: 40,000 calls of functions
#: on Python 3.11.
_GRACE_NS = 50_000_000

#: Returns whether a frame that begins is that of the code to follow.
IsEntry: TypeAlias = Callable[[FrameType], bool]
#: A file and a line of it; ``None`` while no line of the files runs.
Place: TypeAlias = "tuple[str, int] | None"


@dataclass(frozen=True, slots=True)
class LineReadings:
    """The readings of a cell.

    Attributes:
        files: the files whose code ran, the cell's own first.
        start_bytes: bytes in use at the first reading.
        changes: the change in bytes over all runs of each line.
        unread_bytes: change in bytes while lines ran that were not read one by one.
        unread_lines: the lines that were not read; empty if they are not known.
        n_readings: number of readings.
        notes: on what is missing.
    """

    files: tuple[str, ...]
    start_bytes: int
    changes: dict[Place, int]
    unread_bytes: int
    unread_lines: frozenset[Place]
    n_readings: int
    notes: tuple[TraceNote, ...]


class LineReader:
    """Adds up, for each line, how the bytes in use changed while it ran.

    Attributes:
        call_ns: estimated cost of being told of a line, beside the reading itself.
        place: the line that runs.
        is_unread: whether other lines may have run since the last reading.
        changes: change in bytes, by the line.
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
        self.place: Place = None
        self.is_unread = False
        self.changes: dict[Place, int] = {}
        self.unread_bytes = 0
        self.n_readings = 0
        self.start_bytes = self._last_bytes = 0
        self._start_ns = self._spent_ns = 0

    def start(self) -> None:
        """Begin with the bytes in use now."""
        # The first readings fill caches that later ones find full.
        for _ in range(3):
            self.advance(None)
        self.changes.clear()
        self.unread_bytes = self.n_readings = self._spent_ns = 0
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
        self.n_readings += 1
        return self.charge(self._clock_ns() - start_ns + self.call_ns)

    def exclude(self, action: Callable[[], object]) -> None:
        """Run an action of ours that takes memory, and leave its bytes out of the figures."""
        start_ns = self._clock_ns()
        self._book()
        action()
        self._last_bytes = self._read()
        self.charge(self._clock_ns() - start_ns)

    def charge(self, cost_ns: int) -> bool:
        """Add time that was spent on the cell; return whether that is too much by now."""
        self._spent_ns += cost_ns
        return self._spent_ns > _GRACE_NS + (self._clock_ns() - self._start_ns) * _SHARE

    def _book(self) -> None:
        change = self._read() - self._last_bytes
        if not change:
            return
        self._last_bytes += change
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
    """

    #: Estimated cost of being told of a line, beside the reading itself.
    call_ns: int

    def __init__(self, read: Callable[[], int], *, on_interrupt: Callable[[], None]) -> None:
        self._reader = LineReader(read)
        self._reader.call_ns = self.call_ns
        self._on_interrupt = on_interrupt
        self._thread_id = threading.get_ident()
        #: The files that are followed.
        self._files: dict[str, None] = {}
        self._is_entry: IsEntry | None = None
        self._is_on = False
        #: Lines that ran unread, as far as they are known, and how often in the present pause.
        self._unread: dict[Place, int] = {}
        #: The error of our own code that ended the reading.
        self._failure: Exception | None = None
        #: True if the files' code was seen to run on other threads too.
        self._saw_threads = False
        #: True if another tool took our place.
        self._was_displaced = False
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
        self._files[frame.f_code.co_filename] = None
        return self._start(frame)

    def stop(self) -> LineReadings:
        """Remove all hooks, and return the readings. May be called twice."""
        reader = self._reader
        if self._is_on:
            self._was_displaced |= self._is_displaced()
            reader.is_unread |= self._was_displaced
            reader.advance(None)
        self._end()
        return LineReadings(
            files=tuple(self._files),
            start_bytes=reader.start_bytes,
            changes=reader.changes,
            unread_bytes=reader.unread_bytes,
            unread_lines=frozenset(self._unread),
            n_readings=reader.n_readings,
            notes=tuple(self._list_notes()),
        )

    def reset_after_fork(self) -> None:
        """Stop following in a forked child."""
        self._end()

    @abstractmethod
    def _start(self, frame: FrameType | None) -> str | None:
        """Begin to follow; ``frame`` and those that called it run already."""

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
        """Return whether a frame that begins is of the files."""
        filename = frame.f_code.co_filename
        if filename in self._files:
            return True
        if self._is_entry is None or not self._is_entry(frame):
            return False
        if len(self._files) < _MAX_FILES:
            self._files[filename] = None
        return filename in self._files

    # -- Errors ------------------------------------------------------------------------------------

    def _survive(self, exc: BaseException) -> bool:
        """Keep an error of our own code from the cell; return ``False`` if it is the cell's."""
        if isinstance(exc, KeyboardInterrupt):
            self._on_interrupt()
            return True
        traceback = exc.__traceback__
        while traceback is not None and traceback.tb_next is not None:
            traceback = traceback.tb_next
        if traceback is not None and not traceback.tb_frame.f_code.co_filename.startswith(_PACKAGE):
            return False  # Raised by a signal handler of the user's.
        if isinstance(exc, Exception):
            # The traceback's frames hold the cell's.
            self._failure = exc.with_traceback(None)
        self._end()
        return True

    def _list_notes(self) -> list[TraceNote]:
        notes = []
        if self._failure is not None:
            notes.append(TraceNote(NoteKind.READING_FAILED, describe_exception(self._failure)))
        elif self._was_displaced:
            notes.append(TraceNote(NoteKind.TRACING_REPLACED))
        if self._saw_threads:
            notes.append(TraceNote(NoteKind.OTHER_THREADS))
        return notes
