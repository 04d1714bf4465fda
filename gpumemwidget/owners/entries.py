"""The account of owners: every allocated byte of every device, once, with its owner.

Storages come from the walk, blocks from the allocator. On CUDA a storage's bytes are those of the
block it lies in, so the lines add up to the allocator's own figure; what no storage claims is told
by the block's size and pool. On the host malloc has no list of what it handed out: what is no
tensor's is one line.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from dataclasses import replace

from gpumemwidget.backends.hardware import Hardware
from gpumemwidget.errors import forgets_frames
from gpumemwidget.owners.account import ELSEWHERE, Account, take_account
from gpumemwidget.owners.base import Shell
from gpumemwidget.owners.blocks import BlockMap, name_pools
from gpumemwidget.owners.collector import paused_collector
from gpumemwidget.owners.holdings import describe_rows
from gpumemwidget.owners.lines import format_allocation
from gpumemwidget.owners.paths import Paths
from gpumemwidget.owners.purposes import Purposes
from gpumemwidget.records import HOST, DeviceAccount, MemoryAccount, Owned, Reading
from gpumemwidget.units import format_bytes

__all__ = ["take_memory_account"]

#: The full account is asked for, and may look at all there is.
FULL_BUDGET_S = 10.0

_RUBBISH = "rubbish in a cycle (gc.collect() frees it)"
_NO_NAME = "no name (held where Python can't see)"
#: Stands for the device of host memory that is not malloc's.
_PINNED = "pinned"
_OTHER = "Python's own objects and libraries"


@forgets_frames
def take_memory_account(
    shell: Shell, hardware: Hardware, *, budget_s: float = FULL_BUDGET_S
) -> MemoryAccount:
    """Who owns what is allocated, on every device that the process uses.

    Nothing is changed: no hook runs, nothing is computed, and what is allocated on a device is the
    same before and after.

    Args:
        shell: the running IPython.
        hardware: the allocators' figures and blocks.
        budget_s: seconds after which the walk stops; the account then says that it is not complete.

    Returns:
        Lines that add up to what each allocator says is allocated.
    """
    with paused_collector():
        return _take(shell, hardware, budget_s)


def _take(shell: Shell, hardware: Hardware, budget_s: float) -> MemoryAccount:
    started_s = time.perf_counter()
    account = take_account(shell, budget_s=budget_s, scope="surroundings")
    segments = hardware.read_segments()
    readings = hardware.read()
    cells = shell.read_cell_numbers()
    blocks = BlockMap(segments, cells=cells)
    pools: dict[tuple[int, int], str] = {}
    owned: list[Owned] = []
    claimed: set[tuple[str, int]] = set()
    notes: list[str] = []
    if account is not None:
        n_outside = _list_storages(account, blocks, owned, claimed, cells)
        pools = name_pools(
            (row.name, account.graph.objects[place])
            for row in account.rows.values()
            for place in row.places
        )
        notes.extend(_describe_outside(*each) for each in n_outside.items() if each[1])
    owned.extend(blocks.describe_unclaimed(claimed, pools))
    devices = [_close_account(reading, owned, notes) for reading in readings]
    return MemoryAccount(
        devices=tuple(devices),
        holdings=() if account is None else describe_rows(account),
        is_complete=account is None or account.graph.is_complete,
        duration_s=time.perf_counter() - started_s,
        notes=tuple(notes),
    )


def _list_storages(
    account: Account,
    blocks: BlockMap,
    owned: list[Owned],
    claimed: set[tuple[str, int]],
    cells: Mapping[str, int],
) -> dict[str, int]:
    """A line for each storage; what lies in no block of torch's, in bytes for each device."""
    graph = account.graph
    paths = account.find_paths()
    purposes = Purposes(graph, paths)
    outside: dict[str, int] = {}
    for places in _group_by_memory(account):
        place = places[0] if len(places) == 1 else min(places, key=paths.rank)
        info = graph.storages[place]
        n_bytes = info.freed_bytes
        line = None
        # Without a snapshot sizes are rounded as the allocator rounds them, which is nearly right.
        if info.device in blocks.devices:
            block = blocks.find(info.device, info.address)
            if block is None:
                if blocks.is_reserved(info.device, info.address):
                    continue  # Freed under its tensor.
                outside[info.device] = outside.get(info.device, 0) + info.n_bytes
                continue
            key = (info.device, block.address)
            is_named = (root := paths.find_root(place)) is not None and root.kind != "nowhere"
            if key in claimed or (not is_named and blocks.name_state(info.device, block)):
                continue
            claimed.add(key)
            n_bytes = block.n_bytes
            line = format_allocation(block.frames, cells)
        elif info.device == HOST and (info.is_borrowed or info.is_pinned):
            # NumPy's or a file's, or pinned: malloc may not even know of it.
            outside[_PINNED] = outside.get(_PINNED, 0) + (info.n_bytes if info.is_pinned else 0)
            continue
        described = _describe(account, paths, purposes, place, n_bytes)
        owned.append(described if line is None else replace(described, allocated_at=line))
    return outside


