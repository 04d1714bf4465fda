"""Find the remedies for an out-of-memory error, each with the bytes that it would free.

Remedies are found when the cell has ended and its traceback still exists, so a release frees what
is promised here.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator
from dataclasses import replace
from typing import Literal

from gpumemwidget.backends.hardware import Hardware
from gpumemwidget.device_parts import build_breakdown
from gpumemwidget.errors import forgets_frames
from gpumemwidget.model.devices import HOST
from gpumemwidget.model.ooms import OomEvent, Remedy, RemedyKind
from gpumemwidget.model.ownership import DeviceAccount, MemoryAccount, Owned
from gpumemwidget.ownership.account import describe_memory, may_read_graphs, read_blocks
from gpumemwidget.ownership.graph.objects import paused_collector
from gpumemwidget.ownership.holdings import Account, join_marks, take_account
from gpumemwidget.ownership.partition import ReleasePartition, join_overlapping
from gpumemwidget.ownership.shell import LAST_EXCEPTION, Shell

#: Remedies that free less are left out (bytes).
_MIN_BYTES = 1024**2
#: Remedies that free at least this much are listed, however large the request was (bytes).
_ALWAYS_LISTED_BYTES = 64 * 1024**2
#: Maximum number of releases of names that are listed, the largest first: of those that lose
#: training state, and of all others.
_MAX_NAME_REMEDIES = 4
#: Share of the time budget for the walk; its evaluation takes the rest.
_WALK_SHARE = 0.8
#: Environment variables of the allocator's settings; the first one's name is new in PyTorch 2.9.
_SETTINGS = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
#: Parts of a device that no other process has.
_OWN_OR_FREE = frozenset({"allocated", "outside", "free"})
#: Whoever mentions one of these may be training, in a way that can't be seen from here.
_TRAINING = frozenset({"backward", "fit", "grad", "train", "training_step"})

_Is = Literal["exact", "at least", "at most", "about"]


@forgets_frames
def find_remedies(
    shell: Shell,
    hardware: Hardware,
    event: OomEvent,
    at_oom: DeviceAccount | None,
    *,
    mentions: Collection[str],
    budget_s: float,
) -> tuple[MemoryAccount | None, tuple[Remedy, ...]]:
    """Walk the heap once; return the owners after the cell's end, and the remedies.

    Args:
        shell: the running IPython; the cell has ended, and its traceback still exists.
        hardware: the allocators' figures and blocks.
        event: the state of the device at the OOM.
        at_oom: who owned what on that device, as read within the failing allocation. Without it
            the owners after the cell's end are taken in its place, and returned.
        mentions: the words of the cell's code.
        budget_s: seconds for all of it. Where the walk stops early, figures are ``about``.

    Returns:
        The owners after the cell's end (``None`` with ``at_oom``), and the remedies in the order
        of ``Remedy.rank``.
    """
    with paused_collector():
        is_at_end = at_oom is None
        blocks = read_blocks(shell, hardware, event.device)
        account = take_account(
            shell,
            budget_s=budget_s * _WALK_SHARE,
            depth="holders" if is_at_end else "release",
            reads_graphs=may_read_graphs(hardware),
            blocks=blocks,
        )
        taken = None
        if at_oom is None:
            taken, _ = describe_memory(account, shell, hardware, blocks, event.device)
            devices = {account.device: account for account in taken.devices}
            at_oom = devices.get(event.device)
        remedies: list[Remedy] = []
        if account is not None:
            has_blocks = event.device in blocks.devices
            releases = _Releases(account, event.device, has_blocks=has_blocks)
            remedies += releases.release_exception(None if is_at_end else at_oom)
            remedies += releases.list_releases(mentions)
        remedies += _list_settings(event)
        uses = () if event.device == HOST else hardware.read_libraries(event.device)
        cached_bytes = sum(use.cached_bytes or 0 for use in uses if use.can_empty)
        if cached_bytes:
            remedies.append(Remedy("library caches", cached_bytes, "at most"))
        if at_oom is not None:
            remedies += _list_savings(at_oom, mentions, is_at_end=is_at_end)
    breakdown = build_breakdown(event.state)
    if breakdown is not None and breakdown.asleep_bytes:
        # What sleeps has no memory behind it that a release could give.
        remedies = [replace(remedy, gives_is="at most") for remedy in remedies]
    # 1 % of the request, within bounds.
    least = max(_MIN_BYTES, min((event.requested_bytes or 0) // 100, _ALWAYS_LISTED_BYTES))
    remedies = [
        remedy for remedy in remedies if remedy.gives_bytes is None or remedy.gives_bytes >= least
    ]
    return taken, tuple(sorted(remedies, key=lambda remedy: remedy.rank))


class _Releases:
    """Computes what releases would free on one device."""

    def __init__(self, account: Account, device: str, *, has_blocks: bool) -> None:
        self._account = account
        self._device = device
        #: Without the blocks, sizes are rounded as the allocator rounds them at least.
        self._is: _Is = "exact" if has_blocks or device == HOST else "at least"
        if not account.graph.is_complete:
            self._is = "about"

    def release_exception(self, at_oom: DeviceAccount | None) -> Iterator[Remedy]:
        """Yield the release of the last exception, which often frees the whole failed step.

        What an earlier exception held at the OOM may be left in cycles, and goes too.
        """
        if LAST_EXCEPTION not in self._account.rows:
            return
        gives, gives_is = self._judge(ReleasePartition(self._account, (), exceptions=True))
        if not self._account.graph.is_complete and gives < _MIN_BYTES:
            # Whatever it may be, it is often most of all.
            yield Remedy("last exception", None, gives_is)
            return
        had_earlier = at_oom is not None and any(
            line.root == "exception" and set(line.rows) <= {LAST_EXCEPTION} for line in at_oom.owned
        )
        is_exact = gives_is == "exact"
        yield Remedy("last exception", gives, "at least" if had_earlier and is_exact else gives_is)

    def list_releases(self, mentions: Collection[str]) -> Iterator[Remedy]:
        """Yield the releases of displayed values, and of names not mentioned."""
        displayed = ReleasePartition(self._account, (), out=True)
        if displayed.dropped:
            yield Remedy("out", *self._judge(displayed))
        names = sorted(self._list_names(mentions), key=lambda remedy: remedy.rank)
        for loses_training_state in (False, True):
            alike = [row for row in names if row.loses_training_state is loses_training_state]
            yield from alike[:_MAX_NAME_REMEDIES]

    def _list_names(self, mentions: Collection[str]) -> Iterator[Remedy]:
        """Yield the releases of variables that the cell does not mention, one by one.

        Variables that free much more together than one by one are one remedy besides.
        """
        account = self._account
        unused = {
            row.name: row
            for row in account.rows.values()
            if row.root == "name" and row.name not in mentions
        }
        marks = join_marks(row.mark for row in unused.values())
        places = [
            place
            for place in account.list_storages(marks)
            if account.graph.storages[place].device == self._device
        ]
        for unit in join_overlapping([account.marks[place] & marks for place in places]):
            names = tuple(name for name, row in unused.items() if row.mark & unit)
            alone = list(filter(None, (self._release_names((name,)) for name in names)))
            yield from alone
            together = self._release_names(names) if len(names) > 1 else None
            if together is not None:
                found = sum(release.gives_bytes or 0 for release in alone)
                if (together.gives_bytes or 0) - found >= max(_MIN_BYTES, found // 10):
                    yield together

    def _release_names(self, names: tuple[str, ...]) -> Remedy | None:
        """Return the release of names; ``None`` if it frees nothing or would move something."""
        partition = ReleasePartition(self._account, names)
        gives, gives_is = self._judge(partition)
        # The cell may be working with memory that would have to be moved to the CPU.
        if not gives or partition.moved:
            return None
        loses_training_state = bool(partition.dropped & self._account.training_marks)
        return Remedy("names", gives, gives_is, names, loses_training_state)

    def _judge(self, partition: ReleasePartition) -> tuple[int, _Is]:
        """Return the bytes that go with what is dropped, and how exactly they are known."""
        dying = partition.sum_dying()
        is_more = self._is == "exact" and dying.is_at_least
        return dying.on(self._device), "at least" if is_more else self._is


def _list_settings(event: OomEvent) -> Iterator[Remedy]:
    """Yield changes to the settings of the allocator, the process or the machine."""
    if event.cached_bytes:
        yield Remedy("cached blocks", event.cached_bytes, "exact")
    settings = "".join(os.environ.get(name, "") for name in _SETTINGS)
    if (
        event.is_fragmented
        and event.device.startswith("cuda:")
        and "expandable_segments:True" not in settings
    ):
        yield Remedy("expandable segments", event.unallocated_bytes, "at most")
    if event.limit_bytes is not None:
        free, room = event.device_free_bytes, event.room_bytes
        beyond = None if free is None or room is None else free - room
        yield Remedy("limit", beyond, "at most")
    breakdown = build_breakdown(event.state)
    others_bytes = sum(
        part.n_bytes
        for part in (() if breakdown is None else breakdown.parts)
        if part.key in ("children", "others")
        or ("others" in part.merged and not _OWN_OR_FREE.intersection(part.merged))
    )
    if others_bytes:
        yield Remedy("other processes", others_bytes, "at most")


def _list_savings(
    at_oom: DeviceAccount, mentions: Collection[str], *, is_at_end: bool
) -> Iterator[Remedy]:
    """Yield changes to the cell by which the same work needs less memory."""
    # The roots under which the account has the functions that ran out of memory.
    running = {"thread", "exception"} if is_at_end else {"thread"}
    saved = sum(
        line.n_bytes
        for line in at_oom.owned
        if line.kind == "saved for backward"
        and (is_at_end or line.root != "exception")
        and _is_this_cells(line, mentions)
    )
    # Tensors that only the running functions hold.
    made = sum(
        line.n_bytes for line in at_oom.owned if line.kind == "tensor" and line.root in running
    )
    if saved + made:
        yield Remedy("smaller batch", (saved + made) // 2, "about")
    gradients = sum(line.n_bytes for line in at_oom.owned if line.kind == "gradient")
    if gradients:
        yield Remedy("gradients", gradients, "at most")
    if saved:
        kind: RemedyKind = "no_grad" if _TRAINING.isdisjoint(mentions) else "checkpointing"
        yield Remedy(kind, saved, "at most")


def _is_this_cells(owned: Owned, mentions: Collection[str]) -> bool:
    """Return whether memory may be the running cell's: variables not mentioned in it are older."""
    if owned.root == "name":
        return any(name in mentions for name in (*owned.rows, *owned.steps[:1]))
    return owned.root != "out"
