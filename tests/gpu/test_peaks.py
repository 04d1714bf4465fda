"""Peaks are exact, and invisible to the user: proved on random programs, in three processes."""

from __future__ import annotations

from typing import Any

import pytest

from tests.gpu.processes import run_program

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

SEED, COUNT = 20_261_121, 150


def run_programs(mode: str) -> Any:
    return run_program(
        f"""
import json
from tests.gpu.programs import run
print(json.dumps(run({mode!r}, {SEED}, {COUNT})))
"""
    )


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
