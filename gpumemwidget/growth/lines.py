"""Find the line that adds memory: the one after which more is in use, again and again."""

from __future__ import annotations

import linecache
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import FrameType

from gpumemwidget.backends.hardware import Hardware
from gpumemwidget.model.devices import HOST
from gpumemwidget.tracing.line_watch import LineReadings, LineWatch, watch_lines
from gpumemwidget.tracing.sources import IsEntry

#: Share of the growth that a line must have added.
_MIN_SHARE = 0.25


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

    def start(self, where: IsEntry | FrameType, files: Sequence[str]) -> bool:
        """Begin to read at each line of a cell and of these files; return ``False`` if it can't be.

        See ``LineWatch.start``.
        """
        return self._watch is not None and self._watch.start(where, also=files)

    def stop(self) -> LineReadings | None:
        """End, and return the readings. May be called twice."""
        watch, self._watch = self._watch, None
        return None if watch is None else watch.stop()


@dataclass(frozen=True, slots=True)
class LineChanges:
    """How much each line added while lines were read.

    Attributes:
        changes: bytes by file and line.
        grown_bytes: how much was added in all.
    """

    changes: Mapping[tuple[str, int], int]
    grown_bytes: int

    def find(self, name: str) -> tuple[str, int] | None:
        """Return the file and the line that added the most; ``None`` if none added a good part.

        What a forward pass takes and the backward gives back is added by one line and taken by
        another. So a line that names the holder goes before all others.

        Args:
            name: the variable that holds what was added.
        """
        least = _MIN_SHARE * self.grown_bytes
        found = [(n, place) for place, n in self.changes.items() if n > 0 and n >= least]
        word = re.compile(rf"\b{re.escape(name)}\b") if name else None
        naming = [
            (n, place) for n, place in found if word and word.search(linecache.getline(*place))
        ]
        return max(naming or found, default=(0, None))[1]


def sum_lines(readings: LineReadings | None, grown_bytes: int) -> LineChanges:
    """Return what was read at the lines, those outside of all files left out."""
    changes = {} if readings is None else readings.changes
    known = {place: n_bytes for place, n_bytes in changes.items() if place is not None}
    return LineChanges(known, grown_bytes)


def _count(hardware: Hardware, device: str) -> Callable[[], int]:
    def read() -> int:
        for reading in hardware.read():
            if reading.device == device:
                return reading.allocated_bytes or 0
        return 0

    return read
