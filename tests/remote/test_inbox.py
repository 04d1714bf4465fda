"""What workers send waits within bounds until it is read."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from gpumemwidget.model.devices import DeviceInfo
from gpumemwidget.model.processes import ProcessInfo, RunningSpan, SpanRecord
from gpumemwidget.remote.engines import inbox as adapter
from gpumemwidget.remote.engines.inbox import InboxSource
from gpumemwidget.remote.messages import (
    Began,
    Counters,
    Devices,
    Ended,
    Figures,
    Sent,
    SpanBegan,
    SpanEnded,
    encode,
)
from gpumemwidget.remote.process_log import ProcessLog

BEGAN = Began(ProcessInfo("1", "host", 7, "python", 0.0))
DEVICES = Devices((DeviceInfo("cuda:0", "GPU", 1000),))


def make_span(number: int) -> SpanEnded:
    return SpanEnded(SpanRecord("step", float(number), 1.0, "ok", (), number))


def test_what_is_read_comes_once_and_in_order() -> None:
    """Each message has the key of its process; what is none is counted for that process."""
    inbox = InboxSource()

    inbox.put("a", encode(BEGAN) + b"torn\n" + encode(make_span(1)))
    inbox.put("b", "text")

    assert [*inbox.read()] == [("a", BEGAN), ("a", make_span(1))]
    assert [*inbox.read()] == []
    assert [inbox.count_unread(key) for key in "abc"] == [1, 1, 0]


def test_samples_go_first_where_too_much_waits() -> None:
    """What is left fits, and the newest samples are there."""
    inbox = InboxSource(max_waiting=10)
    samples = b"".join(encode(Counters(time, {"cuda:0": Figures(1, 1)})) for time in range(20))
    inbox.put("a", encode(BEGAN) + encode(DEVICES) + samples + encode(make_span(1)))
    inbox.put("a", encode(Counters(21, {"cuda:0": Figures(26, 26)})))

    log = ProcessLog()
    messages = [*inbox.read()]
    for _, message in messages:
        log.take(message)

    state = log.describe(is_alive=True)
    assert len(messages) <= 10
    assert state is not None
    assert [span.number for span in state.spans] == [1]
    assert [sample.time_s for sample in log.history.samples()] == [0.021]
    assert [reading.allocated_bytes for reading in state.readings] == [26]


def test_the_newest_spans_stay() -> None:
    """Where spans alone are too many, the oldest go; what says which process it is stays."""
    inbox = InboxSource(max_waiting=10)
    for number in range(50):
        begins = SpanBegan(RunningSpan("step", float(number)))
        inbox.put("a", (encode(BEGAN) if not number else b"") + encode(begins))
        inbox.put("a", encode(make_span(number)))

    messages = [message for _, message in [*inbox.read()]]

    assert len(messages) <= 10
    assert messages[0] == BEGAN
    assert messages[-1] == make_span(49)


def test_a_source_counts_as_lost_what_was_not_heard_for_long(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A process is heard with each batch; one that never was is silent."""
    source = InboxSource()
    now_s = [100.0]
    monkeypatch.setattr(adapter.time, "monotonic", lambda: now_s[0])
    source.put("a", encode(BEGAN))

    silent = [source.is_silent(key) for key in "ab"]
    now_s[0] += adapter.SILENT_S + 0.1
    later = source.is_silent("a")
    source.put("a", encode(DEVICES))

    assert (silent, later, source.is_silent("a")) == ([False, True], True, False)


def test_a_question_waits_for_what_was_sent_until_then() -> None:
    """A batch that was sent before it is not enough; one after it is."""
    inbox = InboxSource()
    inbox.put("a", encode(Sent(time.time())) + encode(BEGAN))
    with ThreadPoolExecutor(1) as thread:
        waiting = thread.submit(inbox.wait_for_all, 20.0)
        while not inbox._has_news._waiters:  # type: ignore[attr-defined]
            time.sleep(0.001)

        inbox.put("a", encode(Sent(time.time() - 10.0)) + encode(make_span(1)))
        inbox.put("b", "text")
        was_enough = waiting.done()
        inbox.put("a", encode(Sent(time.time())) + encode(make_span(2)))
        waiting.result(10)

    assert not was_enough
    assert [m.span.number for _, m in [*inbox.read()] if isinstance(m, SpanEnded)] == [1, 2]


def test_nobody_waits_for_a_process_that_has_ended() -> None:
    """Nor for one that never said when it sent."""
    inbox = InboxSource()
    inbox.put("a", encode(Sent(time.time())) + encode(BEGAN) + encode(Ended(1.0)))
    inbox.put("b", encode(BEGAN))

    begin_s = time.monotonic()
    inbox.wait_for_all(60.0)

    assert time.monotonic() - begin_s < 50.0
