"""Spans of a recorded program: their exact peaks, however they lie within one another."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import gpumemwidget
from gpumemwidget.backends.hardware import detect_hardware
from gpumemwidget.errors import BusyError
from gpumemwidget.model.processes import ProcessState, SpanRecord
from gpumemwidget.remote.engines import worker
from gpumemwidget.remote.messages import Began, Ended, Peaks, decode
from gpumemwidget.remote.writer.recorder import FileRecording
from gpumemwidget.remote.writer.spans import Spans
from gpumemwidget.testing import simulate_gpus, simulate_torch
from gpumemwidget.testing.machine import SimulatedMachine
from tests.remote.programs import (
    find_peak,
    list_spans,
    load_one,
    read_lines,
    run_python,
    write_script,
)

MIB = 1 << 20
GPU = "cuda:0"


@pytest.fixture
def gpus() -> Iterator[SimulatedMachine]:
    with simulate_gpus(2, total_bytes=1 << 30) as machine:
        machine.touch(0)
        yield machine


@pytest.fixture
def recording(gpus: SimulatedMachine, tmp_path: Path) -> Iterator[FileRecording]:
    """A recording that makes no spans by itself."""
    with gpumemwidget.record(tmp_path / "a.jsonl", steps=False) as made:
        yield made


def read_spans(state: ProcessState) -> dict[str, SpanRecord]:
    return {span.name: span for span in state.spans}


def read_gpu(span: SpanRecord) -> tuple[int | None, int | None, int | None]:
    """What a span had on the first GPU before and after, and at its peak, in MiB."""
    allocated = next(each.allocated for each in span.devices if each.device == GPU)
    values = (allocated.before_bytes, allocated.after_bytes, allocated.peak_bytes)
    return tuple(None if value is None else value // MIB for value in values)  # type: ignore[return-value]


def test_nested(gpus: SimulatedMachine, recording: FileRecording) -> None:
    """Each has its own peak, and the outer one those within it."""
    with gpumemwidget.span("epoch", 3):
        gpus.free(gpus.allocate(10 * MIB))
        with gpumemwidget.span("forward"):
            kept = gpus.allocate(40 * MIB)
            gpus.free(gpus.allocate(60 * MIB))
        with gpumemwidget.span("backward"):
            gpus.free(kept)
    recording.close()

    state = load_one(recording.path)
    spans = read_spans(state)
    assert {name: read_gpu(span) for name, span in spans.items()} == {
        "epoch": (0, 0, 100),
        "forward": (0, 40, 100),
        "backward": (40, 0, 40),
    }
    assert spans["epoch"].number == 3
    assert {each.peak_is for span in spans.values() for each in span.devices[:1]} == {"exact"}
    assert find_peak(state, GPU).span in {"epoch", "forward"}


@pytest.mark.parametrize(
    ("name", "number", "shown"),
    [
        ("epoch 3", None, ("epoch", 3)),
        ("layer2", None, ("layer2", None)),
        ("7", None, ("7", None)),
        ("epoch", 1.5, ("epoch 1.5", None)),
        ("epoch", "b", ("epoch b", None)),
        ("key", 2**63 - 1, ("key", 2**63 - 1)),
        ("key", -(10**30), (f"key {-(10**30)}", None)),
        ("<b>\ud800</b>", None, None),
        ("x" * 10_000, None, None),
        ("", None, ("span", None)),
        ("two\nlines", None, None),
        (12, None, ("12", None)),
        (None, None, ("None", None)),
    ],
)
def test_names_and_numbers(
    name: Any, number: Any, shown: tuple[str, int | None] | None, recording: FileRecording
) -> None:
    """A number at a name's end is one, and one that no record holds is part of the name.

    Any name is written as one line that can be written and shown.
    """
    with gpumemwidget.span(name, number):
        pass
    recording.close()

    recordings = gpumemwidget.load(recording.path)
    ((*found, _),) = list_spans(recordings)
    assert shown is None or tuple(found) == shown
    assert 1 <= len(str(found[0])) <= 120
    assert "<b>" not in recordings.report().html
    assert recordings.processes[0].n_unread == 0


def test_long_words_of_a_process_are_cut(tmp_path: Path) -> None:
    """Its label, and the error that ends it; nothing of them is lost to the reader."""
    batches: list[bytes] = []
    path = tmp_path / "a.jsonl"

    worker.join(batches.append, role="actor", label="trainer " * 10_000)
    worker.leave()
    with pytest.raises(ValueError, match="bad"), gpumemwidget.record(path):
        raise ValueError("bad " * 2_000_000)

    state = load_one(path)
    assert read_lines(b"".join(batches)).info.label == ("trainer " * 25)
    assert (state.status, state.n_unread) == ("failed", 0)
    assert len(state.error) == 1000
    assert state.error.startswith("ValueError: bad bad")
    assert state.error.endswith("…")


def test_side_by_side(gpus: SimulatedMachine, recording: FileRecording) -> None:
    """Spans of two threads see each other's memory, and say so; they end in any order."""
    began, may_end = threading.Event(), threading.Event()

    def work() -> None:
        with gpumemwidget.span("other"):
            began.set()
            may_end.wait(20)

    thread = threading.Thread(target=work)
    with gpumemwidget.span("mine"):
        thread.start()
        began.wait(20)
        gpus.free(gpus.allocate(30 * MIB))
    with gpumemwidget.span("alone"):
        may_end.set()
        thread.join()
    recording.close()

    spans = read_spans(load_one(recording.path))
    assert [read_gpu(spans[name])[2] for name in ("mine", "other", "alone")] == [30, 30, 0]
    assert [spans[name].shared_with for name in ("mine", "other", "alone")] == [1, 1, 1]


