"""Check what pages ask for, and describe records as the plain dictionaries that pages read.

``js/store.js`` reads these dictionaries: a field that is renamed here is renamed there.

A browser may have kept a page of another release. A request of which a field is not of its type is
refused as a whole, so that nothing of it fails later, in the middle of somebody's cell.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import UnionType
from typing import Any

from gpumemwidget.errors import BadInputError, GpuMemError, describe_exception
from gpumemwidget.model.cells import CellDevice, CellRecord
from gpumemwidget.model.devices import DeviceInfo
from gpumemwidget.model.ownership import DeviceBytes, JointRelease, Variable
from gpumemwidget.recording.cells import RunningCell

#: Maximum number of rows in a message: a page takes seconds to lay out more.
MOST_VARIABLES = 500

#: A message's content: JSON.
Message = dict[str, Any]
#: The fields of each kind of request, with their types.
Requests = Mapping[str, Mapping[str, type | UnionType]]


# -- Requests --------------------------------------------------------------------------------------

#: Requests of the dashboard's views.
DASHBOARD_REQUESTS: Requests = {
    "view": {
        "view": str,
        "visible": bool,
        "variables": bool,
        "device": str | None,
        "snapshot": bool | None,
        "since_s": float | int | None,
        "list": bool | None,
        "look": bool | None,
    },
    "gone": {"view": str},
    "snapshot": {"since_s": float | int | None},
    "variables": {},
    "account": {},
    "parts": {"key": int, "node": int, "start": int},
    "find": {"key": int, "text": str},
    "sum": {"id": str, "names": list},
    "release": {"id": str, "names": list, "keep": bool},
}

#: Requests of the buttons on the cards of OOMs.
CARD_REQUESTS: Requests = {"hello": {}, "do": {"card": str, "way": int}}


def check_request(content: object, requests: Requests) -> Message:
    """Return a request with all fields of its kind and no other; ``None`` for those left out.

    Raises:
        BadInputError: it is no message of these kinds, or a field is not of its type.
    """
    if isinstance(content, dict) and isinstance(content.get("kind"), str):
        kind = content["kind"]
        fields = requests.get(kind)
        if fields is not None and all(
            isinstance(content.get(name), type_) for name, type_ in fields.items()
        ):
            return {"kind": kind, **{name: content.get(name) for name in fields}}
    raise BadInputError("a message from this page was not understood: reload the page")


# -- Records ---------------------------------------------------------------------------------------


def describe_device(info: DeviceInfo, budget_bytes: int | None, *, is_touched: bool) -> Message:
    """Describe a device, what may be taken of it, and whether this process uses it."""
    return {
        "device": info.device,
        "is_touched": is_touched,
        "name": info.name,
        "total_bytes": info.total_bytes,
        "limit_bytes": info.limit_bytes,
        "budget_bytes": budget_bytes,
    }


def describe_running(cell: RunningCell) -> Message:
    """Describe a cell that has begun."""
    return {
        "execution_count": cell.execution_count,
        "first_line": cell.first_line,
        "start_s": cell.start_s,
        "own": cell.is_only_own_magics,
    }


def describe_cell(record: CellRecord) -> Message:
    """Describe a cell that has ended, with its change and peak on each device."""
    return {
        "execution_count": record.execution_count,
        "first_line": record.first_line,
        "start_s": record.start_s,
        "duration_s": record.duration_s,
        "status": record.status,
        "own": record.is_only_own_magics,
        "devices": [_describe_cell_device(device) for device in record.devices],
    }


def _describe_cell_device(device: CellDevice) -> Message:
    allocated = device.allocated.peak_bytes
    return {
        "device": device.device,
        "change": device.allocated.change_bytes,
        # The host has no high-water mark of what is allocated, only one of its resident size.
        "peak": device.reserved.peak_bytes if allocated is None else allocated,
        "rise": (device.reserved if allocated is None else device.allocated).rise_bytes,
        "peak_of": "reserved" if allocated is None else "allocated",
        "peak_is": device.peak_is,
        # The budget that the cell's peak went beyond.
        "crossed": device.budget_bytes if device.is_over_budget else None,
    }


def describe_variables(variables: Sequence[Variable]) -> Message:
    """Describe the biggest rows of the variables tab, and how many more there are."""
    return {
        "variables": [_describe_variable(variable) for variable in variables[:MOST_VARIABLES]],
        "n_more_variables": max(0, len(variables) - MOST_VARIABLES),
    }


def _describe_variable(variable: Variable) -> Message:
    return {
        "name": variable.name,
        "root": variable.root,
        "kind": variable.kind,
        "type_name": variable.type_name,
        "shape": None if variable.shape is None else list(variable.shape),
        "dtype": None if variable.dtype is None else variable.dtype.removeprefix("torch."),
        "held": describe_bytes(variable.held_bytes),
        "frees": describe_bytes(variable.frees_bytes),
        "shared_with": list(variable.shared_with),
        "held_elsewhere": variable.held_elsewhere,
        "holds_training_state": variable.holds_training_state,
        "joint": describe_joint(variable.joint),
    }


def describe_failure(exc: BaseException) -> str:
    """Return a line on a failure: our own message, or the kind and message of another error."""
    if isinstance(exc, KeyboardInterrupt):
        return "interrupted; nothing was changed"
    return str(exc) if isinstance(exc, GpuMemError) else describe_exception(exc)


def describe_joint(joint: JointRelease | None) -> Message | None:
    """Describe the rows that have to be released together to free shared memory."""
    if joint is None:
        return None
    return {"names": list(joint.names), "frees": describe_bytes(joint.frees_bytes)}


def describe_bytes(amounts: DeviceBytes) -> Message:
    """Describe the bytes on each device, and whether they are a lower bound."""
    return {
        "by_device": [list(pair) for pair in amounts.by_device],
        "is_at_least": amounts.is_at_least,
    }
