"""Recordings: the file, what is refused, recorders of hardware, and playing them."""

from __future__ import annotations

import dataclasses
import gzip
import json
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpumemwidget.backends.cuda.backend import CudaBackend
from gpumemwidget.backends.hardware import Hardware
from gpumemwidget.errors import FileError
from gpumemwidget.model.devices import (
    ChildProcess,
    DeviceUse,
    Limit,
    LimitRequest,
    ProcessUse,
)
from gpumemwidget.model.traces import AllocatorRules, AllocatorTrace
from gpumemwidget.ownership.blocks import BlockMap
from gpumemwidget.testing import SimulatedDriver, SimulatedGpus, simulate_torch
from tools.recordings import (
    Recorder,
    Recording,
    RecordingPlayer,
    ReplayBackend,
    ReplayMonitor,
    load_recording,
    save_recording,
)
from tools.recordings.recording import decode_recording, encode_recording

DATA = Path(__file__).parents[1] / "data"
MIB = 1 << 20


def make_recording() -> Recording:
    """Events with everything that a recording may hold."""
    recording, _ = trace_simulated_gpu()
    around: dict[str, Any] = {
        "processes": {
            "cuda:0": (
                ProcessUse(5, "python a.py", "own", 30),
                ProcessUse(6, None, "other", None),
            ),
            "cuda:1": None,
        },
        "children": (ChildProcess(7, 5, "python b.py", None),),
        "pinned_bytes": 2,
        "limits": (Limit("cuda:0", 50, 100, None), Limit("cuda:1", None, None, None, share=0.5)),
    }
    first, second, *others = recording.events
    uses = (DeviceUse("cuda:0", 40, 55, 100, 93, driver_bytes=5),)
    changed = dataclasses.replace(second, uses=uses, **around)
    return dataclasses.replace(
        recording,
        events=(first, changed, *others),
        rules=AllocatorRules(64 * MIB, is_expandable=True, roundup_divisions=((0, 4), (MIB, 0))),
        is_whole=False,
    )


def trace_simulated_gpu() -> tuple[Recording, AllocatorTrace]:
    """A recording of a simulated GPU, and the trace that it was made with."""
    gpu = SimulatedGpus()
    recorder = Recorder(Hardware([CudaBackend(simulate_torch(gpu))]), about="simulated")
    kept = gpu.allocate(5 * MIB)
    recorder.start_trace()
    first = gpu.allocate(100)
    recorder.tick(with_segments=True)
    gpu.free(kept)
    recorder.tick()
    gpu.free(first)
    gpu.empty_cache()
    (trace,) = recorder.end_trace()
    return recorder.to_recording(), trace


# -- The file --------------------------------------------------------------------------------------


def test_a_file_keeps_everything(tmp_path: Path) -> None:
    """What is written is read back; equal recordings give equal files, which gzip can open."""
    recording = make_recording()

    save_recording(recording, tmp_path / "one.json.gz")
    save_recording(recording, tmp_path / "two.json.gz")

    assert load_recording(tmp_path / "one.json.gz") == recording
    data = (tmp_path / "one.json.gz").read_bytes()
    assert data == (tmp_path / "two.json.gz").read_bytes()
    assert json.loads(gzip.decompress(data))["about"] == "simulated"


def test_a_file_that_is_there_is_left_alone(tmp_path: Path) -> None:
    """A recording is never written over another file."""
    path = tmp_path / "there.json.gz"
    path.write_text("mine")

    with pytest.raises(FileError, match=r"there.json.gz is there already: choose another name"):
        save_recording(make_recording(), path)

    assert path.read_text() == "mine"


# -- Recorders -------------------------------------------------------------------------------------


