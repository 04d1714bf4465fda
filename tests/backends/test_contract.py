"""What ``backends/protocol.py`` promises, held against every implementation.

The same tests run on real process memory, on recordings, on the CUDA backend over
simulated allocators, and on a real GPU where there is one. So what is shown with a recording is
what a GPU would show.
"""

from __future__ import annotations

import dataclasses
import functools
import random
import subprocess
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import pynvml
import pytest

from gpumemwidget.backends.counters import AcceleratorBackend
from gpumemwidget.backends.cuda.backend import CudaBackend
from gpumemwidget.backends.driver.gpu_processes import ProcessTree
from gpumemwidget.backends.driver.nvml import NvmlMonitor
from gpumemwidget.backends.hardware import Hardware
from gpumemwidget.backends.host import HostBackend
from gpumemwidget.backends.protocol import DeviceMonitor, MemoryBackend, ProcessSource
from gpumemwidget.errors import BackendError
from gpumemwidget.model.devices import (
    HOST,
    Block,
    ChildProcess,
    DeviceInfo,
    Limit,
    LimitRequest,
    PeakIs,
    Reading,
    Segment,
)
from gpumemwidget.model.traces import AllocatorTrace, TraceAction
from gpumemwidget.report.render.wording import word_hardware_note
from gpumemwidget.testing import SimulatedDriver, SimulatedGpus, simulate_torch
from tests.backends.children import run_in_fork
from tests.backends.fake_accelerators import make_mps, make_xpu
from tests.backends.fake_nvml import FakeGpu, FakeNvml
from tools.recordings import (
    Recorder,
    Recording,
    RecordingPlayer,
    ReplayBackend,
    ReplayMonitor,
    load_recording,
    save_recording,
)

DATA = Path(__file__).parents[1] / "data"
MIB = 1024 * 1024
WORK_BYTES = 48 * MIB
#: What the process may do beside the work, where real memory is read.
SLACK_BYTES = 4 * MIB
METHODS = (
    *("list_devices", "read", "start_span", "read_exact", "read_as_user"),
    *("read_segments", "release_workspaces", "empty_cache", "take_notes"),
    *("start_trace", "end_trace", "read_pinned", "read_limits", "reset_peaks"),
    "close",
)
#: What the calls need to be told.
OPTIONS: dict[str, dict[str, int]] = {"start_trace": {"n_events": 1000}}


@dataclass
class Subject:
    """A backend, and how to use memory on what it reads."""

    backend: MemoryBackend
    #: Takes ``WORK_BYTES`` on the first device and lets them go again.
    work: Callable[[], None]
    #: Begins to use another device; ``None`` where there is none.
    touch: Callable[[], None] | None = None
    #: Whether it tells of the allocator's blocks, and of its events.
    tells_blocks: bool = True
    is_traced: bool = True


def make_host() -> Subject:
    def work() -> None:
        block = bytearray(WORK_BYTES)
        del block

    return Subject(HostBackend(), work, tells_blocks=False, is_traced=False)


def make_replay(recording: Recording) -> Subject:
    player = RecordingPlayer(recording)
    player.advance()

    def work() -> None:
        player.advance(2)

    def touch() -> None:
        player.advance(player.n_events)

    return Subject(ReplayBackend(player), work, touch)


@functools.cache
def record_simulation() -> Recording:
    """A device in use from the start that works again and again, and another from the end on."""
    gpus = SimulatedGpus(2)
    recorder = Recorder(Hardware([CudaBackend(simulate_torch(gpus))]))
    recorder.start_trace()
    gpus.allocate(3 * MIB)
    for _ in range(400):
        recorder.tick(with_segments=True)
        block = gpus.allocate(WORK_BYTES)
        recorder.tick(with_segments=True)
        gpus.free(block)
    gpus.allocate(MIB, 1)
    recorder.end_trace()
    return recorder.to_recording()


@functools.cache
def record_file() -> Recording:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "simulation.json.gz"
        save_recording(record_simulation(), path)
        return load_recording(path)


def make_file() -> Subject:
    return make_replay(record_file())


