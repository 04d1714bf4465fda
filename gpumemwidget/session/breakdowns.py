"""Take whole devices apart: what their drivers and allocators read, and who owns it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from gpumemwidget.breakdowns.breakdown import build_breakdown
from gpumemwidget.breakdowns.segment_map import build_segment_map
from gpumemwidget.errors import BadInputError
from gpumemwidget.model.breakdowns import Breakdown, SegmentMap
from gpumemwidget.model.devices import (
    HOST,
    ChildProcess,
    DeviceState,
    ProcessUse,
    check_device_name,
)
from gpumemwidget.model.ownership import DeviceAccount, MemoryAccount
from gpumemwidget.tracing.sources import format_allocation

if TYPE_CHECKING:
    from gpumemwidget.backends.hardware import Hardware
    from gpumemwidget.ownership.shell import Shell
    from gpumemwidget.recording.monitor import Monitor
    from gpumemwidget.report.render.output import Report


#: Seconds that somebody who has asked may wait for the walk through the user's objects.
_BUDGET_S = 10.0
#: Maximum number of walks to get one that is of the same moment as the counters: other threads may
#: allocate between the two.
_MAX_TRIES = 3


@dataclass(frozen=True, repr=False)
class DeviceBreakdowns:
    """Whole devices at one moment, each in parts that are all of it; bytes.

    Attributes:
        records: one ``Breakdown`` for each device.
        children: the processes below this one.
        maps: where the blocks lie, by device, where the allocator tells that.
        notes: sentences on what could not be read.
    """

    records: tuple[Breakdown, ...]
    children: tuple[ChildProcess, ...] = ()
    maps: Mapping[str, SegmentMap] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    def record(self, device: str | None = None) -> Breakdown:
        """Return the parts of one device; without a name, of the first.

        Raises:
            BadInputError: there is none of that name.
        """
        check_device_name(device)
        found = [record for record in self.records if device in (None, record.device)]
        if not found:
            raise BadInputError(_refuse(device, [record.device for record in self.records]))
        return found[0]

    def to_html(self) -> str:
        """Return the report as static HTML."""
        return self._report().html

    def to_text(self) -> str:
        """Return the report as plain text."""
        return self._report().text

    def _report(self) -> Report:
        from gpumemwidget.report.breakdown import report_breakdown  # noqa: PLC0415 - when it is used

        return report_breakdown(self.records, self.children, self.maps, self.notes)

    def _repr_html_(self) -> str:
        return self.to_html()

    def _repr_mimebundle_(
        self,
        include: object = None,  # noqa: ARG002 - IPython's protocol
        exclude: object = None,  # noqa: ARG002
    ) -> dict[str, Any]:
        return {"text/plain": self.to_text(), "text/html": self.to_html()}

    def __repr__(self) -> str:
        return self.to_text()


def take_breakdowns(
    shell: Shell,
    monitor: Monitor,
    device: str | None = None,
    *,
    with_maps: bool = False,
    budget_s: float | None = None,
) -> DeviceBreakdowns:
    """Return every device, or one, with what is allocated there by kind.

    Nothing is changed, and no device is touched that the user has not.

    Args:
        shell: the running IPython.
        monitor: what records its cells.
        device: the one; ``None`` for all.
        with_maps: also where each block lies, and what is in it.
        budget_s: seconds after which a walk through the user's objects stops, and none begins;
            ``None`` for ten.

    Raises:
        BadInputError: there is no such device.
    """
    from gpumemwidget.ownership.account import take_block_account  # noqa: PLC0415 - when it is used

    hardware = monitor.hardware
    budget_s = _BUDGET_S if budget_s is None else budget_s
    end_s = monitor.clock.now() + budget_s
    for _ in range(_MAX_TRIES):
        account, names = take_block_account(shell, hardware, budget_s=budget_s)
        states = _choose(hardware.take_device_states(), device)
        if all(_is_of(account, state) for state in states) or monitor.clock.now() >= end_s:
            break
    children = hardware.list_children()
    breakdowns = []
    for state in states:
        owners = _find_account(account, state)
        breakdowns.append(
            build_breakdown(
                _match(state, owners, children),
                owners,
                budget_bytes=_read_budget(monitor, state.info.device),
                is_complete=account.is_complete,
            )
        )
    cells = shell.read_cell_numbers()
    tell_line = partial(format_allocation, cells=cells)
    maps = {
        state.info.device: build_segment_map(
            state.segments, names.get(state.info.device, {}), tell_line=tell_line
        )
        for state in (states if with_maps else ())
    }
    return _put_together(
        breakdowns, children, maps, [*hardware.take_notes(), *_miss(states, breakdowns)]
    )


def take_plain_breakdowns(hardware: Hardware, device: str | None = None) -> DeviceBreakdowns:
    """Return every device, or one, without a notebook, and so without what is allocated for.

    Raises:
        BadInputError: there is no such device.
    """
    states = _choose(hardware.take_device_states(), device)
    maps = {state.info.device: build_segment_map(state.segments) for state in states}
    children = hardware.list_children()
    breakdowns = [build_breakdown(_match(state, None, children)) for state in states]
    return _put_together(
        breakdowns, children, maps, [*hardware.take_notes(), *_miss(states, breakdowns)]
    )


def _miss(states: Sequence[DeviceState], breakdowns: Sequence[Breakdown | None]) -> list[str]:
    """Return a sentence for each device in use that is not among the breakdowns."""
    return [
        f"{state.info.device}: neither PyTorch nor a driver tells its total, so it can't be shown "
        "in parts that add up; %memvars tells who holds what on it."
        for state, breakdown in zip(states, breakdowns, strict=True)
        if breakdown is None and state.reading is not None
    ]


def _put_together(
    breakdowns: Sequence[Breakdown | None],
    children: Sequence[ChildProcess],
    maps: Mapping[str, SegmentMap | None],
    notes: Sequence[str],
) -> DeviceBreakdowns:
    return DeviceBreakdowns(
        tuple(breakdown for breakdown in breakdowns if breakdown is not None),
        tuple(children),
        {device: found for device, found in maps.items() if found is not None},
        tuple(notes),
    )


def _choose(states: Sequence[DeviceState], device: str | None) -> Sequence[DeviceState]:
    check_device_name(device)
    chosen = [state for state in states if device in (None, state.info.device)]
    if device is not None and not chosen:
        raise BadInputError(_refuse(device, [state.info.device for state in states]))
    return chosen


def _refuse(device: str | None, known: Sequence[str]) -> str:
    if not known:
        return "there is no device of which the total is known"
    return f"no device {device!r} here: choose from {', '.join(known)}"


def _find_account(account: MemoryAccount, state: DeviceState) -> DeviceAccount | None:
    if state.reading is None:
        return None
    return next((owners for owners in account.devices if owners.device == state.info.device), None)


def _is_of(account: MemoryAccount, state: DeviceState) -> bool:
    """Tell whether the account and the counters are of one moment, as far as that can be."""
    owners = _find_account(account, state)
    if state.info.device == HOST or owners is None or state.reading is None:
        return True
    return owners.allocated_bytes == state.reading.allocated_bytes


def _match(
    state: DeviceState, owners: DeviceAccount | None, children: Sequence[ChildProcess]
) -> DeviceState:
    """Return the host with its children, and with malloc's figure as the account has it."""
    if state.info.device != HOST:
        return state
    if state.processes is None:
        found = tuple(ProcessUse(c.pid, c.name, "child", c.resident_bytes) for c in children)
        state = dataclasses.replace(state, processes=found)
    reading = state.reading
    if reading is None or owners is None or owners.allocated_bytes is None:
        return state
    reading = dataclasses.replace(reading, allocated_bytes=owners.allocated_bytes)
    return dataclasses.replace(state, reading=reading)


def _read_budget(monitor: Monitor, device: str) -> int | None:
    budget = monitor.budgets.find(device)
    return None if budget is None else budget.budget_bytes
