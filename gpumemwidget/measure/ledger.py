"""The cells that were run, in order: what a notebook did to its memory."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, overload

from gpumemwidget.measure.export import build_dataframe, list_rows, write_rows
from gpumemwidget.measure.forks import survive_fork
from gpumemwidget.records import CellRecord

if TYPE_CHECKING:
    import os

    import pandas as pd

__all__ = ["Ledger"]


class Ledger:
    """The recorded cells, oldest first.

    Args:
        max_records: how many to keep; beyond that the oldest go, and ``dropped`` counts them.
    """

    def __init__(self, max_records: int = 10_000) -> None:
        self._records: deque[CellRecord] = deque(maxlen=max_records)
        self._n_appended = 0
        self._lock = threading.RLock()
        survive_fork(self)

    def append(self, record: CellRecord) -> None:
        """Add the newest record."""
        with self._lock:
            self._records.append(record)
            self._n_appended += 1

    @property
    def records(self) -> tuple[CellRecord, ...]:
        """The records that are kept, oldest first."""
        with self._lock:
            return tuple(self._records)

    @property
    def dropped(self) -> int:
        """How many of the oldest records are no longer kept."""
        with self._lock:
            return self._n_appended - len(self._records)

    def __len__(self) -> int:
        return len(self._records)

    def __iter__(self) -> Iterator[CellRecord]:
        return iter(self.records)

    @overload
    def __getitem__(self, index: int) -> CellRecord: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[CellRecord, ...]: ...
    def __getitem__(self, index: int | slice) -> CellRecord | tuple[CellRecord, ...]:
        return self.records[index]

    def __repr__(self) -> str:
        dropped = f", {self.dropped} older ones dropped" if self.dropped else ""
        return f"<Ledger of {len(self)} cells{dropped}>"

    def to_rows(self) -> list[dict[str, Any]]:
        """A row for each cell and device.

        Returns:
            Dictionaries with the columns of ``gpumemwidget.measure.export.COLUMNS``. ``started_at``
            is a ``datetime`` in UTC; unknown is ``None``.
        """
        return list_rows(self.records)

    def to_dataframe(self) -> pd.DataFrame:
        """The same rows as a pandas ``DataFrame``; unknown is ``<NA>``.

        Raises:
            GpuMemError: pandas is not installed.
        """
        return build_dataframe(self.to_rows())

    def export(self, path: str | os.PathLike[str], *, force: bool = False) -> Path:
        """Write the same rows to a file: ``.csv``, ``.json`` or ``.parquet``, by its suffix.

        The file is there as a whole or not at all. Unknown is empty in CSV and null in the others;
        ``started_at`` is a timestamp in Parquet, and ISO 8601 with microseconds in the others. Text
        stands there as it was typed, so tell a spreadsheet that ``first_line`` is no formula.

        Args:
            path: the file; ``~`` is the home folder.
            force: take the place of a file that is there.

        Returns:
            The path of the file.

        Raises:
            FileError: it can't be written, or is there already.
        """
        return write_rows(self.to_rows(), path, force=force)

    def reset_after_fork(self) -> None:
        """Renew the lock in a forked child."""
        self._lock = threading.RLock()