@functools.cache
def record_host() -> Recording:
    """Real memory, recorded once: it takes a while to touch so much."""
    host = HostBackend()
    recorder = Recorder(Hardware([host]))
    recorder.tick()
    for _ in range(10):
        block = bytearray(WORK_BYTES)
        del block
        recorder.tick()
    host.close()
    return recorder.to_recording()


def make_recorded_host() -> Subject:
    backend = ReplayBackend(RecordingPlayer(record_host()))

    def work() -> None:
        backend.player.advance()

    return Subject(backend, work, tells_blocks=False, is_traced=False)


def simulate(
    make_backend: Callable[[SimulatedGpus], MemoryBackend], n_gpus: int = 2, **about: Any
) -> Subject:
    allocator = SimulatedGpus(n_gpus)
    allocator.allocate(3 * MIB)

    def work() -> None:
        allocator.free(allocator.allocate(WORK_BYTES))
        allocator.empty_cache()

    touch = None if n_gpus == 1 else lambda: allocator.touch(1)
    return Subject(make_backend(allocator), work, touch, **about)


def make_simulated_cuda() -> Subject:
    return simulate(lambda gpus: CudaBackend(simulate_torch(gpus)))


def make_simulated_xpu() -> Subject:
    return simulate(lambda gpus: AcceleratorBackend(make_xpu(gpus)), is_traced=False)


def make_simulated_mps() -> Subject:
    return simulate(
        lambda gpus: AcceleratorBackend(make_mps(gpus)),
        n_gpus=1,
        tells_blocks=False,
        is_traced=False,
    )


def make_real_cuda() -> Subject:
    import torch

    kept = torch.zeros(1, device="cuda:0")

    def work() -> None:
        torch.empty(WORK_BYTES, dtype=torch.uint8, device=kept.device)
        torch.cuda.empty_cache()

    return Subject(CudaBackend(torch), work)


WITH_A_SECOND_DEVICE = [
    pytest.param(make_file, id="file"),
    pytest.param(make_simulated_cuda, id="simulated-cuda"),
]


@pytest.fixture(
    params=[
        *WITH_A_SECOND_DEVICE,
        pytest.param(make_simulated_xpu, id="simulated-xpu"),
        pytest.param(make_simulated_mps, id="simulated-mps"),
        pytest.param(make_host, id="host"),
        pytest.param(make_recorded_host, id="recorded-host"),
        pytest.param(make_real_cuda, id="cuda", marks=pytest.mark.gpu),
    ]
)
def subject(request: pytest.FixtureRequest) -> Iterator[Subject]:
    made = request.param()
    yield made
    made.backend.close()


def check_readings(readings: tuple[Reading, ...]) -> None:
    """What holds of every answer, whenever it was asked for."""
    assert type(readings) is tuple
    devices = [reading.device for reading in readings]
    assert len(set(devices)) == len(devices)
    for reading in readings:
        assert type(reading) is Reading
        assert reading.device == "host" or reading.device.startswith(("cuda:", "xpu:", "mps:"))
        for field in dataclasses.fields(reading):
            value = getattr(reading, field.name)
            if field.name not in ("device", "peak_is"):
                assert value is None or (type(value) is int and value >= 0), (field.name, value)
        peaks = [
            (reading.allocated_bytes, reading.allocated_peak_bytes),
            (reading.reserved_bytes, reading.reserved_peak_bytes),
        ]
        assert all(peak >= current for current, peak in peaks if None not in (current, peak))
        has_peak = any(peak is not None for _, peak in peaks)
        assert (reading.peak_is in get_args(PeakIs)) is has_peak


