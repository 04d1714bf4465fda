"""The ways out of an OOM, each with the bytes that it would give.

Looked at when the cell has ended and its traceback still stands: what a release promises here is
what it would do now.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Literal

from gpumemwidget.backends.hardware import Hardware
from gpumemwidget.errors import forgets_frames
from gpumemwidget.owners.account import Account, take_account
from gpumemwidget.owners.advice import list_savings, list_settings, sum_float32
from gpumemwidget.owners.base import LAST_EXCEPTION, Shell
from gpumemwidget.owners.blocks import BlockMap
from gpumemwidget.owners.collector import paused_collector
from gpumemwidget.owners.entries import describe_briefly, may_read_graphs
from gpumemwidget.owners.grads import find_gradients
from gpumemwidget.owners.sorting import Sorting, join_marks
from gpumemwidget.records import HOST, DeviceAccount, MemoryAccount
from gpumemwidget.traces import OomEvent, WayOut

__all__ = ["list_ways", "look_at_end"]

#: What gives less than the first is no way out, and what gives the second always is one.
_LEAST_BYTES, _ENOUGH_BYTES = 1024**2, 64 * 1024**2
#: So many sets of names are told, those that give most.
_MOST_NAMES = 4
#: A text has room for so many names of one set.
_MOST_IN_TEXT = 3
#: The walk's part of the time: what is made of it takes the rest.
_WALK_SHARE = 0.8
_Is = Literal["exact", "at least", "at most", "about"]


@forgets_frames
def list_ways(
    shell: Shell,
    hardware: Hardware,
    event: OomEvent,
    at_oom: DeviceAccount | None,
    *,
    mentions: Collection[str],
    budget_s: float,
    is_at_end: bool = True,
) -> tuple[WayOut, ...]:
    """What gives memory back or needs less of it, the most first.

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
def look_at_end(
    shell: Shell,
    hardware: Hardware,
    event: OomEvent,
    *,
    mentions: Collection[str],
    budget_s: float,
) -> tuple[MemoryAccount, tuple[WayOut, ...]]:
    """Who has what when the cell has ended, and the ways out, of one walk.

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
) -> tuple[WayOut, ...]:
    ways: list[WayOut] = []
    own = 0 if at_oom is None else _sum_alone(at_oom, "exception" if is_at_end else "thread")
    earlier = 0 if is_at_end or at_oom is None else _sum_alone(at_oom, "exception")
    if account is not None:
        releases = _Releases(account, hardware, event.device)
        ways.extend(releases.release_exception(own, earlier))
        ways.extend(releases.list_ways(mentions))
    ways.extend(list_settings(shell, event))
    if at_oom is not None:
        floats = 0 if account is None else sum_float32(account, event.device)
        ways.extend(list_savings(at_oom, mentions, floats, is_at_end=is_at_end))
    least = _find_least(event)
    given = [way for way in ways if way.gives_bytes is None or way.gives_bytes >= least]
    return tuple(sorted(given, key=lambda way: (way.gives_bytes is None, -(way.gives_bytes or 0))))


def _find_least(event: OomEvent) -> int:
    """What a way must give to be one: a hundredth of the request, or a thousandth of the device."""
    asked, total = event.requested_bytes or 0, event.device_total_bytes
    least = min(asked // 100, _ENOUGH_BYTES if total is None else total // 1000, _ENOUGH_BYTES)
    return max(least, _LEAST_BYTES)


def _sum_alone(at_oom: DeviceAccount, root: Literal["exception", "thread"]) -> int:
    """What exceptions, or the functions that were running, had and no name of the notebook's."""
    return sum(
        each.n_bytes
        for each in at_oom.owned
        if each.root == root and set(each.rows) <= {LAST_EXCEPTION}
    )


# -- What can be released --------------------------------------------------------------------------


class _Releases:
    """What a release of something would free on one device."""

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

    def release_exception(self, own_bytes: int, earlier_bytes: int) -> Iterator[WayOut]:
        """The way that often gives the whole failed step.

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
        # Of an exception that still stands, in the chain of this one, nothing is left over.
        left = min(earlier_bytes, self._allocated - self._sum_held()) if earlier_bytes else 0
        text = "release the last exception, with all that its frames hold"
        if left >= _LEAST_BYTES:
            text = (
                "release the last exception and what is left of the one before it, with all that "
                "their frames hold"
            )
        else:
            left = 0
        yield WayOut(
            kind="last exception",
            text=text,
            # Whatever it may be, it is often most of all.
            gives_bytes=None if is_cut and gives + left < _LEAST_BYTES else gives + left,
            gives_is="about" if left else self._is,
            command="%memrelease --exceptions",
            can_do=True,
        )

    def list_ways(self, mentions: Collection[str]) -> Iterator[WayOut]:
        rows = self._account.rows
        out = 0
        for row in rows.values():
            out |= row.mark if row.root == "out" else 0
        if out:
            yield WayOut(
                kind="out",
                text="drop the displayed values (Out)",
                gives_bytes=self._sum_dying(out),
                gives_is=self._is,
                command="%memrelease --out",
                can_do=True,
            )
        gradients = find_gradients(self._account)
        if gradients.dying:
            yield WayOut(
                kind="gradients",
                text="set the gradients to None, as zero_grad(set_to_none=True) does",
                gives_bytes=self._sum(gradients.dying),
                gives_is=self._is,
                command="%memrelease --grads",
                can_do=True,
            )
        names = sorted(self._list_names(mentions), key=lambda way: -(way.gives_bytes or 0))
        yield from names[:_MOST_NAMES]

    def _list_names(self, mentions: Collection[str]) -> Iterator[WayOut]:
        """The sets of names that the cell does not mention, each of what hangs together."""
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
        for unit in join_marks([account.marks[place] & marks for place in places]):
            names = tuple(name for name, row in unused.items() if row.mark & unit)
            # What would have to be moved to the CPU may be what the cell works with.
            if Sorting(account, names).moved:
                continue
            shown = [*names[:_MOST_IN_TEXT]]
            if len(names) > len(shown):
                shown.append(f"{len(names) - len(shown)} more")
            yield WayOut(
                kind="names",
                text=f"release {_join(shown)}, which this cell does not mention",
                gives_bytes=self._sum_dying(account.find_marks(names)),
                gives_is=self._is,
                # Of others, which code can make, none can be typed.
                command=(
                    f"%memrelease {' '.join(names)}" if all(map(str.isidentifier, names)) else None
                ),
                can_do=True,
                names=names,
            )

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
            return dict(self._account.sum_places(places)).get(self._device, 0)
        sizes: dict[int, int] = {}
        for place in places:
            info = self._account.graph.storages[place]
            block = self._blocks.find(info.device, info.address)
            if block is not None:
                sizes[block.address] = block.n_bytes
        return sum(sizes.values())


def _join(words: Sequence[str]) -> str:
    *first, last = words
    return f"{', '.join(first)} and {last}" if first else last
