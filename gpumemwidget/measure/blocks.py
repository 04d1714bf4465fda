"""Samples packed into arrays, 49 bytes a reading, and thinned without losing an extreme.

As records eight hours of eight GPUs would take gigabytes.
"""

from __future__ import annotations

import bisect
from array import array
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from typing import TypeAlias

from gpumemwidget.records import PeakIs, Reading, Sample

__all__ = ["Block", "merge_blocks", "thin_blocks"]

#: Stands for ``None`` in the packed columns: no counter is ever there.
_UNKNOWN = -(2**63)
#: The codes of the kinds of peak; a device that a sample does not have is ``_ABSENT``.
_KINDS: tuple[PeakIs | None, ...] = (None, "exact", "at least", "sampled")
_KIND_CODES = {kind: code for code, kind in enumerate(_KINDS)}
_ABSENT = -1
#: The columns of a reading, in their order: what has extremes to keep stands first.
_WIDTH = 6
_ALLOCATED = 0
_N_HIGHEST = 4
_Columns: TypeAlias = "tuple[array[float], array[int], array[int]]"
_NOTHING = (None,) * _WIDTH


class Block:
    """Samples of consecutive times, in order, with the devices that any of them has.

    Args:
        devices: the devices of all samples.
        start_s: the first time that the block stands for.
        end_s: the last one; without it, that of the newest sample.
        columns: the samples so far, packed.
        is_thin: these hold nothing but extremes.
    """

    __slots__ = (
        "_device_list",
        "_is_thin",
        "_kinds",
        "_values",
        "devices",
        "end_s",
        "start_s",
        "times",
    )

    def __init__(
        self,
        devices: tuple[str, ...],
        start_s: float,
        *,
        end_s: float | None = None,
        columns: _Columns | None = None,
        is_thin: bool = False,
    ) -> None:
        self.devices = devices
        self._device_list = list(devices)
        #: The first and last time of the samples that the block stands for, kept or not.
        self.start_s = start_s
        self.end_s = start_s if end_s is None else end_s
        if columns is None:
            columns = array("d"), array("q"), array("b")
        self.times, self._values, self._kinds = columns
        self._is_thin = is_thin

    def __len__(self) -> int:
        return len(self.times)

    @property
    def nbytes(self) -> int:
        """Bytes of the packed samples."""
        columns = (self.times, self._values, self._kinds)
        return sum(column.itemsize * len(column) for column in columns)

    def append(self, sample: Sample) -> None:
        """Pack one more sample.

        Raises:
            KeyError: it has a device that the block has not.
        """
        readings: Sequence[Reading | None] = sample.readings
        if [reading.device for reading in sample.readings] != self._device_list:
            readings = self._arrange(sample)
        kinds: list[int] = []
        values: list[int | None] = []
        for reading in readings:
            if reading is None:
                kinds.append(_ABSENT)
                values += _NOTHING
            else:
                kinds.append(_KIND_CODES[reading.peak_is])
                values += (
                    reading.allocated_bytes,
                    reading.reserved_bytes,
                    reading.allocated_peak_bytes,
                    reading.reserved_peak_bytes,
                    reading.num_alloc_retries,
                    reading.num_ooms,
                )
        packed = _pack(values)
        # A Ctrl-C may have stopped the last append halfway: the times are written last, and count.
        n_before = len(self.times) * len(self.devices)
        self._values[n_before * _WIDTH :] = packed
        self._kinds[n_before:] = array("b", kinds)
        self.times.append(sample.time_s)
        self.end_s = sample.time_s

    def _arrange(self, sample: Sample) -> list[Reading | None]:
        found = {reading.device: reading for reading in sample.readings}
        for device in found:
            if device not in self.devices:
                raise KeyError(device)
        return [found.get(device) for device in self.devices]

    def cut(self, since_s: float | None, until_s: float | None) -> Block:
        """The samples between two moments, both included."""
        first = 0 if since_s is None else bisect.bisect_left(self.times, since_s)
        end = len(self) if until_s is None else bisect.bisect_right(self.times, until_s)
        return self if end - first == len(self) else self._take(range(first, end))

    def copy(self) -> Block:
        """A block of its own with the same samples."""
        return Block(
            self.devices,
            self.start_s,
            end_s=self.end_s,
            columns=(self.times[:], self._values[:], self._kinds[:]),
        )

    def iter_samples(self) -> Iterator[Sample]:
        """The samples as records, in order of time."""
        n_devices = len(self.devices)
        for row, time_s in enumerate(self.times):
            readings = []
            for column, device in enumerate(self.devices):
                cell = row * n_devices + column
                kind = self._kinds[cell]
                if kind == _ABSENT:
                    continue
                at = cell * _WIDTH
                allocated, reserved, allocated_peak, reserved_peak, retries, ooms = [
                    None if value == _UNKNOWN else value for value in self._values[at : at + _WIDTH]
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

    def thin(self) -> Block:
        """The samples that hold the extremes of the block, each as it was read.

        These are, for every device, a highest of each of allocated, reserved and their peaks, and a
        lowest of allocated. One sample often holds many of them.
        """
        if self._is_thin:
            return self
        return self._take(self._find_extremes(), is_thin=True)

    def _find_extremes(self) -> list[int]:
        stride = len(self.devices) * _WIDTH
        rows: set[int] = set()
        for column in range(len(self.devices)):
            first = column * _WIDTH
            for offset in range(_N_HIGHEST):
                series = self._values[first + offset :: stride]
                _add_row(rows, series, max(series))
                if offset == _ALLOCATED:
                    known = [value for value in series if value != _UNKNOWN]
                    if known:
                        _add_row(rows, series, min(known))
        return sorted(rows)

    def _take(self, rows: Iterable[int], *, is_thin: bool = False) -> Block:
        """A block of some of the samples, which stands for all of them."""
        n_devices = len(self.devices)
        width = n_devices * _WIDTH
        columns = times, values, kinds = array("d"), array("q"), array("b")
        for row in rows:
            times.append(self.times[row])
            values.extend(self._values[row * width : (row + 1) * width])
            kinds.extend(self._kinds[row * n_devices : (row + 1) * n_devices])
        return Block(self.devices, self.start_s, end_s=self.end_s, columns=columns, is_thin=is_thin)

    def _join(self, newer: Block) -> Block:
        """Both blocks in one, where they have the same devices."""
        return Block(
            self.devices,
            self.start_s,
            end_s=newer.end_s,
            columns=(
                self.times + newer.times,
                self._values + newer._values,
                self._kinds + newer._kinds,
            ),
        )


def merge_blocks(older: Block, newer: Block) -> Block:
    """One thinned block for two neighbours: the extremes of both."""
    if older.devices == newer.devices:
        return older._join(newer).thin()  # noqa: SLF001 - of this module
    # The newer one has the older one's devices too: nothing that was seen is forgotten.
    merged = Block(newer.devices, older.start_s)
    for sample in chain(older.iter_samples(), newer.iter_samples()):
        merged.append(sample)
    merged.end_s = newer.end_s
    return merged.thin()


def thin_blocks(blocks: list[Block], most: int) -> list[Block]:
    """Blocks for the same time with at most ``most`` samples, and the extremes still among them.

    One block remains at the least, with up to five samples a device.
    """
    if sum(map(len, blocks)) > most:
        blocks = [block.thin() for block in blocks]
    while len(blocks) > 1 and sum(map(len, blocks)) > most:
        pairs = zip(blocks[::2], blocks[1::2], strict=False)
        alone = blocks[-1:] if len(blocks) % 2 else []
        blocks = [merge_blocks(older, newer) for older, newer in pairs] + alone
    return blocks


def _add_row(rows: set[int], series: array[int], extreme: int) -> None:
    """Add a row that holds this extreme, unless one of the rows holds it already."""
    if not any(series[row] == extreme for row in rows):
        rows.add(series.index(extreme))


def _pack(values: list[int | None]) -> array[int]:
    known = [_UNKNOWN if value is None else value for value in values]
    try:
        return array("q", known)
    except OverflowError:  # No machine has that much: the source gave nonsense.
        return array("q", [value if value.bit_length() <= 63 else _UNKNOWN for value in known])
