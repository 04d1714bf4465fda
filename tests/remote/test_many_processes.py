"""A collector keeps what it is told: within its bounds, and without losing a peak."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from gpumemwidget.errors import BackendError
from gpumemwidget.model.processes import ProcessInfo
from gpumemwidget.remote.engines.inbox import InboxSource
from gpumemwidget.remote.gathering import collector as collecting
from gpumemwidget.remote.gathering.collector import Collector
from gpumemwidget.remote.gathering.recordings import FileSource
from gpumemwidget.remote.messages import Began, Message
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


class FailingSource(InboxSource):
    """A source that tells of one process, fails, and knows of no process any more."""

    name = "failing"

    def read(self) -> Iterator[tuple[str, Message]]:
        yield "key", Began(ProcessInfo("id", "host", 1, "train.py", 0.0))
        raise BackendError("the cluster is gone")

    def is_alive(self, key: str, info: ProcessInfo) -> bool:  # noqa: ARG002 - of all sources
        return False

    def close(self) -> None:
        """Do nothing."""


def test_what_a_source_told_before_it_failed_counts() -> None:
    """The failure is told, and the process is there: as lost, as the source says."""
    failures: list[str] = []
    collector = Collector(lambda what, exc: failures.append(f"{what}: {exc}"))
    collector.add(FailingSource())

    collector.read()

    assert failures == ["reading failing: the cluster is gone"]
    assert [(state.info.name, state.status) for state in collector.processes] == [
        ("train.py", "lost")
    ]
