"""Collect the recordings of many processes, from files and engines, for one notebook."""

from __future__ import annotations

import re
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter
from typing import Protocol

from gpumemwidget.errors import GpuMemError, RecordingError
from gpumemwidget.model.processes import ProcessInfo, ProcessState
from gpumemwidget.recording.history import History
from gpumemwidget.remote.messages import MAX_PROCESSES, Began, Ended, Message, decode
from gpumemwidget.remote.process_log import ProcessLog

#: Maximum number of samples, and of spans, of all processes together.
_MAX_SAMPLES = 400_000


class Source(Protocol):
    """A place where messages come from: a file or a folder, or the workers of an engine.

    Attributes:
        name: what a person calls it: a path, ``4 engines``.
        n_left_out: number of older recordings there that are not read.
        failures: why files could not be read at the last look, one error a file.
    """

    name: str
    n_left_out: int
    failures: tuple[GpuMemError, ...]

    def read(self) -> Iterable[tuple[str, Message | None]]:
        """Return the messages since the last call, each with the key of its process.

        ``None`` is a line that is no message.

        Raises:
            GpuMemError: nothing can be read now.
        """
        ...

    def is_alive(self, key: str, info: ProcessInfo) -> bool:
        """Return whether a process is known to run, or has been heard of lately."""
        ...

    def close(self) -> None:
        """Listen no more, and take away what was added elsewhere. May be called twice."""
        ...


@dataclass(slots=True, eq=False)
class _Entry:
    """A process of a source, as it was when the source was read last."""

    source: Source
    key: str
    log: ProcessLog
    #: Until the source is asked: it was heard just now.
    is_alive: bool = True


