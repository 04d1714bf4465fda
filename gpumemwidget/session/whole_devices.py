"""Take whole devices apart: what their drivers and allocators read, and who owns it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from gpumemwidget.device_parts import build_breakdown, build_segment_map
from gpumemwidget.errors import BadInputError
from gpumemwidget.model.breakdowns import Breakdown, SegmentMap
from gpumemwidget.model.devices import (
    HOST,
    ChildProcess,
    DeviceState,
    HardwareNote,
    HardwareNoteKind,
    ProcessUse,
    check_device,
)
from gpumemwidget.model.ownership import BlockNames, DeviceAccount, MemoryAccount
from gpumemwidget.report.render.output import Report, ShowsReport
from gpumemwidget.report.render.wording import word_hardware_note
from gpumemwidget.tracing.sources import format_allocation

if TYPE_CHECKING:
    from gpumemwidget.backends.hardware import Hardware
    from gpumemwidget.ownership.shell import Shell
    from gpumemwidget.recording.limits import Budgets


@dataclass(frozen=True, repr=False)
class DeviceBreakdowns(ShowsReport):
    """Whole devices at one moment, each in parts that are all of it; bytes.

    Attributes:
        records: one ``Breakdown`` for each device.
        children: the processes below this one.
        maps: where the blocks lie, by device, where the allocator lists them.
        hardware_notes: what could not be read.
    """

    records: tuple[Breakdown, ...]
    children: tuple[ChildProcess, ...] = ()
    maps: Mapping[str, SegmentMap] = field(default_factory=dict)
    hardware_notes: tuple[HardwareNote, ...] = ()

    @property
    def notes(self) -> tuple[str, ...]:
        """Sentences on what could not be read."""
        return tuple(map(word_hardware_note, self.hardware_notes))

    def record(self, device: str | None = None) -> Breakdown:
        """Return the parts of one device; without a name, of the first.

        Raises:
            BadInputError: there is none of that name.
        """
        check_device(device, [record.device for record in self.records])
        if not self.records:
            raise BadInputError("there is no device of which the total is known")
        return next(record for record in self.records if device in (None, record.device))

    def _report(self) -> Report:
        from gpumemwidget.report.devices import report_breakdown  # noqa: PLC0415 - when it is used

        return report_breakdown(self.records, self.children, self.maps, self.notes)


def take_breakdowns(
    hardware: Hardware,
    device: str | None = None,
    *,
    shell: Shell | None = None,
    budgets: Budgets | None = None,
    with_maps: bool = True,
    budget_s: float = 10.0,
) -> DeviceBreakdowns:
    """Return every device, or one, in parts.

    Nothing is changed, and no device is touched that the user has not.

    Args:
        hardware: the machine's memory.
        device: the one; ``None`` for all.
        shell: the running IPython, whose objects show what is allocated for what; ``None``: that
            stays unknown.
        budgets: what cells may allocate.
        with_maps: also where each block lies, and what is in it.
        budget_s: seconds after which the walk through the user's objects stops.

    Raises:
        BadInputError: there is no such device.
    """
    account: MemoryAccount | None = None
    names: dict[str, BlockNames] = {}
    find_line = None
    if shell is not None:
        from gpumemwidget.ownership.account import take_block_account  # noqa: PLC0415 - when it is used

        account, names = take_block_account(shell, hardware, budget_s=budget_s)
        find_line = partial(format_allocation, cells=shell.read_cell_numbers())
    states = hardware.take_device_states()
    check_device(device, [state.info.device for state in states])
    children = hardware.list_children()
    records, maps, notes = [], {}, []
    for state in states:
        name = state.info.device
        if device not in (None, name):
            continue
        owners = _find_account(account, state)
        record = build_breakdown(
            _complete(state, hardware, owners, children),
            owners,
            budget_bytes=None if budgets is None else budgets.find(name),
            is_complete=account is None or account.is_complete,
        )
        if record is not None:
            records.append(record)
        elif state.reading is not None:
            notes.append(HardwareNote(HardwareNoteKind.NO_TOTAL, device=name))
        segment_map = None
        if with_maps:
            segment_map = build_segment_map(state.segments, names.get(name), find_line=find_line)
        if segment_map is not None:
            maps[name] = segment_map
    return DeviceBreakdowns(tuple(records), tuple(children), maps, (*hardware.take_notes(), *notes))


def _find_account(account: MemoryAccount | None, state: DeviceState) -> DeviceAccount | None:
    if account is None or state.reading is None:
        return None
    return next((owners for owners in account.devices if owners.device == state.info.device), None)


def _complete(
    state: DeviceState,
    hardware: Hardware,
    owners: DeviceAccount | None,
    children: Sequence[ChildProcess],
) -> DeviceState:
    """Return a GPU with its libraries; the host with its children and the account's figure."""
    if state.info.device != HOST:
        return dataclasses.replace(state, libraries=hardware.read_libraries(state.info.device))
    if state.processes is None:
        found = tuple(ProcessUse(c.pid, c.name, "child", c.resident_bytes) for c in children)
        state = dataclasses.replace(state, processes=found)
    reading = state.reading
    if reading is None or owners is None or owners.allocated_bytes is None:
        return state
    reading = dataclasses.replace(reading, allocated_bytes=owners.allocated_bytes)
    return dataclasses.replace(state, reading=reading)