def check_segments(segments: tuple[Segment, ...], readings: tuple[Reading, ...]) -> None:
    """What holds of every snapshot, against the readings of its moment."""
    assert type(segments) is tuple
    places = [(segment.device, segment.address) for segment in segments]
    assert places == sorted(set(places))
    reserved: Counter[str] = Counter()
    allocated: Counter[str] = Counter()
    for segment in segments:
        assert type(segment) is Segment
        assert segment.is_private is (segment.pool_id != (0, 0))
        reserved[segment.device] += segment.n_bytes
        end = segment.address
        for block in segment.blocks:
            assert type(block) is Block
            assert block.address == end
            assert block.n_bytes > 0
            assert block.requested_bytes is None or 0 <= block.requested_bytes <= block.n_bytes
            end += block.n_bytes
            if block.state == "active_allocated":
                allocated[segment.device] += block.n_bytes
        assert end == segment.address + segment.n_bytes
    counted = {reading.device: reading for reading in readings}
    assert {device: counted[device].reserved_bytes for device in reserved} == dict(reserved)
    assert {device: counted[device].allocated_bytes for device in allocated} == dict(allocated)


# -- Memory backends --------------------------------------------------------------------------


def test_it_is_a_memory_backend(subject: Subject) -> None:
    """Of a known kind."""
    assert isinstance(subject.backend, MemoryBackend)
    assert subject.backend.kind in ("cuda", "host", "mps", "replay", "xpu")


def test_devices_are_described(subject: Subject) -> None:
    """Infos are frozen records with a name, for exactly the devices that are read."""
    infos = subject.backend.list_devices()
    readings = subject.backend.read()

    assert type(infos) is tuple
    assert all(type(info) is DeviceInfo and info.name for info in infos)
    assert all(info.total_bytes is None or info.total_bytes > 0 for info in infos)
    assert [info.device for info in infos] == [reading.device for reading in readings]
    assert len(infos) >= 1


@pytest.mark.parametrize("method", ["read", "start_span", "read_exact", "read_as_user"])
def test_readings_make_sense_at_any_time(subject: Subject, method: str) -> None:
    """Before a span, within one, after one: known figures are never negative, peaks no lower."""
    ask = getattr(subject.backend, method)

    check_readings(ask())
    subject.work()
    check_readings(ask())
    subject.backend.start_span()
    subject.work()
    check_readings(ask())
    subject.backend.read_exact()
    check_readings(ask())


def test_readings_are_records_of_their_moment(subject: Subject) -> None:
    """A reading is frozen, and does not change with what comes after."""
    before = subject.backend.start_span()
    copies = [dataclasses.astuple(reading) for reading in before]

    subject.work()
    subject.backend.read_exact()

    assert [dataclasses.astuple(reading) for reading in before] == copies
    with pytest.raises(dataclasses.FrozenInstanceError):
        before[0].reserved_bytes = 1


def test_a_span_starts_with_peaks_that_are_its_present(subject: Subject) -> None:
    """At a span's start the marks stand where the counters do."""
    subject.work()

    (reading, *_) = subject.backend.start_span()

    assert reading.reserved_peak_bytes == reading.reserved_bytes
    assert reading.allocated_peak_bytes in (None, reading.allocated_bytes)
    assert reading.peak_is == "exact"


def test_a_span_ends_with_the_peak_of_what_came_and_went(subject: Subject) -> None:
    """Work that is gone at the end shows in the peak, and only there."""
    (before, *_) = subject.backend.start_span()
    subject.work()
    (after, *_) = subject.backend.read_exact()

    rise_bytes = after.reserved_peak_bytes - before.reserved_bytes
    assert after.peak_is == "exact"
    assert after.reserved_peak_bytes >= max(before.reserved_bytes, after.reserved_bytes)
    # A cache may have had part of it in reserve.
    assert 0 <= rise_bytes < WORK_BYTES + SLACK_BYTES
    if after.allocated_peak_bytes is not None:
        allocated_bytes = after.allocated_peak_bytes - before.allocated_bytes
        assert 0 <= allocated_bytes - WORK_BYTES < SLACK_BYTES
        assert after.allocated_bytes == before.allocated_bytes
    else:
        assert rise_bytes > WORK_BYTES - SLACK_BYTES


def test_a_span_knows_nothing_of_the_one_before(subject: Subject) -> None:
    """An end's peaks are those of its own span alone."""
    subject.backend.start_span()
    subject.work()
    subject.backend.read_exact()

    (before, *_) = subject.backend.start_span()
    (after, *_) = subject.backend.read_exact()

    assert after.reserved_peak_bytes - before.reserved_bytes < SLACK_BYTES
    if after.allocated_peak_bytes is not None:
        assert after.allocated_peak_bytes == before.allocated_bytes


