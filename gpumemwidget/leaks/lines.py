"""Find the line that added most of the memory that has stayed."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from types import FrameType

from gpumemwidget.backends.hardware import Hardware
from gpumemwidget.model.devices import HOST
from gpumemwidget.tracing.line_watch import LineReadings, LineWatch, Place, watch_lines
from gpumemwidget.tracing.sources import IsEntry

#: Time that reading may always take: only a cell or a few steps that grow are read.
_GRACE_NS = 200_000_000


def start_lines(
    hardware: Hardware,
    device: str,
    where: IsEntry | FrameType,
    files: Sequence[str],
    *,
    on_interrupt: Callable[[], None],
) -> LineWatch | None:
    """Read a device's memory at each line of a cell and of files; ``None`` if that can't be done.

    A Ctrl-C that landed in our own code calls ``on_interrupt``, which sends another.
    """
    counter = hardware.find_host_counter()
    if device != HOST:
        counter = functools.partial(hardware.read_allocated, device)
    if counter is None:
        return None
    watch = watch_lines(counter, on_interrupt=on_interrupt, grace_ns=_GRACE_NS)
    return watch if watch.start(where, also=files) else None


def find_growing_line(readings: LineReadings) -> tuple[str, int] | None:
    """Return the file and the line that added at least half of what has stayed; or ``None``.

    What is given back is subtracted from the last line that took exactly as much, or else from the
    last lines that took any.
    """
    added: list[tuple[Place, int]] = []
    for line, change in readings.events:
        if change > 0:
            added.append((line, change))
            continue
        left = -change
        last_ones = reversed(range(max(0, len(added) - 1000), len(added)))
        same = next((n for n in last_ones if added[n][1] == left), None)
        if same is not None:
            del added[same]
            continue
        while added and left > 0:
            last, n_bytes = added.pop()
            if n_bytes > left:
                added.append((last, n_bytes - left))
            left -= n_bytes
    kept: dict[Place, int] = {}
    for line, n_bytes in added:
        kept[line] = kept.get(line, 0) + n_bytes
    grown_bytes = sum(readings.changes.values()) + readings.unread_bytes
    largest = max(kept, key=lambda line: kept[line], default=None)
    if largest is None or grown_bytes <= 0 or kept[largest] < 0.5 * grown_bytes:
        return None
    return largest
