"""Describe how each line of a cell changed the host's memory, from readings at its lines."""

from __future__ import annotations

from collections import Counter

from gpumemwidget.model.cells import CellDevice
from gpumemwidget.model.devices import Frame
from gpumemwidget.model.traces import HostLine, HostLines
from gpumemwidget.tracing.line_watch import LineReadings, Place
from gpumemwidget.tracing.sources import Sources


def describe_lines(
    readings: LineReadings, sources: Sources, cell: CellDevice | None = None
) -> HostLines:
    """Return the changes by the lines of the traced source.

    Args:
        readings: the readings at the lines.
        sources: the cell, or the file that the ``with`` block stands in, and its parts.
        cell: the host in the cell's record; ``None`` where its end could not be read.
    """
    source = sources.traced

    def number(place: Place) -> int:
        return 0 if place is None else sources.find_line(Frame(*place, "")) or 0

    changes: Counter[int] = Counter()
    for place, n_bytes in readings.changes.items():
        changes[number(place)] += n_bytes
    read_bytes = changes.total() + readings.unread_bytes
    del changes[0]
    before_bytes = None if cell is None else cell.allocated.before_bytes
    after_bytes = None if cell is None else cell.allocated.after_bytes
    if before_bytes is None:
        before_bytes = readings.start_bytes
    if after_bytes is None:
        after_bytes = readings.start_bytes + read_bytes
    return HostLines(
        name=source.name,
        filename=source.filename,
        kind="file" if source.kind == "file" else "cell",
        lines=tuple(
            HostLine(line, text, changes[line])
            for line, text in source.list_shown(
                line for line, n_bytes in changes.items() if n_bytes
            )
        ),
        before_bytes=before_bytes,
        after_bytes=after_bytes,
        # Includes the few bytes between our first and last readings and those of the record.
        outside_bytes=after_bytes - before_bytes - changes.total() - readings.unread_bytes,
        unread_bytes=readings.unread_bytes,
        unread_lines=tuple(sorted({number(place) for place in readings.unread_lines} - {0})),
        notes=tuple(readings.notes),
    )