def test_a_second_start_ends_the_running_span(subject: Subject) -> None:
    """What came before the second start is not in the end's peaks."""
    subject.backend.start_span()
    subject.work()
    (before, *_) = subject.backend.start_span()
    (after, *_) = subject.backend.read_exact()

    assert after.reserved_peak_bytes - before.reserved_bytes < SLACK_BYTES
    assert after.peak_is == "exact"


def test_marks_stay_until_the_next_span(subject: Subject) -> None:
    """A reading after a span's end still has the peaks since it began, and so has a second end."""
    subject.backend.start_span()
    subject.work()
    (end, *_) = subject.backend.read_exact()

    (later, *_) = subject.backend.read()
    (again, *_) = subject.backend.read_exact()

    assert later.reserved_peak_bytes >= end.reserved_peak_bytes
    assert again.reserved_peak_bytes >= end.reserved_peak_bytes
    assert (later.allocated_peak_bytes, again.allocated_peak_bytes) == (
        end.allocated_peak_bytes,
        end.allocated_peak_bytes,
    )


def test_reading_ends_nothing(subject: Subject) -> None:
    """However often one reads within a span, its end tells the same."""
    (before, *_) = subject.backend.start_span()
    subject.work()
    seen = [subject.backend.read()[0].reserved_peak_bytes for _ in range(5)]
    subject.backend.read_as_user()
    subject.backend.list_devices()
    (after, *_) = subject.backend.read_exact()

    assert seen == sorted(seen)
    assert after.reserved_peak_bytes >= seen[-1]
    assert after.reserved_peak_bytes - before.reserved_bytes < WORK_BYTES + SLACK_BYTES


def test_users_peak_outlives_our_spans(subject: Subject) -> None:
    """What the user is told of the peak never falls by what we do."""
    subject.work()
    (told, *_) = subject.backend.read_as_user()
    for _ in range(3):
        subject.backend.start_span()
        subject.backend.read_exact()
    (after, *_) = subject.backend.read_as_user()

    assert after.reserved_peak_bytes >= told.reserved_peak_bytes
    if told.allocated_peak_bytes is not None:
        assert after.allocated_peak_bytes == told.allocated_peak_bytes


@pytest.mark.parametrize("subject", WITH_A_SECOND_DEVICE, indirect=True)
def test_a_device_touched_within_a_span_is_in_its_end(subject: Subject) -> None:
    """It is missing at the start, and there at the end with peaks of its own."""
    assert subject.touch is not None
    start = subject.backend.start_span()
    subject.touch()
    end = subject.backend.read_exact()

    assert [reading.device for reading in start] == ["cuda:0"]
    assert [reading.device for reading in end] == ["cuda:0", "cuda:1"]
    assert [info.device for info in subject.backend.list_devices()] == ["cuda:0", "cuda:1"]
    assert end[1].allocated_bytes is not None
    assert end[1].peak_is == "exact"
    check_readings(end)


def test_blocks_are_what_is_allocated_and_segments_what_is_reserved(subject: Subject) -> None:
    """To the byte, before, within and after work, and of every device that is in use."""
    backend = subject.backend
    check_segments(backend.read_segments(), backend.read())
    subject.work()
    if subject.touch is not None:
        subject.touch()
    segments, readings = backend.read_segments(), backend.read()

    check_segments(segments, readings)
    if subject.tells_blocks:
        in_use = {reading.device for reading in readings if reading.reserved_bytes}
        assert {segment.device for segment in segments} == in_use != set()


def test_who_tells_no_blocks_has_none(subject: Subject) -> None:
    """The host has no segments, played back, and MPS has none."""
    assert bool(subject.backend.read_segments()) is subject.tells_blocks


