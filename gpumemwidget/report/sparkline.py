"""The chart of one device over one cell: its geometry, and its SVG.

The rules, which the live chart follows too:

- The ``viewBox`` is ``0 0 SPARKLINE_WIDTH SPARKLINE_HEIGHT``; x is time from the cell's start to
  its end, y is bytes from ``low_bytes`` at the bottom to ``high_bytes`` at the top
  (``choose_range``).
- *Allocated* is a filled area (class ``gmw-a``), *reserved* a line (``gmw-v``), the peak a dashed
  line over the whole width (``gmw-p``): when it was reached is not known, but that it was.
- What is unknown is a gap. Of many points those are kept that are the extremes of their stretch of
  time, so no tip is lost.
- All text stands outside of the SVG, which is stretched.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from gpumemwidget.records import CellDevice, CellRecord, Reading, Sample
from gpumemwidget.report.theme import SPARKLINE_HEIGHT, SPARKLINE_WIDTH
from gpumemwidget.report.words import format_peak, name_counters

__all__ = ["Sparkline", "choose_range", "list_points", "plot_device", "thin"]

#: Stretches of time, of each of which the lowest and the highest point are kept.
_N_STRETCHES = 60

#: The scale is never finer than this part of its top, so that a rounding is not drawn as a drama.
_FINEST_PART = 200

#: One counter over time: seconds since the cell's start, and bytes.
Points = Sequence[tuple[float, int | None]]


@dataclass(frozen=True, slots=True)
class Sparkline:
    """What is drawn of one device; empty paths where a counter is unknown."""

    device: str
    allocated_path: str
    reserved_path: str
    allocated_name: str
    reserved_name: str
    #: How high the dashed line stands; ``None`` where no peak is known.
    peak_y: int | None
    #: ``"peak 3.40 GiB"``, with what it is the peak of where that is not *allocated*.
    peak_label: str
    low_bytes: int
    high_bytes: int
    duration_s: float
    #: How many readings within the cell are drawn between its two ends.
    n_samples: int


def choose_range(values: Iterable[int]) -> tuple[int, int]:
    """The bytes at the bottom and at the top of the chart.

    The bottom is 0 unless everything happens in the upper half: then it is a little below the
    lowest value, so that the area still has a body.
    """
    known = list(values)
    low, high = min(known, default=0), max(known, default=0)
    if high <= 0:
        return 0, 1
    if low <= high / 2 or low == high:
        return 0, high
    span = max(high - low, high // _FINEST_PART)
    return max(high - span - span // 5, 0), high


def thin(points: Points, n_stretches: int = _N_STRETCHES) -> list[tuple[float, int | None]]:
    """At most two points for each stretch, plus the ends and one for each gap's edge.

    Every point kept is one of the given ones; of each stretch the lowest and the highest are kept,
    so the extremes of the whole are too.
    """
    if len(points) <= 2 * n_stretches:
        return list(points)
    kept = {0, len(points) - 1}
    for stretch in range(n_stretches):
        start = stretch * len(points) // n_stretches
        end = (stretch + 1) * len(points) // n_stretches
        known = [
            (value, index)
            for index, (_, value) in enumerate(points[start:end], start)
            if value is not None
        ]
        if known:
            kept.add(min(known)[1])
            kept.add(max(known)[1])
        if len(known) < end - start:
            kept.add(next(i for i in range(start, end) if points[i][1] is None))
    return [points[index] for index in sorted(kept)]


def list_points(
    record: CellRecord, device: CellDevice, samples: Sequence[Sample]
) -> tuple[Points, Points]:
    """Allocated and reserved over the cell: its start, the samples within it, its end."""
    allocated: list[tuple[float, int | None]] = [(0.0, device.allocated.before_bytes)]
    reserved: list[tuple[float, int | None]] = [(0.0, device.reserved.before_bytes)]
    for sample in samples:
        time_s = sample.time_s - record.start_s
        reading = _find_reading(sample, device.device)
        if reading is not None and 0 < time_s < record.duration_s:
            allocated.append((time_s, reading.allocated_bytes))
            reserved.append((time_s, reading.reserved_bytes))
    allocated.append((record.duration_s, device.allocated.after_bytes))
    reserved.append((record.duration_s, device.reserved.after_bytes))
    return allocated, reserved


def plot_device(
    record: CellRecord, device: CellDevice, samples: Sequence[Sample]
) -> Sparkline | None:
    """The chart of one device of a cell; ``None`` where not one reading is known.

    Args:
        record: the cell.
        device: one of ``record.devices``.
        samples: the readings taken while the cell ran; others are left out.
    """
    allocated, reserved = list_points(record, device, samples)
    names = name_counters(device.device)
    peak_bytes, peak_of = device.allocated.peak_bytes, "peak"
    if peak_bytes is None:
        peak_bytes, peak_of = device.reserved.peak_bytes, f"peak {names.reserved}"
    known = [value for _, value in (*allocated, *reserved) if value is not None]
    if not known:
        return None
    peak_label = ""
    if peak_bytes is not None:
        known.append(peak_bytes)
        peak_label = f"{peak_of} {format_peak(peak_bytes, device.peak_is)}"
    low, high = choose_range(known)

    def draw(points: Points, *, is_area: bool) -> str:
        return _draw_path(thin(points), record.duration_s, low, high, is_area=is_area)

    return Sparkline(
        device=device.device,
        allocated_name=names.allocated,
        reserved_name=names.reserved,
        allocated_path=draw(allocated, is_area=True),
        reserved_path=draw(reserved, is_area=False),
        peak_y=None if peak_bytes is None else _place(peak_bytes, low, high),
        peak_label=peak_label,
        low_bytes=low,
        high_bytes=high,
        duration_s=record.duration_s,
        n_samples=len(allocated) - 2,
    )


def _find_reading(sample: Sample, device: str) -> Reading | None:
    return next((reading for reading in sample.readings if reading.device == device), None)


def _place(value: int, low: int, high: int) -> int:
    """The height of a value in the ``viewBox``, where y grows downwards."""
    part = min(max((value - low) / (high - low), 0.0), 1.0)
    return round((1 - part) * SPARKLINE_HEIGHT)


def _place_time(time_s: float, duration_s: float) -> int:
    # A cell that took no time at all is all end.
    return round(time_s / duration_s * SPARKLINE_WIDTH) if duration_s > 0 else SPARKLINE_WIDTH


def _draw_path(points: Points, duration_s: float, low: int, high: int, *, is_area: bool) -> str:
    """The points as an SVG path, a piece for each run of known values.

    An area's piece starts and ends at the bottom. Points on a level line are left out, for they
    change nothing and every saved notebook carries them.
    """
    pieces: list[str] = []
    for run in _split_at_gaps(points):
        corners = [
            (_place_time(time_s, duration_s), _place(value, low, high)) for time_s, value in run
        ]
        corners = _drop_level(corners)
        if len(corners) == 1:
            # A point alone would not be seen: a short dash.
            corners.append((corners[0][0] + 2, corners[0][1]))
        steps = "".join(
            f" {x - x_before} {y - y_before}" for (x_before, y_before), (x, y) in pairwise(corners)
        )
        # A minus sign needs no space before it.
        line = f"l{steps[1:]}".replace(" -", "-")
        x, y = corners[0]
        if is_area:
            pieces.append(f"M{x} {SPARKLINE_HEIGHT}V{y}{line}V{SPARKLINE_HEIGHT}")
        else:
            pieces.append(f"M{x} {y}{line}")
    return "".join(pieces)


def _split_at_gaps(points: Points) -> list[list[tuple[float, int]]]:
    runs: list[list[tuple[float, int]]] = [[]]
    for time_s, value in points:
        if value is None:
            runs.append([])
        else:
            runs[-1].append((time_s, value))
    return [run for run in runs if run]


def _drop_level(corners: list[tuple[int, int]]) -> list[tuple[int, int]]:
    return [
        corner
        for index, corner in enumerate(corners)
        if index in (0, len(corners) - 1)
        or not corners[index - 1][1] == corner[1] == corners[index + 1][1]
    ]
