"""Whole devices for code: what is read of each, who owns what of it, and both put together."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

from gpumemwidget.devices import (
    Bridge,
    ChildProcess,
    DeviceState,
    ProcessUse,
    SegmentMap,
    check_device_name,
)
from gpumemwidget.errors import BadInputError
from gpumemwidget.measure.bridge import build_bridge
from gpumemwidget.measure.segmentmap import build_segment_map
from gpumemwidget.owners.lines import format_allocation
from gpumemwidget.records import HOST, DeviceAccount, MemoryAccount

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

    from gpumemwidget.backends.hardware import Hardware
    from gpumemwidget.measure.monitor import Monitor
    from gpumemwidget.owners.base import Shell

__all__ = ["DeviceBridges", "Session", "take_bridges", "take_plain_bridges"]

#: Who asks may wait so long.
_BUDGET_S = 10.0
#: Other threads may take memory between the account and the counters.
_TRIES = 3


class Session(Protocol):
    """What is needed of a notebook: the extension has it."""

    @property
    def shell(self) -> Shell:
        """The running IPython."""
        ...

    @property
    def monitor(self) -> Monitor:
        """What records the cells."""
        ...


class DeviceBridges:
    """Whole devices at one moment, each in parts that are all of it; bytes.

    Attributes:
        records: one ``Bridge`` for each device.
        children: the processes below this one.
        maps: where the blocks lie, by device, where the allocator tells that.
        notes: sentences on what could not be read.
    """

    def __init__(
        self,
        records: Sequence[Bridge],
        children: Sequence[ChildProcess] = (),
        maps: Mapping[str, SegmentMap] | None = None,
        notes: Sequence[str] = (),
    ) -> None:
        self.records = tuple(records)
        self.children = tuple(children)
        self.maps = dict(maps or {})
        self.notes = tuple(notes)

    def record(self, device: str | None = None) -> Bridge:
        """The parts of one device; without a name of the first.

        Raises:
            BadInputError: there is none of that name.
        """
        check_device_name(device)
        found = [each for each in self.records if device in (None, each.device)]
        if not found:
            raise BadInputError(_refuse(device, [each.device for each in self.records]))
        return found[0]

    def figure(self, device: str | None = None) -> Figure:
        """A device's parts as a figure of plotly's; without a name of the first.

        Raises:
            BadInputError: there is none of that name.
        """
        from gpumemwidget.report.figures import figure_bridge  # noqa: PLC0415 - brings plotly

        return figure_bridge(self.record(device))

    def segments_figure(self, device: str | None = None) -> Figure:
        """A device's blocks where they lie, as a figure of plotly's; without a name of the first.

        Raises:
            BadInputError: there is none of that name, or its allocator does not tell.
        """
        from gpumemwidget.report.figures import figure_segments  # noqa: PLC0415 - brings plotly

        check_device_name(device)
        found = [each for name, each in self.maps.items() if device in (None, name)]
        if not found:
            if device is not None:
                self.record(device)
            raise BadInputError(
                f"there are no segments on {device or 'any of these devices'}: PyTorch has nothing "
                "reserved there, or its allocator does not tell where"
            )
        return figure_segments(found[0])

    def to_html(self) -> str:
        """The report as static HTML."""
        from gpumemwidget.report.bridge import report_bridge  # noqa: PLC0415 - when it is used

        return report_bridge(self.records, self.children, self.maps, self.notes).html

    def to_text(self) -> str:
        """The report as plain text."""
        from gpumemwidget.report.bridge import report_bridge  # noqa: PLC0415 - when it is used

        return report_bridge(self.records, self.children, self.maps, self.notes).text

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


def take_bridges(
    session: Session,
    device: str | None = None,
    *,
    with_maps: bool = False,
    budget_s: float = _BUDGET_S,
) -> DeviceBridges:
    """Every device, or one, with what is allocated there by kind.

    Nothing is changed, and no device is touched that the user has not.

    Args:
        session: the notebook.
        device: the one; ``None`` for all.
        with_maps: also where each block lies, and what is in it.
        budget_s: seconds after which a walk through the user's objects stops, and none begins.

    Raises:
        BadInputError: there is no such device.
    """
    from gpumemwidget.owners.entries import take_block_account  # noqa: PLC0415 - when it is used

    shell, monitor = session.shell, session.monitor
    hardware = monitor.hardware
    end_s = monitor.clock.now() + budget_s
    for _ in range(_TRIES):
        account, names = take_block_account(shell, hardware, budget_s=budget_s)
        states = _choose(hardware.take_device_states(), device)
        if all(_is_of(account, state) for state in states) or monitor.clock.now() >= end_s:
            break
    children = hardware.list_children()
    bridges = []
    for state in states:
        owners = _find_account(account, state)
        bridges.append(
            build_bridge(
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
    return _put_together(bridges, children, maps, [*hardware.take_notes(), *_miss(states, bridges)])


def take_plain_bridges(hardware: Hardware, device: str | None = None) -> DeviceBridges:
    """Every device, or one, without a notebook: it is not told what is allocated for.

    Raises:
        BadInputError: there is no such device.
    """
    states = _choose(hardware.take_device_states(), device)
    maps = {state.info.device: build_segment_map(state.segments) for state in states}
    children = hardware.list_children()
    bridges = [build_bridge(_match(state, None, children)) for state in states]
    return _put_together(bridges, children, maps, [*hardware.take_notes(), *_miss(states, bridges)])


def _miss(states: Sequence[DeviceState], bridges: Sequence[Bridge | None]) -> list[str]:
    """Why a device in use is not among the bridges."""
    return [
        f"{state.info.device}: neither PyTorch nor a driver tells its total, so it can't be shown "
        "in parts that add up; %memvars tells who holds what on it."
        for state, bridge in zip(states, bridges, strict=True)
        if bridge is None and state.reading is not None
    ]


def _put_together(
    bridges: Sequence[Bridge | None],
    children: Sequence[ChildProcess],
    maps: Mapping[str, SegmentMap | None],
    notes: Sequence[str],
) -> DeviceBridges:
    return DeviceBridges(
        [bridge for bridge in bridges if bridge is not None],
        children,
        {device: found for device, found in maps.items() if found is not None},
        notes,
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
    return next((each for each in account.devices if each.device == state.info.device), None)


def _is_of(account: MemoryAccount, state: DeviceState) -> bool:
    """Whether the account and the counters are of one moment, as far as that can be."""
    owners = _find_account(account, state)
    if state.info.device == HOST or owners is None or state.reading is None:
        return True
    return owners.allocated_bytes == state.reading.allocated_bytes


def _match(
    state: DeviceState, owners: DeviceAccount | None, children: Sequence[ChildProcess]
) -> DeviceState:
    """The host with its children, and malloc's figure, which moves with every object, as owned."""
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
