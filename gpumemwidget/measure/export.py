"""The ledger as a table and as a file.

A row for each cell and device. A file appears whole or not at all, and takes no other's place
unless that was asked for.
"""

from __future__ import annotations

import csv
import datetime
import io
import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from gpumemwidget.errors import FileError, GpuMemError
from gpumemwidget.measure.files import find_target, refuse_target, write_whole
from gpumemwidget.records import CellDevice, CellRecord

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["COLUMNS", "build_dataframe", "list_rows", "write_rows"]

Row = dict[str, Any]

#: The columns in their order, and what kind of value each has.
COLUMNS: Mapping[str, Literal["integer", "number", "text", "time", "flag"]] = {
    "execution_count": "integer",
    "cell_id": "text",
    "first_line": "text",
    "started_at": "time",
    "duration_s": "number",
    "status": "text",
    "device": "text",
    "allocated_before_bytes": "integer",
    "allocated_after_bytes": "integer",
    "allocated_peak_bytes": "integer",
    "reserved_before_bytes": "integer",
    "reserved_after_bytes": "integer",
    "reserved_peak_bytes": "integer",
    "peak_is": "text",
    "num_alloc_retries": "integer",
    "num_ooms": "integer",
    "budget_bytes": "integer",
    "is_over_budget": "flag",
    "stopped_at_bytes": "integer",
}


def list_rows(records: Iterable[CellRecord]) -> list[Row]:
    """A row for each cell and device, in order.

    A cell of which no device is known has one row, with ``device`` unknown.

    Returns:
        Dictionaries with the columns' names. ``started_at`` is a ``datetime`` in UTC, unknown is
        ``None``.
    """
    return [
        _build_row(record, device) for record in records for device in (record.devices or (None,))
    ]


def build_dataframe(rows: Sequence[Row]) -> pd.DataFrame:
    """The rows as a pandas table, with types in which integers can be unknown.

    Raises:
        GpuMemError: pandas is not installed.
    """
    try:
        import pandas as pd  # noqa: PLC0415 - optional, and half a second to import
    except ImportError:
        raise GpuMemError(
            "pandas is not installed, so there is no DataFrame: "
            'pip install "gpumemwidget[parquet]", or take ledger.to_rows()'
        ) from None
    types = {
        "integer": "Int64",
        "number": "float64",
        "text": "string",
        "time": "datetime64[us, UTC]",
        "flag": "boolean",
    }
    return pd.DataFrame(
        {
            name: pd.Series([row[name] for row in rows], dtype=types[kind])
            for name, kind in COLUMNS.items()
        }
    )


def write_rows(rows: Sequence[Row], path: str | os.PathLike[str], *, force: bool = False) -> Path:
    """Write the rows to a file whose suffix says how: ``.csv``, ``.json`` or ``.parquet``.

    Text stands there as it was typed, also where a spreadsheet would take ``=`` or ``@`` for a
    formula: the file is for programs, and theirs should be what the user's was.

    Args:
        rows: what ``list_rows`` gives.
        path: the file; ``~`` is the home folder, and a link is followed.
        force: take the place of a file that is there.

    Returns:
        The path of the file that was written.

    Raises:
        FileError: the suffix is not one of these, the file is there already, the folder is not, or
            the system refuses; nothing was written.
    """
    target = find_target(path)
    encode = _ENCODERS.get(target.suffix.lower())
    if encode is None:
        known = ", ".join(_ENCODERS)
        raise FileError(f"{target.name!r} has no suffix that we can write: take one of {known}")
    refuse_target(target, force=force)
    # Surrogates that belong to no pair can't be written as UTF-8.
    content = encode([_clean(row) for row in rows])
    write_whole(target, content, force=force)
    return target


def _build_row(record: CellRecord, device: CellDevice | None) -> Row:
    row: Row = dict.fromkeys(COLUMNS)
    row.update(
        execution_count=record.execution_count,
        cell_id=record.cell_id,
        first_line=record.first_line,
        started_at=datetime.datetime.fromtimestamp(record.started_at, datetime.timezone.utc),
        duration_s=record.duration_s,
        status=record.status,
    )
    if device is not None:
        row.update(
            device=device.device,
            allocated_before_bytes=device.allocated.before_bytes,
            allocated_after_bytes=device.allocated.after_bytes,
            allocated_peak_bytes=device.allocated.peak_bytes,
            reserved_before_bytes=device.reserved.before_bytes,
            reserved_after_bytes=device.reserved.after_bytes,
            reserved_peak_bytes=device.reserved.peak_bytes,
            peak_is=device.peak_is,
            num_alloc_retries=device.num_alloc_retries,
            num_ooms=device.num_ooms,
            budget_bytes=device.budget_bytes,
            is_over_budget=_read_mark(device),
            stopped_at_bytes=device.stopped_at_bytes,
        )
    return row


def _read_mark(device: CellDevice) -> bool | None:
    """Whether the cell went beyond its budget; unknown where it had none, or no peak is known."""
    if device.budget_bytes is None or device.budgeted.peak_bytes is None:
        return None
    return device.is_over_budget


# -- The three formats -----------------------------------------------------------------------------


def _encode_csv(rows: Sequence[Row]) -> bytes:
    text = io.StringIO()
    writer = csv.DictWriter(text, list(COLUMNS), lineterminator="\n")
    writer.writeheader()
    writer.writerows(map(_to_plain, rows))
    return text.getvalue().encode()


def _encode_json(rows: Sequence[Row]) -> bytes:
    lines = [json.dumps(_to_plain(row), ensure_ascii=False) for row in rows]
    return ("[\n" + ",\n".join(lines) + "\n]\n").encode() if lines else b"[]\n"


def _encode_parquet(rows: Sequence[Row]) -> bytes:
    try:
        import pyarrow as pa  # noqa: PLC0415 - optional, and slow to import
        from pyarrow import parquet  # noqa: PLC0415
    except ImportError:
        raise FileError(
            'pyarrow is not installed, and Parquet needs it: pip install "gpumemwidget[parquet]", '
            "or export to .csv or .json"
        ) from None
    types = {
        "integer": pa.int64(),
        "number": pa.float64(),
        "text": pa.string(),
        "time": pa.timestamp("us", tz="UTC"),
        "flag": pa.bool_(),
    }
    schema = pa.schema([(name, types[kind]) for name, kind in COLUMNS.items()])
    buffer = io.BytesIO()
    parquet.write_table(pa.Table.from_pylist(list(rows), schema=schema), buffer)
    return buffer.getvalue()


_ENCODERS: Mapping[str, Callable[[Sequence[Row]], bytes]] = {
    ".csv": _encode_csv,
    ".json": _encode_json,
    ".parquet": _encode_parquet,
}


def _to_plain(row: Row) -> Row:
    return {**row, "started_at": row["started_at"].isoformat(timespec="microseconds")}


def _clean(row: Row) -> Row:
    return {
        name: value.encode(errors="replace").decode() if isinstance(value, str) else value
        for name, value in row.items()
    }
