"""Keep what the workers of an engine send until the notebook reads it, within bounds."""

from __future__ import annotations

import threading
from collections import Counter

from gpumemwidget.errors import RecordingError
from gpumemwidget.remote.messages import (
    Counters,
    Devices,
    Message,
    SpanBegan,
    SpanEnded,
    decode,
)

#: Maximum number of messages that wait, of all processes together.
_MAX_WAITING = 100_000
#: Maximum number of processes whose unread lines are counted.
_MAX_COUNTED = 10_000


class Inbox:
    """The messages of several processes; any thread may put some in, and one takes them out.

    Where too many wait, samples are dropped. Spans and their peaks are kept as long as can be.

    Args:
        max_waiting: maximum number of messages that wait.
    """

    def __init__(self, *, max_waiting: int = _MAX_WAITING) -> None:
        self._max_waiting = max_waiting
        self._waiting: list[tuple[str, Message]] = []
        self._n_unread: Counter[str] = Counter()
        self._lock = threading.Lock()

    def put(self, key: str, lines: object) -> None:
        """Take lines that a process sent. What is none is counted, and nothing of it is run."""
        messages: list[tuple[str, Message]] = []
        n_unread = 0
        for line in lines.splitlines() if isinstance(lines, bytes) else [b""]:
            try:
                messages.append((key, decode(line)))
            except RecordingError:
                n_unread += 1
        with self._lock:
            if n_unread and (key in self._n_unread or len(self._n_unread) < _MAX_COUNTED):
                self._n_unread[key] += n_unread
            self._waiting += messages
            if len(self._waiting) > self._max_waiting:
                self._waiting = _drop(self._waiting, self._max_waiting)

    def take(self) -> list[tuple[str, Message]]:
        """Return the messages since the last call, each with the key of its process."""
        with self._lock:
            waiting, self._waiting = self._waiting, []
            return waiting

    def count_unread(self, key: str) -> int:
        """Return how many lines of a process were no messages."""
        return self._n_unread[key]


def _drop(waiting: list[tuple[str, Message]], most: int) -> list[tuple[str, Message]]:
    """Return at most ``most`` messages: without samples and, if need be, the oldest spans."""
    kept: list[tuple[str, Message]] = []
    keys = dict.fromkeys(key for key, message in waiting if type(message) is Counters)
    n_samples = sum(type(message) in (Counters, Devices) for _, message in waiting)
    n_over = len(waiting) - n_samples + len(keys) - most
    for key, message in waiting:
        if type(message) in (Counters, Devices):
            continue
        if n_over > 0 and type(message) in (SpanBegan, SpanEnded):
            n_over -= 1
        else:
            kept.append((key, message))
    # Samples count from those before, so the next ones are passed over until they are told anew.
    return [*kept, *((key, Devices(())) for key in keys)]
