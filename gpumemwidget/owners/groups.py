"""Storages in groups: those that exactly the same rows hold are one.

There may be a thousand rows over thousands of storages, and each row is asked what it holds and
frees. It is the groups that are gone through then, and summed once.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence

from gpumemwidget.owners.storages import StorageInfo

__all__ = ["Groups", "sum_storages"]


class Groups:
    """The storages of an account by the marks that they carry.

    Args:
        storages: by their places.
        marks: for each place, the marks of all that reaches it.
    """

    def __init__(self, storages: Mapping[int, StorageInfo], marks: Sequence[int]) -> None:
        self._storages = storages
        #: With each storage's place in the order of all.
        self._members: dict[int, list[tuple[int, int]]] = {}
        for number, place in enumerate(storages):
            self._members.setdefault(marks[place], []).append((number, place))
        addresses = {(info.device, info.address) for info in storages.values()}
        #: Whether any memory has two storages (DLPack): sums of groups may not be added then.
        self._has_twins = len(addresses) < len(storages)
        self._devices = {info.device for info in storages.values()}
        self._sums: dict[tuple[int, bool], dict[str, int]] = {}
        self._last: tuple[int, list[int]] = (0, [])

    def find(self, marks: int) -> list[int]:
        """The groups that any of these marks reaches, each by all that it carries."""
        if self._last[0] != marks:
            # A row is asked several things, one after the other.
            self._last = marks, [carried for carried in self._members if carried & marks]
        return self._last[1]

    def list_places(self, groups: Iterable[int]) -> list[int]:
        """The storages of these groups, in the order of all."""
        members = itertools.chain.from_iterable(map(self._members.__getitem__, groups))
        return [place for _, place in sorted(members)]

    def has_other_than(self, device: str, groups: Iterable[int]) -> bool:
        """Whether any of these groups has a storage on another device."""
        if self._devices <= {device}:
            return False
        return any(self._sum(carried, rounded=False).keys() - {device} for carried in groups)

    def sum(self, groups: Sequence[int], *, rounded: bool) -> tuple[tuple[str, int], ...]:
        """Bytes of these groups for each device, biggest first; see ``sum_storages``."""
        if self._has_twins:
            return sum_storages(map(self._storages.__getitem__, self.list_places(groups)), rounded)
        sums: dict[str, int] = {}
        for carried in groups:
            for device, n_bytes in self._sum(carried, rounded=rounded).items():
                sums[device] = sums.get(device, 0) + n_bytes
        return tuple(sorted(sums.items(), key=lambda item: (-item[1], item[0])))

    def _sum(self, carried: int, *, rounded: bool) -> dict[str, int]:
        known = self._sums.get((carried, rounded))
        if known is None:
            infos = [self._storages[place] for _, place in self._members[carried]]
            known = self._sums[carried, rounded] = dict(sum_storages(infos, rounded))
        return known


def sum_storages(infos: Iterable[StorageInfo], rounded: bool) -> tuple[tuple[str, int], ...]:
    """Bytes of storages for each device, biggest first.

    Args:
        infos: the storages; two over the same memory are counted once.
        rounded: as the device's allocator counts them, and not as they are held.
    """
    by_address: dict[tuple[str, int], int] = {}
    for info in infos:
        n_bytes = info.freed_bytes if rounded else info.n_bytes
        key = (info.device, info.address)
        known = by_address.get(key)
        if known is None or known < n_bytes:
            by_address[key] = n_bytes
    sums: dict[str, int] = {}
    for (device, _), n_bytes in by_address.items():
        sums[device] = sums.get(device, 0) + n_bytes
    return tuple(sorted(sums.items(), key=lambda item: (-item[1], item[0])))
