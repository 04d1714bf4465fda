"""What was sampled, for as long as the session lasts and in bounded memory.

The recent samples are all there. Older ones are thinned in blocks: of each block those samples
remain that hold its extremes, for every device, and neighbouring blocks are merged when room is
needed. So a line through what is kept touches every peak, every point on it was really read, and
how far a kept point may be from its neighbours is known (``stretches``).
"""

from __future__ import annotations

import bisect
import threading
from collections import deque
from itertools import chain

from gpumemwidget.measure.blocks import Block, merge_blocks, thin_blocks
from gpumemwidget.measure.forks import survive_fork
from gpumemwidget.records import HOST, Sample

__all__ = ["History"]

#: How many samples are packed, thinned and dropped together.
_BLOCK = 64
#: Samples that are kept as they came until so many are packed at once.
_MOST_UNPACKED = 32
#: How much of the capacity recent samples take, which are never thinned.
_RECENT_SHARE = 0.3
#: Merging begins here, so that there is room for the appends over which it is spread.
_SOFT_SHARE = 0.8
#: Merges of blocks in one append: together well under a millisecond.
_MERGES_AT_ONCE = 8


class History:
    """The samples of a session.

    Appending takes microseconds, with a little merging once in 64 appends. All methods may be
    called from any thread.

    Args:
        capacity: the most samples to keep, at least 1,000.
    """

    def __init__(self, capacity: int = 20_000) -> None:
        if capacity < 1000:
            raise ValueError(f"a history of {capacity} samples is too short: take at least 1000")
        self.capacity = capacity
        self._n_recent_blocks = int(capacity * _RECENT_SHARE) // _BLOCK
        self._soft_limit = int(capacity * _SOFT_SHARE)
        self._devices: tuple[str, ...] = ()
        self._open: Block | None = None
        #: The newest samples, as they came: packing them one by one would cost each cell more.
        self._unpacked: deque[Sample] = deque()
        self._recent: deque[Block] = deque()
        #: Thinned blocks; those of level n came of 2**n blocks. A higher level is older as a whole.
        self._levels: list[deque[Block]] = []
        self._n_sealed = 0
        self._last_s = float("-inf")
        self._lock = threading.RLock()
        survive_fork(self)

    def append(self, sample: Sample) -> bool:
        """Keep one more sample.

        Returns:
            Whether it was kept: one that is older than the last is not.
        """
        with self._lock:
            if sample.time_s < self._last_s:
                return False
            self._last_s = sample.time_s
            self._unpacked.append(sample)
            if len(self._unpacked) >= _MOST_UNPACKED or self._has_new_device(sample):
                self._pack()
            return True

    def __len__(self) -> int:
        """How many samples are kept."""
        with self._lock:
            self._pack()
            return self._n_sealed + (0 if self._open is None else len(self._open))

    @property
    def nbytes(self) -> int:
        """Bytes of the samples that are kept."""
        return sum(block.nbytes for block in self._list_blocks())

    def devices(self) -> tuple[str, ...]:
        """Every device that was ever in a sample: GPUs by their index, the host last."""
        return self._devices

    def samples(
        self,
        since_s: float | None = None,
        until_s: float | None = None,
        *,
        most: int | None = None,
    ) -> list[Sample]:
        """The samples that are kept, in order of time.

        Args:
            since_s: leave out what is older, on the monitor's clock.
            until_s: leave out what is newer.
            most: give no more than this, the newest sample and all extremes of this window among
                them. Only where that is less than five for each device may there be more.
        """
        blocks = self._list_blocks()
        if since_s is not None:
            blocks = blocks[bisect.bisect_left(blocks, since_s, key=lambda block: block.end_s) :]
        if until_s is not None:
            blocks = blocks[: bisect.bisect_right(blocks, until_s, key=lambda block: block.start_s)]
        if blocks:
            blocks[-1] = blocks[-1].cut(since_s, until_s)
            blocks[0] = blocks[0].cut(since_s, until_s)
            blocks = [block for block in blocks if len(block)]
        newest = list(blocks[-1].iter_samples())[-1:] if blocks else []
        if most is not None:
            blocks = thin_blocks(blocks, most - 1)
        samples = list(chain.from_iterable(block.iter_samples() for block in blocks))
        return samples if samples[-1:] == newest else samples + newest

    def stretches(self) -> list[tuple[float, float]]:
        """Where samples were thinned out: first and last time of each stretch, oldest first.

        Over any run of whole stretches the highest allocated, reserved and peaks and the lowest
        allocated of what is kept are those of all that was appended, for every device.
        """
        with self._lock:
            self._pack()
            return [(block.start_s, block.end_s) for block in chain(*reversed(self._levels))]

    def reset_after_fork(self) -> None:
        """Renew the lock in a forked child."""
        self._lock = threading.RLock()

    def _list_blocks(self) -> list[Block]:
        """All blocks, oldest first. None of them changes any more: the open one is a copy."""
        with self._lock:
            self._pack()
            blocks = [*chain(*reversed(self._levels)), *self._recent]
            if self._open is not None:
                blocks.append(self._open.copy())
            return blocks

    def _has_new_device(self, sample: Sample) -> bool:
        for reading in sample.readings:  # noqa: SIM110 - a generator takes twice as long, in every cell
            if reading.device not in self._devices:
                return True
        return False

    def _pack(self) -> None:
        while self._unpacked:
            sample = self._unpacked.popleft()
            block = self._open
            if block is None:
                block = self._open = self._begin_block(sample)
            try:
                block.append(sample)
            except KeyError:  # A device that was touched just now.
                self._seal(block)
                block = self._open = self._begin_block(sample)
                block.append(sample)
            if len(block) >= _BLOCK:
                self._seal(block)
                self._open = None

    def _begin_block(self, sample: Sample) -> Block:
        names = [reading.device for reading in sample.readings]
        if not set(names) <= set(self._devices):
            self._devices = tuple(sorted({*names, *self._devices}, key=_by_kind_and_index))
        return Block(self._devices, sample.time_s)

    def _seal(self, block: Block) -> None:
        self._recent.append(block)
        self._n_sealed += len(block)
        if len(self._recent) > self._n_recent_blocks:
            oldest = self._recent.popleft()
            self._n_sealed -= len(oldest)
            self._add(0, oldest.thin())
        n_merges = 0
        while self._n_sealed > self._soft_limit and self._merge_two():
            n_merges += 1
            if n_merges >= _MERGES_AT_ONCE and self._n_sealed <= self.capacity - _BLOCK:
                break

    def _add(self, level: int, block: Block) -> None:
        if level == len(self._levels):
            self._levels.append(deque())
        self._levels[level].append(block)
        self._n_sealed += len(block)

    def _merge_two(self) -> bool:
        """Merge the two oldest blocks of the finest level that has two.

        The result is newer than all of the next level, so the order of the levels stays.
        """
        for level, blocks in enumerate(self._levels):
            if len(blocks) >= 2:
                older, newer = blocks.popleft(), blocks.popleft()
                self._n_sealed -= len(older) + len(newer)
                self._add(level + 1, merge_blocks(older, newer))
                return True
        return False


def _by_kind_and_index(device: str) -> tuple[bool, int, str]:
    # The order of the hardware's own readings: cuda:9 stands before cuda:10.
    return device == HOST, len(device), device