def test_a_generator(gpus: SimulatedMachine, recording: FileRecording) -> None:
    """Its span may outlive the one that it began in, and ends with the loop over it."""

    def produce() -> Iterator[int]:
        with gpumemwidget.span("produce"):
            yield from range(3)

    with gpumemwidget.span("first"):
        produced = produce()
        next(produced)
    gpus.free(gpus.allocate(20 * MIB))
    produced.close()  # type: ignore[attr-defined]
    recording.close()

    spans = read_spans(load_one(recording.path))
    assert read_gpu(spans["produce"])[2] == 20
    assert read_gpu(spans["first"])[2] == 0
    assert {span.status for span in spans.values()} == {"ok"}


@pytest.mark.parametrize(
    ("error", "status"), [(ValueError, "error"), (KeyboardInterrupt, "interrupted")]
)
def test_an_error(recording: FileRecording, error: type[BaseException], status: str) -> None:
    """It passes through, and the span says how it ended."""
    with pytest.raises(error), gpumemwidget.span("epoch"):
        raise error
    recording.close()

    assert [span.status for span in load_one(recording.path).spans] == [status]


def test_an_oom_has_one_card_however_many_spans_it_ends(recording: FileRecording) -> None:
    """Also where the program catches it and goes on; the next one has a card of its own."""
    for number in range(2):
        with (
            contextlib.suppress(MemoryError),
            gpumemwidget.span("epoch", number),
            gpumemwidget.span("step", number),
        ):
            raise MemoryError
    recording.close()

    state = load_one(recording.path)
    assert [card.text for card in state.ooms] == ["raise MemoryError"] * 2
    assert [span.status for span in state.spans] == ["error"] * 4


def test_a_flood_of_ooms_has_few_cards(recording: FileRecording) -> None:
    """Each of them costs time; the one that ends the recording has its card all the same."""
    with contextlib.suppress(MemoryError), recording:
        for number in range(30):
            with contextlib.suppress(MemoryError), gpumemwidget.span("batch", number):
                raise MemoryError
        raise MemoryError("the last")

    written = recording.path.read_text()
    assert written.count('"type":"oom"') == 9
    assert load_one(recording.path).ooms[-1].text == 'raise MemoryError("the last")'


def test_closed_within_a_span(gpus: SimulatedMachine, recording: FileRecording) -> None:
    """The span is recorded as far as it came; its end neither measures nor writes anything."""
    torch = simulate_torch(gpus)
    with gpumemwidget.span("epoch"):
        gpus.free(gpus.allocate(50 * MIB))
        recording.close()
        written = recording.path.read_bytes()
        gpus.free(gpus.allocate(70 * MIB))
    with gpumemwidget.span("later"):
        pass

    assert recording.path.read_bytes() == written
    assert read_gpu(read_spans(load_one(recording.path))["epoch"])[2] == 50
    assert torch.cuda.max_memory_allocated() == 70 * MIB


def test_without_a_recording() -> None:
    """Nothing is done."""
    with gpumemwidget.span("epoch"):
        pass


