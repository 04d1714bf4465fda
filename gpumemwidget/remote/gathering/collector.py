"""Gather what many processes tell, from files and from engines, for the views of one notebook."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from typing import Protocol

from gpumemwidget.errors import Notes
from gpumemwidget.model.processes import ProcessInfo, ProcessState
from gpumemwidget.recording.history import History
from gpumemwidget.remote.messages import Message
from gpumemwidget.remote.process_log import ProcessLog

#: Seconds between two looks at the sources.
_POLL_EVERY_S = 0.5
#: Maximum number of processes that are kept; beyond that the first of those that have ended go.
MAX_PROCESSES = 2000
#: Maximum number of samples, and of spans, of all processes together, and of each.
_MAX_SAMPLES = 400_000
_MAX_SAMPLES_EACH = 10_000
#: Minimum number of each, however many processes there are.
_LEAST_SAMPLES_EACH = 100


class Source(Protocol):
    """A place where messages come from: a file or a folder, or the workers of an engine.

    Attributes:
        name: what a person calls it: a path, ``4 engines``.
    """

    name: str

    def read(self) -> Iterable[tuple[str, Message]]:
        """Return the messages since the last call, each with the key of its process.

        Raises:
            GpuMemError: nothing can be read now.
        """
        ...

    def is_alive(self, key: str, info: ProcessInfo) -> bool:
        """Return whether a process is known to run, or has been heard of lately."""
        ...

    def measure_offset(self, key: str) -> float | None:
        """Return the seconds by which a process's clock is ahead of ours; ``None``: not known."""
        ...

    def count_unread(self, key: str) -> int:
        """Return how many messages of a process could not be read."""
        ...

    def close(self) -> None:
        """Listen no more, and take away what was added elsewhere. May be called twice."""
        ...


class Collector:
    """The processes that some sources tell of.

    Without ``start`` it is read where it is asked to; with it, a thread does that twice a second.

    Args:
        on_failure: is told what failed, each time.
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
        self._logs: dict[tuple[int, str], tuple[Source, str, ProcessLog]] = {}
        self._lock = threading.RLock()
        self._wake = threading.Event()
        self._thread: threading.Thread | None = None
        self._notes: Notes[str] = Notes()
        #: Maximum number of samples, and of spans, of each process.
        self._capacity = _MAX_SAMPLES_EACH
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
            self._sources = [each for each in self._sources if each is not source]
            self._logs = {key: entry for key, entry in self._logs.items() if entry[0] is not source}
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
        """Let the thread read at once, and not only when half a second has passed."""
        self._wake.set()

    def read(self) -> None:
        """Take what the sources have. What one can't tell is reported, and the others are read."""
        for source in self.sources:
            try:
                # Without the lock: a source may wait for an answer from elsewhere.
                messages = list(source.read())
            except Exception as exc:  # noqa: BLE001 - one source's failure is not another's
                self._on_failure(f"reading {source.name}", exc)
                continue
            with self._lock:
                for key, message in messages:
                    self._find_log(source, key).take(message)
        with self._lock:
            self._forget_ended()

    @property
    def processes(self) -> tuple[ProcessState, ...]:
        """The processes: by their role and number, others by the beginning of their recording."""
        return tuple(state for state, _, _ in self.list_entries())

    def list_entries(self) -> list[tuple[ProcessState, Source, str]]:
        """Return the processes in their order, each with its source and its key there."""
        with self._lock:
            entries = list(self._logs.values())
        # One file may be watched under two names.
        found: dict[str, tuple[ProcessState, Source, str]] = {}
        for source, key, log in entries:
            if log.info is None:
                continue
            log.clock_offset_s = source.measure_offset(key)
            state = log.describe(
                is_alive=source.is_alive(key, log.info), n_unread=source.count_unread(key)
            )
            if state is not None:
                found[state.info.id] = state, source, key
        return sorted(found.values(), key=lambda entry: _rank_process(entry[0]))

    def find_history(self, process: ProcessState) -> History:
        """Return the samples of one of ``processes``, in seconds since its recording began.

        Raises:
            KeyError: it is not kept any more.
        """
        with self._lock:
            for _, _, log in self._logs.values():
                if log.info is not None and log.info.id == process.info.id:
                    return log.history
        raise KeyError(process.info.id)

    def close(self) -> None:
        """Stop, and close all sources. May be called twice."""
        with self._lock:
            self._is_closed = True
            sources, self._sources = self._sources, []
            thread, self._thread = self._thread, None
        self._wake.set()
        for source in sources:
            source.close()
        if thread is not None and thread is not threading.current_thread():
            thread.join(1.0)

    def _run(self) -> None:
        while not self._is_closed:
            began_s = time.monotonic()
            self.read()
            self._on_read()
            # A read that takes long is not followed by another at once.
            self._wake.wait(max(_POLL_EVERY_S, time.monotonic() - began_s))
            self._wake.clear()

    def _find_log(self, source: Source, key: str) -> ProcessLog:
        entry = self._logs.get((id(source), key))
        if entry is None:
            self._share_room(len(self._logs) + 1)
            entry = (source, key, ProcessLog(capacity=self._capacity))
            self._logs[id(source), key] = entry
        return entry[2]

    def _share_room(self, n_processes: int) -> None:
        capacity = max(_LEAST_SAMPLES_EACH, _MAX_SAMPLES // n_processes)
        # In steps: each goes through all that is kept.
        if capacity < 0.8 * self._capacity:
            self._capacity = capacity
            for _, _, log in self._logs.values():
                log.limit(capacity)

    def _forget_ended(self) -> None:
        n_over = len(self._logs) - MAX_PROCESSES
        if n_over <= 0:
            return
        ended = [
            place
            for place, (source, key, log) in self._logs.items()
            if log.info is None or not source.is_alive(key, log.info)
        ]
        for place in ended[:n_over]:
            del self._logs[place]


def _rank_process(state: ProcessState) -> tuple[str, int, str, float]:
    info = state.info
    return info.role, -1 if info.number is None else info.number, info.host, info.started_at
