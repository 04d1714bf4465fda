"""Batches of lines go to an engine without holding up anybody, and wait within bounds."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest

from gpumemwidget.model.cells import CellDevice, Span
from gpumemwidget.model.devices import DeviceInfo
from gpumemwidget.model.processes import ProcessInfo, SpanRecord
from gpumemwidget.remote.engines.worker import join, leave
from gpumemwidget.remote.messages import (
    Began,
    Counters,
    Devices,
    Figures,
    SpanEnded,
    encode,
)
from gpumemwidget.remote.writer import record_writer
from gpumemwidget.remote.writer.record_writer import BatchSink
from gpumemwidget.remote.writer.spans import OpenSpan
from gpumemwidget.testing import simulate_gpus
from tests.remote.programs import read_lines, wait_for

MIB = 1 << 20
BEGAN = encode(Began(ProcessInfo("1", "host", 7, "python", 0.0)))
DEVICES = encode(Devices((DeviceInfo("cuda:0", "GPU", 1000),)))
SAMPLE = encode(Counters(1, {"cuda:0": Figures(2, 3)}))
_DEADLINE_S = 20.0


class Receiver:
    """Takes batches; where it ``hangs``, each send waits; where it is ``gone``, each fails."""

    def __init__(self) -> None:
        self.is_sending = threading.Event()
        self.may_go_on = threading.Event()
        self.may_go_on.set()
        self.is_gone = False
        self.batches: list[bytes] = []

    def send(self, lines: bytes) -> None:
        self.is_sending.set()
        assert self.may_go_on.wait(_DEADLINE_S)
        if self.is_gone:
            raise ConnectionError
        self.batches.append(lines)

    @property
    def lines(self) -> list[bytes]:
        return b"".join(self.batches).splitlines(keepends=True)


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    """A receiver to which each line but one of devices is a batch of its own."""
    receiver = Receiver()
    yield receiver
    receiver.may_go_on.set()


def read_spans(receiver: Receiver) -> list[str]:
    return [span.name for span in read_lines(b"".join(receiver.batches)).spans]


def make_span(name: str, peak: int = 0) -> SpanEnded:
    span = Span(0, 0, peak)
    device = CellDevice("cuda:0", span, span, "exact", 0, 0)
    return SpanEnded(SpanRecord(name, 0.0, 1.0, "ok", (device,)))


def test_a_send_that_hangs_holds_up_no_task(receiver: Receiver) -> None:
    """Spans begin and end meanwhile; then all is sent, once and in order."""
    receiver.may_go_on.clear()
    with simulate_gpus(1) as gpus:
        gpus.touch(0)
        recording = join(receiver.send, role="worker")
        assert receiver.is_sending.wait(_DEADLINE_S)

        for number in range(3):
            span = recording.begin_span("step", number)
            gpus.free(gpus.allocate((number + 1) * MIB))
            recording.end_span(span)
        assert not receiver.batches
        receiver.may_go_on.set()
        leave()

    state = read_lines(b"".join(receiver.batches))
    assert [span.number for span in state.spans] == [0, 1, 2]
    assert state.spans[2].devices[0].allocated.peak_bytes == 3 * MIB
    assert state.status == "ended"


def test_close_gives_up_on_a_send_that_hangs(
    receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It returns, and what hung is sent when it goes on, with all that waits."""
    monkeypatch.setattr(record_writer, "_CLOSE_S", 0.01)
    receiver.may_go_on.clear()
    sink = BatchSink(receiver.send, every_s=0.0)

    lines = [encode(make_span(name)) for name in "abc"]
    for line in lines:
        sink.write(line)
    sink.close()
    sink.close()

    assert not receiver.batches
    receiver.may_go_on.set()
    sink._thread.join(_DEADLINE_S)
    assert receiver.lines == lines


def test_close_ends_the_thread_at_any_moment(receiver: Receiver) -> None:
    """Beside a busy thread, ``close`` often comes between the sender's wait and its next step."""
    is_over: list[bool] = []

    def keep_busy() -> None:
        while not is_over:
            pass

    busy = threading.Thread(target=keep_busy, daemon=True)
    busy.start()
    sinks = []
    try:
        for _ in range(20):
            sink = BatchSink(receiver.send, every_s=0.002)
            sink.write(BEGAN)
            time.sleep(0.003)
            sink.close()
            sinks.append(sink)
            if sink._thread.is_alive():
                break
    finally:
        is_over.append(True)
        busy.join(_DEADLINE_S)
    for sink in sinks:
        sink._thread.join(_DEADLINE_S)

    assert not any(sink._thread.is_alive() for sink in sinks)
    assert receiver.lines == [BEGAN] * len(sinks)


def test_a_span_that_ends_on_the_sending_thread(receiver: Receiver) -> None:
    """Garbage that is collected there may end one: another thread of ours writes it."""
    spans: list[OpenSpan | None] = []

    def send(lines: bytes) -> None:
        while spans:
            recording.end_span(spans.pop())
        receiver.send(lines)

    with simulate_gpus(1):
        recording = join(send, role="worker")
        spans.append(recording.begin_span("late"))
        wait_for(lambda: b'"late"' in b"".join(receiver.batches) and read_spans(receiver))
        leave()

    assert read_spans(receiver) == ["late"]


def test_where_too_much_waits_samples_go_first(
    receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All spans are kept as long as they have room, and then the newest half of them."""
    spans = [encode(make_span(f"span {number}")) for number in range(10, 20)]
    receiver.may_go_on.clear()
    sink = BatchSink(receiver.send, every_s=0.0)
    sink.write(BEGAN)
    assert receiver.is_sending.wait(_DEADLINE_S)

    monkeypatch.setattr(record_writer, "_MAX_WAITING_BYTES", 10 * len(spans[0]))
    for line in [SAMPLE] * 200 + spans[:5]:
        sink.write(line)
    before = list(sink._lines)
    for line in [*spans[5:], SAMPLE]:
        sink.write(line)
    receiver.may_go_on.set()
    sink.close()

    assert [line for line in before if line != SAMPLE] == spans[:5]
    assert before.count(SAMPLE) < 100
    first, *kept = (line for line in receiver.lines if line != SAMPLE)
    assert first == BEGAN
    assert 3 <= len(kept) < 10
    assert kept == spans[-len(kept) :]


def test_what_could_not_be_sent_is_sent_again(receiver: Receiver) -> None:
    """Once the next line comes, or at the end; what failed is known at once."""
    has_failed = threading.Event()
    receiver.is_gone = True
    sink = BatchSink(receiver.send, every_s=0.0)
    sink.on_failure = lambda _: has_failed.set()
    sink.write(BEGAN)
    assert has_failed.wait(_DEADLINE_S)

    receiver.is_gone = False
    sink.write(DEVICES)
    sink.close()

    assert receiver.lines == [BEGAN, DEVICES]
