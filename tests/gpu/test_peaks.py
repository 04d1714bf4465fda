"""Peaks are exact, and invisible to the user: proved on random programs, in three processes."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

SEED, COUNT = 20_261_121, 150


def run_programs(mode: str) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-m", "tests.gpu.programs", mode, str(SEED), str(COUNT)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_user_is_told_the_same_and_our_peaks_are_the_allocators() -> None:
    """What the programs read is equal with and without us, and each cell's peak is the truth."""
    plain = run_programs("plain")
    truth = run_programs("truth")

    loaded = run_programs("loaded")

    assert len(plain["told"]) > COUNT
    for number, (with_us, without) in enumerate(zip(loaded["told"], plain["told"], strict=True)):
        assert with_us.split("\\n") == without.split("\\n"), f"answer {number}"
    assert len(loaded["peaks"]) > 2 * COUNT
    assert loaded["peaks"] == truth["peaks"]
