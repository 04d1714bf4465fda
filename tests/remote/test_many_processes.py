"""A collector of very many processes keeps within its bounds, and loses no peak."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpumemwidget.remote.gathering import collector as collecting
from gpumemwidget.remote.gathering.collector import Collector
from gpumemwidget.remote.gathering.recordings import FileSource
from tests.ranks import GIB, Rank


def test_processes_share_the_room_for_samples_and_spans(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those that were first give of theirs to those that come; peaks and counts stay exact."""
    monkeypatch.setattr(collecting, "_MAX_SAMPLES", 1200)
    failures: list[Exception] = []
    collector = Collector(lambda _, exc: failures.append(exc))
    collector.add(FileSource(tmp_path))
    for number in range(10):
        rank = Rank(tmp_path, number)
        rank.take(10 * GIB)
        rank.train(1, n_bytes=(20 + number) * GIB)
        for _ in range(150):
            rank.end(rank.begin("evaluation"))
            rank.sample(2.0)
        rank.stop()
        collector.read()

    collector.read()
    states = collector.processes

    histories = [collector.find_history(state) for state in states]
    assert sum(history.capacity for history in histories) <= 1.25 * 1200
    assert all(len(state.spans) <= 150 for state in states)
    assert all(len(state.spans) + state.n_dropped_spans == 151 for state in states)
    assert [state.peaks[0].allocated_bytes for state in states] == [
        (30 + number) * GIB for number in range(10)
    ]
    assert failures == []
