"""Keep the samples of a session in bounded memory, and thin values without losing an extreme.

Recent samples are all kept. When there is no more room, the older ones are thinned: of each stretch
there remain the samples that hold its extremes, for every device. So a line through what is kept
touches every peak, and every point on it was really read.
"""

from __future__ import annotations

import bisect
from array import array
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from itertools import pairwise
from operator import attrgetter

from gpumemwidget.model.devices import Sample, rank_device

#: Shares of the capacity: for recent samples, which are never thinned, and for thinned ones.
_RECENT_SHARE, _THINNED_SHARE = 0.3, 0.35

#: Seconds between two samples from which on something is missing between them, and the number of
#: such gaps that are kept. Between cells there is a sample a second, while anybody looks.
_GAP_S, _MOST_GAPS = 5.0, 500

_get_time_s = attrgetter("time_s")


class History:
    """The samples of a session.

    Appending takes microseconds. Thinning takes some 50 ms for a GPU and the host, once in several
    thousand samples. One thread at a time may append, and one may thin; any may read meanwhile.
    """

    def __init__(self, capacity: int = 10_000) -> None:
        self.capacity = capacity
        #: Replaced as a whole where more than its end changes.
        self._samples: list[Sample] = []
        self._devices: tuple[str, ...] = ()
        #: The times between which nothing was sampled; thinning makes no gap. Replaced as a whole.
        self.gaps: list[tuple[float, float]] = []

    def append(self, sample: Sample) -> bool:
        """Keep one more sample. The caller calls ``thin``, when there is time for it.

        Returns:
            ``False`` if it is older than the last, and not kept.
        """
        last_s = self._samples[-1].time_s if self._samples else sample.time_s
        if sample.time_s < last_s:
            return False
        if sample.time_s - last_s > _GAP_S:
            self.gaps = [*self.gaps[1 - _MOST_GAPS :], (last_s, sample.time_s)]
        new = [r.device for r in sample.readings if r.device not in self._devices]
        if new:
            self._devices = tuple(sorted({*new, *self._devices}, key=rank_device))
        self._samples.append(sample)
        return True

    def thin(self, lock: AbstractContextManager[object]) -> None:
        """Thin the older samples, if there is no more room.

        Args:
            lock: is held by those who append meanwhile. Here it is held for microseconds, while the
                thinned samples replace the others.
        """
        if len(self) > self.capacity:
            n_old = len(self) - int(self.capacity * _RECENT_SHARE)
            kept = thin_samples(self._samples[:n_old], int(self.capacity * _THINNED_SHARE))
            with lock:
                self._samples = [*kept, *self._samples[n_old:]]

    def __len__(self) -> int:
        return len(self._samples)

    def devices(self) -> tuple[str, ...]:
        """Return every device that was ever in a sample: GPUs by their index, the host last."""
        return self._devices

    def samples(self, since_s: float | None = None, until_s: float | None = None) -> list[Sample]:
        """Return the samples that are kept, in order of time.

        Args:
            since_s: leave out older samples, on the monitor's clock.
            until_s: leave out newer samples.
        """
        samples = self._samples
        first, end = 0, len(samples)
        if since_s is not None:
            first = bisect.bisect_left(samples, since_s, key=_get_time_s)
        if until_s is not None:
            end = bisect.bisect_right(samples, until_s, key=_get_time_s)
        return samples[first:end]


# -- Thinning --------------------------------------------------------------------------------------


def find_extremes(
    stretch: range,
    *,
    highest: Iterable[Sequence[float | None]],
    lowest: Iterable[Sequence[float | None]] = (),
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


def thin_samples(samples: Sequence[Sample], most: int) -> Sequence[Sample]:
    """Return at most ``most`` samples, with the newest and the extremes of every device.

    The extremes are the highest allocated, reserved and peaks, and the lowest allocated. All of
    them stay, also where they are more than ``most``.
    """
    if len(samples) <= most:
        return samples
    highest, lowest = _list_columns(samples)

    def choose(n_stretches: int) -> list[int]:
        kept = {len(samples) - 1}
        for start, stop in pairwise(_cut(samples, n_stretches)):
            kept.update(find_extremes(range(start, stop), highest=highest, lowest=lowest))
        return sorted(kept)

    # How many extremes of a stretch are one and the same sample shows in a few stretches.
    n_stretches = max(1, most // 8)
    n_stretches = max(1, n_stretches * most // len(choose(n_stretches)))
    while True:
        kept = choose(n_stretches)
        if len(kept) <= most or n_stretches == 1:
            return [samples[place] for place in kept]
        n_stretches = max(1, n_stretches * most * 9 // (len(kept) * 10))


def _cut(samples: Sequence[Sample], n_stretches: int) -> list[int]:
    """Return the bounds of stretches that are equal in number or in time, whichever is shorter.

    Equal in number for where samples crowd, equal in time for where they are few.
    """
    n_samples, start_s = len(samples), samples[0].time_s
    step_s = (samples[-1].time_s - start_s) / n_stretches
    bounds = {n_samples * stretch // n_stretches for stretch in range(n_stretches + 1)}
    bounds.update(
        bisect.bisect_left(samples, start_s + step_s * stretch, key=_get_time_s)
        for stretch in range(n_stretches)
    )
    return sorted(bounds)


def _list_columns(
    samples: Sequence[Sample],
) -> tuple[list[Sequence[float | None]], list[Sequence[float | None]]]:
    """Return the columns to keep the highest of, and those to keep the lowest of."""
    devices = {reading.device: None for sample in samples for reading in sample.readings}
    columns: dict[str, tuple[list[float | None], ...]] = {
        device: tuple([None] * len(samples) for _ in range(4)) for device in devices
    }
    for place, sample in enumerate(samples):
        for reading in sample.readings:
            allocated, reserved, allocated_peak, reserved_peak = columns[reading.device]
            allocated[place] = reading.allocated_bytes
            reserved[place] = reading.reserved_bytes
            allocated_peak[place] = reading.allocated_peak_bytes
            reserved_peak[place] = reading.reserved_peak_bytes
    packed: list[Sequence[float | None]] = []
    for column in (column for device in columns.values() for column in device):
        known = [value for value in column if value is not None]
        # An array has no gaps that would have to be left out of each stretch.
        packed.append(array("d", known) if len(known) == len(column) else column)
    return packed, packed[::4]
