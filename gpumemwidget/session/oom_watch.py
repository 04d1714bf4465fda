"""Notice OOMs while a cell or a program runs, and describe the one that ends it in a card.

Code that looks for the biggest batch catches OOM after OOM and must not wait for us each time. So
the device and its owners are looked at for the first two OOMs of a cell. If a later one ends the
cell, they are looked at then, while its traceback still holds the frames.

Nothing but records is kept: no tensor, no frame and no error.
"""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from gpumemwidget.backends.cuda.oom_observer import OomMoment, OomObserver
from gpumemwidget.model.devices import HOST
from gpumemwidget.model.ooms import OomCard, OomEvent
from gpumemwidget.model.ownership import DeviceAccount, MemoryAccount, Owned
from gpumemwidget.oom.detection import OomSign, describe_oom, divide_device
from gpumemwidget.session.interrupts import run_unraised

if TYPE_CHECKING:
    from gpumemwidget.backends.hardware import Hardware
    from gpumemwidget.model.devices import Frame
    from gpumemwidget.ownership.shell import Shell
    from gpumemwidget.tracing.sources import Sources

#: Seconds for the look at the owners when the OOM happens, and for all work on the card.
_ACCOUNT_BUDGET_S = 0.5
_CARD_BUDGET_S = 0.85


@dataclass(slots=True)
class _SeenOom:
    """An OOM with the state of its device and the owners there, where these were read."""

    device: str
    requested_bytes: int | None
    frames: tuple[Frame, ...]
    event: OomEvent | None = None
    taken: MemoryAccount | None = None  #: the owners of the memory of all devices

    def find_account(self) -> DeviceAccount | None:
        """Return who owned what on the device; ``None`` if that is not known."""
        devices = () if self.taken is None else self.taken.devices
        return next((account for account in devices if account.device == self.device), None)


@dataclass(slots=True)
class _Cell:
    n_ooms: int = 0
    #: The last ones: one of them ends the cell.
    seen: deque[_SeenOom] = field(default_factory=lambda: deque(maxlen=16))
    #: The OOM that a run within the cell ended with: ``%%capture`` hides the error of its body.
    inner: OomSign | None = None


@dataclass(frozen=True, slots=True)
class EndedRun:
    """The code of a cell, or of a program, that has ended."""

    #: The code as typed, and as compiled, where that differs.
    source: str
    compiled: str
    sources: Sources  #: finds the lines of a stack
    number: int | None = None  #: the number of the cell


