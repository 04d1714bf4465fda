"""What a process writes, and what is read of that: the same."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.day import count_bytes
from gpumemwidget.errors import RecordingError
from gpumemwidget.model.cells import CellDevice, Span, Status
from gpumemwidget.model.devices import DeviceInfo, DeviceState, Frame, Reading, Sample
from gpumemwidget.model.ooms import OomCard, OomEvent
from gpumemwidget.model.ownership import Owned
from gpumemwidget.model.processes import (
    DevicePeak,
    ProcessInfo,
    ProcessState,
    RunningSpan,
    SpanRecord,
)
from gpumemwidget.remote.messages import RanOut, decode, encode
from gpumemwidget.remote.process_log import ProcessLog
from gpumemwidget.remote.writer.record_writer import RecordWriter
from tests.remote.programs import read_lines

INFO = ProcessInfo("1f", "host", 12, "python train.py", 1_800_000_000.0)
DEVICES = ("cuda:0", "cuda:1", "host")
INFOS = {name: DeviceInfo(name, name, 1) for name in DEVICES}


class Wire:
    """A writer whose lines go to a log; ``is_open``: whether they arrive."""

    def __init__(self) -> None:
        self.lines: list[bytes] = []
        self.is_open = True
        self.log = ProcessLog()
        self.writer = RecordWriter(self, INFO)

    def write(self, lines: bytes) -> None:
        for line in lines.splitlines(keepends=True) if self.is_open else ():
            self.lines.append(line)
            self.log.take(decode(line))

    def close(self) -> None:
        """Do nothing."""

    @property
    def state(self) -> ProcessState:
        state = self.log.describe(is_alive=True)
        assert state is not None
        return state

    def count(self, kind: bytes) -> int:
        return sum(kind in line[:20] for line in self.lines)


def make_span(
    name: str, start_s: float, duration_s: float, peak: int = 1, **fields: Any
) -> SpanRecord:
    device = CellDevice("cuda:0", Span(0, peak, peak), Span(0, peak, peak), "exact", 0, 0)
    return SpanRecord(name, start_s, duration_s, "ok", (device,), **fields)


COUNTERS = st.none() | st.integers(0, 2**45)
SAMPLES = st.dictionaries(st.sampled_from(DEVICES), st.tuples(COUNTERS, COUNTERS))
#: Samples of devices that come and go, and some that do not arrive.
STREAM = st.lists(st.tuples(SAMPLES, st.booleans()), max_size=20)


@given(stream=STREAM)
def test_samples_come_back(stream: list[tuple[dict[str, Any], bool]]) -> None:
    """Whatever comes, goes, is unknown or gets lost: those that arrive are what was measured."""
    wire, sent = Wire(), []

    for place, (counters, is_open) in enumerate(stream):
        wire.is_open = is_open
        readings = tuple(Reading(device, *values) for device, values in counters.items())
        sample = Sample(place / 10, readings)
        wire.writer.write_sample(place / 10, readings, INFOS)
        sent += [sample] * is_open

    assert wire.log.history.samples() == sent
    if sent:
        known = wire.state.readings
        assert [each.device for each in known] == [each.device for each in sent[-1].readings]
        # An unknown figure is shown as it was known last.
        for now, last in zip(known, sent[-1].readings, strict=True):
            assert last.allocated_bytes in (None, now.allocated_bytes)
            assert last.reserved_bytes in (None, now.reserved_bytes)


KINDS: list[tuple[str, Status]] = [("a", "ok"), ("b", "ok"), ("a", "error")]


@given(data=st.data())
def test_counted_spans_lose_no_peak(data: st.DataObject) -> None:
    """Of each name and status as many as there were, their highest peak, their whole time."""
    wire, sent = Wire(), []
    end_s = 0.0
    for place in range(data.draw(st.integers(0, 30))):
        end_s += data.draw(st.sampled_from((0.0, 0.01, 0.4, 3.0)))
        duration_s = min(end_s, data.draw(st.sampled_from((0.0, 0.01, 0.7, 2.0))))
        name, status = data.draw(st.sampled_from(KINDS))
        peak = data.draw(st.integers(1, 100))
        span = make_span(name, end_s - duration_s, duration_s, peak, number=place)
        span = replace(span, status=status)
        sent.append(span)
        wire.writer.end_span(span, None)
    wire.writer.close(end_s)

    found = wire.state.spans
    for kind in KINDS:
        before = [span for span in sent if (span.name, span.status) == kind]
        after = [span for span in found if (span.name, span.status) == kind]
        assert sum(span.n_spans for span in after) == len(before)
        if not before:
            continue
        assert min(span.start_s for span in after) == min(span.start_s for span in before)
        whole_s = sum(span.duration_s for span in before)
        assert sum(span.duration_s for span in after) == pytest.approx(whole_s, abs=1e-4)
        assert max(map(read_peak, after)) == max(map(read_peak, before))
    # Each record has the figures of the span that it names.
    assert all(span.devices == sent[span.number or 0].devices for span in found)


def read_peak(span: SpanRecord) -> int:
    return span.devices[0].allocated.peak_bytes or 0


def test_a_flood_is_few_lines() -> None:
    """Three names in turns, 600 a second, are a few lines a second."""
    wire = Wire()

    for step in range(2000):
        for place, name in enumerate(("step", "forward", "backward")):
            start_s = step / 200 + place / 1000
            wire.writer.begin_span(RunningSpan(name, start_s, step))
            wire.writer.end_span(make_span(name, start_s, 0.0005, step, number=step), None)
    wire.writer.close(10.0)

    assert sum(span.n_spans for span in wire.state.spans) == 6000
    # In two seconds six are written at once, as they begin and as they end, and three are counted.
    assert len(wire.lines) <= 6 * (6 + 6 + 3) + 2
    counted = [span for span in wire.state.spans if span.n_spans > 1]
    assert {span.number for span in counted} <= {399, 799, 1199, 1599, 1999, 400, 800, 1200, 1600}


def test_many_names_are_bounded() -> None:
    """Of spans that are all named differently only so many have their names."""
    wire = Wire()

    for number in range(3000):
        wire.writer.begin_span(RunningSpan(f"batch {number}", number / 1000))
        wire.writer.end_span(make_span(f"batch {number}", number / 1000, 0.0005, number), None)
    wire.writer.close(3.0)

    spans = wire.state.spans
    assert len(wire.lines) < 100
    assert sum(span.n_spans for span in spans) == 3000
    assert max(map(read_peak, spans)) == 2999
    assert {"batch 0", "other spans"} < {span.name for span in spans}


def test_peaks_come_once() -> None:
    """At most once a second, and only where they have risen."""
    wire = Wire()
    for time_s, peak in ((0.0, 30), (0.5, 35), (1.5, 40), (9.0, 40)):
        ends = (Reading("cuda:0", 1, 2, peak, 40, "exact"),)
        wire.writer.write_peaks(time_s, ends, is_last=False)

    assert [peak.allocated_bytes for peak in wire.state.peaks] == [40]
    assert wire.count(b'"peaks"') == 2


def test_sampled_peaks_of_both_counters() -> None:
    """The highest reserved bytes count, also where more was allocated at another time."""
    log = ProcessLog()

    for sample in (b'["sample",1,{"cuda:0":[10,20]}]', b'["sample",2,{"cuda:0":[5,30]}]'):
        log.take(decode(sample))
        log.flush()

    assert log.peaks == (DevicePeak("cuda:0", 10, 30, "sampled"),)


def test_a_new_sink_gets_the_extremes_of_few_samples() -> None:
    """A program keeps some hundred samples of a long recording, with the highest and the lowest."""
    first, late = Wire(), Wire()
    for tick in range(3000):
        n_bytes = {700: 90, 1500: 1}.get(tick, 40)
        first.writer.write_sample(tick / 10, (Reading("cuda:0", n_bytes, 100),), INFOS)

    first.writer.add_sink("late", late)

    assert len(first.writer.log.history) <= 400
    samples = late.log.history.samples()
    assert len(samples) <= 200
    assert {70.0, 150.0, 299.9} < {sample.time_s for sample in samples}


def test_nothing_after_the_end() -> None:
    """A sampler that comes late writes nothing."""
    wire = Wire()
    wire.writer.close(1.0, "ValueError: no")
    lines = list(wire.lines)

    wire.writer.write_sample(2.0, (), {})
    wire.writer.end_span(make_span("late", 1.0, 1.0), None)

    assert wire.lines == lines
    assert (wire.state.status, wire.state.error) == ("failed", "ValueError: no")


HOSTILE = {
    "no JSON": b"hello",
    "cut": b'{"type":"ended","time_s":',
    "no message": b'{"a": 1}',
    "another type": b'{"type":"ended","time_s":"soon"}',
    "deep": b"[" * 100_000,
    "deep within": b'{"type":"oom","time_s":1,"card":' + b'{"event":' * 50_000,
    "no UTF-8": b'{"type":"ended","time_s":1,"error":"\xff"}',
    "half a pair": rb'{"type":"ended","time_s":1,"error":"\ud800"}',
    "NaN": b'{"type":"ended","time_s":NaN}',
    "huge time": b'{"type":"ended","time_s":1e300}',
    "huge bytes": b'["sample",1,{"a":[1,' + b"9" * 400 + b"]}]",
    "many devices": b'["sample",1,{' + b",".join(b'"%d":[1,1]' % n for n in range(1025)) + b"}]",
    "a bool": b'["sample",1,{"a":[true,1]}]',
    "one figure": b'["sample",1,{"a":[1]}]',
    "a long name": b'["sample",1,{"' + b"a" * 16_385 + b'":[1,1]}]',
    "changes, as in older files": b'["sample",1,[5,5]]',
    "a long text": b'{"type":"ended","time_s":1,"error":"' + b"x" * 16_385 + b'"}',
    "too long": b'{"type":"ended","time_s":1,"error":"' + b"x" * (5 << 20) + b'"}',
    "pickle": b"\x80\x04\x95\x0f\x00\x00\x00",
}


@pytest.mark.parametrize("line", HOSTILE.values(), ids=HOSTILE)
def test_hostile_lines(line: bytes) -> None:
    """They are refused as no message, at once."""
    with pytest.raises(RecordingError):
        decode(line)


def test_messages_that_do_not_fit() -> None:
    """A sample before the devices, times that go back, a second beginning: nothing fails."""
    lines = [
        b'["sample",1,{"cuda:0":[5,5]}]',
        encode_began("first"),
        encode_began("second"),
        b'["sample",-5,{"cuda:0":[6,6]}]',
        b'["sample",-9,{}]',
        b'["sample",-9,{"cuda:0":[10,null]}]',
        b'{"type":"span","span":{"name":"","start_s":-3,"duration_s":-2,"status":"ok","devices":[]}}',
        b'{"type":"peaks","time_s":-1,"peaks":[{"device":"","allocated_bytes":null,"reserved_bytes":-1}]}',
    ]

    state = read_lines(b"\n".join(lines))

    assert state.info.name == "first"
    assert state.heard_s == 0.001
    assert state.readings == (Reading("cuda:0", 10, 6),)


def encode_began(name: str) -> bytes:
    began = b'{"type":"began","process":{"id":"1","host":"h","pid":1,"name":"%s","started_at":1}}'
    return began % name.encode()


def test_devices_are_bounded() -> None:
    """However many devices a file makes up, few are kept."""
    log, numbers = ProcessLog(), itertools.count()
    for _ in range(30):
        peaks = b",".join(
            b'{"device":"d%d","allocated_bytes":1,"reserved_bytes":1}' % next(numbers)
            for _ in range(1000)
        )
        log.take(decode(b'{"type":"peaks","time_s":1,"peaks":[' + peaks + b"]}"))

    assert len(log._peaks) == 1024


def test_a_file_stays_small() -> None:
    """An hour at 10 Hz with a GPU, and spans all the time, is less than an eighth of 150 MB."""
    assert count_bytes(hours=0.1) < 0.1 * 150e6 / 8


# -- What is written of the span that runs ---------------------------------------------------------


def test_the_span_that_runs_in_a_flood() -> None:
    """Each sample shows which one; in a pause none, or the one around."""
    wire, found = Wire(), []

    for number in range(300):
        start_s = number / 100
        wire.writer.begin_span(RunningSpan("step", start_s, number))
        if number % 100 == 50:
            wire.writer.write_sample(start_s + 0.001, (), INFOS)
            found.append(wire.state.running)
        wire.writer.end_span(make_span("step", start_s, 0.005, number=number), None)
        if number % 100 == 70:
            wire.writer.write_sample(start_s + 0.006, (), INFOS)
            found.append(wire.state.running)

    assert [span and span.number for span in found] == [50, None, 150, None, 250, None]
    assert wire.count(b"span_began") < 30


# -- What is too large -----------------------------------------------------------------------------


def make_long_card() -> OomCard:
    """A card of a program with a line of code and names that nobody would read."""
    event = OomEvent(
        DeviceState(INFOS["cuda:0"], None, None),
        requested_bytes=2**60,
        frames=(Frame("f" * 1000, 1, "train"),) * 2000,
    )
    owners = tuple(
        Owned("cuda:0", 1, "tensor", (f"x{n}",), "name", ("y" * 50_000,)) for n in range(20)
    )
    return OomCard(event, None, "a.py, line 1", "x = '" + "é" * 1_000_000, None, owners, 1, ())


def test_what_is_written_can_be_read() -> None:
    """Of a card its texts and lists are cut, and a figure of exbibytes stays."""
    card = make_long_card()

    read = decode(encode(RanOut(1.0, card)))

    assert isinstance(read, RanOut)
    assert read.card.event.requested_bytes == 2**60
    assert read.card.text == card.text[:16_384]
    assert len(read.card.event.frames) == 1024
    assert read.card.owners[0].rows == ("y" * 16_384,)
