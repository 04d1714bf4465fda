"""The account of owners: every allocated byte of every device, once, with its owner.

Storages come from the walk, blocks from the allocator. On CUDA a storage's bytes are those of the
block it lies in, so the lines add up to the allocator's own figure; what no storage claims is told
by the block's size and pool. On the host malloc has no list of what it handed out: what is no
tensor's is one line.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

from gpumemwidget.backends.hardware import Hardware
from gpumemwidget.errors import forgets_frames
from gpumemwidget.owners.account import ELSEWHERE, Account, take_account
from gpumemwidget.owners.base import Shell
from gpumemwidget.owners.blocks import BlockMap, find_rounding, name_pools
from gpumemwidget.owners.busy import has_backward_beside
from gpumemwidget.owners.claims import PINNED, group_storages, list_claims
from gpumemwidget.owners.collector import paused_collector
from gpumemwidget.owners.holdings import describe_rows
from gpumemwidget.owners.lines import format_allocation
from gpumemwidget.owners.paths import Paths
from gpumemwidget.owners.purposes import Purposes
from gpumemwidget.owners.walk import Graph
from gpumemwidget.records import (
    HOST,
    Block,
    DeviceAccount,
    MemoryAccount,
    MemoryKind,
    Owned,
    Reading,
)
from gpumemwidget.traces import BlockNames
from gpumemwidget.units import format_bytes

__all__ = [
    "describe_briefly",
    "may_read_graphs",
    "name_blocks",
    "take_block_account",
    "take_memory_account",
    "take_running_account",
]

#: Of each device its blocks by their addresses, while they are being named.
_Names = dict[str, dict[int, tuple[MemoryKind, str]]]
#: A storage's place, its block and its bytes.
_Claim = tuple[int, Block | None, int]

#: The full account is asked for, and may look at all there is.
FULL_BUDGET_S = 10.0

_RUBBISH = "rubbish in a cycle (gc.collect() frees it)"
_NO_NAME = "no name (held where Python can't see)"
#: Where nobody has looked for another holder.
_NO_NAME_OF_YOURS = "no name of the notebook's"
_OTHER = "Python's own objects and libraries"
#: So many lines of a brief account stand for themselves, the biggest.
_MOST_ALONE = 128
#: For less than this nobody is looked for where there is little time.
_LEAST_UNMET_BYTES = 1024**2


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
        started_s = time.perf_counter()
        account = take_account(shell, budget_s=budget_s, scope="surroundings")
        devices, notes = _close(account, shell, hardware)
        return MemoryAccount(
            devices=devices,
            holdings=(
                () if account is None else describe_rows(account, deadline_s=started_s + budget_s)
            ),
            is_complete=account is None or account.graph.is_complete,
            duration_s=time.perf_counter() - started_s,
            notes=notes,
        )


@forgets_frames
def take_block_account(
    shell: Shell, hardware: Hardware, *, budget_s: float
) -> tuple[MemoryAccount, dict[str, BlockNames]]:
    """Who owns what is allocated, and what is in each block, of one walk.

    Args:
        shell: the running IPython.
        hardware: the allocators' figures and blocks.
        budget_s: seconds after which the walk stops.

    Returns:
        The account without holdings, and what ``name_blocks`` gives.
    """
    with paused_collector():
        started_s = time.perf_counter()
        account = take_account(shell, budget_s=budget_s, scope="surroundings")
        names: _Names = {}
        devices, notes = _close(account, shell, hardware, names=names)
        taken = MemoryAccount(
            devices=devices,
            holdings=(),
            is_complete=account is None or account.graph.is_complete,
            duration_s=time.perf_counter() - started_s,
            notes=notes,
        )
        return taken, dict(names)


@forgets_frames
def take_running_account(
    shell: Shell, hardware: Hardware, device: str, *, budget_s: float
) -> MemoryAccount:
    """Who owns what is allocated on one device, told within a moment, while a cell is running.

    For the moment of an OOM: on whatever thread, deep in the user's code, before its functions are
    unwound. Their variables are named as names are (``running: train() line 7: batch``). Nothing
    is allocated on a device, and nothing is collected. What neither a name nor a running function
    leads to is told by its kind alone; so is what a graph holds whose backward runs beside this.

    Args:
        shell: the running IPython.
        hardware: the allocators' figures and blocks.
        device: whose memory is told.
        budget_s: seconds for all of it; half of them for the walk. What was not met by then has no
            name, and what was not described is told by its row: the biggest come first. Behind
            these, what has the same row and kind is one line.

    Returns:
        Lines of that device that add up to what its allocator says is allocated, and no holdings.
    """
    with paused_collector():
        started_s = time.perf_counter()
        account = take_account(
            shell,
            budget_s=budget_s / 2,
            scope="running",
            reads_graphs=may_read_graphs(hardware),
            with_host=device == HOST,
            is_enough=lambda graph: _has_met_all(graph, hardware, device),
        )
        return describe_briefly(
            account,
            shell,
            hardware,
            device,
            started_s=started_s,
            budget_s=budget_s,
        )


def may_read_graphs(hardware: Hardware) -> bool:
    """Whether no backward runs beside this thread that changes its graph meanwhile."""
    return not has_backward_beside(sum(each.device != HOST for each in hardware.read()))


def describe_briefly(
    account: Account | None,
    shell: Shell,
    hardware: Hardware,
    device: str,
    *,
    started_s: float,
    budget_s: float,
) -> MemoryAccount:
    """What a walk says of one device, in the few lines of ``take_running_account``.

    Args:
        account: the walk's result; ``None`` where torch is not imported.
        shell: the running IPython.
        hardware: the allocators' figures and blocks.
        device: whose memory is told.
        started_s: when the walk began, on ``time.perf_counter``.
        budget_s: so many seconds later lines are told by their rows.
    """
    brief = _Brief(device, started_s + budget_s)
    devices, notes = _close(account, shell, hardware, brief)
    return MemoryAccount(
        devices=devices,
        holdings=(),
        is_complete=account is None or account.graph.is_complete,
        duration_s=time.perf_counter() - started_s,
        notes=notes,
    )


@forgets_frames
def name_blocks(shell: Shell, hardware: Hardware, *, budget_s: float) -> dict[str, BlockNames]:
    """What each allocated block is for, and the path that a person would type for it.

    Args:
        shell: the running IPython.
        hardware: the allocators' blocks.
        budget_s: seconds after which the walk stops; what was not met by then has no name.

    Returns:
        For each device whose allocator tells its blocks, by their addresses; the path is ``""``
        where no name leads to what is in the block.
    """
    with paused_collector():
        account = take_account(shell, budget_s=budget_s, scope="surroundings")
        blocks = BlockMap(hardware.read_segments())
        names = _list_kinds(blocks)
        if account is not None:
            paths = account.find_paths()
            purposes = Purposes(account.graph, paths)
            for place, block, _ in list_claims(account, paths, blocks, group_storages(account), {}):
                if block is not None:
                    root = paths.find_root(place)
                    is_named = root is not None and root.kind != "nowhere"
                    path = "".join(paths.list_steps(place)) if is_named else ""
                    device = account.graph.storages[place].device
                    names[device][block.address] = (purposes.find(place), path)
        return dict(names)


def _list_kinds(blocks: BlockMap) -> _Names:
    """What each block is where nothing of the user's is in it."""
    return {
        device: {block.address: (kind, "") for block, kind in blocks.list_kinds(device)}
        for device in blocks.devices
    }


