"""Whole devices in a recording's file: processes, children, pinned memory, limits.

Only what changed since the event before is written, under its name.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, get_args

from gpumemwidget.backends.base import Relation
from gpumemwidget.backends.rowfile import (
    BadRowError,
    Columns,
    from_rows,
    is_count,
    is_flag,
    is_share,
    is_text,
    to_rows,
)
from gpumemwidget.backends.statechanges import Change
from gpumemwidget.devices import ChildProcess, Limit, PinnedUse, ProcessUse

__all__ = ["STATE_COLUMNS", "format_change", "parse_change"]


def _is_relation(value: Any) -> bool:
    return isinstance(value, str) and value in get_args(Relation)


_PROCESS_COLUMNS: Columns = {
    "pid": (is_count, False),
    "name": (is_text, True),
    "relation": (_is_relation, False),
    "n_bytes": (is_count, True),
}
_CHILD_COLUMNS: Columns = {
    "pid": (is_count, False),
    "parent_pid": (is_count, False),
    "name": (is_text, False),
    "resident_bytes": (is_count, True),
}
_PINNED_COLUMNS: Columns = {
    "allocated_bytes": (is_count, True),
    "reserved_bytes": (is_count, False),
    "allocated_peak_bytes": (is_count, True),
    "reserved_peak_bytes": (is_count, True),
}
_LIMIT_COLUMNS: Columns = {
    "device": (is_text, False),
    "limit_bytes": (is_count, True),
    "total_bytes": (is_count, True),
    "is_waiting": (is_flag, False),
    "share": (is_share, True),
}
#: For the file's head.
STATE_COLUMNS = {
    "changes": ["processes", "failures", "children", "pinned", "limits"],
    "processes": ["device", "rows: who is on it, or null"],
    "rows": list(_PROCESS_COLUMNS),
    "failures": ["device", "sentences"],
    "children": list(_CHILD_COLUMNS),
    "pinned": list(_PINNED_COLUMNS),
    "limits": list(_LIMIT_COLUMNS),
}


def format_change(change: Change) -> dict[str, Any]:
    """What has changed, by its name; empty where nothing has."""
    data: dict[str, Any] = {}
    if change.processes:
        data["processes"] = [
            [device, None if uses is None else to_rows(uses, _PROCESS_COLUMNS)]
            for device, uses in change.processes
        ]
    if change.failures:
        data["failures"] = [[device, list(sentences)] for device, sentences in change.failures]
    if change.children is not None:
        data["children"] = to_rows(change.children, _CHILD_COLUMNS)
    if change.pinned is not None:
        data["pinned"] = to_rows([change.pinned], _PINNED_COLUMNS)[0]
    if change.limits is not None:
        data["limits"] = to_rows(change.limits, _LIMIT_COLUMNS)
    return data


def parse_change(data: Any, where: str) -> Change:
    """What has changed, out of a file.

    Raises:
        BadRowError: it is anything else.
    """
    if not isinstance(data, dict):
        raise BadRowError(f"{where} has changes without names")
    unknown = data.keys() - set(STATE_COLUMNS["changes"])
    if unknown:
        raise BadRowError(f"{where} changes {min(unknown)!r}, which is unknown")
    children = limits = None
    if "children" in data:
        rows = from_rows(data["children"], _CHILD_COLUMNS, f"{where}'s children", key="pid")
        children = tuple(ChildProcess(**row) for row in rows)
    if "limits" in data:
        rows = from_rows(data["limits"], _LIMIT_COLUMNS, f"{where}'s limits")
        limits = tuple(Limit(**row, reserved_bytes=None) for row in rows)
    pinned = None
    if "pinned" in data:
        (row,) = from_rows([data["pinned"]], _PINNED_COLUMNS, f"{where}'s pinned memory", key=None)
        pinned = PinnedUse(**row)
    return Change(
        processes=tuple(
            (device, None if rows is None else _parse_processes(rows, f"{where}'s {device}"))
            for device, rows in _pairs(data, "processes", where)
        ),
        failures=tuple(
            (device, _parse_sentences(rows, f"{where}'s failures"))
            for device, rows in _pairs(data, "failures", where)
        ),
        children=children,
        pinned=pinned,
        limits=limits,
    )


def _parse_processes(rows: Any, where: str) -> tuple[ProcessUse, ...]:
    return tuple(ProcessUse(**row) for row in from_rows(rows, _PROCESS_COLUMNS, where, key="pid"))


def _parse_sentences(rows: Any, where: str) -> tuple[str, ...]:
    if not isinstance(rows, list) or not all(map(is_text, rows)):
        raise BadRowError(f"{where} are no sentences")
    return tuple(rows)


def _pairs(data: dict[str, Any], name: str, where: str) -> Iterable[tuple[str, Any]]:
    """Devices and what belongs to each."""
    pairs = data.get(name, [])
    if not isinstance(pairs, list):
        raise BadRowError(f"{where}'s {name} is no list")
    for pair in pairs:
        if not isinstance(pair, list) or len(pair) != 2 or not is_text(pair[0]):
            raise BadRowError(f"{where}'s {name} has no device")
    if len({pair[0] for pair in pairs}) != len(pairs):
        raise BadRowError(f"{where}'s {name} has a device twice")
    return [(device, rows) for device, rows in pairs]
