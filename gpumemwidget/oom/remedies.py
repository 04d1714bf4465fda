"""Find the remedies for an out-of-memory error, each with the bytes that it would free.

Remedies are found when the cell has ended and its traceback still exists, so a release frees what
is promised here.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Collection, Iterable, Iterator
from typing import Literal

from gpumemwidget.backends.hardware import Hardware
from gpumemwidget.errors import forgets_frames
from gpumemwidget.model.devices import HOST
from gpumemwidget.model.ooms import OomEvent, Remedy
from gpumemwidget.model.ownership import DeviceAccount, MemoryAccount, Owned
from gpumemwidget.ownership.account import describe_briefly, may_read_graphs
from gpumemwidget.ownership.blocks import BlockMap
from gpumemwidget.ownership.graph.objects import paused_collector
from gpumemwidget.ownership.graph.torch_reader import find_torch
from gpumemwidget.ownership.holdings import ELSEWHERE, Account, take_account
from gpumemwidget.ownership.partition import ReleasePartition, join_overlapping
from gpumemwidget.ownership.shell import LAST_EXCEPTION, Shell
from gpumemwidget.releasing.gradients import find_gradients

__all__ = [
    "find_owners_and_remedies",
    "list_remedies",
    "list_savings",
    "list_settings",
    "sum_float32",
]

#: Remedies that free less are left out (bytes).
_LEAST_BYTES = 1024**2

#: Remedies that free at least this much are listed, however large the request was (bytes).
_ENOUGH_BYTES = 64 * 1024**2

#: Maximum number of releases of names that are listed, those that give most: of those that lose
#: training state, and of all others.
_MOST_NAMES = 4

#: Share of the time budget for the walk; its evaluation takes the rest.
_WALK_SHARE = 0.8

_Is = Literal["exact", "at least", "at most", "about"]


@forgets_frames
def list_remedies(
    shell: Shell,
    hardware: Hardware,
    event: OomEvent,
    at_oom: DeviceAccount | None,
    *,
    mentions: Collection[str],
    budget_s: float,
    is_at_end: bool = True,
) -> tuple[Remedy, ...]:
    """Return the remedies in the order of ``Remedy.rank``.

    Args:
        shell: the running IPython; the cell has ended, its traceback stands.
        hardware: the allocators' figures and blocks.
        event: what stood at the OOM.
        at_oom: who had what then, on that device; ``None`` where that is not known.
        mentions: the words of the cell's code.
        budget_s: seconds for all of it. Where the walk stops early, what is said is ``about``.
        is_at_end: whether ``at_oom`` was read at the cell's end, and not within the allocation.
            The last exception in it is the OOM itself then, and that of an earlier cell otherwise.
    """
    with paused_collector():
        account = take_account(
            shell,
            budget_s=budget_s * _WALK_SHARE,
            reads_graphs=may_read_graphs(hardware),
            with_host=event.device == HOST,
        )
        return _list_ways(
            account, shell, hardware, event, at_oom, mentions=mentions, is_at_end=is_at_end
        )


@forgets_frames
def find_owners_and_remedies(
    shell: Shell,
    hardware: Hardware,
    event: OomEvent,
    *,
    mentions: Collection[str],
    budget_s: float,
) -> tuple[MemoryAccount, tuple[Remedy, ...]]:
    """Walk the heap once; return the owners after the cell's end, and the remedies.

    Args:
        shell: the running IPython; the cell has ended, its traceback stands.
        hardware: the allocators' figures and blocks.
        event: what stood at the OOM.
        mentions: the words of the cell's code.
        budget_s: seconds for all of it. Where the walk stops early, what is said is ``about``.
    """
    with paused_collector():
        started_s = time.perf_counter()
        account = take_account(
            shell,
            budget_s=budget_s * _WALK_SHARE,
            scope="both",
            reads_graphs=may_read_graphs(hardware),
            with_host=event.device == HOST,
        )
        taken = describe_briefly(
            account, shell, hardware, event.device, started_s=started_s, budget_s=budget_s
        )
        at_oom = next((each for each in taken.devices if each.device == event.device), None)
        ways = _list_ways(
            account, shell, hardware, event, at_oom, mentions=mentions, is_at_end=True
        )
        return taken, ways


def _list_ways(
    account: Account | None,
    shell: Shell,
    hardware: Hardware,
    event: OomEvent,
    at_oom: DeviceAccount | None,
    *,
    mentions: Collection[str],
    is_at_end: bool,
) -> tuple[Remedy, ...]:
    ways: list[Remedy] = []
    own = 0 if at_oom is None else _sum_alone(at_oom, "exception" if is_at_end else "thread")
    earlier = 0 if is_at_end or at_oom is None else _sum_alone(at_oom, "exception")
    if account is not None:
        releases = _Releases(account, hardware, event.device)
        ways.extend(releases.release_exception(own, earlier))
        ways.extend(releases.list_remedies(mentions))
    ways.extend(list_settings(shell, event))
    if at_oom is not None:
        floats = 0 if account is None else sum_float32(account, event.device)
        ways.extend(list_savings(at_oom, mentions, floats, is_at_end=is_at_end))
    least = _find_least(event)
    given = [way for way in ways if way.gives_bytes is None or way.gives_bytes >= least]
    return tuple(sorted(given, key=lambda way: way.rank))


def _find_least(event: OomEvent) -> int:
    """Return the least that a remedy must free: 1 % of the request, or 0.1 % of the device."""
    asked, total = event.requested_bytes or 0, event.device_total_bytes
    least = min(asked // 100, _ENOUGH_BYTES if total is None else total // 1000, _ENOUGH_BYTES)
    return max(least, _LEAST_BYTES)


def _sum_alone(at_oom: DeviceAccount, root: Literal["exception", "thread"]) -> int:
    """Return the bytes that exceptions, or running functions, held and no variable did."""
    return sum(
        each.n_bytes
        for each in at_oom.owned
        if each.root == root and set(each.rows) <= {LAST_EXCEPTION}
    )


class _Releases:
    """Computes what releases would free on one device."""

    def __init__(self, account: Account, hardware: Hardware, device: str) -> None:
        self._account = account
        self._device = device
        reading = next((each for each in hardware.read() if each.device == device), None)
        self._allocated = 0 if reading is None else reading.allocated_bytes or 0
        segments = [each for each in hardware.read_segments() if each.device == device]
        self._blocks = BlockMap(segments) if segments else None
        #: Without the blocks, sizes are rounded as the allocator rounds them at least.
        self._is: _Is = "exact" if self._blocks is not None or device == HOST else "at least"
        if not account.graph.is_complete:
            self._is = "about"

    def release_exception(self, own_bytes: int, earlier_bytes: int) -> Iterator[Remedy]:
        """Yield the release of the last exception, which often frees the whole failed step.

        Args:
            own_bytes: what the OOM's functions had, for a walk that was cut before it came there.
            earlier_bytes: what an earlier cell's exception held then. The one that came after it
                has taken its place, and left it in cycles for the collector.
        """
        row = self._account.rows.get(LAST_EXCEPTION)
        if row is None:
            return
        gives = self._sum_dying(row.mark)
        is_cut = not self._account.graph.is_complete
        if is_cut:
            gives = max(gives, own_bytes)
        # An earlier exception that is in the chain of the last one is counted with it already.
        left = min(earlier_bytes, self._allocated - self._sum_held()) if earlier_bytes else 0
        if left < _LEAST_BYTES:
            left = 0
        yield Remedy(
            kind="last exception",
            # Whatever it may be, it is often most of all.
            gives_bytes=None if is_cut and gives + left < _LEAST_BYTES else gives + left,
            gives_is="about" if left else self._judge(row.mark),
            has_earlier=bool(left),
        )

    def list_remedies(self, mentions: Collection[str]) -> Iterator[Remedy]:
        rows = self._account.rows
        out = 0
        for row in rows.values():
            out |= row.mark if row.root == "out" else 0
        if out:
            yield Remedy(
                kind="out",
                gives_bytes=self._sum_dying(out),
                gives_is=self._judge(out),
            )
        gradients = find_gradients(self._account)
        if gradients.dying:
            yield Remedy(
                kind="gradients",
                gives_bytes=self._sum(gradients.dying),
                gives_is=self._is,
            )
        names = sorted(self._list_names(mentions), key=lambda way: way.rank)
        for loses_training_state in (False, True):
            alike = [way for way in names if way.loses_training_state is loses_training_state]
            yield from alike[:_MOST_NAMES]

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
        marks = 0
        for row in unused.values():
            marks |= row.mark
        places = [
            place
            for place in account.list_storages(marks)
            if account.graph.storages[place].device == self._device
        ]
        for unit in join_overlapping([account.marks[place] & marks for place in places]):
            names = tuple(name for name, row in unused.items() if row.mark & unit)
            alone = [self._release_names((name,)) for name in names]
            yield from (way for way in alone if way is not None)
            together = self._release_names(names) if len(names) > 1 else None
            if together is not None:
                found = sum(way.gives_bytes or 0 for way in alone if way is not None)
                if (together.gives_bytes or 0) - found >= max(_LEAST_BYTES, found // 10):
                    yield together

    def _release_names(self, names: tuple[str, ...]) -> Remedy | None:
        """The release of these names; ``None`` where it gives nothing or would move something."""
        account = self._account
        marks = account.find_marks(names)
        gives = self._sum_dying(marks)
        # The cell may be working with memory that would have to be moved to the CPU.
        if not gives or ReleasePartition(account, names).moved:
            return None
        return Remedy(
            kind="names",
            gives_bytes=gives,
            gives_is=self._judge(marks),
            names=names,
            loses_training_state=bool(marks & account.training_marks),
        )

    def _judge(self, marks: int) -> _Is:
        """Return how exactly it is known what a release of these marks frees."""
        if self._is == "exact" and self._account.may_free_more(marks):
            return "at least"
        return self._is

    def _sum_dying(self, marks: int) -> int:
        account = self._account
        return self._sum(
            place for place in account.list_storages(marks) if not account.marks[place] & ~marks
        )

    def _sum_held(self) -> int:
        """Bytes on the device that something known leads to."""
        account = self._account
        return self._sum(place for place in account.graph.storages if account.marks[place])

    def _sum(self, places: Iterable[int]) -> int:
        """Bytes of these storages on the device, as its allocator counts them."""
        places = list(places)
        if self._blocks is None:
            return self._account.sum_places(places).on(self._device)
        sizes: dict[int, int] = {}
        for place in places:
            info = self._account.graph.storages[place]
            block = self._blocks.find(info.device, info.address)
            if block is not None:
                sizes[block.address] = block.n_bytes
        return sum(sizes.values())


#: Whoever mentions one of these may be training, in a way that can't be seen from here.
_TRAINING = frozenset({"backward", "fit", "grad", "train", "training_step"})


def list_settings(shell: Shell, event: OomEvent) -> Iterator[Remedy]:
    """Yield changes to the settings of the allocator, the process or the machine."""
    if event.cached_bytes:
        yield Remedy(
            kind="cached blocks",
            gives_bytes=event.cached_bytes,
            gives_is="exact",
            is_torch_bound=_is_torch_bound(shell),
        )
    if (
        event.is_fragmented
        and event.device.startswith("cuda:")
        and event.unallocated_bytes
        and "expandable_segments:True" not in _read_settings()[1]
    ):
        name, settings = _read_settings()
        wanted = ",".join([*([settings] if settings else []), "expandable_segments:True"])
        yield Remedy(
            kind="expandable segments",
            gives_bytes=event.unallocated_bytes,
            gives_is="at most",
            setting=f"{name}={wanted}",
        )
    yield from _list_limits(event)
    if event.others_bytes:
        yield Remedy(
            kind="other processes",
            gives_bytes=event.others_bytes,
            gives_is="at most",
        )


def _read_settings() -> tuple[str, str]:
    """The environment variable of the allocator's settings, and what it is set to."""
    torch = find_torch()
    # Since 2.9 there is one name for all accelerators, and the older one makes torch warn.
    version = re.match(r"(\d+)\.(\d+)", str(getattr(torch, "__version__", "")))
    is_new = version is not None and (int(version[1]), int(version[2])) >= (2, 9)
    name = "PYTORCH_ALLOC_CONF" if is_new else "PYTORCH_CUDA_ALLOC_CONF"
    return name, os.environ.get(name) or os.environ.get("PYTORCH_CUDA_ALLOC_CONF", "")