class Collector:
    """The processes of some sources.

    Without ``start`` it is read where it is asked to; with it, a thread does that once a second,
    and only that thread: a share that hangs holds up nobody else.

    Args:
        on_failure: is called with what failed, each time.
        on_read: is called by the thread each time that it has read the sources.
    """

    def __init__(
        self,
        on_failure: Callable[[str, Exception], None],
        *,
        on_read: Callable[[], object] = lambda: None,
    ) -> None:
        self._on_failure = on_failure
        self._on_read = on_read
        self._sources: list[Source] = []
        self._entries: dict[tuple[int, str], _Entry] = {}
        self._n_forgotten = 0
        self._lock = threading.RLock()
        #: Number of reads of the thread that have begun, and that have ended.
        self._n_begun = self._n_ended = 0
        self._has_read = threading.Condition()
        self._wake = threading.Event()
        self._thread: threading.Thread | None = None
        #: Maximum number of samples, and of spans, of each process.
        self._capacity = 10_000
        self._is_closed = False

    @property
    def sources(self) -> tuple[Source, ...]:
        """The sources, in the order in which they were added."""
        return tuple(self._sources)

    def add(self, source: Source) -> None:
        """Listen to a source from now on."""
        with self._lock:
            self._sources.append(source)

    def remove(self, source: Source) -> None:
        """Listen to a source no more, and forget its processes."""
        with self._lock:
            self._sources = [kept for kept in self._sources if kept is not source]
            self._entries = {
                place: entry for place, entry in self._entries.items() if entry.source is not source
            }
        source.close()

    def start(self) -> None:
        """Read the sources on a thread from now on."""
        with self._lock:
            if self._thread is not None or self._is_closed:
                return
            self._thread = threading.Thread(
                target=self._run, name="gpumemwidget-processes", daemon=True
            )
            self._thread.start()

    def read_soon(self) -> None:
        """Let the thread read at once, and not only when a second has passed."""
        self._wake.set()

    def wait_for_read(self, seconds: float) -> None:
        """Wait until the thread has read the sources once more, but no longer than this."""
        with self._has_read:
            # One that is under way may have passed over what has come just now.
            wanted = self._n_begun + 1
            self._wake.set()
            self._has_read.wait_for(lambda: self._is_closed or self._n_ended >= wanted, seconds)

    def read(self) -> None:
        """Take what the sources have. A failure of one is reported, and the others are read."""
        failures: list[tuple[Source, Exception]] = []
        for source in self.sources:
            # A source that fails half-way has sent something already, and may still know who runs.
            for step in (self._take_messages, self._update_entries):
                try:
                    step(source)
                except Exception as exc:  # noqa: BLE001 - one source's failure is not another's
                    failures.append((source, exc))
        with self._lock:
            self._forget_ended()
        for source, failure in failures:
            self._on_failure(f"reading {source.name}", failure)

    def _take_messages(self, source: Source) -> None:
        # Without the lock: a source may wait for an answer from elsewhere.
        for key, messages in groupby(source.read(), itemgetter(0)):
            log = None
            for _, message in messages:
                if log is None or type(message) is Began:
                    with self._lock:
                        if source not in self._sources:
                            return
                        log = self._find_log(source, key, message)
                log.take(message)

    def _update_entries(self, source: Source) -> None:
        with self._lock:
            entries = [entry for entry in self._entries.values() if entry.source is source]
        for entry in entries:
            if entry.log.info is not None:
                # The source may look elsewhere for the answer.
                entry.is_alive = source.is_alive(entry.key, entry.log.info)
            entry.log.flush()

    @property
    def n_older(self) -> int:
        """The number of older recordings that are not among ``processes``: there are so many."""
        return self._n_forgotten + sum(source.n_left_out for source in self.sources)

    @property
    def processes(self) -> tuple[ProcessState, ...]:
        """The processes: by their role and number, others by the beginning of their recording."""
        with self._lock:
            entries = list(self._entries.values())
        # One file may be watched under two names, and a copy of it may end earlier.
        found: dict[str, ProcessState] = {}
        for entry in entries:
            state = entry.log.describe(is_alive=entry.is_alive)
            if state is None:
                continue
            known = found.get(state.info.id)
            if known is None or known.heard_s < state.heard_s:
                found[state.info.id] = state
        return tuple(sorted(found.values(), key=_rank_process))

    def find_history(self, process: ProcessState) -> History:
        """Return the samples of one of ``processes``, in seconds since its recording began.

        Raises:
            KeyError: it is not kept any more.
        """
        with self._lock:
            for entry in self._entries.values():
                if entry.log.info is not None and entry.log.info.id == process.info.id:
                    return entry.log.history
        raise KeyError(process.info.id)

    def close(self) -> None:
        """Stop, and close all sources. May be called twice."""
        with self._lock:
            self._is_closed = True
            sources, self._sources = self._sources, []
            thread, self._thread = self._thread, None
        self._wake.set()
        with self._has_read:
            self._has_read.notify_all()
        for source in sources:
            source.close()
        if thread is not None and thread is not threading.current_thread():
            thread.join(1.0)

    def _run(self) -> None:
        while not self._is_closed:
            began_s = time.monotonic()
            with self._has_read:
                self._n_begun += 1
            self.read()
            with self._has_read:
                self._n_ended += 1
                self._has_read.notify_all()
            self._on_read()
            # A read that takes long is not followed by another at once.
            self._wake.wait(max(1.0, time.monotonic() - began_s))
            self._wake.clear()

    def _find_log(self, source: Source, key: str, message: Message | None) -> ProcessLog:
        entry = self._entries.get((id(source), key))
        info = None if entry is None else entry.log.info
        is_another = type(message) is Began and info is not None and info.id != message.process.id
        if entry is None or is_another:
            entry = self._entries[id(source), key] = _Entry(source, key, ProcessLog())
            # Each has a share of what may be kept. In steps: each goes through all that is kept.
            capacity = max(100, _MAX_SAMPLES // len(self._entries))
            if capacity < 0.8 * self._capacity:
                self._capacity = capacity
                for other in self._entries.values():
                    other.log.limit(capacity)
            entry.log.limit(self._capacity)
        return entry.log

    def _forget_ended(self) -> None:
        """Forget the oldest of those that have ended, if there are too many."""
        n_over = len(self._entries) - MAX_PROCESSES
        if n_over <= 0:
            return
        ended = [
            (0.0 if entry.log.info is None else entry.log.info.started_at, place)
            for place, entry in self._entries.items()
            if not entry.is_alive
        ]
        for _, place in sorted(ended)[:n_over]:
            del self._entries[place]
            self._n_forgotten += 1


def _rank_process(state: ProcessState) -> tuple[str, int, str, str, float]:
    info = state.info
    number = -1 if info.number is None else info.number
    # "trainer 2" before "trainer 10".
    label = re.sub("[0-9]+", lambda match: match[0].rjust(20, "0"), info.label)
    return info.role, number, info.host, label, info.started_at


# -- What engines send -----------------------------------------------------------------------------

#: Maximum number of messages that wait, of all processes together: the newest. Each process
#: repeats now and then who it is and what its peaks are.
_MAX_WAITING = 100_000
#: Seconds of silence after which a process counts as lost: it sends something twice a second.
SILENT_S = 15.0


class InboxSource:
    """A source to which the workers of an engine send. Any thread may put lines in; one reads."""

    n_left_out = 0
    failures: tuple[GpuMemError, ...] = ()

    def __init__(self) -> None:
        self._waiting: deque[tuple[str, Message | None]] = deque(maxlen=_MAX_WAITING)
        #: By key, each process that has not ended: when it was heard last, on the monotonic clock,
        #: and how often. Those that were heard last are at the end.
        self._heard: dict[str, tuple[float, int]] = {}
        self._has_news = threading.Condition()

    def put(self, key: str, lines: object) -> None:
        """Take lines that a process sent. Nothing of them is run.

        Args:
            key: the process.
            lines: what it sent; all but ``bytes`` count as a line that is no message.
        """
        messages: list[tuple[str, Message | None]] = []
        for line in lines.splitlines() if isinstance(lines, bytes) else [b""]:
            try:
                messages.append((key, decode(line)))
            except RecordingError:
                messages.append((key, None))
        has_ended = any(type(message) is Ended for _, message in messages)
        with self._has_news:
            self._waiting += messages
            _, n_batches = self._heard.pop(key, (0.0, 0))
            if not has_ended:
                self._heard[key] = time.monotonic(), n_batches + 1
            if len(self._heard) > MAX_PROCESSES:
                del self._heard[next(iter(self._heard))]
            self._has_news.notify_all()

    def read(self) -> Iterable[tuple[str, Message | None]]:
        """Return the messages since the last call, each with the key of its process."""
        with self._has_news:
            messages = list(self._waiting)
            self._waiting.clear()
            return messages

    def wait_for_all(self, seconds: float) -> None:
        """Wait until each process that was heard lately has sent all until now, but no longer.

        The next batch of a process may be on its way already, and the one after it is not.
        """
        with self._has_news:
            before = {key: n for key, (_, n) in self._heard.items() if self.is_heard(key)}
            self._has_news.wait_for(
                lambda: all(n - before.get(key, -2) >= 2 for key, (_, n) in self._heard.items()),
                seconds,
            )

    def is_heard(self, key: str, seconds: float | None = None) -> bool:
        """Return whether a process was heard within some seconds, and has not ended.

        Args:
            key: the process.
            seconds: the seconds; ``None``: as long as it does not count as lost.
        """
        heard_s, _ = self._heard.get(key, (float("-inf"), 0))
        return time.monotonic() - heard_s <= (SILENT_S if seconds is None else seconds)
