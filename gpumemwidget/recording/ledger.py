"""Keep the recorded cells, and export them as a table or as a file with a row a cell and device."""

from __future__ import annotations

import csv
import datetime
import io
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpumemwidget.errors import FileError, GpuMemError
from gpumemwidget.model.cells import CellDevice, CellRecord
from gpumemwidget.recording.files import find_target, refuse_target, write_whole

if TYPE_CHECKING:
    import pandas as pd

Row = dict[str, Any]

#: The columns in their order, with their types in pandas.
COLUMNS: Mapping[str, str] = {
    "execution_count": "Int64",
    "cell_id": "string",
    "first_line": "string",
    "started_at": "datetime64[us, UTC]",
    "duration_s": "float64",
    "status": "string",
    "device": "string",
    "allocated_before_bytes": "Int64",
    "allocated_after_bytes": "Int64",
    "allocated_peak_bytes": "Int64",
    "reserved_before_bytes": "Int64",
    "reserved_after_bytes": "Int64",
    "reserved_peak_bytes": "Int64",
    "outside_before_bytes": "Int64",
    "outside_after_bytes": "Int64",
    "outside_peak_bytes": "Int64",
    "peak_is": "string",
    "num_alloc_retries": "Int64",
    "num_ooms": "Int64",
    "budget_bytes": "Int64",
    "is_over_budget": "boolean",
    "predicted_peak_bytes": "Int64",
    "is_only_own_magics": "boolean",
}


class Ledger:
    """The recorded cells, oldest first.

    Args:
        max_records: how many to keep; beyond that the oldest go.
    """

    def __init__(self, max_records: int = 10_000) -> None:
        self._max_records = max_records
        #: A list, as Python copies one in a single step while another thread appends.
        self._records: list[CellRecord] = []
        #: Number of oldest records that are no longer kept.
        self.dropped = 0

    def append(self, record: CellRecord) -> None:
        """Add the newest record."""
        self._records.append(record)
        if len(self._records) > self._max_records:
            del self._records[0]
            self.dropped += 1

    @property
    def records(self) -> tuple[CellRecord, ...]:
        """The records that are kept, oldest first."""
        return tuple(self._records)

    def __len__(self) -> int:
        return len(self._records)

    def __iter__(self) -> Iterator[CellRecord]:
        return iter(self.records)

    def __getitem__(self, index: int) -> CellRecord:
        return self._records[index]

    def __repr__(self) -> str:
        dropped = f", {self.dropped} older ones dropped" if self.dropped else ""
        return f"<Ledger of {len(self)} cells{dropped}>"

    def to_rows(self) -> list[dict[str, Any]]:
        """Return a row for each cell and device, in order.

        A cell of which no device is known has one row, with ``device`` unknown.

        Returns:
            Dictionaries with the columns of ``gpumemwidget.recording.ledger.COLUMNS``.
            ``started_at`` is a ``datetime`` in UTC; unknown is ``None``.
        """
        return [
            _build_row(record, device)
            for record in self.records
            for device in (record.devices or (None,))
        ]

    def to_dataframe(self) -> pd.DataFrame:
        """Return the same rows as a pandas ``DataFrame``; unknown is ``<NA>``.

        Raises:
            GpuMemError: pandas is not installed.
        """
        return _build_table(self.to_rows())

    def export(self, path: str | os.PathLike[str], *, force: bool = False) -> Path:
        """Write the same rows to a file: ``.csv``, ``.json`` or ``.parquet``, by its suffix.

        The file is there as a whole or not at all. Unknown is empty in CSV and null in the others;
        ``started_at`` is a timestamp in Parquet, and ISO 8601 with microseconds in the others. Text
        stands there as it was typed, so have a spreadsheet take ``first_line`` as text.

        Args:
            path: the file; ``~`` is the home folder, and a link is followed.
            force: replace a file that is there.

        Returns:
            The path of the file.

        Raises:
            FileError: the suffix is not one of these, the file is there already, the folder is not,
                or the system refuses; nothing was written.
        """
        target = find_target(path)
        encoders = {".csv": _encode_csv, ".json": _encode_json, ".parquet": _encode_parquet}
        encode = encoders.get(target.suffix.lower())
        if encode is None:
            raise FileError(
                f"can't write {target.name!r}: give a name that ends in .csv, .json or .parquet"
            )
        refuse_target(target, force=force)
        write_whole(target, encode(self.to_rows()))
        return target


def _build_row(record: CellRecord, device: CellDevice | None) -> Row:
    row: Row = dict.fromkeys(COLUMNS)
    row.update(
        execution_count=record.execution_count,
        cell_id=record.cell_id,
        first_line=record.first_line,
        started_at=datetime.datetime.fromtimestamp(record.started_at, datetime.UTC),
        duration_s=record.duration_s,
        status=record.status,
        is_only_own_magics=record.is_only_own_magics,
    )
    if device is not None:
        has_verdict = device.budget_bytes is not None and device.peak_counter.peak_bytes is not None
        row.update(
            device=device.device,
            allocated_before_bytes=device.allocated.before_bytes,
            allocated_after_bytes=device.allocated.after_bytes,
            allocated_peak_bytes=device.allocated.peak_bytes,
            reserved_before_bytes=device.reserved.before_bytes,
            reserved_after_bytes=device.reserved.after_bytes,
            reserved_peak_bytes=device.reserved.peak_bytes,
            outside_before_bytes=device.outside and device.outside.before_bytes,
            outside_after_bytes=device.outside and device.outside.after_bytes,
            outside_peak_bytes=device.outside and device.outside.peak_bytes,
            peak_is=device.peak_is,
            num_alloc_retries=device.num_alloc_retries,
            num_ooms=device.num_ooms,
            budget_bytes=device.budget_bytes,
            is_over_budget=device.is_over_budget if has_verdict else None,
            predicted_peak_bytes=device.predicted_peak_bytes,
        )
    return row


def _build_table(rows: Sequence[Row]) -> pd.DataFrame:
    try:
        import pandas as pd  # noqa: PLC0415 - optional, and half a second to import
    except ImportError:
        raise GpuMemError(
            "pandas is not installed, so there is no DataFrame: "
            'pip install "gpumemwidget[parquet]", or take ledger.to_rows()'
        ) from None
    return pd.DataFrame(
        {
            name: pd.Series([row[name] for row in rows], dtype=dtype)
            for name, dtype in COLUMNS.items()
        }
    )


# -- File formats ----------------------------------------------------------------------------------


def _encode_csv(rows: Sequence[Row]) -> bytes:
    text = io.StringIO()
    writer = csv.DictWriter(text, list(COLUMNS), lineterminator="\n")
    writer.writeheader()
    writer.writerows(map(_format_time, rows))
    return text.getvalue().encode("utf-8", "replace")


def _encode_json(rows: Sequence[Row]) -> bytes:
    text = json.dumps([_format_time(row) for row in rows], ensure_ascii=False, indent=1)
    return text.encode("utf-8", "replace")


def _encode_parquet(rows: Sequence[Row]) -> bytes:
    buffer = io.BytesIO()
    try:
        _build_table(rows).to_parquet(buffer, engine="pyarrow", index=False)
    except (ImportError, GpuMemError):
        raise FileError(
            "Parquet needs pandas and pyarrow, which are not both installed: "
            'pip install "gpumemwidget[parquet]", or export to .csv or .json'
        ) from None
    return buffer.getvalue()


def _format_time(row: Row) -> Row:
    return {**row, "started_at": row["started_at"].isoformat(timespec="microseconds")}
