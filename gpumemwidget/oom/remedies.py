"""Find the remedies for an out-of-memory error, each with the bytes that it would free.

Remedies are found when the cell has ended and its traceback still exists, so a release frees what
is promised here.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterable, Iterator
from typing import Literal

from gpumemwidget.backends.hardware import Hardware
from gpumemwidget.errors import forgets_frames
from gpumemwidget.model.devices import HOST
from gpumemwidget.model.ooms import OomEvent, Remedy, RemedyKind
from gpumemwidget.model.ownership import DeviceAccount, MemoryAccount, Owned
from gpumemwidget.ownership.account import describe_memory, may_read_graphs
from gpumemwidget.ownership.blocks import BlockMap
from gpumemwidget.ownership.graph.objects import paused_collector
from gpumemwidget.ownership.graph.torch_reader import find_torch
from gpumemwidget.ownership.holdings import ELSEWHERE, Account, Row, take_account
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
        shell: the running IPython; the cell has ended, its traceback stands.
        hardware: the allocators' figures and blocks.
        event: the state of the device at the OOM.
        at_oom: who owned what on that device, as read within the failing allocation; ``None`` if
            it was not. Then the owners after the cell's end are taken in its place, and returned.
        mentions: the words of the cell's code.
        budget_s: seconds for all of it. Where the walk stops early, figures are ``about``.

    Returns:
        The owners after the cell's end (``None`` with ``at_oom``), and the remedies in the order
        of ``Remedy.rank``.
    """
    with paused_collector():
        is_at_end = at_oom is None
        account = take_account(
            shell,
            budget_s=budget_s * _WALK_SHARE,
            depth="holders" if is_at_end else "process",
            reads_graphs=may_read_graphs(hardware),
            with_host=event.device == HOST,
        )
        taken = None
        if at_oom is None:
            taken, _ = describe_memory(account, shell, hardware, event.device)
            at_oom = next((each for each in taken.devices if each.device == event.device), None)
        remedies: list[Remedy] = []
        if account is not None:
            releases = _Releases(account, hardware, event.device)
            remedies += releases.release_exception(at_oom, is_at_end=is_at_end)
            remedies += releases.list_releases(mentions)
        remedies += _list_settings(event)
        if at_oom is not None:
            n_float32 = 0 if account is None else _sum_float32(account, event.device)
            remedies += _list_savings(at_oom, mentions, n_float32, is_at_end=is_at_end)
    # 1 % of the request, within bounds.
    least = max(_MIN_BYTES, min((event.requested_bytes or 0) // 100, _ALWAYS_LISTED_BYTES))
    given = [each for each in remedies if each.gives_bytes is None or each.gives_bytes >= least]
    return taken, tuple(sorted(given, key=lambda remedy: remedy.rank))


def _sum_alone(at_oom: DeviceAccount | None, root: Literal["exception", "thread"]) -> int:
    """Return the bytes that exceptions, or running functions, held and no variable did."""
    return sum(
        each.n_bytes
        for each in ([] if at_oom is None else at_oom.owned)
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

    def release_exception(
        self, at_oom: DeviceAccount | None, *, is_at_end: bool
    ) -> Iterator[Remedy]:
        """Yield the release of the last exception, which often frees the whole failed step.

        Args:
            at_oom: who owned what.
            is_at_end: whether that was read after the cell's end. The last exception in it is the
                OOM itself then, and that of an earlier cell otherwise.
        """
        row = self._account.rows.get(LAST_EXCEPTION)
        if row is None:
            return
        gives = self._sum_dying(row.mark)
        is_cut = not self._account.graph.is_complete
        if is_cut:
            gives = max(gives, _sum_alone(at_oom, "exception" if is_at_end else "thread"))
        left = 0
        if not is_at_end and (earlier := _sum_alone(at_oom, "exception")):
            # The OOM's exception has taken the place of an earlier cell's, and left that in cycles
            # for the collector. One that is in the chain of the last is counted with it already.
            left = min(earlier, self._allocated - self._sum_held())
            left = 0 if left < _MIN_BYTES else left
        yield Remedy(
            kind="last exception",
            # Whatever it may be, it is often most of all.
            gives_bytes=None if is_cut and gives + left < _MIN_BYTES else gives + left,
            gives_is="about" if left else self._judge(row.mark),
            has_earlier=bool(left),
        )

    def list_releases(self, mentions: Collection[str]) -> Iterator[Remedy]:
        """Yield the releases of displayed values, and of names not mentioned."""
        out = _join_marks(row for row in self._account.rows.values() if row.root == "out")
        if out:
            yield Remedy("out", self._sum_dying(out), self._judge(out))
        names = sorted(self._list_names(mentions), key=lambda remedy: remedy.rank)
        for loses_training_state in (False, True):
            alike = [each for each in names if each.loses_training_state is loses_training_state]
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
        marks = _join_marks(unused.values())
        places = [
            place
            for place in account.list_storages(marks)
            if account.graph.storages[place].device == self._device
        ]
        for unit in join_overlapping([account.marks[place] & marks for place in places]):
            names = tuple(name for name, row in unused.items() if row.mark & unit)
            alone = [each for name in names if (each := self._release_names((name,))) is not None]
            yield from alone
            together = self._release_names(names) if len(names) > 1 else None
            if together is not None:
                found = sum(each.gives_bytes or 0 for each in alone)
                if (together.gives_bytes or 0) - found >= max(_MIN_BYTES, found // 10):
                    yield together

    def _release_names(self, names: tuple[str, ...]) -> Remedy | None:
        """Return the release of names; ``None`` if it frees nothing or would move something."""
        account = self._account
        marks = account.find_marks(names)
        gives = self._sum_dying(marks)
        # The cell may be working with memory that would have to be moved to the CPU.
        if not gives or ReleasePartition(account, names).moved:
            return None
        loses_training_state = bool(marks & account.training_marks)
        return Remedy("names", gives, self._judge(marks), names, loses_training_state)

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


def _join_marks(rows: Iterable[Row]) -> int:
    marks = 0
    for row in rows:
        marks |= row.mark
    return marks


def _list_settings(event: OomEvent) -> Iterator[Remedy]:
    """Yield changes to the settings of the allocator, the process or the machine."""
    if event.cached_bytes:
        yield Remedy("cached blocks", event.cached_bytes, "exact")
    name, settings = _read_settings()
    if (
        event.is_fragmented
        and event.device.startswith("cuda:")
        and event.unallocated_bytes
        and "expandable_segments:True" not in settings
    ):
        wanted = ",".join([*([settings] if settings else []), "expandable_segments:True"])
        setting = f"{name}={wanted}"
        yield Remedy("expandable segments", event.unallocated_bytes, "at most", setting=setting)
    if event.limit_bytes is not None:
        free, room = event.device_free_bytes, event.room_bytes
        beyond = None if free is None or room is None else free - room
        yield Remedy("limit", beyond, "at most")
    if event.others_bytes:
        yield Remedy("other processes", event.others_bytes, "at most")


def _read_settings() -> tuple[str, str]:
    """Return the environment variable of the allocator's settings, and its value."""
    torch = find_torch()
    # Since 2.9 there is one name for all accelerators, and the older one makes torch warn.
    version = re.match(r"(\d+)\.(\d+)", str(getattr(torch, "__version__", "")))
    is_new = version is not None and (int(version[1]), int(version[2])) >= (2, 9)
    name = "PYTORCH_ALLOC_CONF" if is_new else "PYTORCH_CUDA_ALLOC_CONF"
    return name, os.environ.get(name) or os.environ.get("PYTORCH_CUDA_ALLOC_CONF", "")


def _list_savings(
    at_oom: DeviceAccount, mentions: Collection[str], n_float32: int, *, is_at_end: bool
) -> Iterator[Remedy]:
    """Yield changes to the cell by which the same work needs less memory."""
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
        yield Remedy("smaller batch", (saved + made) // 2, "about")
    gradients = sum(each.n_bytes for each in at_oom.owned if each.kind == "gradient")
    if gradients:
        yield Remedy("gradients", gradients, "at most")
    if saved:
        kind: RemedyKind = "no_grad" if _TRAINING.isdisjoint(mentions) else "checkpointing"
        yield Remedy(kind, saved, "at most")
    if n_float32:
        yield Remedy("lower precision", n_float32 // 2, "at most")


def _is_this_cells(owned: Owned, mentions: Collection[str]) -> bool:
    """Return whether memory may be the running cell's: variables not mentioned in it are older."""
    if owned.root == "name":
        return any(each in mentions for each in (*owned.rows, *owned.steps[:1]))
    return owned.root != "out"


def _sum_float32(account: Account, device: str) -> int:
    """Return the bytes on the device that float32 tensors look at."""
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