def test_a_recorded_trace_is_played_as_it_was() -> None:
    """Its events stand with the moment at which it ends, its blocks at both ends."""
    recording, trace = trace_simulated_gpu()
    backend = ReplayBackend(RecordingPlayer(decode_recording(encode_recording(recording))))
    backend.start_trace(n_events=100)
    backend.player.advance(3)

    (played,) = backend.end_trace()

    counts = [[len(entries) for _, entries in event.traced] for event in recording.events]
    # With the first moment's own snapshot.
    assert counts == [[], [], [], [9]]
    for name in ("actions", "addresses", "sizes", "streams"):
        assert getattr(played.events, name) == getattr(trace.events, name), name
    assert [played.events.stack_table[place] for place in played.events.stacks] == [
        trace.events.stack_table[place] for place in trace.events.stacks
    ]
    assert (played.before, played.after) == (trace.before, trace.after)
    assert played.is_whole


def describe(hardware: Hardware) -> list[object]:
    """What a recorder writes down of whole devices."""
    states = hardware.take_device_states()
    told = [(each.info, each.use, each.processes) for each in states]
    return [told, hardware.list_children(), hardware.read_limits(), hardware.read_pinned()]


def test_what_is_played_is_what_was_there() -> None:
    """Other processes and children that come and go, pinned memory, a limit, a GPU that is lost."""
    gpus = SimulatedGpus(2)
    gpus.allocate(MIB)
    driver = SimulatedDriver(gpus)
    hardware = Hardware([CudaBackend(simulate_torch(gpus))], driver)
    recorder = Recorder(hardware)
    events: list[Callable[[], object]] = [
        lambda: None,
        lambda: driver.set_process(2**30, 30 * MIB, name="python serve.py"),
        lambda: driver.set_process(2**30 + 1, 20 * MIB, 1, relation="child"),
        lambda: gpus.allocate(3 * MIB, 1),
        lambda: gpus.pinned.add(128),
        lambda: hardware.set_limit("cuda:0", LimitRequest(64 * MIB)),
        lambda: driver.set_process(2**30, 0),
        lambda: driver.lose(1),
    ]
    told = []
    for happen in events:
        happen()
        recorder.tick()
        told.append(describe(hardware))

    recording = decode_recording(encode_recording(recorder.to_recording()))
    player = RecordingPlayer(recording)
    played = Hardware([ReplayBackend(player)], ReplayMonitor(player))
    told_again = [describe(played)]
    while player.advance():
        told_again.append(describe(played))

    assert told_again == told


def test_a_script_is_recorded_from_the_command_line(tmp_path: Path) -> None:
    """The tool runs a script with its arguments, and what it writes can be played."""
    out, script = tmp_path / "out.json.gz", tmp_path / "work.py"
    script.write_text(
        "import sys\nblock = bytearray(64 << 20)\ndel block\nprint(__name__, sys.argv[1:])\n"
    )
    options = ("--interval-s", "0.01", "--trace", "--snapshot")

    done = subprocess.run(
        [sys.executable, "-m", "tools.record", *options, out, "--", script, "--fast", "1"],
        capture_output=True,
        text=True,
        check=True,
        cwd=DATA.parents[1],
    )
    recording = load_recording(out)

    assert done.stdout == "__main__ ['--fast', '1']\n"
    assert recording.devices[-1].device == "host"
    assert recording.about.startswith("work.py on ")
    peaks = [event.readings[-1].reserved_peak_bytes for event in recording.events]
    assert max(peaks) - recording.events[0].readings[-1].reserved_bytes > 60 << 20


# -- The recordings beside the tests ---------------------------------------------------------------


@pytest.mark.parametrize("path", sorted(DATA.glob("**/*.json.gz")), ids=lambda path: path.name)
def test_kept_recordings_add_up(path: Path) -> None:
    """Every one is whole, and no peak in it is below what stands; none has grown large."""
    recording = load_recording(path)

    for event in recording.events:
        for reading in event.readings:
            if reading.reserved_peak_bytes is not None:
                assert reading.reserved_peak_bytes >= reading.reserved_bytes
            if reading.allocated_peak_bytes is not None:
                assert reading.allocated_peak_bytes >= reading.allocated_bytes
    assert path.stat().st_size < 100 * 1024