@dataclass(frozen=True, slots=True)
class _Brief:
    """Of an account only what one device's biggest lines are."""

    device: str
    #: On ``time.perf_counter``: from then on lines are told by their rows.
    deadline_s: float


def _close(
    account: Account | None,
    shell: Shell,
    hardware: Hardware,
    brief: _Brief | None = None,
    names: _Names | None = None,
) -> tuple[tuple[DeviceAccount, ...], tuple[str, ...]]:
    """The lines of each device, and sentences on what is not among them.

    What is in each block is added to ``names``, where that is asked for.
    """
    segments = hardware.read_segments()
    readings = hardware.read()
    if brief is not None:
        segments = tuple(each for each in segments if each.device == brief.device)
        readings = tuple(each for each in readings if each.device == brief.device)
    cells = shell.read_cell_numbers()
    blocks = BlockMap(segments, cells=cells)
    if names is not None:
        names.update(_list_kinds(blocks))
    pools: dict[tuple[int, int], str] = {}
    owned: list[Owned] = []
    claimed: set[tuple[str, int]] = set()
    outside: dict[str, int] = {}
    if account is not None:
        paths = account.find_paths()
        purposes = Purposes(account.graph, paths)
        groups = group_storages(account, None if brief is None else brief.device)
        claims = list_claims(account, paths, blocks, groups, outside)
        for lot in (
            [[each] for each in claims]
            if brief is None
            else _join_claims(claims, account, paths, purposes, cells)
        ):
            place = lot[0][0]
            is_late = brief is not None and time.perf_counter() > brief.deadline_s
            line = _describe(
                account,
                paths,
                purposes,
                place,
                sum(n_bytes for _, _, n_bytes in lot),
                by_row=is_late or len(lot) > 1,
            )
            if brief is not None and line.steps[0] == _NO_NAME:
                line = replace(line, steps=(_NO_NAME_OF_YOURS, *line.steps[1:]))
            for _, block, _ in lot:
                if block is None:
                    continue
                claimed.add((line.device, block.address))
                if names is not None:
                    path = "" if line.root == "nowhere" else line.owner
                    names[line.device][block.address] = (line.kind, path)
            block = lot[0][1]
            if block is not None:
                line = replace(
                    line,
                    rounding_bytes=_sum_rounding(lot),
                    allocated_at=format_allocation(block.frames, cells),
                )
            owned.append(line)
        pools = name_pools(
            (row.name, account.graph.objects[place])
            for row in account.rows.values()
            for place in row.places
        )
    notes = [_describe_outside(*each) for each in outside.items() if each[1]]
    owned.extend(blocks.describe_unclaimed(claimed, pools))
    devices = [_close_device(reading, owned, notes) for reading in readings]
    return tuple(devices), tuple(notes)


