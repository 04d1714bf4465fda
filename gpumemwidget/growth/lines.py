"""Find the line that adds memory: the one after which more is in use, again and again."""

from __future__ import annotations

import linecache
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import FrameType

from gpumemwidget.backends.hardware import Hardware
from gpumemwidget.model.devices import HOST
from gpumemwidget.tracing.line_watch import LineReadings, LineWatch, Place, watch_lines
from gpumemwidget.tracing.sources import IsEntry

#: Share of the growth that a line must have added.
_MIN_SHARE = 0.25
#: Amounts are of the same size if they differ by no more than this share.
_SAME = 0.01
_NAME = re.compile(r"[A-Za-z_]\w*")


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
    """How much each line added that stayed, while lines were read.

    Attributes:
        changes: bytes by file and line.
        grown_bytes: how much was added in all.
    """

    changes: Mapping[Place, int]
    grown_bytes: int

    def find(self, holder: str) -> tuple[str, int] | None:
        """Return the file and the line that added the most; ``None`` if none added a good part.

        A line that stores into the holder goes before one that names it, and that one before all
        others.

        Args:
            holder: the path of what holds it: ``trainer.history[…]``.
        """
        least = _MIN_SHARE * self.grown_bytes
        found = [
            (n_bytes, place)
            for place, n_bytes in self.changes.items()
            if place is not None and n_bytes > 0 and n_bytes >= least
        ]
        names = _NAME.findall(holder)
        best = max(found, key=lambda each: (_rank(each[1], names), each[0]), default=None)
        return None if best is None else best[1]


def _rank(place: tuple[str, int], names: Sequence[str]) -> int:
    text = linecache.getline(*place)
    if not names:
        return 0
    name = re.escape(names[-1])
    if re.search(rf"\b{name}\b(\.\w+\(|\[.*\]\s*=|\s*\+?=[^=])", text):
        return 2
    return 1 if re.search(rf"\b{name}\b", text) else 0


def sum_lines(readings: LineReadings | None, grown_bytes: int) -> LineChanges:
    """Return what lines have added that stayed: what a later line gave back is left out.

    What is given back is taken to be what was added last, and of the same size if there is such.
    So what a forward pass takes and the backward pass gives back counts for neither.

    Args:
        readings: the readings at the lines.
        grown_bytes: how much was added in all.
    """
    added: list[tuple[Place, int]] = []
    for place, change in () if readings is None else readings.events:
        if change > 0:
            added.append((place, change))
            continue
        left = -change
        same = [k for k, (_, n_bytes) in enumerate(added) if abs(n_bytes - left) <= _SAME * left]
        if same:
            del added[same[-1]]
            continue
        while added and left > 0:
            last, n_bytes = added.pop()
            if n_bytes > left:
                added.append((last, n_bytes - left))
            left -= n_bytes
    changes: dict[Place, int] = {}
    for place, n_bytes in added:
        changes[place] = changes.get(place, 0) + n_bytes
    return LineChanges(changes, grown_bytes)


def _count(hardware: Hardware, device: str) -> Callable[[], int]:
    def read() -> int:
        for reading in hardware.read():
            if reading.device == device:
                return reading.allocated_bytes or 0
        return 0

    return read
