"""Check what pages ask for, and describe records as the plain dictionaries that pages read.

``js/store.js`` reads these dictionaries: a field that is renamed here is renamed there.

Requests come from a page of this release, from one of another release that a browser has kept, or
from whatever else can reach the comm. A request that is not what it should be is refused as a
whole, so that nothing of it fails later, in the middle of somebody's cell.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gpumemwidget.errors import BadInputError, GpuMemError
from gpumemwidget.failures import describe_exception
from gpumemwidget.model.cells import CellDevice, CellRecord
from gpumemwidget.model.devices import Budget, DeviceInfo
from gpumemwidget.model.ownership import DeviceBytes, JointRelease, Variable
from gpumemwidget.recording.cells import RunningCell

__all__ = [
    "CARD_REQUESTS",
    "DASHBOARD_REQUESTS",
    "MOST_VARIABLES",
    "Message",
    "check_request",
    "describe_bytes",
    "describe_cell",
    "describe_device",
    "describe_failure",
    "describe_joint",
    "describe_running",
    "describe_variables",
]

#: Maximum number of rows in a message: a page takes seconds to lay out more.
MOST_VARIABLES = 500
#: Maximum number of characters of a text, and of names in a list.
_MAX_CHARACTERS = 10_000
_MAX_NAMES = 10_000
#: Numbers above this one are not exact in JavaScript.
_MAX_COUNT = 2**53

#: A message's content: JSON.
Message = dict[str, Any]


# -- Requests --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Field:
    """The values that a field of a request may have."""

    words: str
    is_valid: Callable[[object], bool]
    is_required: bool = True


def _is_text(value: object) -> bool:
    return isinstance(value, str) and len(value) <= _MAX_CHARACTERS


def _is_flag(value: object) -> bool:
    return isinstance(value, bool)


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not _is_flag(value) and 0 <= value <= _MAX_COUNT


def _is_moment(value: object) -> bool:
    if value is None:
        return True
    return math.isfinite(value) if isinstance(value, float) else _is_count(value)


def _is_names(value: object) -> bool:
    return isinstance(value, list) and len(value) <= _MAX_NAMES and all(map(_is_text, value))


_TEXT = _Field("a text", _is_text)
_FLAG = _Field("true or false", _is_flag)
_COUNT = _Field("a whole number", _is_count)
_NAMES = _Field("a list of names", _is_names)
_MAYBE_FLAG = _Field("true or false", _is_flag, is_required=False)
_MAYBE_MOMENT = _Field("a number of seconds", _is_moment, is_required=False)
_MAYBE_DEVICE = _Field(
    "a device", lambda value: value is None or _is_text(value), is_required=False
)

#: The fields of each kind of request.
Requests = Mapping[str, Mapping[str, _Field]]

#: Requests of the dashboard's views.
DASHBOARD_REQUESTS: Requests = {
    "view": {
        "view": _TEXT,
        "visible": _FLAG,
        "variables": _FLAG,
        "device": _MAYBE_DEVICE,
        "snapshot": _MAYBE_FLAG,
        "since_s": _MAYBE_MOMENT,
        "list": _MAYBE_FLAG,
        "look": _MAYBE_FLAG,
    },
    "gone": {"view": _TEXT, "page_left": _FLAG},
    "snapshot": {"since_s": _MAYBE_MOMENT},
    "variables": {},
    "seen": {"id": _TEXT},
    "account": {},
    "parts": {"key": _COUNT, "node": _COUNT, "start": _COUNT},
    "find": {"key": _COUNT, "text": _TEXT},
    "sum": {"view": _TEXT, "id": _TEXT, "names": _NAMES},
    "release": {"id": _TEXT, "names": _NAMES, "keep": _FLAG},
}

#: Requests of the buttons on the cards of OOMs.
CARD_REQUESTS: Requests = {"hello": {}, "do": {"card": _TEXT, "way": _COUNT}}


def check_request(content: object, requests: Requests) -> Message:
    """Return a request with its known fields alone.

    Args:
        content: what came from the page.
        requests: the kinds of messages there are.

    Raises:
        BadInputError: it is no message of these kinds, or one of its fields is not what it should
            be. The text holds nothing of the message but a known kind and field.
    """
    kind = content.get("kind") if isinstance(content, dict) else None
    fields = requests.get(kind) if isinstance(kind, str) else None
    if not isinstance(content, dict) or fields is None:
        raise BadInputError("a message from this page was not understood: reload the page")
    checked: Message = {"kind": kind}
    for name, field in fields.items():
        if name not in content and not field.is_required:
            continue
        if not field.is_valid(content.get(name)):
            raise BadInputError(
                f"a message from this page was not understood ({kind}: {name} is not "
                f"{field.words}): reload the page"
            )
        checked[name] = content[name]
    return checked


# -- Records ---------------------------------------------------------------------------------------


def describe_device(info: DeviceInfo, budget: Budget | None, *, is_touched: bool) -> Message:
    """Describe a device, what may be taken of it, and whether this process uses it."""
    return {
        "device": info.device,
        "is_touched": is_touched,
        "name": info.name,
        "total_bytes": info.total_bytes,
        "limit_bytes": info.limit_bytes,
        "budget_bytes": None if budget is None else budget.budget_bytes,
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
        return "interrupted"
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
