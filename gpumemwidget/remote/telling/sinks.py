"""Pass a process's messages on: to a file at once, or in batches through what an engine has."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Protocol

from gpumemwidget.remote.messages import Devices, Sent, encode

#: Seconds between two batches.
_BATCH_EVERY_S = 0.5
#: Maximum number of bytes that wait where nothing can be sent: some minutes of samples.
_MAX_WAITING_BYTES = 1024 * 1024
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
    """Sends lines together, twice a second, and keeps what can't be sent, within bounds.

    Samples count from others of their batch alone, so that a batch may be lost on its way. Where
    too much waits, samples are dropped, the oldest first. Spans and their peaks are kept.

    Args:
        send: sends some lines, the first of which is a ``Sent``; what it raises is no failure, and
            is tried again with the next batch.
    """

    def __init__(self, send: Callable[[bytes], None]) -> None:
        self._send = send
        self._lines: deque[bytes] = deque()
        self._n_bytes = 0
        self._lock = threading.Lock()
        self._sent_s = time.monotonic()

    def write(self, line: bytes) -> bool:
        """Take a line; send all where the last batch was long enough ago."""
        with self._lock:
            self._lines.append(line)
            self._n_bytes += len(line)
            is_whole = self._n_bytes <= _MAX_WAITING_BYTES or self._drop_samples()
            # What the next sample counts from belongs into its batch.
            is_devices = line.startswith(_DEVICES)
            is_due = not is_devices and time.monotonic() - self._sent_s >= _BATCH_EVERY_S
        if is_due:
            self.flush()
        return is_whole and not is_due

    def flush(self) -> None:
        """Send what waits."""
        with self._lock:
            self._sent_s = time.monotonic()
            lines = list(self._lines)
            if not lines:
                return
            try:
                self._send(b"".join([encode(Sent(time.time())), *lines]))
            except Exception:  # noqa: BLE001 - the receiver may be gone for a while
                return
            self._lines.clear()
            self._n_bytes = 0

    def close(self) -> None:
        """Send what waits."""
        self.flush()

    def _drop_samples(self) -> bool:
        """Drop all samples that wait, as each counts from the one before; return ``False``."""
        kept = [line for line in self._lines if not line.startswith(b"[")]
        # The first line says which process this is.
        while len(kept) > 1 and sum(map(len, kept)) > _MAX_WAITING_BYTES:
            del kept[1]
        self._lines = deque(kept)
        self._n_bytes = sum(map(len, kept))
        return False