class OomWatch:
    """Notices the OOMs of a cell or of a program, and makes a card of the one that ends it."""

    def __init__(
        self, shell: Shell, hardware: Hardware, on_failure: Callable[[str, Exception], None]
    ) -> None:
        self._shell = shell
        self._hardware = hardware
        self._observer = OomObserver(self._note, on_failure)
        self._cell: _Cell | None = None

    def open(self) -> None:
        """Begin to notice OOMs."""
        self._observer.open()

    def close(self) -> None:
        """Notice nothing more. May be called twice."""
        self._observer.close()
        self._cell = None

    # -- The cell ----------------------------------------------------------------------------------

    def start(self) -> None:
        """Begin to note the OOMs of a cell."""
        self._cell = _Cell()

    def end_inner(self, sign: OomSign | None) -> None:
        """Note the OOM of a run within the cell, as ``%%capture`` makes one."""
        if self._cell is not None:
            self._cell.inner = sign or self._cell.inner

    def end(self, sign: OomSign | None, describe_run: Callable[[], EndedRun]) -> OomCard | None:
        """Return the card of a run that has ended with an OOM; ``None`` if it has not.

        Args:
            sign: what ``find_oom`` finds in the error that ended it. Not the error itself: whatever
                a frame of ours has is held by us too.
            describe_run: returns its code; called only where there was an OOM.
        """
        cell, self._cell = self._cell, None
        if cell is None:
            return None
        sign = sign or cell.inner
        return None if sign is None else self._build(cell, sign, describe_run())

    # -- Within the allocation ---------------------------------------------------------------------

    def _note(self, moment: OomMoment) -> None:
        """Note an allocation that is failing, on any thread."""
        cell = self._cell
        if cell is not None:
            # A Ctrl-C or a timeout that lands here is for the cell.
            run_unraised(self._keep, cell, moment)

    def _keep(self, cell: _Cell, moment: OomMoment) -> None:
        cell.n_ooms += 1
        seen = _SeenOom(moment.device, moment.requested_bytes, moment.read_stack())
        cell.seen.append(seen)
        if cell.n_ooms <= 2:
            seen.event = describe_oom(
                self._hardware,
                moment.device,
                requested_bytes=moment.requested_bytes,
                frames=seen.frames,
                moment=moment,
            )
            self._take_account(seen)

    def _take_account(self, seen: _SeenOom) -> None:
        from gpumemwidget.ownership.account import take_running_account  # noqa: PLC0415 - when needed

        seen.taken = take_running_account(
            self._shell, self._hardware, seen.device, budget_s=_ACCOUNT_BUDGET_S
        )

    # -- The card ----------------------------------------------------------------------------------

    def _build(self, cell: _Cell, sign: OomSign, run: EndedRun) -> OomCard | None:
        from gpumemwidget.oom.remedies import (  # noqa: PLC0415 - when needed
            find_failing_line,
            find_remedies,
            list_mentions,
        )

        shell, hardware = self._shell, self._hardware
        notes: list[str] = []
        seen = _choose(cell.seen, sign) if sign.is_allocators else None
        is_observed = seen is not None
        if seen is None:
            seen = self._look_now(sign, notes)
        if seen is None:
            return None  # A device that is not measured ran out.
        event = seen.event
        if event is None:
            event = describe_oom(
                hardware,
                seen.device,
                requested_bytes=seen.requested_bytes,
                frames=seen.frames,
            )
        account = seen.find_account()
        if account is None:
            notes.append("Measured after the error, while the traceback still holds its frames")
        line = find_failing_line(event.frames or sign.frames, run.sources)
        mentions = list_mentions(run.compiled or run.source, shell.user_ns)
        spent_s = 0.0 if seen.taken is None else seen.taken.duration_s
        taken, ways = find_remedies(
            shell,
            hardware,
            event,
            account,
            mentions=mentions,
            budget_s=max(_CARD_BUDGET_S - spent_s, 0.3),  # A person waits for it.
        )
        if taken is not None:
            seen.taken = taken
            account = seen.find_account()
        if seen.taken is not None and not seen.taken.is_complete:
            notes.append("There was too much to look at all of it: some owners are not known")
        return OomCard(
            event=event,
            execution_count=run.number,
            place=line.place,
            text=line.text,
            function=line.function,
            owners=() if account is None else _join_owners(account),
            owned_bytes=None if account is None else sum(owned.n_bytes for owned in account.owned),
            ways=ways,
            breakdown=divide_device(event, account),
            n_caught=cell.n_ooms - is_observed,
            notes=tuple(notes),
        )

    def _look_now(self, sign: OomSign, notes: list[str]) -> _SeenOom | None:
        """Return the device that ran out of memory, if nobody saw the OOM itself."""
        devices = [HOST]
        if sign.where == "device":
            readings = [reading for reading in self._hardware.read() if reading.device != HOST]
            readings.sort(key=lambda reading: -(reading.allocated_bytes or 0))
            devices = [reading.device for reading in readings]
        if not devices:
            return None
        if sign.device in devices:
            devices = [sign.device]
        if len(devices) > 1:
            notes.append("The error does not say on which device: this is the one with most in use")
        return _SeenOom(devices[0], sign.requested_bytes, sign.frames)


def _choose(seen: deque[_SeenOom], sign: OomSign) -> _SeenOom | None:
    """Return the OOM that the error is about: the last of about the same size, or the last."""
    requested = sign.requested_bytes
    if requested is None:
        return seen[-1] if seen else None
    for oom in reversed(seen):
        asked = oom.requested_bytes
        # The error has two decimals.
        if asked is not None and abs(asked - requested) <= requested // 100:
            return oom
    return None


def _join_owners(account: DeviceAccount) -> tuple[Owned, ...]:
    """Return the account's lines, those of one name and kind as one."""
    groups: dict[tuple[tuple[str, ...], str, str], list[Owned]] = {}
    for owned in account.owned:
        # A variable of a running function has a thread, and a place there.
        name = owned.steps[: 2 if owned.root == "thread" else 1]
        groups.setdefault((name, owned.root, owned.kind), []).append(owned)
    joined = []
    for (name, *_), group in groups.items():
        first, lines = group[0], {owned.allocated_at for owned in group}
        joined.append(
            dataclasses.replace(
                first,
                n_bytes=sum(owned.n_bytes for owned in group),
                steps=first.steps if len(group) == 1 else name,
                allocated_at=lines.pop() if len(lines) == 1 else None,
            )
        )
    return tuple(joined)
