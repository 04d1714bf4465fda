"""The ledger as a sequence, as rows, as a table and as files: their exact content."""

from __future__ import annotations

import dataclasses
import errno
import json
import os
import stat
import sys
from collections.abc import Callable
from pathlib import Path

import pandas as pd
import pyarrow as pa
import pytest
from pyarrow import parquet

from gpumemwidget.errors import FileError, GpuMemError
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


SUFFIXES = [".csv", ".json", ".parquet"]
READERS: dict[str, Callable[[Path], pd.DataFrame]] = {
    ".csv": pd.read_csv,
    ".json": pd.read_json,
    ".parquet": pd.read_parquet,
}

CSV = """\
execution_count,cell_id,first_line,started_at,duration_s,status,device,\
allocated_before_bytes,allocated_after_bytes,allocated_peak_bytes,\
reserved_before_bytes,reserved_after_bytes,reserved_peak_bytes,\
outside_before_bytes,outside_after_bytes,outside_peak_bytes,\
peak_is,num_alloc_retries,num_ooms,\
budget_bytes,is_over_budget,predicted_peak_bytes,is_only_own_magics
3,a1b2,"x = ""é, ü""\",2027-01-15T08:00:00.123456+00:00,0.25,ok,cuda:0,\
1,1099511627776,3,4,5,6,,,,exact,7,8,2,True,,False
3,a1b2,"x = ""é, ü""\",2027-01-15T08:00:00.123456+00:00,0.25,ok,host,\
,9,,10,11,12,,,,at least,,,,,,False
,,,1970-01-01T00:00:00.000000+00:00,0.0,interrupted,,,,,,,,,,,,,,,,,False
"""


@pytest.fixture
def ledger() -> Ledger:
    gpu, host = RECORD.devices
    over_budget = dataclasses.replace(gpu, budget_bytes=2)
    return make_ledger(dataclasses.replace(RECORD, devices=(over_budget, host)), BARE)


def list_names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


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


# -- Files -----------------------------------------------------------------------------------------


class TestContent:
    """What stands in a file."""

    def test_of_csv(self, ledger: Ledger, tmp_path: Path) -> None:
        """UTF-8, one line a row, unknown is empty."""
        written = ledger.export(tmp_path / "cells.csv")

        assert written == tmp_path / "cells.csv"
        assert written.read_bytes().decode() == CSV

    def test_of_json(self, ledger: Ledger, tmp_path: Path) -> None:
        """An array of objects; unknown is null."""
        ledger.export(tmp_path / "cells.json")

        text = (tmp_path / "cells.json").read_text("utf-8")
        rows = json.loads(text)
        assert "é" in text
        assert rows == [
            {**row, "started_at": row["started_at"].isoformat(timespec="microseconds")}
            for row in ledger.to_rows()
        ]

    def test_of_parquet(self, ledger: Ledger, tmp_path: Path) -> None:
        """Typed columns, a timestamp among them; unknown is null. The rows are the ledger's."""
        ledger.export(tmp_path / "cells.parquet")

        table = parquet.read_table(tmp_path / "cells.parquet")
        assert table.to_pylist() == ledger.to_rows()
        assert table.schema.field("started_at").type == pa.timestamp("us", tz="UTC")
        assert {str(field.type) for field in table.schema if field.name.endswith("_bytes")} == {
            "int64"
        }

    @pytest.mark.parametrize("suffix", SUFFIXES)
    @pytest.mark.parametrize("first_line", ["=1+1", "@torch.no_grad()", 'a "b", c', "a\tb", "😀"])
    def test_is_what_was_typed(self, tmp_path: Path, first_line: str, suffix: str) -> None:
        """Also what a spreadsheet would take for a formula: a decorator is not to be maimed."""
        record = CellRecord(1, "a", first_line, 0.0, 0.0, 0.0, "ok", RECORD.devices)

        written = make_ledger(record).export(tmp_path / f"cells{suffix}")

        assert READERS[suffix](written)["first_line"].tolist() == [first_line, first_line]


def test_a_file_that_is_there_is_replaced_only_by_force(ledger: Ledger, tmp_path: Path) -> None:
    """One line names it and both ways out; whoever may read the old one may read the new one."""
    path = tmp_path / "cells.csv"
    path.write_text("precious")
    path.chmod(0o640)

    with pytest.raises(FileError) as error:
        ledger.export(path)
    kept = path.read_text()
    ledger.export(path, force=True)

    assert str(error.value) == (
        f"{path} is there already: choose another name, or overwrite it with --force "
        "(force=True in Python)"
    )
    assert kept == "precious"
    assert path.read_text("utf-8") == CSV
    assert stat.S_IMODE(path.stat().st_mode) == 0o640
    assert list_names(tmp_path) == ["cells.csv"]


