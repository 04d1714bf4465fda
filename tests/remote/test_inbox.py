"""What workers send waits within bounds until it is read."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from gpumemwidget.model.devices import DeviceInfo
from gpumemwidget.model.processes import ProcessInfo, SpanRecord
from gpumemwidget.remote.messages import (
    Began,
    Devices,
    Ended,
    SpanEnded,
    encode,
)
from gpumemwidget.remote.reader import collector as adapter
from gpumemwidget.remote.reader.collector import InboxSource

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
    monkeypatch.setattr(adapter, "_MAX_WAITING", 10)
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
    monkeypatch.setattr(adapter.time, "monotonic", lambda: now_s[0])
    source.put("a", encode(BEGAN))

    heard = [source.is_heard(key) for key in "ab"]
    now_s[0] += adapter.SILENT_S + 0.1
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