def _list_limits(event: OomEvent) -> Iterator[Remedy]:
    limit, total = event.limit_bytes, event.device_total_bytes
    if total is not None:
        total -= event.driver_bytes or 0
    if limit is None:
        return
    room = [each for each in (event.device_free_bytes, total and total - limit) if each is not None]
    yield Remedy(kind="limit", gives_bytes=min(room, default=None), gives_is="at most")


def _is_torch_bound(shell: Shell) -> bool:
    torch = find_torch()
    return torch is not None and shell.user_ns.get("torch") is torch


def list_savings(
    at_oom: DeviceAccount, mentions: Collection[str], n_float32: int, *, is_at_end: bool
) -> Iterator[Remedy]:
    """Yield changes to the cell by which the same work needs less memory.

    Args:
        at_oom: who had what.
        mentions: the words of the cell's code.
        n_float32: bytes of what is in float32.
        is_at_end: whether ``at_oom`` was read at the cell's end, and the last exception in it is
            the cell's own.
    """
    # The roots under which the account has the functions that ran out of memory.
    running = {"thread", "exception"} if is_at_end else {"thread"}
    saved = sum(
        each.n_bytes
        for each in at_oom.owned
        if each.kind == "saved for backward"
        and (is_at_end or each.root != "exception")
        and _is_this_cells(each, mentions)
    )
    # Tensors that only the running functions hold.
    made = sum(
        each.n_bytes for each in at_oom.owned if each.kind == "tensor" and each.root in running
    )
    if saved + made:
        yield Remedy(
            kind="smaller batch",
            gives_bytes=(saved + made) // 2,
            gives_is="about",
        )
    if saved and _TRAINING.isdisjoint(mentions):
        yield Remedy(
            kind="no_grad",
            gives_bytes=saved,
            gives_is="at most",
        )
    elif saved:
        yield Remedy(
            kind="checkpointing",
            gives_bytes=saved,
            gives_is="at most",
        )
    if n_float32:
        yield Remedy(
            kind="lower precision",
            gives_bytes=n_float32 // 2,
            gives_is="at most",
        )


def _is_this_cells(owned: Owned, mentions: Collection[str]) -> bool:
    """Return whether memory may be the running cell's: variables not mentioned in it are older."""
    if owned.root == "name":
        return any(each in mentions for each in (*owned.rows, *owned.steps[:1]))
    return owned.root != "out"


def sum_float32(account: Account, device: str) -> int:
    """Bytes on the device that float32 tensors look at."""
    graph = account.graph
    reader = graph.reader
    n_bytes = 0
    with reader.quiet():
        for place, tensors in graph.tensors_on.items():
            info = graph.storages.get(place)
            # For memory that no row reaches nobody could choose the precision.
            is_yours = account.marks[place] & ~ELSEWHERE
            if info is None or info.device != device or not is_yours:
                continue
            tensor = graph.objects[tensors[0]]
            if not reader.is_dispatched(type(tensor)) and reader.read_shape(tensor)[1] == "float32":
                n_bytes += info.n_bytes
    return n_bytes
