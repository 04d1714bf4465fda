"""Records as the plain dictionaries that the dashboard's front end reads.

``static/store.js`` is the other side: a field that is renamed here is renamed there.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from gpumemwidget.devices import Budget
from gpumemwidget.errors import GpuMemError
from gpumemwidget.measure.cells import RunningCell
from gpumemwidget.records import CellDevice, CellRecord, DeviceInfo, Holding

__all__ = [
    "MOST_HOLDINGS",
    "Message",
    "describe_cell",
    "describe_device",
    "describe_failure",
    "describe_holdings",
    "describe_running",
]

#: More rows than this nobody reads, and a page takes seconds to lay them out.
MOST_HOLDINGS = 500

#: A message's content: JSON.
Message = dict[str, Any]


def describe_device(info: DeviceInfo, budget: Budget | None) -> Message:
    """What a device is, and what may be taken of it."""
    return {
        "device": info.device,
        "name": info.name,
        "total_bytes": info.total_bytes,
        "limit_bytes": info.limit_bytes,
        "budget_bytes": None if budget is None else budget.budget_bytes,
    }


def describe_running(cell: RunningCell) -> Message:
    """A cell that has begun."""
    return {
        "execution_count": cell.execution_count,
        "first_line": cell.first_line,
        "start_s": cell.start_s,
    }


def describe_cell(record: CellRecord) -> Message:
    """A cell that has ended, with what it did to each device's allocated memory."""
    return {
        "execution_count": record.execution_count,
        "first_line": record.first_line,
        "start_s": record.start_s,
        "duration_s": record.duration_s,
        "status": record.status,
        "devices": [_describe_cell_device(device) for device in record.devices],
    }


def _describe_cell_device(device: CellDevice) -> Message:
    allocated = device.allocated.peak_bytes
    is_stopped = device.stopped_at_bytes is not None
    return {
        "device": device.device,
        "change": device.allocated.change_bytes,
        # The host has no high-water mark of what is allocated, only one of its resident size.
        "peak": device.reserved.peak_bytes if allocated is None else allocated,
        "peak_of": "reserved" if allocated is None else "allocated",
        "peak_is": device.peak_is,
        # The budget that it crossed, and what it had when that interrupted it.
        "crossed": device.budget_bytes if device.is_over_budget or is_stopped else None,
        "stopped_at": device.stopped_at_bytes,
    }


def describe_holdings(holdings: Sequence[Holding]) -> Message:
    """The rows of the variables panel; of very many the biggest, and how many more there are."""
    return {
        "holdings": [_describe_holding(holding) for holding in holdings[:MOST_HOLDINGS]],
        "n_more_holdings": max(0, len(holdings) - MOST_HOLDINGS),
    }


def _describe_holding(holding: Holding) -> Message:
    return {
        "name": holding.name,
        "root": holding.root,
        "kind": holding.kind,
        "type_name": holding.type_name,
        "shape": None if holding.shape is None else list(holding.shape),
        "dtype": None if holding.dtype is None else holding.dtype.removeprefix("torch."),
        "held": _list_pairs(holding.held_bytes),
        "frees": _list_pairs(holding.frees_bytes),
        "shared_with": list(holding.shared_with),
        "held_elsewhere": holding.held_elsewhere,
        "is_at_least": holding.is_at_least,
    }


def describe_failure(exc: BaseException) -> str:
    """One line on a failure: ours say all themselves, others need their kind."""
    if isinstance(exc, KeyboardInterrupt):
        return "interrupted"
    return str(exc) if isinstance(exc, GpuMemError) else f"{type(exc).__name__}: {exc}"


def _list_pairs(pairs: Iterable[tuple[str, int]]) -> list[list[object]]:
    return [list(pair) for pair in pairs]
