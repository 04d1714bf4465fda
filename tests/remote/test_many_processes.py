"""A collector keeps what it reads: within its bounds, and without losing a peak."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from gpumemwidget.errors import BackendError
from gpumemwidget.model.devices import DeviceInfo
from gpumemwidget.model.processes import ProcessInfo, SpanRecord
from gpumemwidget.remote.messages import Began, Devices, Ended, Message, SpanEnded, encode
from gpumemwidget.remote.reader import collector as collecting
from gpumemwidget.remote.reader.collector import Collector, InboxSource
from gpumemwidget.remote.reader.recordings import FileSource, share_gpus
from gpumemwidget.report.processes import report_spans
from tests.ranks import DRIVER_BYTES, GIB, Rank
from tests.remote.watching import Watching


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


class ScriptedSource(InboxSource):
    """A source that does what the test says while it is read, and knows of no process any more.

    Args:
        read: yields messages.
    """

    name = "scripted"

    def __init__(self, read: Callable[[], Iterator[tuple[str, Message]]]) -> None:
        super().__init__()
        self.read = read  # type: ignore[method-assign] - as the test says

    def is_alive(self, key: str, info: ProcessInfo) -> bool:  # noqa: ARG002 - of all sources
        return False

    def close(self) -> None:
        """Do nothing."""


def begin(name: str) -> tuple[str, Message]:
    """Return the first message of a process."""
    return name, Began(ProcessInfo(f"id of {name}", "host", 1, name, 0.0))


def test_what_a_source_sent_before_it_failed_counts() -> None:
    """The failure is reported, and the process is there: as lost, as the source says."""
    failures: list[str] = []
    collector = Collector(lambda what, exc: failures.append(f"{what}: {exc}"))

    def read() -> Iterator[tuple[str, Message]]:
        yield begin("train.py")
        raise BackendError("the cluster is gone")

    collector.add(ScriptedSource(read))

    collector.read()

    assert failures == ["reading scripted: the cluster is gone"]
    assert [(state.info.name, state.status) for state in collector.processes] == [
        ("train.py", "lost")
    ]


def test_a_failure_of_ours_is_reported_too() -> None:
    """What an engine doesn't know of a process ends neither its reading nor that of others."""

    class Confused(ScriptedSource):
        def is_alive(self, key: str, info: ProcessInfo) -> bool:
            raise KeyError(key, info)

    failures: list[str] = []
    collector = Collector(lambda what, exc: failures.append(f"{what}: {type(exc).__name__}"))
    collector.add(Confused(lambda: iter([begin("train.py")])))
    collector.add(ScriptedSource(lambda: iter([begin("evaluate.py")])))

    collector.read()

    assert failures == ["reading scripted: KeyError"]
    assert {state.info.name for state in collector.processes} == {"train.py", "evaluate.py"}


def test_nobody_waits_while_a_long_recording_is_read() -> None:
    """What has been read of it until then is there for every thread."""
    collector = Collector(lambda _, __: None)
    seen: list[list[str]] = []

    def read() -> Iterator[tuple[str, Message]]:
        for name in ("train.py", "evaluate.py"):
            yield begin(name)
            with ThreadPoolExecutor(1) as thread:
                states = thread.submit(lambda: collector.processes).result(10)
            seen.append([state.info.name for state in states])

    collector.add(ScriptedSource(read))
    collector.read()

    assert seen == [["train.py"], ["train.py", "evaluate.py"]]


def test_a_source_that_is_removed_while_it_is_read() -> None:
    """What it sends from then on is of no process any more."""
    collector = Collector(lambda _, __: None)

    def read() -> Iterator[tuple[str, Message]]:
        yield begin("train.py")
        collector.remove(source)
        yield begin("train.py")

    source = ScriptedSource(read)
    collector.add(source)

    collector.read()

    assert collector.processes == ()


def test_a_gpus_use_is_the_newest_that_was_recorded(tmp_path: Path) -> None:
    """A process that was heard since then and recorded none takes nothing away from it."""
    ranks = [Rank(tmp_path, number) for number in range(3)]
    for rank in ranks:
        rank.take(10 * GIB)
    ranks[0].sample(1.0)
    ranks[0].write_use()
    ranks[1].driver.set_process(2**31 - 7, 6 * GIB, 0)
    ranks[1].sample(2.0)
    ranks[1].write_use()
    ranks[2].sample(3.0)

    states = Watching(FileSource(tmp_path)).look()
    [share] = share_gpus(states)

    found = [state.uses[0].used_bytes for state in states if state.uses]
    assert len(found) == 2
    assert share.used_bytes == found[1] == found[0] + 6 * GIB


