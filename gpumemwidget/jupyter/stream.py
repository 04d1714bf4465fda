"""Samples as bytes: what the live plot is drawn from.

A row is one sample: its time, then allocated, reserved and peak of each device, all as
little-endian float64 (exact for bytes up to 2**53), NaN where a figure is unknown. One row of a GPU
and the host is 56 bytes. An update begins with four more figures, those of ``UpdateHead``.
"""

from __future__ import annotations

import math
import sys
from array import array
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import NamedTuple

from gpumemwidget.records import Reading, Sample

__all__ = ["UpdateHead", "count_rows", "pack_rows", "pack_update", "thin_samples"]

_NAN = math.nan
_UNKNOWN = (_NAN, _NAN, _NAN)
_N_COUNTERS = 3
_N_BYTES = 8


def pack_rows(samples: Iterable[Sample], devices: Sequence[str]) -> bytes:
    """The samples as rows.

    Args:
        samples: in order of time.
        devices: which devices the columns are for, in this order.
    """
    return _to_bytes(_list_figures(samples, devices))


class UpdateHead(NamedTuple):
    """What an update says beside its samples."""

    #: Of the message, in the order of all messages.
    number: int
    #: When the running cell began, on the monitor's clock; NaN in the update where none runs.
    running_s: float | None
    #: The wall's clock less the monitor's: it jumps when the wall's is set or the machine slept.
    wall_offset_s: float
    #: How soon the next update may be expected while something happens.
    interval_s: float


def pack_update(head: UpdateHead, samples: Iterable[Sample], devices: Sequence[str]) -> bytes:
    """An update's binary part: all of it that is new.

    Args:
        head: the four figures that stand before the rows.
        samples: in order of time.
        devices: which devices the columns are for, in this order.
    """
    figures = [_NAN if figure is None else figure for figure in head]
    return _to_bytes(figures + _list_figures(samples, devices))


def _list_figures(samples: Iterable[Sample], devices: Sequence[str]) -> list[float]:
    figures: list[float] = []
    for sample in samples:
        figures.append(sample.time_s)
        readings = {reading.device: reading for reading in sample.readings}
        for device in devices:
            reading = readings.get(device)
            figures += _UNKNOWN if reading is None else _list_counters(reading)
    return figures


def _to_bytes(figures: list[float]) -> bytes:
    packed = array("d", figures)
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


def count_rows(n_bytes: int, n_devices: int) -> int:
    """How many rows of so many devices fit into ``n_bytes``."""
    return n_bytes // (_N_BYTES * (1 + _N_COUNTERS * n_devices))


def thin_samples(samples: Sequence[Sample], most: int) -> Sequence[Sample]:
    """At most ``most`` of the samples, with the extremes of every device among them.

    Over equal numbers of samples it keeps those that hold the highest allocated, reserved and peak
    and the lowest allocated of each device, and the first one: a plot of what is kept touches
    every peak. The newest is kept too: there the plot goes on.
    """
    if len(samples) <= most:
        return samples
    devices = [reading.device for reading in samples[-1].readings]
    # How many of a span's extremes are one and the same sample shows only when they are picked.
    n_spans = most
    while True:
        kept = _pick_from_spans(samples, n_spans, devices)
        if len(kept) < most or n_spans == 1:
            break
        n_spans = max(1, min(n_spans - 1, n_spans * (most - 1) // len(kept)))
    last = len(samples) - 1
    return [samples[i] for i in [*[i for i in kept if i != last][: most - 1], last]]


def _pick_from_spans(samples: Sequence[Sample], n_spans: int, devices: Sequence[str]) -> list[int]:
    bounds = [span * len(samples) // n_spans for span in range(n_spans + 1)]
    return [
        i
        for start, end in pairwise(bounds)
        for i in sorted(_pick_extremes(samples, range(start, end), devices))
    ]


def _pick_extremes(samples: Sequence[Sample], span: range, devices: Iterable[str]) -> set[int]:
    start = span.start
    best = {device: [(-math.inf, start)] * 4 for device in devices}
    for i in span:
        for reading in samples[i].readings:
            own = best.get(reading.device)
            if own is None:
                continue
            allocated, reserved, peak = _list_counters(reading)
            if allocated > own[0][0]:
                own[0] = (allocated, i)
            if -allocated > own[1][0]:
                own[1] = (-allocated, i)
            if reserved > own[2][0]:
                own[2] = (reserved, i)
            if peak > own[3][0]:
                own[3] = (peak, i)
    return {start, *(i for own in best.values() for _, i in own)}


def _list_counters(reading: Reading) -> tuple[float, float, float]:
    allocated_bytes, reserved_bytes = reading.allocated_bytes, reading.reserved_bytes
    # The host has no high-water mark of what is allocated, only one of its resident size.
    peak_bytes = reading.allocated_peak_bytes
    if peak_bytes is None:
        peak_bytes = reading.reserved_peak_bytes
    return (
        _NAN if allocated_bytes is None else allocated_bytes,
        _NAN if reserved_bytes is None else reserved_bytes,
        _NAN if peak_bytes is None else peak_bytes,
    )
