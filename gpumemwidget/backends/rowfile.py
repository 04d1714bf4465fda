"""Records as rows of a recording's file, and rows that are checked before they become records."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

__all__ = [
    "BadRowError",
    "Columns",
    "from_rows",
    "is_count",
    "is_flag",
    "is_percent",
    "is_share",
    "is_text",
    "to_rows",
]

#: A file's columns: name, what a value must be, and whether it may be null.
Columns = dict[str, tuple[Callable[[Any], bool], bool]]


class BadRowError(Exception):
    """What is wrong with a recording, as part of a sentence."""


def is_text(value: Any) -> bool:
    """Whether it is a text, and not empty."""
    return isinstance(value, str) and value != ""


def is_count(value: Any) -> bool:
    """Whether it is a whole number, and not negative."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def is_percent(value: Any) -> bool:
    """Whether it is a whole number up to 100."""
    return is_count(value) and bool(value <= 100)


def is_flag(value: Any) -> bool:
    """Whether it is true or false."""
    return isinstance(value, bool)


def is_share(value: Any) -> bool:
    """Whether it is a number above 0, up to 1."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value <= 1


def to_rows(records: Iterable[Any], columns: Columns) -> list[list[Any]]:
    """The records' values in the order of the columns."""
    return [[getattr(record, name) for name in columns] for record in records]


def from_rows(
    rows: Any, columns: Columns, where: str, *, key: str | None = "device"
) -> list[dict[str, Any]]:
    """The values of each row by their columns.

    Args:
        rows: what the file has there.
        columns: what it must be.
        where: what to call it in errors.
        key: a column whose values must differ.

    Raises:
        BadRowError: it is anything else.
    """
    if not isinstance(rows, list):
        raise BadRowError(f"{where} is no list")
    found = []
    for row in rows:
        if not isinstance(row, list) or len(row) != len(columns):
            raise BadRowError(f"{where} has a row that is not of {len(columns)} values")
        for value, (name, (is_good, may_be_null)) in zip(row, columns.items(), strict=True):
            if not (may_be_null if value is None else is_good(value)):
                raise BadRowError(f"{where} has {value!r} for {name}")
        found.append(dict(zip(columns, row, strict=True)))
    if key is not None and len({row[key] for row in found}) != len(found):
        raise BadRowError(f"{where} has a {key} twice")
    return found
