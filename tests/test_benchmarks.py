"""The benchmarks run, so that they are there when a figure is asked for. No figure is judged."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.__main__ import GROUPS
from benchmarks.rows import Row, format_table


def test_table_shows_what_is_met_and_what_is_not() -> None:
    """A missed target stands out, and a figure without a target or a value passes no verdict."""
    rows = [
        Row("a start", "112 ms", value=0.112, limit=0.3, target="≤ 300 ms"),
        Row("an update", "0.89 ms", value=0.89e-3, limit=0.5e-3, target="≤ 0.5 ms"),
        Row("an empty cell", "96 µs"),
    ]

    assert format_table(rows) == "\n".join(
        [
            "| what | measured | target | met |",
            "|---|---|---|---|",
            "| a start | 112 ms | ≤ 300 ms | yes |",
            "| an update | 0.89 ms | ≤ 0.5 ms | **no** |",
            "| an empty cell | 96 µs |  |  |",
        ]
    )


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_every_target_gets_a_figure(tmp_path: Path) -> None:
    """Each group has targets, each comes back with a number, and the machine is named.

    Without the browser's group: what it reads in the page, the browser tests read too.
    """
    groups = [group for group in GROUPS if group != "page"]
    file = tmp_path / "figures.json"

    subprocess.run(
        [sys.executable, "-m", "benchmarks", *groups, "--quick", "--json", str(file)], check=True
    )

    figures = json.loads(file.read_text(encoding="utf-8"))
    judged = [row for row in figures["rows"] if row["target"]]
    assert len(judged) >= len(groups)
    assert all(isinstance(row["value"], float | int) for row in judged)
    assert "cores" in figures["machine"]["processor"]
