"""Keep what the workers of an engine send until the notebook reads it, within bounds."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterable

from gpumemwidget.errors import GpuMemError, RecordingError
from gpumemwidget.remote.messages import MAX_PROCESSES, Ended, Message, decode

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
