"""Thin values over time without losing an extreme: the one way in which it is done in Python.

Cut the values into stretches, and of each stretch keep the places of the highest and the lowest
value of every column. A line through what is kept touches every peak.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from itertools import pairwise

from gpumemwidget.model.devices import Sample


def find_extremes(
    stretch: range,
    *,
    highest: Iterable[Sequence[int | None]],
    lowest: Iterable[Sequence[int | None]] = (),
) -> list[int]:
    """Return the places within a stretch that hold its extremes, in ascending order.

    As few as possible: a place often holds the extremes of several columns.

    Args:
        stretch: consecutive places.
        highest: columns of which a highest value is kept; ``None`` in a column is unknown.
        lowest: columns of which a lowest value is kept.
    """
    start = stretch.start
    kept: list[int] = []
    for columns, choose in ((highest, max), (lowest, min)):
        for column in columns:
            values = column[start : stretch.stop]
            known = values if isinstance(values, array) else [v for v in values if v is not None]
            if not known:
                continue
            extreme = choose(known)
            if extreme not in map(column.__getitem__, kept):
                kept.append(start + values.index(extreme))
    return sorted(kept)


def cut_evenly(n_places: int, n_stretches: int) -> list[range]:
    """Cut ``range(n_places)`` into stretches of equal length, give or take one."""
    bounds = [stretch * n_places // n_stretches for stretch in range(n_stretches + 1)]
    return [range(start, stop) for start, stop in pairwise(bounds)]


def thin_samples(samples: Sequence[Sample], most: int) -> Sequence[Sample]:
    """Return at most ``most`` samples, with the newest and the extremes of every device.

    The extremes are the highest allocated, reserved and peaks, and the lowest allocated. Only
    where ``most`` is below five for each device some of them may be missing.
    """
    if len(samples) <= most:
        return samples
    highest, lowest = _list_columns(samples)
    last = len(samples) - 1
    n_stretches = most
    while True:
        # How many extremes of a stretch are one and the same sample shows only now.
        kept = [
            place
            for stretch in cut_evenly(len(samples), n_stretches)
            for place in find_extremes(stretch, highest=highest, lowest=lowest)
            if place != last
        ]
        if len(kept) < most or n_stretches == 1:
            return [samples[place] for place in [*kept[: max(most - 1, 0)], last]]
        n_stretches = max(1, min(n_stretches - 1, n_stretches * (most - 1) // len(kept)))


def _list_columns(
    samples: Sequence[Sample],
) -> tuple[list[list[int | None]], list[list[int | None]]]:
    """Return the columns to keep the highest of, and those to keep the lowest of."""
    devices = {reading.device: None for sample in samples for reading in sample.readings}
    columns: dict[str, tuple[list[int | None], ...]] = {
        device: tuple([None] * len(samples) for _ in range(4)) for device in devices
    }
    for place, sample in enumerate(samples):
        for reading in sample.readings:
            allocated, reserved, allocated_peak, reserved_peak = columns[reading.device]
            allocated[place] = reading.allocated_bytes
            reserved[place] = reading.reserved_bytes
            allocated_peak[place] = reading.allocated_peak_bytes
            reserved_peak[place] = reading.reserved_peak_bytes
    return (
        [column for device in columns.values() for column in device],
        [device[0] for device in columns.values()],
    )
