"""What it takes to be told of the lines that run: of a cell's own code, on one thread.

From Python 3.12 on ``sys.monitoring`` tells (``linemonitoring.py``), before it ``sys.settrace``
(``linetracing.py``). What both do alike is here: to know the files, to find the line that runs, to
keep what goes wrong in our own code from the cell, and to pause where reading is too dear.
"""

from __future__ import annotations

import _thread
import contextvars
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from threading import get_ident
from types import FrameType

from gpumemwidget.measure.forks import survive_fork
from gpumemwidget.measure.linereader import N_LINES, LineReader

__all__ = ["IsEntry", "LineHooks", "Pauses"]

_PACKAGE = str(Path(__file__).parent.parent)

#: How often a pause is looked into, in seconds.
_LOOK_S = 0.005
#: A cell is one file, and one more for each body of a cell magic in it.
_MOST_FILES = 64

#: Whether a frame that begins is that of the code to read.
IsEntry = Callable[[FrameType], bool]


class LineHooks(ABC):
    """Tells a reader of lines.

    Args:
        reader: is told.
        on_interrupt: called for a Ctrl-C that landed in our own code: it sends another.
    """

    #: What telling the reader of a line costs beside the reading itself, by estimate.
    call_ns: int

    def __init__(self, reader: LineReader, on_interrupt: Callable[[], None]) -> None:
        self._reader = reader
        reader.call_ns = self.call_ns
        self._on_interrupt = on_interrupt
        self._thread = get_ident()
        #: The files that are read, and where the lines of each begin in the reader's count.
        self._files: dict[str, int] = {}
        self._is_entry: IsEntry | None = None
        self._pauses = Pauses(reader, self._resume, self._find_look(), self._note_failure)
        self._is_on = False
        #: What our own code failed with; nothing was read from then on.
        self.failure: Exception | None = None
        #: Whether the files' code was seen to run on other threads too.
        self.saw_threads = False
        survive_fork(self)

    @property
    def files(self) -> tuple[str, ...]:
        """The files that are read, as far as code of theirs has run."""
        return tuple(self._files)

    def start_at(self, is_entry: IsEntry) -> str | None:
        """Read the file of each code for which ``is_entry`` holds, from its beginning on.

        Returns:
            Why that can't be done, in one line; ``None`` where it is.
        """
        self._is_entry = is_entry
        return self._start(None)

    def start_in(self, frame: FrameType) -> str | None:
        """Read the file of a frame that is running; see ``start_at``."""
        self._add_file(frame.f_code.co_filename)
        return self._start(frame)

    def stop(self) -> None:
        """Put everything back. May be called twice."""
        if self._is_on:
            self._is_on = False
            self._pauses.stop()
            self._leave()

    def reset_after_fork(self) -> None:
        """A forked child is not read."""
        self._pauses.forget()
        if self._is_on:
            self._is_on = False
            self._leave()

    @property
    def was_displaced(self) -> bool:
        """Whether somebody else has taken our place since."""
        return False

    @abstractmethod
    def _start(self, frame: FrameType | None) -> str | None: ...

    @abstractmethod
    def _leave(self) -> None: ...

    @abstractmethod
    def _resume(self) -> None:
        """Read every line again; on a thread of its own."""

    def _add_file(self, filename: str) -> None:
        if len(self._files) < _MOST_FILES:
            self._files[filename] = len(self._files) * N_LINES

    def _find_look(self) -> Callable[[], bool] | None:
        """What is to be called within each pause, every few milliseconds, by the pause's thread.

        It returns whether there is need to go on with that.
        """
        return None

    def _place(self, filename: str, line: int | None) -> int:
        """A line in the reader's count; 0 for none."""
        return self._files[filename] + line if line and line < N_LINES else 0

    def _find_line(self, frame: FrameType | None) -> int:
        """The innermost line of the files, from ``frame`` outwards; 0 if there is none."""
        while frame is not None:
            if frame.f_code.co_filename in self._files:
                return self._place(frame.f_code.co_filename, frame.f_lineno)
            frame = frame.f_back
        return 0

    def _is_ours(self, frame: FrameType) -> bool:
        """Whether a frame that begins is of the files."""
        filename = frame.f_code.co_filename
        if filename in self._files:
            return True
        if self._is_entry is None or not self._is_entry(frame):
            return False
        self._add_file(filename)
        return filename in self._files

    def _survive(self, exc: BaseException) -> bool:
        """Keep what was raised in our own code from the cell's; ``False`` if it is the cell's."""
        if isinstance(exc, RecursionError):
            return True  # The cell is about to meet it itself.
        if isinstance(exc, KeyboardInterrupt):
            self._on_interrupt()
            return True
        traceback = exc.__traceback__
        while traceback is not None and traceback.tb_next is not None:
            traceback = traceback.tb_next
        if traceback is not None and not traceback.tb_frame.f_code.co_filename.startswith(_PACKAGE):
            return False  # From a handler of signals, which is the user's.
        if isinstance(exc, Exception):
            self._note_failure(exc)
        self.stop()
        return True

    def _note_failure(self, exc: Exception) -> None:
        # Its frames hold the cell's.
        self.failure = exc.with_traceback(None)


class Pauses:
    """The thread that ends each pause in reading, made at the first one.

    Args:
        reader: knows for how long to wait.
        resume: reads again.
        look: called within each pause every few milliseconds, for as long as it returns ``True``;
            ``None``: there is no need.
        on_error: told what it raised; there are no pauses' ends after that.
    """

    def __init__(
        self,
        reader: LineReader,
        resume: Callable[[], None],
        look: Callable[[], bool] | None,
        on_error: Callable[[Exception], None],
    ) -> None:
        self._reader = reader
        self._resume = resume
        self._look = look
        self._on_error = on_error
        self._thread: threading.Thread | None = None
        # Plain locks, which take no memory while they are waited for.
        self._asked, self._stopped = _thread.allocate_lock(), _thread.allocate_lock()
        self._is_asked = False

    def ask(self) -> None:
        """Begin a pause; nothing if there is one. On the thread that is read."""
        if self._is_asked:
            return
        if self._thread is None:
            self._reader.exclude(self._start)
        self._is_asked = True
        self._asked.release()

    def stop(self) -> None:
        """End the thread. May be called twice."""
        thread, self._thread = self._thread, None
        if thread is not None:
            self._stopped.release()
            if self._asked.locked():  # Else it is about to be taken, and the other one after it.
                self._asked.release()
            thread.join()

    def forget(self) -> None:
        """In a forked child there is no thread."""
        self._thread = None

    def _start(self) -> None:
        self._asked.acquire()
        self._stopped.acquire()
        context = contextvars.copy_context()
        self._thread = threading.Thread(
            target=context.run, args=(self._run,), name="gpumemwidget-lines", daemon=True
        )
        self._thread.start()

    def _run(self) -> None:
        while True:
            self._asked.acquire()
            try:
                if self._wait():
                    return
                self._is_asked = False
                self._resume()
            except Exception as exc:  # noqa: BLE001 - told with what was read
                self._on_error(exc)
                return

    def _wait(self) -> bool:
        """Wait for the pause's end; whether it is the end of all."""
        end_s = time.monotonic() + self._reader.wait_s()
        look = self._look
        while (left_s := end_s - time.monotonic()) > 0:
            timeout_s = left_s if look is None else min(left_s, _LOOK_S)
            if self._stopped.acquire(timeout=timeout_s):
                return True
            # Whoever wakes takes the interpreter from the cell, and in a pause of none but its own
            # lines there is nothing to see.
            if look is not None and not look():
                look = None
        return False