def _describe_outside(device: str, n_bytes: int) -> str:
    if device == _PINNED:
        return (
            f"{format_bytes(n_bytes)} of tensors are pinned: torch's own allocator for these has "
            "them, and malloc's figure leaves them out"
        )
    return (
        f"{format_bytes(n_bytes)} of tensors on {device} are no memory of torch's allocator: "
        "another library's, or a CUDA graph's that it has taken back"
    )


def _group_by_memory(account: Account) -> Iterable[list[int]]:
    """The storages, those over the same memory together (DLPack makes a second one)."""
    groups: dict[tuple[str, int], list[int]] = {}
    for place, info in account.graph.storages.items():
        groups.setdefault((info.device, info.address), []).append(place)
    return groups.values()


def _describe(
    account: Account, paths: Paths, purposes: Purposes, place: int, n_bytes: int
) -> Owned:
    marks = account.marks[place]
    steps = paths.list_steps(place)
    root = paths.find_root(place)
    kind = "nowhere" if root is None else root.kind
    rows = account.name_holders(marks)
    if root is not None and root.word in rows and rows[0] != root.word:
        rows = (root.word, *(row for row in rows if row != root.word))
    if root is None or root.kind == "nowhere":
        steps = (_NO_NAME if marks & ELSEWHERE else _RUBBISH, *steps[1:])
    return Owned(
        device=account.graph.storages[place].device,
        n_bytes=n_bytes,
        kind=purposes.find(place),
        steps=steps,
        root=kind,
        rows=rows,
        held_elsewhere=bool(marks & ELSEWHERE),
    )


def _close_account(reading: Reading, owned: Iterable[Owned], notes: list[str]) -> DeviceAccount:
    """The lines of one device, and one for what is left, so that they add up."""
    lines = [each for each in owned if each.device == reading.device]
    allocated = reading.allocated_bytes
    if allocated is not None:
        left = allocated - sum(each.n_bytes for each in lines)
        if left < 0:
            # Tensors in shared memory are not malloc's; another thread may have freed some.
            notes.append(
                f"the tensors on {reading.device} are {format_bytes(-left)} more than its "
                "allocator says: "
                "some are not its own, or were freed meanwhile"
            )
            allocated = None
        elif left:
            lines.append(_describe_rest(reading.device, left))
    lines.sort(key=lambda each: (-each.n_bytes, each.steps))
    return DeviceAccount(device=reading.device, allocated_bytes=allocated, owned=tuple(lines))


def _describe_rest(device: str, n_bytes: int) -> Owned:
    rest = Owned(device=device, n_bytes=n_bytes, kind="other", steps=(_OTHER,), root="nowhere")
    if device == HOST:
        return rest
    return replace(rest, kind="unknown", steps=("unknown",))
