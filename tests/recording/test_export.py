"""The ledger's files: their exact content, and when none is written."""

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

from gpumemwidget.errors import FileError
from gpumemwidget.model.cells import CellRecord
from gpumemwidget.recording.files import write_whole
from gpumemwidget.recording.ledger import Ledger
from tests.recording.test_ledger import BARE, RECORD, make_ledger

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


class TestOverwriting:
    """A file that is there stays, unless told otherwise."""

    def test_refuses_an_existing_file(self, ledger: Ledger, tmp_path: Path) -> None:
        """One line that names the file and both ways out."""
        path = tmp_path / "cells.csv"
        path.write_text("precious")

        with pytest.raises(FileError) as error:
            ledger.export(path)

        assert str(error.value) == (
            f"{path} is there already: choose another name, or overwrite it with --force "
            "(force=True in Python)"
        )
        assert path.read_text() == "precious"
        assert list_names(tmp_path) == [path.name]

    def test_force_takes_its_place(self, ledger: Ledger, tmp_path: Path) -> None:
        """Whoever may read the old one may read the new one."""
        path = tmp_path / "cells.csv"
        path.write_text("old")
        path.chmod(0o640)

        ledger.export(path, force=True)

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

    def test_the_reason_is_shown_where_nothing_can_be_removed_either(self, tmp_path: Path) -> None:
        """As on a read-only file system: whoever takes the half of a file away is refused, too."""
        (tmp_path / "file").write_text("")
        target = tmp_path / "file" / "cells.csv"

        with pytest.raises(FileError) as error:
            write_whole(target, b"1")

        assert str(error.value) == f"can't write {target}: Not a directory; choose another place"

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