def test_a_full_disk(
    gpus: SimulatedMachine,
    recording: FileRecording,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """It is reported once; when there is room again, lines are whole and figures right."""
    write, is_refused = os.write, threading.Event()

    def fill(descriptor: int, data: bytes) -> int:
        # The host's peak begins anew by such a line: no recording's.
        if len(data) > 10 or data == b"5":
            return write(descriptor, data[:10])
        is_refused.set()
        raise OSError(28, "No space left on device")

    kept = gpus.allocate(10 * MIB)
    with monkeypatch.context() as patch:
        patch.setattr(os, "write", fill)
        with gpumemwidget.span("lost"):
            gpus.free(gpus.allocate(80 * MIB))
            recording.recorder.end_span(None)
        recording.recorder._sampler._tick(recording.recorder._sampler._wake)
        assert is_refused.wait(20)
    recording.close()

    state = load_one(recording.path)
    assert capsys.readouterr().err.count("No space left") == 1
    assert next(r for r in state.readings if r.device == GPU).allocated_bytes == 10 * MIB
    assert find_peak(state, GPU).allocated_bytes == 90 * MIB
    assert state.status == "ended"
    gpus.free(kept)


#: What a program does: allocate so many MiB on a GPU, free the oldest, begin a span, end the last.
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("take"), st.integers(1, 8), st.integers(0, 1)),
        st.just(("free",)),
        st.just(("begin",)),
        st.just(("end",)),
    ),
    max_size=30,
)


