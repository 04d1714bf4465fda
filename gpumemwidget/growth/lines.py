"""Find the line that adds memory: the one after which more is in use, again and again."""

from __future__ import annotations

from collections.abc import Callable
from types import FrameType

from gpumemwidget.backends.hardware import Hardware
from gpumemwidget.model.devices import HOST
from gpumemwidget.tracing.line_watch import LineReadings, LineWatch, watch_lines
from gpumemwidget.tracing.sources import IsEntry


class GrowthLines:
    """Reads one device's memory at each line of a cell, for as long as it takes to find a line.

    Args:
        hardware: the machine's memory.
        device: ``cuda:0``, ``host``.
        on_interrupt: called for a Ctrl-C that landed in our own code: it sends another.
    """

    def __init__(
        self, hardware: Hardware, device: str, *, on_interrupt: Callable[[], None]
    ) -> None:
        counter = hardware.find_host_counter() if device == HOST else _count(hardware, device)
        self._watch: LineWatch | None = None
        if counter is not None:
            self._watch = watch_lines(counter, on_interrupt=on_interrupt)

    def start(self, where: IsEntry | FrameType) -> bool:
        """Begin; see ``LineWatch.start``. Return ``False`` where it can't be."""
        return self._watch is not None and self._watch.start(where)

    def stop(self) -> LineReadings | None:
        """End, and return the readings. May be called twice."""
        watch, self._watch = self._watch, None
        return None if watch is None else watch.stop()


def find_line(readings: LineReadings | None, grown_bytes: int) -> tuple[str, int] | None:
    """Return the file and the line that added the most; ``None`` if none added half of it.

    Args:
        readings: the readings at the lines.
        grown_bytes: how much was added while they were read.
    """
    if readings is None:
        return None
    changes = [(n_bytes, place) for place, n_bytes in readings.changes.items() if place is not None]
    n_bytes, place = max(changes, default=(0, None))
    return place if n_bytes > 0 and n_bytes >= grown_bytes / 2 else None


def _count(hardware: Hardware, device: str) -> Callable[[], int]:
    def read() -> int:
        for reading in hardware.read():
            if reading.device == device:
                return reading.allocated_bytes or 0
        return 0

    return read
