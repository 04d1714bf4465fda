"""Watch storages that are meant to be freed, without holding them.

A release is proved by its storages: each is expired or it is not, whatever the counters say.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any, TypeAlias

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
_UNNAMED = "something that no variable names"

#: Torch's own weak reference to a storage (one of Python's would only watch the wrapper), with what
#: was read of it.
WatchedStorage: TypeAlias = "tuple[Any, StorageInfo]"


def watch_storages(account: Account, places: Iterable[int]) -> list[WatchedStorage]:
    """Return references to the storages at these places of the account's graph."""
    graph = account.graph
    refer = graph.reader.torch.multiprocessing.reductions.StorageWeakRef
    return [
        (refer(graph.objects[place]), graph.storages[place])
        for place in dict.fromkeys(places)
        if place not in graph.unseen
    ]


def list_remains(shell: Shell, watched: Sequence[WatchedStorage]) -> list[str]:
    """Return a sentence for each holder of what is still there; none within the tolerance."""
    alive = [(reference, info) for reference, info in watched if not reference.expired()]
    if sum(info.n_bytes for _, info in alive) <= TOLERANCE_BYTES:
        return []
    account = take_account(shell, budget_s=_BUDGET_S, depth="holders")
    paths = None if account is None else account.find_paths()
    sums: Counter[tuple[str, str]] = Counter()
    for reference, info in alive:
        sums[info.device, _name_holder(account, paths, reference.cdata)] += info.n_bytes
    found = sums.most_common()
    sentences = [
        f"{format_bytes(n_bytes)} on {device} was meant to go and is still held by {holder}"
        for (device, holder), n_bytes in found[:_MOST_NAMED]
    ]
    rest = sum(n_bytes for _, n_bytes in found[_MOST_NAMED:])
    if rest:
        sentences.append(f"{format_bytes(rest)} more was meant to go and is held elsewhere")
    return sentences


def _name_holder(account: Account | None, paths: Paths | None, handle: int) -> str:
    """Return the best path to a storage, and the other rows that reach it."""
    if account is None or paths is None:
        return _UNNAMED
    storage = account.graph.reader.storage_type._new_with_weak_ptr(handle)  # noqa: SLF001 - has no public name
    place = None if storage is None else account.graph.find(storage)
    if place is None:
        return _UNNAMED
    tensors = account.graph.tensors_on.get(place, []) or [place]
    best = min(tensors, key=paths.rank)
    root = paths.find_root(best)
    if root is None:
        # Garbage that waits for its collection, or memory held in C++.
        return "something that Python can't see, or rubbish in a cycle"
    others = [name for name in account.name_holders(account.marks[place]) if name != root.word]
    more = f", and by {', '.join(others[:_MOST_NAMED])}" if others else ""
    return spell_steps(paths.list_steps(best)) + more
