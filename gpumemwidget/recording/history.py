"""Keep the samples of a whole session in bounded memory.

Recent samples are all kept. When there is no more room, the older ones are thinned: of each stretch
of time there remain the samples that hold its extremes, for every device. So a line through what is
kept touches every peak, and every point on it was really read.
"""

from __future__ import annotations

import bisect
import threading
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from gpumemwidget.model.devices import PeakIs, Reading, Sample, rank_device
from gpumemwidget.recording.forks import survive_fork
from gpumemwidget.recording.thinning import find_extremes

#: Shares of the capacity: for recent samples, which are never thinned, and for thinned ones.
_RECENT_SHARE, _THINNED_SHARE = 0.3, 0.35

#: Stands for ``None`` in packed columns: no counter ever has this value.
_UNKNOWN = -(2**63)
#: Codes of the kinds of peak; a device that is missing in a sample has the code ``_UNKNOWN``.
_KINDS: tuple[PeakIs | None, ...] = (None, "exact", "at least", "sampled")
_KIND_CODES = {kind: code for code, kind in enumerate(_KINDS)}
#: Number of values in a reading. The first four have a highest to keep, the very first a lowest;
#: the last is the code of its kind of peak.
_WIDTH = 7
_N_HIGHEST = 4


class History:
    """The samples of a session.

    Appending takes microseconds, and some 50 ms once in several thousand times, when older samples
    are thinned. All methods may be called from any thread.

    Args:
        capacity: maximum number of samples.
    """

    def __init__(self, capacity: int = 20_000) -> None:
        self.capacity = capacity
        #: Replaced as a whole where more than its end changes.
        self._table = _Table((), array("d"), array("q"))
        self._lock = threading.RLock()
        survive_fork(self)

    def append(self, sample: Sample) -> bool:
        """Keep one more sample; return ``False`` if it is older than the last, and not kept."""
        with self._lock:
            times = self._table.times
            if times and sample.time_s < times[-1]:
                return False
            new = {reading.device for reading in sample.readings}.difference(self._table.devices)
            if new:
                self._table = self._table.add_devices(new)
            self._table.append(sample)
            if len(self) > self.capacity:
                self._thin()
            return True

    def __len__(self) -> int:
        """Return the number of samples that are kept."""
        return len(self._table.times)

    def devices(self) -> tuple[str, ...]:
        """Return every device that was ever in a sample: GPUs by their index, the host last."""
        return self._table.devices

    def samples(self, since_s: float | None = None, until_s: float | None = None) -> list[Sample]:
        """Return the samples that are kept, in order of time.

        Args:
            since_s: leave out older samples, on the monitor's clock.
            until_s: leave out newer samples.
        """
        with self._lock:
            times = self._table.times
            first = 0 if since_s is None else bisect.bisect_left(times, since_s)
            end = len(times) if until_s is None else bisect.bisect_right(times, until_s)
            window = self._table.cut(first, end)
        return window.unpack()

    def reset_after_fork(self) -> None:
        """Renew the lock in a forked child."""
        self._lock = threading.RLock()

    def _thin(self) -> None:
        """Keep, of the older samples, the extremes of stretches of time of equal length."""
        table, most = self._table, int(self.capacity * _THINNED_SHARE)
        n_old = len(table.times) - int(self.capacity * _RECENT_SHARE)
        columns = [
            column
            for device in range(len(table.devices))
            for column in table.read_columns(device, n_old)
        ]
        start_s, end_s = table.times[0], table.times[n_old - 1]
        n_stretches = max(1, most // (2 * max(1, len(table.devices))))
        while True:
            ends_s = (start_s + (end_s - start_s) * n / n_stretches for n in range(1, n_stretches))
            bounds = [bisect.bisect_left(table.times, time_s, 0, n_old) for time_s in ends_s]
            kept = [
                row
                for first, stop in pairwise([0, *bounds, n_old])
                if first < stop
                for row in find_extremes(
                    range(first, stop), highest=columns, lowest=columns[::_N_HIGHEST]
                )
                or [first]
            ]
            if len(kept) <= most or n_stretches == 1:
                break
            # How many extremes of a stretch are one and the same sample shows only now.
            n_stretches //= 2
        self._table = table.select([*kept, *range(n_old, len(table.times))])


@dataclass(frozen=True, slots=True)
class _Table:
    """Samples in order of time, packed into arrays of 56 bytes a reading."""

    devices: tuple[str, ...]
    times: array[float]
    #: For each sample the values of all devices.
    values: array[int]

    @property
    def stride(self) -> int:
        """Number of values of a sample."""
        return len(self.devices) * _WIDTH

    def append(self, sample: Sample) -> None:
        """Pack one more sample, whose devices the table has."""
        readings = {reading.device: reading for reading in sample.readings}
        values: list[int | None] = []
        for device in self.devices:
            reading = readings.get(device)
            if reading is None:
                values += (None,) * _WIDTH
            else:
                values += (
                    reading.allocated_bytes,
                    reading.reserved_bytes,
                    reading.allocated_peak_bytes,
                    reading.reserved_peak_bytes,
                    reading.num_alloc_retries,
                    reading.num_ooms,
                    _KIND_CODES[reading.peak_is],
                )
        # A Ctrl-C may have stopped the last append halfway: the times are written last, and count.
        self.values[len(self.times) * self.stride :] = _pack(values)
        self.times.append(sample.time_s)

    def add_devices(self, names: set[str]) -> _Table:
        """Return a table with more devices, which its samples do not have."""
        devices = tuple(sorted({*names, *self.devices}, key=rank_device))
        n_values = len(self.times) * self.stride
        stride = len(devices) * _WIDTH
        values = array("q", [_UNKNOWN]) * (len(self.times) * stride)
        for old, device in enumerate(self.devices):
            new = devices.index(device)
            for offset in range(_WIDTH):
                column = self.values[old * _WIDTH + offset : n_values : self.stride]
                values[new * _WIDTH + offset :: stride] = column
        return _Table(devices, self.times, values)

    def read_columns(self, device: int, n_rows: int) -> list[Sequence[int | None]]:
        """Return the columns of a device of which the highest is kept, of the first samples."""
        first = device * _WIDTH
        return [
            _read_column(self.values[at : n_rows * self.stride : self.stride])
            for at in range(first, first + _N_HIGHEST)
        ]

    def cut(self, first: int, end: int) -> _Table:
        """Return a table of its own with the samples of consecutive rows."""
        values = self.values[first * self.stride : end * self.stride]
        return _Table(self.devices, self.times[first:end], values)

    def select(self, rows: Sequence[int]) -> _Table:
        """Return a table of its own with some of the samples."""
        selected = _Table(self.devices, array("d"), array("q"))
        for row in rows:
            selected.times.append(self.times[row])
            selected.values.extend(self.values[row * self.stride : (row + 1) * self.stride])
        return selected

    def unpack(self) -> list[Sample]:
        """Return the samples as records."""
        samples = []
        for row, time_s in enumerate(self.times):
            readings = []
            for place, device in enumerate(self.devices):
                at = row * self.stride + place * _WIDTH
                kind = self.values[at + _WIDTH - 1]
                if kind == _UNKNOWN:
                    continue
                allocated, reserved, allocated_peak, reserved_peak, retries, ooms = [
                    None if value == _UNKNOWN else value
                    for value in self.values[at : at + _WIDTH - 1]
                ]
                readings.append(
                    Reading(
                        device=device,
                        allocated_bytes=allocated,
                        reserved_bytes=reserved,
                        allocated_peak_bytes=allocated_peak,
                        reserved_peak_bytes=reserved_peak,
                        peak_is=_KINDS[kind],
                        num_alloc_retries=retries,
                        num_ooms=ooms,
                    )
                )
            samples.append(Sample(time_s, tuple(readings)))
        return samples


def _pack(values: list[int | None]) -> array[int]:
    known = [_UNKNOWN if value is None else value for value in values]
    try:
        return array("q", known)
    except OverflowError:  # No machine has that much: the source gave nonsense.
        return array("q", [value if value.bit_length() <= 63 else _UNKNOWN for value in known])


def _read_column(values: array[int]) -> Sequence[int | None]:
    if _UNKNOWN not in values:
        return values
    return [None if value == _UNKNOWN else value for value in values]
