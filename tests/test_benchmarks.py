"""The benchmarks run, so that they are there when a figure is asked for. No figure is judged."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.__main__ import GROUPS
from benchmarks.fit import KINDS
from benchmarks.fit.one_case import _write_history
from benchmarks.rows import Row, format_table
from gpumemwidget.prediction.allocator.allocator import CachingAllocator
from tests.prediction.recorded import read_figures, replay_steps


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


def test_rows_with_columns_have_a_table_of_their_own() -> None:
    rows = [
        Row("an empty cell", "96 µs"),
        Row("gpt2", "", columns={"real": "9.0 GiB", "predicted": "9.1 GiB"}),
        Row("t5", "", columns={"real": "2.0 GiB", "predicted": ""}, facts={"error": "none"}),
    ]

    assert format_table(rows).split("\n\n")[1] == "\n".join(
        [
            "| what | real | predicted |",
            "|---|---|---|",
            "| gpt2 | 9.0 GiB | 9.1 GiB |",
            "| t5 | 2.0 GiB |  |",
        ]
    )


def test_judged_steps_are_not_those_of_the_calibration() -> None:
    """There are 15 of each, and no builder serves both."""
    calibration, judged = KINDS["calibration"], KINDS["judged"]

    assert len(calibration) == len(judged) == 15
    assert not {*calibration} & {*judged}
    assert not {*calibration.values()} & {*judged.values()}


def test_a_history_is_written_as_it_is_replayed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the allocator noted of a step, replayed, has the peaks that its counters had."""
    allocator = CachingAllocator(1 << 30)
    history: list[dict[str, Any]] = []
    allocator.on_event = lambda action, address, n_bytes, *_: history.append(
        {"action": action, "addr": address, "size": n_bytes}
    )
    kept = allocator.allocate(3 << 20)
    n_built = len(history)
    allocator.reset_peaks()
    for n_bytes in (5 << 20, 700, 30 << 20):
        allocator.free(allocator.allocate(n_bytes))
    allocator.free(kept)
    step = {"end": len(history), **read_figures(allocator)}

    _write_history(tmp_path / "case.json.gz", {"name": "case"}, history, n_built, [step])

    monkeypatch.setattr("tests.prediction.recorded.FOLDER", tmp_path)
    replayed, recorded = replay_steps("case")
    assert replayed == recorded == [{**step, "end": 8}]
    assert step["allocated_peak_bytes"] == 33 << 20


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