def check_trace(trace: AllocatorTrace, readings: dict[str, tuple[Reading, Reading]]) -> None:
    """What holds of every trace, against the readings at its ends."""
    events = trace.events
    columns = (events.addresses, events.sizes, events.times_us, events.streams, events.stacks)
    assert {len(events), *map(len, columns)} == {len(events)}
    assert all(code < len(TraceAction) for code in events.actions)
    assert [each.typecode for each in columns] == ["Q", "q", "q", "q", "i"]
    assert all(0 <= place < len(events.stack_table) for place in events.stacks)
    assert events.stack_table[0] == ()
    times_us = list(events.times_us)
    assert times_us == sorted(times_us)
    assert not times_us or trace.start_us <= times_us[0] <= times_us[-1] <= trace.end_us
    start, end = readings[trace.device]
    for segments, reading in ((trace.before, start), (trace.after, end)):
        check_segments(segments, (reading,))
        assert sum(each.n_bytes for each in segments) == reading.reserved_bytes


def test_a_trace_tells_what_was_allocated(subject: Subject) -> None:
    """One for each GPU in use, with what stood at its ends; none of the host."""
    backend = subject.backend
    devices = [info.device for info in backend.list_devices() if info.device != HOST]
    untraced = [] if subject.is_traced else devices
    assert len(backend.start_trace(n_events=1000)) == len(untraced)
    starts = {reading.device: reading for reading in backend.read()}
    subject.work()
    ends = {reading.device: reading for reading in backend.read()}
    traces = backend.end_trace()

    assert [trace.device for trace in traces] == (devices if subject.is_traced else [])
    for trace in traces:
        check_trace(trace, {device: (starts[device], ends[device]) for device in devices})
        assert trace.is_whole
        actions = [TraceAction(code).word for code in trace.events.actions]
        taken, given = actions.index("alloc"), actions.index("free_requested")
        assert trace.events.sizes[taken] == WORK_BYTES
        assert taken < given
        assert trace.events.addresses[taken] == trace.events.addresses[given]


def test_a_trace_runs_from_its_start_to_its_end(subject: Subject) -> None:
    """Where there is something to trace; a second end gives nothing."""
    backend = subject.backend
    assert backend.end_trace() == ()
    backend.start_trace(n_events=1000)

    assert bool(backend.end_trace()) is subject.is_traced
    assert backend.end_trace() == ()


def test_a_trace_keeps_no_more_events_than_asked_for(subject: Subject) -> None:
    """The newest; and says that others are missing."""
    backend = subject.backend
    backend.start_trace(n_events=2)
    subject.work()
    subject.work()
    traces = backend.end_trace()

    assert all(len(trace.events) <= 2 and not trace.is_whole for trace in traces)
    assert len(traces) == (1 if subject.is_traced else 0)


def test_closing_ends_a_trace(subject: Subject) -> None:
    """Nothing runs on."""
    backend = subject.backend
    backend.start_trace(n_events=1000)

    backend.close()

    assert backend.end_trace() == ()


def test_no_order_of_calls_fails(subject: Subject) -> None:
    """All methods may follow one another in any order, ``close`` in between too."""
    rng = random.Random(20_261_121)
    methods = list(METHODS)
    calls = [rng.choice(methods[:-1]) for _ in range(60)]
    calls += [rng.choice(methods) for _ in range(60)]

    for name in calls:
        answer = getattr(subject.backend, name)(**OPTIONS.get(name, {}))
        if name in ("read", "start_span", "read_exact", "read_as_user"):
            check_readings(answer)


def test_closed_twice_is_fine(subject: Subject) -> None:
    """The second time does nothing, started or not."""
    subject.backend.start_span()

    subject.backend.close()
    subject.backend.close()

    check_readings(subject.backend.read())


def test_notes_are_told_once(subject: Subject) -> None:
    """Notes are sentences, and none comes twice."""
    subject.backend.start_span()
    subject.backend.read_exact()

    notes = subject.backend.take_notes()

    assert type(notes) is tuple
    assert all("\n" not in word_hardware_note(note) for note in notes)
    assert subject.backend.take_notes() == ()


