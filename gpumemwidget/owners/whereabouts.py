"""Remembers where storages were before a release moved them to the CPU.

A release notes each storage that it made on the CPU, and where its memory was. The note holds
nothing: torch's weak reference keeps a storage's header alive, some hundred bytes, and no memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from gpumemwidget.owners.storages import StorageInfo

__all__ = ["Whereabouts", "whereabouts"]

#: So many storages are remembered, the latest: a model has some thousands.
MOST_NOTED = 100_000


class Whereabouts:
    """Where storages were before a release moved them; it keeps none of them alive.

    Args:
        most: so many are remembered, the latest.
    """

    def __init__(self, most: int = MOST_NOTED) -> None:
        self._most = most
        #: The device, by the address of a storage's header, which is also torch's weak reference:
        #: as long as it is kept no other storage gets this address.
        self._devices: dict[int, str] = {}
        self._storage_type: Any = None

    def note(
        self, storage_type: Any, storages: Sequence[Any], infos: Iterable[StorageInfo]
    ) -> None:
        """Remember where the memory of these new storages was."""
        self._storage_type = storage_type
        for storage, info in zip(storages, infos, strict=True):
            self._forget(storage._cdata)  # noqa: SLF001 - its name in torch
            self._devices[storage._weak_ref()] = info.device  # noqa: SLF001 - has no public name
        expired = [each for each in self._devices if storage_type._expired(each)]  # noqa: SLF001
        for each in expired:
            self._forget(each)
        while len(self._devices) > self._most:
            self._forget(next(iter(self._devices)))

    def find(self, storage: Any) -> str | None:
        """The device where a storage's memory was; ``None`` where that is not known."""
        return self._devices.get(storage._cdata)  # noqa: SLF001 - its name in torch

    def forget(self, storage: Any) -> None:
        """Remember this storage no more."""
        self._forget(storage._cdata)  # noqa: SLF001 - its name in torch

    def forget_all(self) -> None:
        """Remember nothing; the headers go."""
        for each in list(self._devices):
            self._forget(each)

    def __len__(self) -> int:
        return len(self._devices)

    def _forget(self, handle: int) -> None:
        if self._devices.pop(handle, None) is not None:
            self._storage_type._free_weak_ref(handle)  # noqa: SLF001 - has no public name


#: Of the whole process, as its storages are.
whereabouts = Whereabouts()
