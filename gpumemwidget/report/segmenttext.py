"""A map of a device's segments as lines of letters, for where no picture is shown."""

from __future__ import annotations

from collections.abc import Iterator

from gpumemwidget.report.segmentchart import SegmentChart, name_look, tell_rows
from gpumemwidget.units import format_bytes

__all__ = ["write_segments"]

_WIDTH = 64
#: By look; all others are in use.
_LETTERS = {"pending": "~", "releasable": ".", "fragmented": "-", "pools": "="}
_IN_USE = "#"


def write_segments(chart: SegmentChart) -> list[str]:
    """The map's rows, and at last how to read them; a letter is what most of its bytes are.

    Args:
        chart: the map as it is drawn.
    """
    letters = "".join(_list_letters(chart, chart.row_bytes // _WIDTH))
    rows = [
        "  " + letters[start : start + _WIDTH].rstrip() for start in range(0, len(letters), _WIDTH)
    ]
    keys = "; ".join(
        f"{_LETTERS.get(look, _IN_USE)} {name_look(look)} {format_bytes(n_bytes)}"
        for look, n_bytes in chart.looks
    )
    return [*rows, f"{tell_rows(chart)} {keys}."]


def _list_letters(chart: SegmentChart, cell_bytes: int) -> Iterator[str]:
    """One for each cell, the last of which may be no more than begun."""
    n_cells = -(-chart.total_bytes // cell_bytes)
    sums: list[dict[str, float]] = [{} for _ in range(n_cells)]
    for piece in chart.pieces:
        n_bytes = piece.end - piece.start
        for cell in range(piece.start // cell_bytes, -(-piece.end // cell_bytes)):
            start, end = cell * cell_bytes, (cell + 1) * cell_bytes
            share = (min(piece.end, end) - max(piece.start, start)) / n_bytes
            for look, amount in piece.looks:
                letter = _LETTERS.get(look, _IN_USE)
                sums[cell][letter] = sums[cell].get(letter, 0.0) + amount * share
    for each in sums:
        yield max(each, key=lambda letter: each[letter], default=" ")