def _has_met_all(graph: Graph, hardware: Hardware, device: str) -> bool:
    """Whether the walk has met all tensors of a device, as its blocks tell."""
    blocks = BlockMap(each for each in hardware.read_segments() if each.device == device)
    if device not in blocks.devices:
        return False
    met: set[int] = set()
    for info in graph.storages.values():
        block = None if info.device != device else blocks.find(device, info.address)
        if block is not None:
            met.add(block.address)
    unmet = sum(
        block.n_bytes
        for block, kind in blocks.list_kinds(device)
        if kind == "unknown" and block.address not in met
    )
    return unmet < _LEAST_UNMET_BYTES


def _join_claims(
    claims: Iterable[_Claim],
    account: Account,
    paths: Paths,
    purposes: Purposes,
    cells: Mapping[str, int],
) -> Iterator[list[_Claim]]:
    """The biggest each by itself, then those together that a brief line tells alike."""
    claims = iter(claims)
    for claim in itertools.islice(claims, _MOST_ALONE):
        yield [claim]
    lots: dict[tuple[object, ...], list[_Claim]] = {}
    for claim in claims:
        place, block, _ = claim
        root = paths.find_root(place)
        key = (
            root and root.kind,
            root and root.word,
            purposes.find(place),
            account.marks[place],
            block and format_allocation(block.frames, cells),
        )
        lots.setdefault(key, []).append(claim)
    yield from lots.values()


def _sum_rounding(lot: Iterable[_Claim]) -> int | None:
    found = [find_rounding(block) for _, block, _ in lot if block is not None]
    return None if None in found else sum(each for each in found if each is not None)


def _describe_outside(device: str, n_bytes: int) -> str:
    if device == PINNED:
        return (
            f"{format_bytes(n_bytes)} of tensors are pinned: torch's own allocator for these has "
            "them, and malloc's figure leaves them out"
        )
    return (
        f"{format_bytes(n_bytes)} of tensors on {device} are no memory of torch's allocator: "
        "another library's, or a CUDA graph's that it has taken back"
    )


def _describe(
    account: Account,
    paths: Paths,
    purposes: Purposes,
    place: int,
    n_bytes: int,
    *,
    by_row: bool = False,
) -> Owned:
    marks = account.marks[place]
    root = paths.find_root(place)
    kind = "nowhere" if root is None else root.kind
    steps = (root.word,) if root is not None and by_row else paths.list_steps(place)
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


def _close_device(reading: Reading, owned: Iterable[Owned], notes: list[str]) -> DeviceAccount:
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