def test_all_may_be_called_from_other_threads(subject: Subject) -> None:
    """While one thread has spans, others read: nothing fails and every answer makes sense."""
    stop = threading.Event()
    failures: list[BaseException] = []

    def watch() -> None:
        while not stop.is_set():
            try:
                check_readings(subject.backend.read())
                check_readings(subject.backend.read_as_user())
                subject.backend.list_devices()
                assert type(subject.backend.read_segments()) is tuple
            except BaseException as error:  # noqa: BLE001 - whatever it is, the test is to fail
                failures.append(error)
                return

    threads = [threading.Thread(target=watch) for _ in range(3)]
    for thread in threads:
        thread.start()
    ends = []
    for _ in range(20):
        subject.backend.start_span()
        subject.work()
        ends.append(subject.backend.read_exact())
    stop.set()
    for thread in threads:
        thread.join()

    assert failures == []
    for end in ends:
        check_readings(end)


def test_a_forked_child_reads_without_failing(subject: Subject) -> None:
    """In a child that was forked within a span, every method answers."""
    subject.backend.start_span()

    def ask_all() -> None:
        for name in METHODS:
            getattr(subject.backend, name)(**OPTIONS.get(name, {}))

    assert run_in_fork(ask_all) is None
    check_readings(subject.backend.read_exact())


# -- What may be taken, and peaks begun anew ---------------------------------------------------


def test_a_limit_is_told_or_refused(subject: Subject) -> None:
    """What was set is read, until it is taken away; who can't says so in one line."""
    backend = subject.backend
    for info in backend.list_devices():
        before = backend.read_limits()
        try:
            backend.set_limit(info.device, LimitRequest(80 * MIB))
        except BackendError as error:
            assert "\n" not in str(error)  # noqa: PT017 - either outcome is right, none other is
            assert backend.read_limits() == before
            continue
        limits = {limit.device: limit for limit in backend.read_limits()}
        backend.set_limit(info.device, LimitRequest())
        after = {limit.device: limit.limit_bytes for limit in backend.read_limits()}

        assert limits[info.device].limit_bytes == 80 * MIB
        assert after.get(info.device) is None


def test_limits_are_those_of_its_devices(subject: Subject) -> None:
    """In their order; with what is reserved, where a device is in use."""
    limits = subject.backend.read_limits()

    devices = [info.device for info in subject.backend.list_devices()]
    reserved = {each.device: each.reserved_bytes for each in subject.backend.read()}
    assert [each.device for each in limits] == [
        each for each in devices if each in {limit.device for limit in limits}
    ]
    for limit in limits:
        assert type(limit) is Limit
        assert limit.reserved_bytes == reserved[limit.device]
        assert not limit.is_waiting


@pytest.mark.parametrize("device", ["cuda:99", "cuda:", "cuda:x", "disk", ""])
def test_what_is_no_device_has_no_limit(subject: Subject, device: str) -> None:
    """It is refused, and nothing waits for it."""
    backend = subject.backend
    with pytest.raises(BackendError):
        backend.set_limit(device, LimitRequest(80 * MIB))

    assert device not in [limit.device for limit in backend.read_limits()]


def test_peaks_begin_anew_for_the_user_alone(subject: Subject) -> None:
    """On the devices that are told of; the running span keeps its own."""
    subject.backend.start_span()
    subject.work()
    (before, *_) = subject.backend.read()

    done = subject.backend.reset_peaks()
    (told, *_) = subject.backend.read_as_user()
    (after, *_) = subject.backend.read_exact()

    assert set(done) <= {info.device for info in subject.backend.list_devices()} - {HOST}
    assert after.reserved_peak_bytes >= before.reserved_peak_bytes
    assert after.allocated_peak_bytes == before.allocated_peak_bytes
    if told.device in done:
        assert told.allocated_peak_bytes == told.allocated_bytes
        assert told.reserved_peak_bytes == told.reserved_bytes
    else:
        assert told.reserved_peak_bytes >= before.reserved_peak_bytes


def test_peaks_of_other_devices_stay(subject: Subject) -> None:
    """Where only some are to begin anew, and these are none of its own."""
    subject.work()
    before = subject.backend.read_as_user()[0].allocated_peak_bytes

    assert subject.backend.reset_peaks(["cuda:99"]) == ()
    assert subject.backend.read_as_user()[0].allocated_peak_bytes == before