def test_parts_of_a_gpu_add_up_to_its_total(tmp_path: Path) -> None:
    """What each process takes, what others take, what the driver keeps, and what is free."""
    ranks = [Rank(tmp_path, number) for number in range(2)]
    ranks[0].take(20 * GIB)
    ranks[1].take(8 * GIB)
    taken = [rank.hardware.read_own_use("cuda:0") or 0 for rank in ranks]
    for rank, other, n_bytes in zip(ranks, (5001, 5000), reversed(taken), strict=True):
        rank.driver.set_process(other, n_bytes, 0)
        rank.driver.set_process(2**31 - 7, 6 * GIB, 0)
        rank.sample()
        rank.write_use()

    states = Watching(FileSource(tmp_path)).look()
    [share] = share_gpus(states)

    assert [part.n_bytes for part in share.parts] == taken
    assert min(taken) > 8 * GIB
    assert share.other_bytes == 6 * GIB
    assert share.free_bytes is not None
    whole_bytes = sum(taken) + 6 * GIB + DRIVER_BYTES + share.free_bytes
    assert whole_bytes == share.total_bytes == 80 * GIB + DRIVER_BYTES


def test_spans_of_one_name_are_one_row(tmp_path: Path) -> None:
    """With their number, and below it how many are no longer kept."""
    rank = Rank(tmp_path, 0)
    for number in range(150):
        rank.end(rank.begin(f"part {number % 2}"))
        rank.sample(2.0)
    [whole] = Watching(FileSource(tmp_path)).look()
    less = replace(whole, spans=whole.spans[50:], n_dropped_spans=50)

    texts = [report_spans([state]).text for state in (whole, less)]

    lines = [[line.split() for line in text.splitlines() if "part " in line] for text in texts]
    assert [[int(words[2]) for words in listed] for listed in lines] == [[75, 75], [50, 50]]
    assert "50 older spans not counted." not in texts[0]
    assert "50 older spans not counted." in texts[1]


# -- What engines send -----------------------------------------------------------------------------

BEGAN = Began(ProcessInfo("1", "host", 7, "python", 0.0))
DEVICES = Devices((DeviceInfo("cuda:0", "GPU", 1000),))


def make_span(number: int) -> SpanEnded:
    return SpanEnded(SpanRecord("step", float(number), 1.0, "ok", (), number))


def test_what_is_read_comes_once_and_in_order() -> None:
    """Each message has the key of its process, as has a line that is none."""
    inbox = InboxSource()

    inbox.put("a", encode(BEGAN) + b"torn\n" + encode(make_span(1)))
    inbox.put("b", "text")

    assert inbox.read() == [("a", BEGAN), ("a", None), ("a", make_span(1)), ("b", None)]
    assert inbox.read() == []


def test_the_newest_messages_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where too many wait, the oldest go."""
    monkeypatch.setattr(collecting, "_MAX_WAITING", 10)
    inbox = InboxSource()

    for number in range(50):
        inbox.put("a", (encode(BEGAN) if not number else b"") + encode(make_span(number)))

    assert [message for _, message in inbox.read()] == [make_span(n) for n in range(40, 50)]


def test_a_source_counts_as_lost_what_was_not_heard_for_long(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A process is heard with each batch; one that never was is silent."""
    source = InboxSource()
    now_s = [100.0]
    monkeypatch.setattr(collecting.time, "monotonic", lambda: now_s[0])
    source.put("a", encode(BEGAN))

    heard = [source.is_heard(key) for key in "ab"]
    now_s[0] += collecting.SILENT_S + 0.1
    later = source.is_heard("a")
    source.put("a", encode(DEVICES))

    assert (heard, later, source.is_heard("a")) == ([True, False], False, True)


def test_a_question_waits_for_what_was_sent_until_then() -> None:
    """The next batch was maybe sent before it; the second one was not."""
    inbox = InboxSource()
    inbox.put("a", encode(BEGAN))
    with ThreadPoolExecutor(1) as thread:
        waiting = thread.submit(inbox.wait_for_all, 20.0)
        while not inbox._has_news._waiters:  # type: ignore[attr-defined]
            time.sleep(0.001)

        inbox.put("a", encode(make_span(1)))
        inbox.put("b", "text")
        was_enough = waiting.done()
        inbox.put("a", encode(make_span(2)))
        waiting.result(10)

    assert not was_enough


def test_nobody_waits_for_a_process_that_has_ended() -> None:
    """It sends no more batch."""
    inbox = InboxSource()
    inbox.put("a", encode(BEGAN) + encode(Ended(1.0)))

    begin_s = time.monotonic()
    inbox.wait_for_all(60.0)

    assert time.monotonic() - begin_s < 50.0