@given(steps=STEPS)
def test_exact_peaks(
    steps: list[tuple[Any, ...]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Of any program, each span's and the whole recording's are those of the allocators."""
    path = tmp_path_factory.mktemp("spans") / "a.jsonl"
    expected: dict[str, list[int]] = {}
    with simulate_gpus(2, total_bytes=1 << 30) as gpus:
        for gpu in range(2):
            gpus.touch(gpu)
        read_stats = gpus.torch._C._cuda_memoryStats
        held: list[int] = []
        open_spans: list[tuple[str, Any]] = []
        highest = [0, 0]
        with gpumemwidget.record(path, steps=False):
            for place, (verb, *amount) in enumerate(steps):
                if verb == "take":
                    n_mib, gpu = amount
                    held.append(gpus.allocate(n_mib * MIB, gpu))
                elif verb == "free" and held:
                    gpus.free(held.pop(0))
                elif verb == "begin":
                    name = f"span{place}"
                    block = gpumemwidget.span(name)
                    block.__enter__()
                    open_spans.append((name, block))
                    expected[name] = [0, 0]
                elif verb == "end" and open_spans:
                    open_spans.pop()[1].__exit__(None, None, None)
                # The rest of a block stays with it if it is too small for one of its own.
                stats = [read_stats(gpu)["allocated_bytes"]["all"] for gpu in range(2)]
                taken = [each["current"] for each in stats]
                highest = list(map(max, highest, taken))
                for name, _ in open_spans:
                    expected[name] = list(map(max, expected[name], taken))
            for _, block in reversed(open_spans):
                block.__exit__(None, None, None)

    state = load_one(path)
    found = {
        span.name: [
            each.allocated.peak_bytes for each in span.devices if each.device.startswith("cuda")
        ]
        for span in state.spans
    }
    assert found == expected
    assert [find_peak(state, f"cuda:{gpu}").allocated_bytes for gpu in range(2)] == highest
    assert find_peak(state, GPU).peak_is == "exact"


def test_closed_while_threads_work(
    gpus: SimulatedMachine, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Spans of many threads begin and end as the recording does: nothing fails, no line is torn."""
    is_done = threading.Event()

    def work(name: str) -> None:
        number = 0
        while not is_done.is_set():
            with gpumemwidget.span(name, number):
                gpus.free(gpus.allocate(MIB))
            number += 1

    threads = [threading.Thread(target=work, args=(f"thread {n}",)) for n in range(8)]
    for thread in threads:
        thread.start()
    for n in range(10):
        with gpumemwidget.record(tmp_path / f"{n}.jsonl"):
            gpus.free(gpus.allocate(50 * MIB))
    is_done.set()
    for thread in threads:
        thread.join()

    states = gpumemwidget.load(tmp_path).processes
    assert len(states) == 10
    assert {(state.status, state.n_unread) for state in states} == {("ended", 0)}
    assert {find_peak(state, GPU).peak_is for state in states} == {"exact"}
    assert capfd.readouterr().err == ""


def test_the_process_and_its_peaks_are_written_again_at_the_end(recording: FileRecording) -> None:
    """Messages may be lost on their way, where an engine passes them on."""
    with gpumemwidget.span("epoch", 1):
        pass
    recording.close()

    last = list(map(decode, recording.path.read_bytes().splitlines()))[-4:]

    assert isinstance(last[-1], Ended)
    assert [type(message) for message in last].count(Began) == 1
    [written] = [message for message in last if isinstance(message, Peaks)]
    assert {peak.device for peak in written.peaks} == {"cuda:0", "host"}


def test_exit_status_0_is_no_failure(tmp_path: Path) -> None:
    """Nor is a span that it ends."""
    for code, status in ((0, "ended"), (3, "failed"), ("no data", "failed")):
        path = tmp_path / f"{code}.jsonl"
        with (
            pytest.raises(SystemExit),
            gpumemwidget.record(path),
            gpumemwidget.span("epoch"),
        ):
            sys.exit(code)

        state = load_one(path)
        assert state.status == status
        assert state.spans[0].status == ("ok" if status == "ended" else "error")


_INTERRUPTED = """
import gc, signal, sys, gpumemwidget

def batches():
    with gpumemwidget.span("load"):
        yield

class Holder:
    pass

def abandon():
    holder = Holder()
    holder.batches, holder.itself = batches(), holder
    next(holder.batches)

def handle(*_):
    with gpumemwidget.span("checkpoint"):
        pass

gc.set_threshold(50)
signal.signal(signal.SIGALRM, handle)
with gpumemwidget.record("a.jsonl"):
    signal.setitimer(signal.ITIMER_REAL, 0.003, 0.003)
    for step in range(3000):
        abandon()
        with gpumemwidget.span("step", step):
            pass
    signal.setitimer(signal.ITIMER_REAL, 0)
"""


def test_spans_in_finalizers_and_signal_handlers_hold_nothing_up(tmp_path: Path) -> None:
    """They come while their thread is within code of ours, which has its locks."""
    script = write_script(tmp_path, _INTERRUPTED)

    ended = run_python(tmp_path, script)

    state = load_one(tmp_path / "a.jsonl")
    counts = dict.fromkeys(("load", "step", "checkpoint"), 0)
    for span in state.spans:
        counts[span.name] = counts.get(span.name, 0) + span.n_spans
    assert (ended.status, ended.err) == (0, "")
    assert counts["step"] == 3000
    assert counts["load"] > 2000
    assert counts["checkpoint"] > 10


_FORKED = """
import multiprocessing, os, threading, torch, gpumemwidget

def make_optimizer():
    weight = torch.nn.Parameter(torch.ones(1))
    weight.grad = torch.ones(1)
    return torch.optim.SGD([weight], lr=0.1)

# To make one imports, and so does its first step: the lock of an import may be held at a fork.
optimizers = [make_optimizer() for _ in range(2)]
for optimizer in optimizers:
    optimizer.step()

def work(number):
    optimizers[1].step()
    gpumemwidget.record(f"child{number}.jsonl")
    with gpumemwidget.span("work"):
        pass

is_over = threading.Event()
def train():
    while not is_over.is_set():
        optimizers[0].step()

with gpumemwidget.record("parent.jsonl"):
    thread = threading.Thread(target=train, daemon=True)
    thread.start()
    context = multiprocessing.get_context("fork")
    for number in range(8):
        child = context.Process(target=work, args=(number,))
        child.start()
        child.join(20)
        assert child.exitcode == 0, child
    is_over.set()
    thread.join()
"""


def test_forked_children_step_and_record(tmp_path: Path) -> None:
    """Their parent's hook is silent, and their own recording ends with them."""
    script = write_script(tmp_path, _FORKED)

    ended = run_python(tmp_path, script)

    assert ended.status == 0, ended.err
    for number in range(8):
        state = load_one(tmp_path / f"child{number}.jsonl")
        assert state.status == "ended"
        assert [span.name for span in state.spans] == ["work", "the program"]
    parent = load_one(tmp_path / "parent.jsonl")
    assert (parent.status, parent.n_unread) == ("ended", 0)
    assert "work" not in {span.name for span in parent.spans}


@pytest.mark.parametrize("is_watched_first", [True, False])
def test_a_file_beside_a_notebook_that_watches(
    is_watched_first: bool, gpus: SimulatedMachine, tmp_path: Path
) -> None:
    """Whoever began first, each has the spans of its own time, with its own exact peaks."""
    batches: list[bytes] = []

    def spike(name: str, n_mib: int) -> None:
        with gpumemwidget.span(name):
            gpus.free(gpus.allocate(n_mib * MIB))

    with contextlib.ExitStack() as stack:
        if is_watched_first:
            worker.join(batches.append, role="worker", number=3)
            stack.callback(worker.leave)
            spike("before", 100)
        with gpumemwidget.record(tmp_path / "a.jsonl", steps=False):
            spike("within", 50)
            with pytest.raises(BusyError, match="recorded already"):
                gpumemwidget.record(tmp_path / "b.jsonl")
            assert not (tmp_path / "b.jsonl").exists()
            if not is_watched_first:
                worker.join(batches.append, role="worker", number=3)
                stack.callback(worker.leave)
            spike("within both", 30)
        spike("after", 20)

    in_file, sent = load_one(tmp_path / "a.jsonl"), read_lines(b"".join(batches))
    assert in_file.status == sent.status == "ended"
    assert {name: read_gpu(span)[2] for name, span in read_spans(in_file).items()} == {
        "within": 50,
        "within both": 30,
    }
    expected = {"within both": 30, "after": 20}
    if is_watched_first:
        expected = {"before": 100, "within": 50, **expected}
    assert {name: read_gpu(span)[2] for name, span in read_spans(sent).items()} == expected
    assert find_peak(in_file, GPU).allocated_bytes == 50 * MIB
    assert find_peak(sent, GPU).allocated_bytes == max(expected.values()) * MIB


_HANGING = """
import os, threading, gpumemwidget

recording = gpumemwidget.record("a.jsonl")
write, hangs = os.write, threading.Event()

def hang(descriptor, data):
    if threading.current_thread().name != "gpumemwidget-sending":
        return write(descriptor, data)
    hangs.set()
    threading.Event().wait()

os.write = hang
for number in range(100):
    with gpumemwidget.span("step", number):
        pass
hangs.wait()
print("done", flush=True)
"""


def test_a_write_that_hangs_holds_up_neither_a_span_nor_the_end(tmp_path: Path) -> None:
    """As on a share that is gone: the program ends as it would, after two seconds at most."""
    script = write_script(tmp_path, _HANGING)

    ended = run_python(tmp_path, script)

    assert (ended.status, ended.out, ended.err) == (0, "done\n", "")


def test_more_open_spans_than_are_measured(
    gpus: SimulatedMachine, recording: FileRecording, capsys: pytest.CaptureFixture[str]
) -> None:
    """The first 200 have their peaks, and it is said once that the others are not recorded."""
    with contextlib.ExitStack() as stack:
        for number in range(1000):
            stack.enter_context(gpumemwidget.span("request", number))
        gpus.free(gpus.allocate(30 * MIB))
    recording.close()

    state = load_one(recording.path)
    assert sum(span.n_spans for span in state.spans) == 200
    assert find_peak(state, GPU).allocated_bytes == 30 * MIB
    assert {read_gpu(span)[2] for span in state.spans} == {30}
    assert capsys.readouterr().err.count("200 spans are open, and those beyond") == 1


@given(order=st.permutations(range(6)), held=st.lists(st.integers(0, 8), min_size=12, max_size=12))
def test_peaks_of_spans_side_by_side(order: list[int], held: list[int]) -> None:
    """Spans of several lanes that end in any order each have the highest of their time."""
    with (
        simulate_gpus(1, total_bytes=1 << 30) as gpus,
        contextlib.closing(detect_hardware()) as all_,
    ):
        gpus.touch(0)
        spans, now = Spans(all_, lambda: 0.0), iter(held)
        spans.start()
        expected: dict[int, int] = {}
        begun, ended = [], []

        def use() -> None:
            n_mib = next(now)
            if n_mib:
                gpus.free(gpus.allocate(n_mib * MIB))
            for number in set(expected).difference(ended):
                expected[number] = max(expected[number], n_mib)

        for number in range(6):
            begun.append(spans.begin(f"span{number}", lane=number))
            expected[number] = 0
            use()
        records = {}
        for number in order:
            use()
            records[number] = spans.end(begun[number])
            ended.append(number)

    assert {number: read_gpu(record)[2] for number, record in records.items()} == expected
    assert {record.shared_with for record in records.values()} == {5}
