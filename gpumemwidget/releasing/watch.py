"""Watch storages that are meant to be freed, without holding them.

A release is proved by its storages: each is expired or it is not, whatever the counters say. Torch
has weak references of its own for storages; a Python one would only watch the wrapper.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from gpumemwidget.ownership.graph.torch_reader import StorageInfo
from gpumemwidget.ownership.holdings import Account, take_account
from gpumemwidget.ownership.labels import spell_steps
from gpumemwidget.ownership.paths import Paths
from gpumemwidget.ownership.shell import Shell
from gpumemwidget.units import format_bytes

#: Shortfall from a plan that is not looked into (bytes): other threads and the interpreter
#: allocate meanwhile.
TOLERANCE_BYTES = 1024**2

_BUDGET_S = 5.0
#: Maximum number of holders that are named, the biggest first.
_MOST_NAMED = 5


class StorageWatch:
    """Weak references to storages; ``close`` it, or their headers stay allocated."""

    def __init__(self) -> None:
        #: Torch's weak references, which are addresses that must be given back.
        self._watched: dict[int, StorageInfo] = {}
        self._storage_type: Any = None

    def add(self, account: Account, places: Iterable[int]) -> None:
        """Watch the storages at these places of the account's graph."""
        graph = account.graph
        self._storage_type = graph.reader.storage_type
        for place in dict.fromkeys(places):
            if place in graph.unseen:
                continue
            storage: Any = graph.objects[place]
            handle = self._storage_type._weak_ref(storage)  # noqa: SLF001 - has no public name
            self._watched[handle] = graph.storages[place]

    def list_remains(self, shell: Shell) -> list[str]:
        """A sentence for each holder of what is still there; none within the tolerance."""
        alive = {
            handle: info
            for handle, info in self._watched.items()
            if not self._storage_type._expired(handle)  # noqa: SLF001
        }
        if sum(info.n_bytes for info in alive.values()) <= TOLERANCE_BYTES:
            return []
        account = take_account(shell, budget_s=_BUDGET_S, depth="holders")
        paths = None if account is None else account.find_paths()
        sums: dict[tuple[str, str], int] = {}
        for handle, info in alive.items():
            key = (info.device, self._name_holder(account, paths, handle))
            sums[key] = sums.get(key, 0) + info.n_bytes
        found = sorted(sums.items(), key=lambda item: -item[1])
        sentences = [
            f"{format_bytes(n_bytes)} on {device} was meant to go and is still held by {holder}"
            for (device, holder), n_bytes in found[:_MOST_NAMED]
        ]
        rest = sum(n_bytes for _, n_bytes in found[_MOST_NAMED:])
        if rest:
            sentences.append(f"{format_bytes(rest)} more was meant to go and is held elsewhere")
        return sentences

    def close(self) -> None:
        """Give the weak references back. May be called twice."""
        while self._watched:
            self._storage_type._free_weak_ref(self._watched.popitem()[0])  # noqa: SLF001

    def _name_holder(self, account: Account | None, paths: Paths | None, handle: int) -> str:
        """The best path to it, and the other rows that reach it."""
        storage = self._storage_type._new_with_weak_ptr(handle)  # noqa: SLF001
        if account is None or paths is None or storage is None:
            return "something that no variable names"
        place = account.graph.find(storage)
        if place is None:
            return "something that no variable names"
        tensors = account.graph.tensors_on.get(place, []) or [place]
        best = min(tensors, key=paths.rank)
        root = paths.find_root(best)
        if root is None:
            # Garbage that waits for its collection, or memory held in C++.
            return "something that Python can't see, or rubbish in a cycle"
        others = [name for name in account.name_holders(account.marks[place]) if name != root.word]
        more = f", and by {', '.join(others[:_MOST_NAMED])}" if others else ""
        return spell_steps(paths.list_steps(best)) + more