def test_pinned_memory_is_known_or_not(subject: Subject) -> None:
    """Nobody begins it by asking."""
    told = [subject.backend.read_pinned() for _ in range(2)]

    assert told[0] == told[1]
    for pinned in told:
        assert pinned is None or pinned >= 0


# -- Device monitors --------------------------------------------------------------------------


def make_nvml(*gpus: FakeGpu, **environ: str) -> NvmlMonitor:
    return NvmlMonitor(FakeNvml(*gpus), environ=environ)


def make_instance() -> NvmlMonitor:
    instance = FakeGpu("MIG 1g", "MIG-1", processes={1: 5})
    return make_nvml(FakeGpu(uuid="GPU-b", instances=[instance]), CUDA_VISIBLE_DEVICES="MIG-1")


def make_simulated() -> SimulatedDriver:
    """Two simulated GPUs: one in use, beside another process and a child."""
    gpus = SimulatedGpus(2)
    gpus.allocate(3 * MIB)
    driver = SimulatedDriver(gpus)
    driver.set_process(2**30 + 1, 5 * MIB)
    driver.set_process(2**30 + 2, 7 * MIB, 1, name="python rank.py", relation="child")
    return driver


def make_lost() -> SimulatedDriver:
    driver = make_simulated()
    driver.lose(1)
    return driver


def record(driver: SimulatedDriver) -> ReplayMonitor:
    """A recording of a driver, played."""
    recorder = Recorder(Hardware([], driver))
    recorder.tick()
    return ReplayMonitor(RecordingPlayer(recorder.to_recording()))


def play_to_the_end(name: str) -> ReplayMonitor:
    """A recording of real GPUs, where it ends."""
    player = RecordingPlayer(load_recording(DATA / "h200-devices" / f"{name}.json.gz"))
    player.advance(player.n_events)
    return ReplayMonitor(player)


TELLING = [
    pytest.param(
        lambda: make_nvml(FakeGpu(processes={3: 5, 2: None}, drawing={3: 5}), FakeGpu()), id="nvml"
    ),
    pytest.param(lambda: make_nvml(FakeGpu(reserved_bytes=MIB)), id="nvml-driver"),
    pytest.param(make_instance, id="instance"),
    pytest.param(lambda: play_to_the_end("two-gpus"), id="recorded-gpus"),
    pytest.param(make_simulated, id="simulated"),
    pytest.param(lambda: record(make_simulated()), id="recorded-simulation"),
    pytest.param(NvmlMonitor, id="real-nvml", marks=pytest.mark.gpu),
]
SILENT = [
    pytest.param(
        lambda: make_nvml(
            FakeGpu(
                failures={
                    f"nvmlDeviceGet{what}": pynvml.NVML_ERROR_GPU_IS_LOST
                    for what in ("MemoryInfo", "UtilizationRates", "ComputeRunningProcesses")
                }
            )
        ),
        id="lost",
    ),
    pytest.param(
        lambda: make_nvml(
            FakeGpu(
                failures={"nvmlDeviceGetComputeRunningProcesses": pynvml.NVML_ERROR_NO_PERMISSION}
            )
        ),
        id="no-permission",
    ),
    pytest.param(make_lost, id="simulated-lost-one"),
    pytest.param(lambda: record(make_lost()), id="recorded-lost-one"),
]


@pytest.fixture(params=TELLING)
def monitor(request: pytest.FixtureRequest) -> Iterator[DeviceMonitor]:
    made = request.param()
    yield made
    made.close()


@pytest.fixture(params=[*TELLING, *SILENT])
def any_monitor(request: pytest.FixtureRequest) -> Iterator[DeviceMonitor]:
    made = request.param()
    yield made
    made.close()


def test_it_is_a_device_monitor(monitor: DeviceMonitor) -> None:
    """It has every method of the protocol."""
    assert isinstance(monitor, DeviceMonitor)


