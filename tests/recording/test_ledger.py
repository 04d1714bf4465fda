"""The ledger as a sequence, as rows and as a table."""

from __future__ import annotations

import dataclasses
import sys

import pandas as pd
import pytest

from gpumemwidget.errors import GpuMemError
from gpumemwidget.model.cells import CellDevice, CellRecord, Span
from gpumemwidget.recording.ledger import COLUMNS, Ledger

RECORD = CellRecord(
    execution_count=3,
    cell_id="a1b2",
    first_line='x = "é, ü"',
    started_at=1_800_000_000.123456,
    start_s=10.0,
    duration_s=0.25,
    status="ok",
    devices=(
        CellDevice("cuda:0", Span(1, 2**40, 3), Span(4, 5, 6), "exact", 7, 8),
        CellDevice("host", Span(None, 9, None), Span(10, 11, 12), "at least", None, None),
    ),
)
#: A cell in a terminal of which nothing could be read.
BARE = CellRecord(None, None, "", 0.0, 11.0, 0.0, "interrupted", ())


def make_ledger(*records: CellRecord) -> Ledger:
    ledger = Ledger()
    for record in records:
        ledger.append(record)
    return ledger


class TestSequence:
    """The records, oldest first."""

    def test_reads_like_a_sequence(self) -> None:
        """Length, order, single records, slices."""
        records = [dataclasses.replace(RECORD, execution_count=number) for number in range(5)]

        ledger = make_ledger(*records)

        assert len(ledger) == 5
        assert list(ledger) == records
        assert ledger.records == tuple(records)
        assert (ledger[0], ledger[-1]) == (records[0], records[4])
        with pytest.raises(IndexError):
            ledger[5]
        assert repr(ledger) == "<Ledger of 5 cells>"

    def test_drops_the_oldest_and_counts_them(self) -> None:
        """A notebook that runs for months stays small."""
        ledger = Ledger(max_records=3)

        for number in range(10):
            ledger.append(dataclasses.replace(RECORD, execution_count=number))

        assert [record.execution_count for record in ledger] == [7, 8, 9]
        assert (len(ledger), ledger.dropped) == (3, 7)
        assert repr(ledger) == "<Ledger of 3 cells, 7 older ones dropped>"


class TestRows:
    """A row for each cell and device."""

    def test_mark_what_went_beyond_its_budget(self) -> None:
        """A cell within it is told from one of which no peak is known."""
        gpu, host = RECORD.devices
        devices = (
            dataclasses.replace(gpu, budget_bytes=2),
            dataclasses.replace(gpu, device="cuda:1", budget_bytes=3),
            dataclasses.replace(gpu, device="cuda:2", allocated=Span(1, 2, None), budget_bytes=1),
            host,
        )

        rows = make_ledger(dataclasses.replace(RECORD, devices=devices)).to_rows()

        names = ("budget_bytes", "is_over_budget")
        assert [tuple(row[name] for name in names) for row in rows] == [
            (2, True),
            (3, False),
            (1, None),
            (None, None),
        ]


class TestDataFrame:
    """The rows in pandas."""

    @pytest.mark.parametrize("records", [(), (RECORD,), (BARE,), (BARE, RECORD)])
    def test_types_do_not_depend_on_what_is_known(self, records: tuple[CellRecord, ...]) -> None:
        """Integers stay integers where some are unknown, and in an empty table."""
        table = make_ledger(*records).to_dataframe()

        assert list(table.columns) == list(COLUMNS)
        types = {name: str(dtype) for name, dtype in table.dtypes.items()}
        assert {types[name] for name in COLUMNS if name.endswith("_bytes")} == {"Int64"}
        assert (types["duration_s"], types["status"]) == ("float64", "string")
        assert (types["started_at"], types["is_over_budget"]) == ("datetime64[us, UTC]", "boolean")

    def test_holds_the_rows(self) -> None:
        """Exact values; unknown is NA."""
        table = make_ledger(RECORD, BARE).to_dataframe()

        assert len(table) == 3
        assert table["allocated_after_bytes"].tolist() == [2**40, 9, pd.NA]
        assert table["started_at"][0] == pd.Timestamp("2027-01-15T08:00:00.123456Z")
        assert table["device"].isna().tolist() == [False, False, True]

    def test_without_pandas_says_how_to_get_it(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """One line with the command, and the way without."""
        monkeypatch.setitem(sys.modules, "pandas", None)

        with pytest.raises(GpuMemError) as error:
            make_ledger(RECORD).to_dataframe()

        assert str(error.value) == (
            "pandas is not installed, so there is no DataFrame: "
            'pip install "gpumemwidget[parquet]", or take ledger.to_rows()'
        )
