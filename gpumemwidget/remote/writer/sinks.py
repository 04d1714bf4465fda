"""Send lines in batches, on a thread of their own."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Protocol

from gpumemwidget.remote.messages import is_sample

#: Seconds in which lines gather by default.
_BATCH_EVERY_S = 0.5
#: Maximum number of bytes that wait where nothing can be sent: some minutes of samples.
_MAX_WAITING_BYTES = 1024 * 1024
#: Maximum seconds to wait for what is sent at the end.
_CLOSE_S = 2.0


class Sink(Protocol):
    """Takes the lines of a recording. It must not wait: a span may end in any thread."""

    def write(self, line: bytes) -> None:
        """Take a line."""
        ...

    def close(self) -> None:
        """Take no more lines. May be called twice."""
        ...


class BatchSink:
    """Sends lines together, on a thread of its own: neither a task nor a program's end waits.

    What can't be sent is kept, within bounds: where too much waits, the samples are dropped, and
    if they are few the older half of all lines.

    Attributes:
        on_failure: is called with what ``send`` raises.

    Args:
        send: sends some lines. What it raises is no failure of the sink: it is called with the same
            lines again when the next ones have come.
        every_s: the seconds in which lines gather; ``None``: half a second.
    """

    def __init__(
        self,
        send: Callable[[bytes], object],
        *,
        every_s: float | None = None,
    ) -> None:
        self._send = send
        self._every_s = _BATCH_EVERY_S if every_s is None else every_s
        self.on_failure: Callable[[Exception], object] = lambda _: None
        self._lock = threading.Lock()
        #: The lines that wait, and their bytes; then the batch that is on its way.
        self._lines: list[bytes] = []
        self._n_bytes = 0
        self._batch = b""
        self._wake = threading.Event()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="gpumemwidget-sending", daemon=True)
        self._thread.start()

    @property
    def has_sent_all(self) -> bool:
        """True where nothing waits."""
        return not (self._lines or self._batch)

    def write(self, line: bytes) -> None:
        """Take a line; nothing is done once this is closed."""
        if self._closed.is_set():
            return
        with self._lock:
            self._lines.append(line)
            self._n_bytes += len(line)
            if self._n_bytes > _MAX_WAITING_BYTES:
                kept = [line for line in self._lines if not is_sample(line)]
                if sum(map(len, kept)) > _MAX_WAITING_BYTES / 2:
                    kept = kept[len(kept) // 2 :]
                self._lines, self._n_bytes = kept, sum(map(len, kept))
        self._wake.set()

    def close(self) -> None:
        """Send what waits, and give up after some seconds. May be called twice."""
        self._closed.set()
        self._wake.set()
        self._thread.join(_CLOSE_S)

    def _run(self) -> None:
        is_closed = False
        while not is_closed:
            self._wake.wait()
            is_closed = self._closed.wait(self._every_s)
            self._wake.clear()
            try:
                while self._take_batch():
                    self._send(self._batch)
                    self._batch = b""
            except Exception as exc:  # noqa: BLE001 - the receiver may be gone for a while
                self.on_failure(exc)

    def _take_batch(self) -> bool:
        """Take what waits, unless the batch before could not be sent; return if there is any."""
        if not self._batch:
            with self._lock:
                self._batch = b"".join(self._lines)
                self._lines.clear()
                self._n_bytes = 0
        return bool(self._batch)