class TestWholeOrNot:
    """Nothing of a file that could not be written remains."""

    @pytest.mark.parametrize(
        "failure", [OSError(errno.ENOSPC, "No space left on device"), KeyboardInterrupt()]
    )
    def test_a_full_disk_leaves_what_was(
        self,
        ledger: Ledger,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
        failure: BaseException,
    ) -> None:
        """Neither half a file nor a draft; the same for a Ctrl-C, which goes through."""
        path = tmp_path / "cells.csv"
        path.write_text("old")

        def fail(draft: Path, content: bytes) -> None:
            with draft.open("xb") as file:
                file.write(content[:10])
            raise failure

        monkeypatch.setattr(Path, "write_bytes", fail)

        with pytest.raises((FileError, KeyboardInterrupt)):
            ledger.export(path, force=True)

        assert list_names(tmp_path) == ["cells.csv"]
        assert path.read_text() == "old"

    def test_permissions_are_the_users_own(self, ledger: Ledger, tmp_path: Path) -> None:
        """As for any new file, by the umask."""
        umask = os.umask(0o027)
        try:
            ledger.export(tmp_path / "cells.csv")
        finally:
            os.umask(umask)

        assert stat.S_IMODE((tmp_path / "cells.csv").stat().st_mode) == 0o640


class TestPaths:
    """Where a file goes, and where not."""

    def test_a_link_is_followed(self, ledger: Ledger, tmp_path: Path) -> None:
        """The file behind it is replaced, or made, and the link stays a link."""
        (tmp_path / "real.csv").write_text("old")
        (tmp_path / "link.csv").symlink_to("real.csv")
        (tmp_path / "dangling.csv").symlink_to("new.csv")

        with pytest.raises(FileError, match=r"real\.csv is there already"):
            ledger.export(tmp_path / "link.csv")
        written = ledger.export(tmp_path / "link.csv", force=True)
        new = ledger.export(tmp_path / "dangling.csv")

        assert (written, new) == (tmp_path / "real.csv", tmp_path / "new.csv")
        assert (tmp_path / "link.csv").is_symlink()
        assert written.read_text("utf-8") == new.read_text("utf-8") == CSV

    @pytest.mark.parametrize(
        ("name", "reason"),
        [
            ("cells.xlsx", "give a name that ends in .csv, .json or .parquet"),
            ("no/cells.csv", "no does not exist: create it first, or choose another"),
            ("folder.csv", "folder.csv is there and is no file: give a file's name"),
            ("pipe.csv", "pipe.csv is there and is no file: give a file's name"),
            ("file/cells.csv", "Not a directory; choose another place"),
            ("loop.csv", "choose another place|give another path"),
            ("a\0b.csv", "give another path"),
            (f"{'x' * 300}.csv", "File name too long; choose another place"),
        ],
    )
    def test_refuses_in_one_line(
        self, ledger: Ledger, tmp_path: Path, name: str, reason: str
    ) -> None:
        """Also with --force: a pipe's reader would wait for ever."""
        (tmp_path / "file").write_text("")
        (tmp_path / "folder.csv").mkdir()
        os.mkfifo(tmp_path / "pipe.csv")
        (tmp_path / "loop.csv").symlink_to("loop.csv")
        before = list_names(tmp_path)

        with pytest.raises(FileError, match=f"({reason})$") as error:
            ledger.export(tmp_path / name, force=True)

        assert "\n" not in str(error.value)
        assert list_names(tmp_path) == before

    @pytest.mark.parametrize("path", [3, None, b"cells.csv"])
    def test_refuses_what_is_no_path(self, ledger: Ledger, path: str) -> None:
        """By its type, in one line."""
        with pytest.raises(FileError, match=r"^a path can't be of type \w+: give text such as"):
            ledger.export(path)

    @pytest.mark.parametrize("package", ["pandas", "pyarrow"])
    def test_without_packages_says_how_to_get_them(
        self, ledger: Ledger, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, package: str
    ) -> None:
        """One line with the command, and the formats that need nothing."""
        monkeypatch.setitem(sys.modules, package, None)

        with pytest.raises(FileError) as error:
            ledger.export(tmp_path / "cells.parquet")

        assert str(error.value) == (
            "Parquet needs pandas and pyarrow, which are not both installed: "
            'pip install "gpumemwidget[parquet]", or export to .csv or .json'
        )
        assert list_names(tmp_path) == []
