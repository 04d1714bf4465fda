"""Pass a process's messages on: to a file at once, or in batches through what an engine has."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Protocol

from gpumemwidget.remote.messages import Devices, Sent, encode

#: Seconds between two batches.
_BATCH_EVERY_S = 0.5
#: Maximum number of bytes that wait where nothing can be sent: some minutes of samples.
_MAX_WAITING_BYTES = 1024 * 1024
#: Maximum seconds to wait for what is sent at the end.
_CLOSE_S = 2.0
#: How the line of a ``Devices`` begins.
_DEVICES = encode(Devices(())).partition(b"[")[0]


class Sink(Protocol):
    """Takes the lines of a process."""

    def write(self, line: bytes) -> bool:
        """Take a line with its end; return ``False`` if no sample may count from those so far."""
        ...

    def close(self) -> None:
        """Pass on what waits, and take nothing more."""
        ...


class BatchSink:
    """Sends lines together, twice a second, on a thread of its own: no task waits for it.

    Samples count from others of their batch alone, so that a batch may be lost on its way. What
    can't be sent is kept, within bounds: where too much waits, samples are dropped, and then whole
    batches, the oldest first.

    Args:
        send: sends some lines, the first of which is a ``Sent``; what it raises is no failure, and
            is tried again with the next batch.
    """

    def __init__(self, send: Callable[[bytes], None]) -> None:
        self._send = send
        self._lock = threading.Lock()
        #: The lines of the batch that is being made, and when it began.
        self._lines: list[bytes] = []
        self._began_s = time.monotonic()
        #: The batches that wait; the first one may be on its way.
        self._batches: list[bytes] = []
        self._is_closed = False
        self._wake = threading.Event()
        self._thread = threading.Thread(target=self._run, name="gpumemwidget-sending", daemon=True)
        self._thread.start()

    def write(self, line: bytes) -> bool:
        """Take a line; have all sent where the last batch was long enough ago."""
        with self._lock:
            if self._is_closed:
                return True
            self._lines.append(line)
            # A batch must have the sample that its later ones count from.
            is_due = time.monotonic() - self._began_s >= _BATCH_EVERY_S
            is_last = is_due and not line.startswith(_DEVICES)
            if is_last:
                self._end_batch()
        return not is_last

    def close(self) -> None:
        """Send what waits, and give up after some seconds. May be called twice."""
        with self._lock:
            if self._lines:
                self._end_batch()
            self._is_closed = True
        self._wake.set()
        self._thread.join(_CLOSE_S)

    def _end_batch(self) -> None:
        self._began_s = time.monotonic()
        self._batches.append(b"".join(self._lines))
        self._lines.clear()
        n_over = sum(map(len, self._batches)) - _MAX_WAITING_BYTES
        for place, batch in enumerate(self._batches):
            if n_over > 0:
                lines = batch.splitlines(keepends=True)
                kept = [line for line in lines if not line.startswith((b"[", _DEVICES))]
                self._batches[place] = b"".join(kept)
                n_over -= len(batch) - len(self._batches[place])
        # The first batch may be on its way.
        while n_over > 0 and len(self._batches) > 1:
            n_over -= len(self._batches.pop(1))
        self._wake.set()

    def _run(self) -> None:
        is_closed = False
        while not is_closed:
            self._wake.wait()
            self._wake.clear()
            is_closed = self._is_closed
            with suppress(Exception):  # The receiver may be gone for a while.
                while self._batches:
                    self._send(encode(Sent(time.time())) + self._batches[0])
                    with self._lock:
                        del self._batches[0]
