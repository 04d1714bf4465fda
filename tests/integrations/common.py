"""What the tests of the trainers' callbacks share."""

from __future__ import annotations

from pathlib import Path

from gpumemwidget.model.processes import ProcessState
from tests.remote.programs import load_one

MIB, GIB = 1 << 20, 1 << 30
PEAK = "memory/allocated_peak_bytes"
HOST_PEAK = "memory/host_resident_peak_bytes"


def do_nothing(_: int) -> None:
    """The work of a batch that has none, which can be pickled."""


def load(folder: Path) -> ProcessState:
    """Return the one process that is recorded in a folder."""
    (path,) = folder.glob("*.jsonl")
    return load_one(path)


def list_ends(state: ProcessState) -> dict[str, str]:
    """Return how the last span of each name ended."""
    return {span.name: span.status for span in state.spans}


def count_spans(state: ProcessState) -> dict[str, int]:
    """Return the number of spans of each name."""
    counts: dict[str, int] = {}
    for span in state.spans:
        counts[span.name] = counts.get(span.name, 0) + span.n_spans
    return counts