def test_a_real_gpus_session_plays_as_it_was() -> None:
    """Ten training steps on an H200: their peak, the out-of-memory error, what cuBLAS keeps."""
    backend = ReplayBackend(RecordingPlayer(load_recording(DATA / "h200-training.json.gz")))
    backend.start_span()

    while backend.player.advance():
        pass

    gpu, host = backend.read_exact()
    assert (gpu.device, host.device) == ("cuda:0", "host")
    assert (gpu.allocated_peak_bytes, gpu.reserved_peak_bytes) == (387_023_872, 446_693_376)
    assert (gpu.peak_is, gpu.num_alloc_retries, gpu.num_ooms) == ("exact", 1, 1)
    # Two workspaces of 32.5 MiB: the main thread's and the backward pass's.
    assert gpu.allocated_bytes == 2 * 34_078_720


def test_a_real_gpus_blocks_play_as_they_were(monkeypatch: pytest.MonkeyPatch) -> None:
    """The blocks of a training step and a CUDA graph on an H100: they add up, and are told apart.

    Those that no object of Python's held there are cuBLAS's (the main thread's, the side stream's,
    the backward thread's, and in the graph's pool what was made while it was captured), and one
    that nothing names, the graph's random state.
    """
    path = DATA / "h100-blocks.json.gz"
    backend = ReplayBackend(RecordingPlayer(load_recording(path)))
    while backend.player.advance():
        pass

    segments, (gpu, _) = backend.read_segments(), backend.read()

    blocks = [block for segment in segments for block in segment.blocks]
    in_use = [block for block in blocks if block.state == "active_allocated"]
    assert (len(segments), len(blocks)) == (24, 398)
    assert sum(segment.n_bytes for segment in segments) == gpu.reserved_bytes
    assert sum(block.n_bytes for block in in_use) == gpu.allocated_bytes
    sizes = {32 * MIB, MIB}
    claimed = {
        ("cuda:0", block.address) for block in in_use if block.requested_bytes not in {*sizes, 8}
    }
    monkeypatch.setattr("gpumemwidget.ownership.blocks.read_workspace_sizes", lambda _: sizes)
    owned = BlockMap(segments).describe_unclaimed(claimed)
    pool = "cuBLAS workspace in the private pool 1, 0 on cuda:0"
    assert [(each.owner, each.n_bytes, each.allocated_at) for each in owned] == [
        (pool, 33 * MIB, "blocks.py, line 27"),
        ("cuBLAS workspace of cuda:0", 33 * MIB, "blocks.py, line 15"),
        ("cuBLAS workspace of cuda:0", 33 * MIB, "blocks.py, line 23"),
        # The backward thread's own: it has no line of Python.
        ("cuBLAS workspace of cuda:0", 32 * MIB, None),
        ("random state of CUDA graphs on cuda:0", 1024, "blocks.py, line 26"),
    ]
    assert load_recording(path).about.startswith("tests/data/blocks.py on one NVIDIA H100")


# -- Playing ---------------------------------------------------------------------------------------


@given(st.integers(0, 10_000), st.data())
def test_any_span_agrees_with_the_allocator(seed: int, data: st.DataObject) -> None:
    """Over any stretch of a session the peaks are the highest that it reached, exactly."""
    chance = random.Random(seed)
    gpus = SimulatedGpus()
    recorder = Recorder(Hardware([CudaBackend(simulate_torch(gpus))]))
    live: list[int] = []
    recorder.tick()
    for _ in range(30):
        if live and chance.random() < 0.5:
            gpus.free(live.pop(chance.randrange(len(live))))
        else:
            live.append(gpus.allocate(chance.randrange(1, 9) * MIB))
        recorder.tick()
    recording = recorder.to_recording()
    first = data.draw(st.integers(1, 30))
    last = data.draw(st.integers(first, 30))
    backend = ReplayBackend(RecordingPlayer(recording))
    backend.player.advance(first)

    backend.start_span()
    backend.player.advance(last - first)
    (end,) = backend.read_exact()

    passed = [event.readings[0] for event in recording.events[first : last + 1]]
    assert end.allocated_peak_bytes == max(reading.allocated_bytes for reading in passed)
    assert end.reserved_peak_bytes == max(reading.reserved_bytes for reading in passed)
    assert end.peak_is == "exact"
