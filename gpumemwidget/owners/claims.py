"""Which storage is told for which memory: two may lie in one block, or over the same bytes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from gpumemwidget.owners.account import Account
from gpumemwidget.owners.blocks import BlockMap
from gpumemwidget.owners.paths import Paths
from gpumemwidget.records import HOST, Block

__all__ = ["PINNED", "group_storages", "list_claims"]

#: Stands for the device of host memory that is not malloc's.
PINNED = "pinned"


def group_storages(account: Account, device: str | None = None) -> list[list[int]]:
    """The storages, those over the same memory together (DLPack makes a second one).

    Of one device, where one is given, the biggest first.
    """
    storages = account.graph.storages
    groups: dict[tuple[str, int], list[int]] = {}
    for place, info in storages.items():
        if device is None or info.device == device:
            groups.setdefault((info.device, info.address), []).append(place)
    found = list(groups.values())
    if device is not None:
        found.sort(key=lambda places: -max(storages[each].n_bytes for each in places))
    return found


def list_claims(
    account: Account,
    paths: Paths,
    blocks: BlockMap,
    groups: Iterable[list[int]],
    outside: dict[str, int],
) -> Iterator[tuple[int, Block | None, int]]:
    """The storages that are a line each, with their blocks and bytes.

    What lies in no block of torch's is added to ``outside``, in bytes for each device.
    """
    graph = account.graph
    claimed: set[tuple[str, int]] = set()
    for places in groups:
        place = places[0] if len(places) == 1 else min(places, key=paths.rank)
        info = graph.storages[place]
        # Without a snapshot sizes are rounded as the allocator rounds them, which is nearly right.
        if info.device in blocks.devices:
            block = blocks.find(info.device, info.address)
            if block is None:
                # Else it was freed under its tensor.
                if not blocks.is_reserved(info.device, info.address):
                    outside[info.device] = outside.get(info.device, 0) + info.n_bytes
                continue
            key = (info.device, block.address)
            is_named = (root := paths.find_root(place)) is not None and root.kind != "nowhere"
            if key in claimed or (not is_named and blocks.name_state(info.device, block)):
                continue
            claimed.add(key)
            yield place, block, block.n_bytes
        elif info.device == HOST and (info.is_borrowed or info.is_pinned):
            # NumPy's or a file's, or pinned: malloc may not even know of it.
            outside[PINNED] = outside.get(PINNED, 0) + (info.n_bytes if info.is_pinned else 0)
        else:
            yield place, None, info.freed_bytes
