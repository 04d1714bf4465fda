"""From an OOM to its card: what is seen while a cell runs, and what is said of it at the end.

Code that looks for the biggest batch catches OOM after OOM, and must not wait for us each time. So
of the first two in a cell it is seen who owns what; of later ones only the counters are read, and
where such a one ends the cell, its traceback still tells.

Nothing but records is kept: no tensor, no frame and no error.
"""

from __future__ import annotations

import dataclasses
import linecache
import threading
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from gpumemwidget.backends.ooms import OomMoment, OomObserver, describe_state
from gpumemwidget.jupyter.interrupts import run_uninterrupted
from gpumemwidget.records import HOST, CellRecord, DeviceAccount, MemoryAccount, Owned
from gpumemwidget.traces import OomCard, OomEvent

if TYPE_CHECKING:
    from gpumemwidget.backends.hardware import Hardware
    from gpumemwidget.jupyter.extension import Extension
    from gpumemwidget.owners.ooms import OomSign

__all__ = ["OomCards"]

#: Of so many OOMs in a cell the owners are looked at where they happen.
_MOST_ACCOUNTS = 2
#: So many of a cell's OOMs are kept, the last ones: one of them ends it.
_MOST_KEPT = 16
#: The look at the owners, and all together: a person waits for it.
_ACCOUNT_BUDGET_S = 0.5
_CARD_BUDGET_S = 0.85
_LEAST_BUDGET_S = 0.3
#: The card's owners.
_MOST_OWNERS = 10


@dataclass(slots=True)
class _Seen:
    """An OOM as it was seen."""

    event: OomEvent
    account: DeviceAccount | None = None
    is_complete: bool = True
    duration_s: float = 0.0

    def keep(self, taken: MemoryAccount) -> None:
        """Keep who had what."""
        device = self.event.device
        self.account = next((each for each in taken.devices if each.device == device), None)
        self.is_complete = taken.is_complete
        self.duration_s = taken.duration_s


@dataclass(slots=True)
class _Cell:
    """What a cell has met so far."""

    n_ooms: int = 0
    seen: deque[_Seen] = field(default_factory=lambda: deque(maxlen=_MOST_KEPT))
    #: What a run within the cell ended with, which hides its error: ``%%capture``.
    inner: OomSign | None = None


class OomCards:
    """Shows a card under each cell that ends with an OOM.

    Args:
        extension: whose cells these are.
    """

    def __init__(self, extension: Extension) -> None:
        self._extension = extension
        self._observer = OomObserver(extension.monitor.hardware, self._note, self._fail)
        self._cell: _Cell | None = None
        #: For the next cell: most meet nothing, and leave it as it is.
        self._unused = _Cell()
        self._failures: deque[tuple[str, Exception]] = deque(maxlen=_MOST_KEPT)

    def open(self) -> None:
        """Begin to notice OOMs."""
        self._observer.open()

    def close(self) -> None:
        """Notice nothing more. May be called twice."""
        self._observer.close()
        self._cell = None

    # -- The cell ----------------------------------------------------------------------------------

    def start(self) -> None:
        """A cell begins."""
        unused = self._unused
        if unused.n_ooms or unused.inner is not None:
            unused = self._unused = _Cell()
        self._cell = unused

    def end_inner(self, result: Any) -> None:
        """A run within the cell has ended, as ``%%capture`` makes one."""
        if self._cell is not None:
            self._cell.inner = _find_sign(result) or self._cell.inner

    def end(self, record: CellRecord | None, result: Any) -> None:
        """The cell has ended and its traceback, if any, is shown: show the card, if it needs one.

        Args:
            record: what is recorded of it.
            result: IPython's ``ExecutionResult``.
        """
        cell, self._cell = self._cell, None
        while self._failures:
            self._extension.report_failure(*self._failures.popleft())
        if cell is None:
            return
        sign = _find_sign(result) or cell.inner
        if sign is None:
            return
        info = None if result is None else result.info
        card = self._build(cell, sign, record, "" if info is None else info.raw_cell)
        if card is not None:
            from gpumemwidget.jupyter.oomcard import show_card  # noqa: PLC0415 - brings widgets

            show_card(card, self._extension)

    # -- Within the allocation ---------------------------------------------------------------------

    def _note(self, moment: OomMoment) -> None:
        """An allocation is failing, on whatever thread."""
        cell = self._cell
        if cell is None:
            return
        if threading.get_ident() == threading.main_thread().ident:
            # A Ctrl-C that lands here is for the cell.
            run_uninterrupted(self._keep, cell, moment)
        else:
            self._keep(cell, moment)

    def _keep(self, cell: _Cell, moment: OomMoment) -> None:
        cell.n_ooms += 1
        is_thorough = cell.n_ooms <= _MOST_ACCOUNTS
        seen = _Seen(moment.describe(is_thorough=is_thorough))
        cell.seen.append(seen)
        if is_thorough:
            self._take_account(seen)

    def _take_account(self, seen: _Seen) -> None:
        from gpumemwidget.owners.entries import take_running_account  # noqa: PLC0415 - when needed

        extension, device = self._extension, seen.event.device
        seen.keep(
            take_running_account(
                extension.shell, extension.monitor.hardware, device, budget_s=_ACCOUNT_BUDGET_S
            )
        )

    def _fail(self, what: str, exc: Exception) -> None:
        if threading.get_ident() == threading.main_thread().ident:
            self._extension.report_failure(what, exc)
        else:
            # What another thread prints need not come to the cell.
            self._failures.append((what, exc))

    # -- The card ----------------------------------------------------------------------------------

    def _build(
        self, cell: _Cell, sign: OomSign, record: CellRecord | None, source: str
    ) -> OomCard | None:
        from gpumemwidget.owners.mentions import list_mentions  # noqa: PLC0415 - when needed
        from gpumemwidget.owners.places import find_place  # noqa: PLC0415
        from gpumemwidget.owners.ways import list_ways, look_at_end  # noqa: PLC0415

        shell, hardware = self._extension.shell, self._extension.monitor.hardware
        notes: list[str] = []
        seen = _choose(cell.seen, sign) if sign.is_allocators else None
        is_observed = seen is not None
        if seen is None:
            seen = self._look_now(sign, notes)
        if seen is None:
            return None  # It was no device's of ours that ran out.
        is_at_end = seen.account is None
        if is_at_end:
            words = "The owners are those"
            if is_observed and seen.event.largest_free_block_bytes is None:
                words = "The owners and the free blocks are those"
                seen.event = _fill_up(seen.event, hardware)
            notes.append(f"{words} at the cell's end, with its traceback still standing")
        cells = shell.read_cell_numbers()
        number = None if record is None else record.execution_count
        frames = seen.event.frames or sign.frames
        place = find_place(frames, cells, source=source, number=number)
        mentions = list_mentions(_find_source(cells, number) or source, shell.user_ns)
        if is_at_end:
            taken, ways = look_at_end(
                shell, hardware, seen.event, mentions=mentions, budget_s=_CARD_BUDGET_S
            )
            seen.keep(taken)
        else:
            ways = list_ways(
                shell,
                hardware,
                seen.event,
                seen.account,
                mentions=mentions,
                budget_s=max(_CARD_BUDGET_S - seen.duration_s, _LEAST_BUDGET_S),
                is_at_end=False,
            )
        if not seen.is_complete:
            notes.append("There was too much to look at all of it: some owners are not known")
        account = seen.account
        return OomCard(
            event=seen.event,
            execution_count=number,
            place=place.place,
            text=place.text,
            function=place.function,
            owners=() if account is None else _list_biggest(account),
            owned_bytes=None if account is None else sum(each.n_bytes for each in account.owned),
            ways=ways,
            kinds=() if account is None else account.sum_kinds(),
            n_caught=cell.n_ooms - is_observed,
            notes=tuple(notes),
        )

    def _look_now(self, sign: OomSign, notes: list[str]) -> _Seen | None:
        """What stands at the cell's end, where nobody saw the OOM itself."""
        hardware = self._extension.monitor.hardware
        devices = [HOST]
        if sign.where == "device":
            readings = [each for each in hardware.read() if each.device != HOST]
            readings.sort(key=lambda each: -(each.allocated_bytes or 0))
            devices = [each.device for each in readings]
        if not devices:
            return None
        if sign.device in devices:
            devices = [sign.device]
        if len(devices) > 1:
            notes.append("The error does not say on which device: this is the one with most in use")
        return _Seen(
            describe_state(
                hardware, devices[0], requested_bytes=sign.requested_bytes, frames=sign.frames
            )
        )


