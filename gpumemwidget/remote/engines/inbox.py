"""Keep what the workers of an engine send until the notebook reads it, within bounds."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass

from gpumemwidget.errors import RecordingError
from gpumemwidget.remote.messages import (
    MAX_PROCESSES,
    Counters,
    Ended,
    Message,
    Sent,
    SpanBegan,
    SpanEnded,
    decode,
)

#: Maximum number of messages that wait, of all processes together.
_MAX_WAITING = 100_000
#: Seconds of silence after which a process counts as lost: it sends something twice a second.
SILENT_S = 15.0


@dataclass(slots=True)
class _Sender:
    """A process that sends, as far as it is known."""

    #: When it was heard last, on the monotonic clock.
    heard_s: float = 0.0
    #: When the newest batch was sent, by the clock of its host; infinite if no batch says that, and
    #: once all was sent.
    sent_at: float = float("inf")
    #: Number of lines that were no messages.
    n_unread: int = 0


class InboxSource:
    """A source to which the workers of an engine send; any thread may put lines in, and one reads.

    Where too many messages wait, samples are dropped. Spans and their peaks stay as long as can be.

    Args:
        max_waiting: maximum number of messages that wait.
    """

    n_left_out = 0

    def __init__(self, *, max_waiting: int = _MAX_WAITING) -> None:
        self._max_waiting = max_waiting
        self._waiting: list[tuple[str, Message]] = []
        #: By key, at most ``MAX_PROCESSES``, those heard last at the end.
        self._senders: dict[str, _Sender] = {}
        self._lock = threading.Lock()
        self._has_news = threading.Condition(self._lock)

    def put(self, key: str, lines: object) -> None:
        """Take lines that a process sent. What is none is counted, and nothing of it is run.

        Args:
            key: the process.
            lines: what it sent; all but ``bytes`` count as a line that is none.
        """
        messages: list[tuple[str, Message]] = []
        sent_at: float | None = None
        n_unread = 0
        for line in lines.splitlines() if isinstance(lines, bytes) else [b""]:
            try:
                message = decode(line)
            except RecordingError:
                n_unread += 1
                continue
            if type(message) is Sent:
                sent_at = message.sent_at
                continue
            messages.append((key, message))
            if type(message) is Ended:
                sent_at = float("inf")
        with self._lock:
            sender = self._senders[key] = self._senders.pop(key, _Sender())
            sender.heard_s = time.monotonic()
            sender.n_unread += n_unread
            if sent_at is not None:
                sender.sent_at = sent_at
            self._has_news.notify_all()
            if len(self._senders) > MAX_PROCESSES:
                del self._senders[next(iter(self._senders))]
            self._waiting += messages
            if len(self._waiting) > self._max_waiting:
                self._waiting = _drop(self._waiting, self._max_waiting)

    def read(self) -> Iterable[tuple[str, Message]]:
        """Return the messages since the last call, each with the key of its process."""
        with self._lock:
            waiting, self._waiting = self._waiting, []
            return waiting

    def count_unread(self, key: str) -> int:
        """Return how many lines of a process were no messages."""
        sender = self._senders.get(key)
        return 0 if sender is None else sender.n_unread

    def wait_for_all(self, seconds: float) -> None:
        """Wait until each process that was heard lately has sent all until now, but no longer.

        A message is as new as its sending. Where the clock of another host is behind, that takes
        all the seconds; where it is ahead, the last batch may be missing.
        """
        asked_at = time.time()

        def are_heard() -> bool:
            oldest_s = time.monotonic() - SILENT_S
            return all(
                sender.sent_at >= asked_at
                for sender in self._senders.values()
                if sender.heard_s > oldest_s
            )

        with self._has_news:
            self._has_news.wait_for(are_heard, seconds)

    def measure_silence(self, key: str) -> float:
        """Return the seconds since a process was heard last; infinite for one that is not known."""
        sender = self._senders.get(key)
        return float("inf") if sender is None else time.monotonic() - sender.heard_s

    def is_silent(self, key: str) -> bool:
        """Return whether a process was not heard for so long that it counts as lost."""
        return self.measure_silence(key) > SILENT_S


def _drop(waiting: list[tuple[str, Message]], most: int) -> list[tuple[str, Message]]:
    """Return at most ``most`` messages: without samples and, if need be, the oldest spans."""
    others = [(key, message) for key, message in waiting if type(message) is not Counters]
    n_over = len(others) - most
    kept = []
    for key, message in others:
        if n_over > 0 and type(message) in (SpanBegan, SpanEnded):
            n_over -= 1
        else:
            kept.append((key, message))
    return kept