def test_every_device_has_a_use(monitor: DeviceMonitor) -> None:
    """Each listed device is named as PyTorch names it, and its use adds up."""
    infos = monitor.list_infos()

    assert [info.device for info in infos] == [f"cuda:{index}" for index in range(len(infos))]
    assert len(infos) >= 1
    for info in infos:
        use = monitor.read_use(info.device)
        assert use.device == info.device
        driver_bytes = use.driver_bytes or 0
        assert driver_bytes + use.used_bytes + use.free_bytes == use.total_bytes == info.total_bytes
        assert use.utilization_percent is None or 0 <= use.utilization_percent <= 100
        assert use.failure == ""


def test_what_is_not_told_has_a_reason(any_monitor: DeviceMonitor) -> None:
    """Where a listed device's use is not told, the driver's words say why."""
    for info in any_monitor.list_infos():
        use = any_monitor.read_use(info.device)
        assert bool(use.failure) is (use.used_bytes is None)


def test_processes_are_listed_once_and_by_their_numbers(any_monitor: DeviceMonitor) -> None:
    """With their bytes, where these are told; together no more than what is used."""
    for info in any_monitor.list_infos():
        use, listed = any_monitor.read_use(info.device), any_monitor.list_processes(info.device)
        pids = [pid for pid, _ in listed or ()]
        assert pids == sorted(set(pids))
        assert all(n_bytes is None or n_bytes >= 0 for _, n_bytes in listed or ())
        if use is not None and use.used_bytes is not None:
            assert sum(n_bytes or 0 for _, n_bytes in listed or ()) <= use.used_bytes


@pytest.mark.parametrize("device", ["cuda:99", "host", "cuda", ""])
def test_unknown_devices_have_no_use(monitor: DeviceMonitor, device: str) -> None:
    """A device that is not listed is unknown, which is no failure."""
    assert monitor.read_use(device) is None
    assert monitor.list_processes(device) is None
    assert monitor.take_notes() == ()


def test_a_closed_monitor_lists_nothing(monitor: DeviceMonitor) -> None:
    """After ``close``, which may come twice, there is nothing to read and nothing fails."""
    monitor.list_infos()

    monitor.close()
    monitor.close()

    assert monitor.list_infos() == ()
    assert monitor.read_use("cuda:0") is None
    assert monitor.take_notes() == ()
    assert monitor.list_processes("cuda:0") is None


# -- Processes ---------------------------------------------------------------------------------


@pytest.fixture(
    params=[
        pytest.param(ProcessTree, id="this-machine"),
        pytest.param(make_simulated, id="simulated"),
        pytest.param(lambda: play_to_the_end("two-gpus"), id="recorded-gpus"),
    ]
)
def source(request: pytest.FixtureRequest) -> Iterator[ProcessSource]:
    """With at least one child."""
    command = [sys.executable, "-c", "input()"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL) as child:
        yield request.param()
        child.kill()


def test_it_is_a_process_source(source: ProcessSource) -> None:
    """It has every method of the protocol."""
    assert isinstance(source, ProcessSource)
    assert type(source.own_pid) is int
    assert source.own_pid > 0
    assert type(source.are_pids_certain([source.own_pid])) is bool


def test_children_are_told_by_their_numbers(source: ProcessSource) -> None:
    """Each once, with a short name and a size; what they take of devices is the driver's."""
    children = source.list_children()

    assert len(children) >= 1
    pids = [child.pid for child in children]
    assert pids == sorted(set(pids))
    assert source.own_pid not in pids
    for child in children:
        assert type(child) is ChildProcess
        assert 0 < len(child.name) <= 60
        assert child.name.isprintable()
        assert child.resident_bytes is None or child.resident_bytes >= 0
        assert child.devices == ()


def test_processes_are_this_one_its_children_and_others(source: ProcessSource) -> None:
    """This one has a name, and a number that nobody has is somebody else's without one."""
    told = source.describe([source.own_pid, 2**30])

    relation, name = told[source.own_pid]
    assert relation == "own"
    assert name.startswith("python")
    assert told[2**30] == ("other", None)
    assert source.describe([]) == {}