def _fill_up(event: OomEvent, hardware: Hardware) -> OomEvent:
    """An event of which the counters alone were read, with what the end tells of the rest.

    Not what is cached: PyTorch gives that back before it says that memory ran out.
    """
    now = describe_state(hardware, event.device, free_bytes=event.device_free_bytes)
    return dataclasses.replace(
        event,
        largest_free_block_bytes=now.largest_free_block_bytes,
        others_bytes=now.others_bytes,
        others=now.others,
        unlisted_bytes=now.unlisted_bytes,
        outside_bytes=now.outside_bytes,
    )


def _find_sign(result: Any) -> OomSign | None:
    """What a run's error says; nothing is imported where there is none."""
    if result is None or result.error_in_exec is None:
        return None
    from gpumemwidget.owners.ooms import find_oom  # noqa: PLC0415 - when needed

    return find_oom(result.error_in_exec)


def _choose(seen: deque[_Seen], sign: OomSign) -> _Seen | None:
    """The OOM that the error tells of: the last of the same size, or the last."""
    from gpumemwidget.owners.ooms import format_as_torch  # noqa: PLC0415 - when needed

    for each in reversed(seen):
        asked = each.event.requested_bytes
        if asked is not None and sign.request == format_as_torch(asked):
            return each
    return seen[-1] if seen and not sign.request else None


def _find_source(cells: dict[str, int], number: int | None) -> str:
    """A cell as it was compiled, its magics made calls; ``""`` where IPython has it no more."""
    names = [name for name, each in cells.items() if each == number]
    return "".join(linecache.getlines(names[-1])) if names else ""


def _list_biggest(account: DeviceAccount) -> tuple[Owned, ...]:
    """The account's lines, those of one name and kind as one, the biggest ten."""
    groups: dict[tuple[str, str, str], list[Owned]] = {}
    for each in account.owned:
        groups.setdefault((each.root, each.steps[0] if each.steps else "", each.kind), []).append(
            each
        )
    joined = [_join(group) for group in groups.values()]
    return tuple(sorted(joined, key=lambda each: -each.n_bytes)[:_MOST_OWNERS])


def _join(group: list[Owned]) -> Owned:
    first = group[0]
    if len(group) == 1:
        return first
    lines = {each.allocated_at for each in group}
    return Owned(
        device=first.device,
        n_bytes=sum(each.n_bytes for each in group),
        kind=first.kind,
        steps=first.steps[:1],
        root=first.root,
        rows=tuple(dict.fromkeys(row for each in group for row in each.rows)),
        held_elsewhere=any(each.held_elsewhere for each in group),
        allocated_at=lines.pop() if len(lines) == 1 else None,
    )
