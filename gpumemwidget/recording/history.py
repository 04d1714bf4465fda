"""Keep the samples of a whole session in bounded memory.

Recent samples are all kept. Older ones are thinned in blocks: of each block there remain the
samples that hold its extremes, for every device, and neighbouring blocks are merged when room is
needed. So a line through what is kept touches every peak, and every point on it was really read.
"""

from __future__ import annotations

import bisect
import threading
from array import array
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain

from gpumemwidget.model.devices import PeakIs, Reading, Sample, rank_device
from gpumemwidget.recording.forks import survive_fork
from gpumemwidget.recording.thinning import find_extremes

#: Number of samples in a block.
_BLOCK = 64
#: Share of the capacity for recent samples, which are never thinned.
_RECENT_SHARE = 0.3

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

    Appending takes microseconds, with a little merging once in 64 appends. All methods may be
    called from any thread.

    Args:
        capacity: maximum number of samples: several times as many as a block has.
    """

    def __init__(self, capacity: int = 20_000) -> None:
        self.capacity = capacity
        self._min_recent = int(capacity * _RECENT_SHARE) // _BLOCK * _BLOCK
        self._devices: tuple[str, ...] = ()
        self._open: _Block | None = None
        self._recent: deque[_Block] = deque()
        self._n_recent = 0
        #: Thinned blocks; one of level n was merged of 2**n blocks. Higher levels are older.
        self._levels: list[deque[_Block]] = []
        #: Number of samples in full blocks.
        self._n_sealed = 0
        self._last_s = float("-inf")
        self._lock = threading.RLock()
        survive_fork(self)

    def append(self, sample: Sample) -> bool:
        """Keep one more sample; return ``False`` if it is older than the last, and not kept."""
        with self._lock:
            if sample.time_s < self._last_s:
                return False
            self._last_s = sample.time_s
            block = self._open
            if block is None or not block.can_hold(sample):
                if block is not None:
                    self._seal(block)
                block = self._open = self._begin_block(sample)
            block.append(sample)
            if len(block) >= _BLOCK:
                self._seal(block)
                self._open = None
            return True

    def __len__(self) -> int:
        """Return the number of samples that are kept."""
        with self._lock:
            return self._n_sealed + (0 if self._open is None else len(self._open))

    def devices(self) -> tuple[str, ...]:
        """Return every device that was ever in a sample: GPUs by their index, the host last."""
        return self._devices

    def samples(self, since_s: float | None = None, until_s: float | None = None) -> list[Sample]:
        """Return the samples that are kept, in order of time.

        Args:
            since_s: leave out older samples, on the monitor's clock.
            until_s: leave out newer samples.
        """
        blocks = (
            block.cut(since_s, until_s)
            for block in self._list_blocks()
            if (since_s is None or block.end_s >= since_s)
            and (until_s is None or block.start_s <= until_s)
        )
        return [sample for block in blocks for sample in block.iter_samples()]

    def reset_after_fork(self) -> None:
        """Renew the lock in a forked child."""
        self._lock = threading.RLock()

    def _list_blocks(self) -> list[_Block]:
        """Return all blocks, oldest first; none of them changes any more."""
        with self._lock:
            blocks = [*chain(*reversed(self._levels)), *self._recent]
            if self._open is not None:
                blocks.append(self._open.copy())
            return blocks

    def _begin_block(self, sample: Sample) -> _Block:
        names = [reading.device for reading in sample.readings]
        if not set(names) <= set(self._devices):
            self._devices = tuple(sorted({*names, *self._devices}, key=rank_device))
        return _Block(self._devices, sample.time_s)

    def _seal(self, block: _Block) -> None:
        """Keep a full block, and thin and merge older ones where room is needed."""
        self._recent.append(block)
        self._n_recent += len(block)
        self._n_sealed += len(block)
        # By samples: where a device comes, a block ends early.
        while self._n_recent - len(self._recent[0]) >= self._min_recent:
            oldest = self._recent.popleft()
            self._n_recent -= len(oldest)
            self._n_sealed -= len(oldest)
            self._add_thinned(0, oldest.thin())
        while self._n_sealed > self.capacity - _BLOCK and self._merge_two():
            pass

    def _add_thinned(self, level: int, block: _Block) -> None:
        if level == len(self._levels):
            self._levels.append(deque())
        self._levels[level].append(block)
        self._n_sealed += len(block)

    def _merge_two(self) -> bool:
        """Merge the two oldest blocks of the finest level that has two; ``False`` if none has.

        The result is newer than all of the next level, so the order of the levels stays.
        """
        for level, blocks in enumerate(self._levels):
            if len(blocks) >= 2:
                older, newer = blocks.popleft(), blocks.popleft()
                self._n_sealed -= len(older) + len(newer)
                self._add_thinned(level + 1, older.merge(newer))
                return True
        return False


class _Block:
    """Consecutive samples, packed into arrays of 56 bytes a reading.

    Attributes:
        start_s: first time that the block stands for, whether that sample is kept or not.
        end_s: last time that the block stands for.

    Args:
        devices: the devices of all samples.
        start_s: the first time.
    """

    __slots__ = ("_values", "devices", "end_s", "start_s", "times")

    def __init__(self, devices: tuple[str, ...], start_s: float) -> None:
        self.devices = devices
        self.start_s = self.end_s = start_s
        self.times, self._values = array("d"), array("q")

    def __len__(self) -> int:
        return len(self.times)

    def can_hold(self, sample: Sample) -> bool:
        """Return whether the block has all devices of a sample."""
        return {reading.device for reading in sample.readings}.issubset(self.devices)

    def append(self, sample: Sample) -> None:
        """Pack one more sample."""
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
        self._values[len(self.times) * len(self.devices) * _WIDTH :] = _pack(values)
        self.times.append(sample.time_s)
        self.end_s = sample.time_s

    def cut(self, since_s: float | None, until_s: float | None) -> _Block:
        """Return a block with the samples between two times, both included."""
        first = 0 if since_s is None else bisect.bisect_left(self.times, since_s)
        end = len(self) if until_s is None else bisect.bisect_right(self.times, until_s)
        return self if end - first == len(self) else self._select(range(first, end))

    def copy(self) -> _Block:
        """Return a block of its own with the same samples."""
        return self._select(range(len(self)))

    def iter_samples(self) -> Iterator[Sample]:
        """Yield the samples as records, in order of time."""
        stride = len(self.devices) * _WIDTH
        for row, time_s in enumerate(self.times):
            readings = []
            for first, device in enumerate(self.devices):
                at = row * stride + first * _WIDTH
                kind = self._values[at + _WIDTH - 1]
                if kind == _UNKNOWN:
                    continue
                allocated, reserved, allocated_peak, reserved_peak, retries, ooms = [
                    None if value == _UNKNOWN else value
                    for value in self._values[at : at + _WIDTH - 1]
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
            yield Sample(time_s, tuple(readings))

    def thin(self) -> _Block:
        """Return a block for the same time with the samples that hold the extremes of this one.

        For every device: the highest allocated, reserved and peaks, and the lowest allocated.
        """
        stride = len(self.devices) * _WIDTH
        highest = [
            _read_column(self._values[first + offset :: stride])
            for first in range(0, stride, _WIDTH)
            for offset in range(_N_HIGHEST)
        ]
        lowest = highest[::_N_HIGHEST]
        return self._select(find_extremes(range(len(self)), highest=highest, lowest=lowest) or [0])

    def merge(self, newer: _Block) -> _Block:
        """Return one thinned block for this block and the next."""
        # The newer block has the older one's devices too.
        merged = _Block(newer.devices, self.start_s)
        if self.devices == newer.devices:
            merged.times = self.times + newer.times
            merged._values = self._values + newer._values
        else:
            for sample in chain(self.iter_samples(), newer.iter_samples()):
                merged.append(sample)
        merged.end_s = newer.end_s
        return merged.thin()

    def _select(self, rows: Iterable[int]) -> _Block:
        """Return a block with some of the samples, which stands for the same time."""
        width = len(self.devices) * _WIDTH
        selected = _Block(self.devices, self.start_s)
        selected.end_s = self.end_s
        for row in rows:
            selected.times.append(self.times[row])
            selected._values.extend(self._values[row * width : (row + 1) * width])
        return selected


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
