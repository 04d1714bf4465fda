"""Snapshots: torch's dictionaries become records, and go through a file unchanged."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from gpumemwidget.backends.allocator import ReplayAllocator
from gpumemwidget.backends.cuda import CudaBackend
from gpumemwidget.backends.recorder import Recorder
from gpumemwidget.backends.recording import (
    Event,
    Recording,
    format_recording,
    load_recording,
    parse_recording,
)
from gpumemwidget.backends.replay import Playback, ReplayBackend
from gpumemwidget.backends.script import Step, demo_script, play_script
from gpumemwidget.backends.snapshot import parse_segments
from gpumemwidget.errors import RecordingError
from gpumemwidget.owners.blocks import BlockMap
from gpumemwidget.records import Block, DeviceInfo, Frame, Segment
from tests.backends.test_overlay import make_torch

DATA = Path(__file__).parents[1] / "data"
MIB = 1 << 20


def make_raw_segment(*blocks: dict[str, Any], **values: Any) -> dict[str, Any]:
    total = sum(block["size"] for block in blocks)
    return {"device": 0, "address": 4096, "total_size": total, "blocks": list(blocks), **values}


def test_every_state_of_every_release_is_understood() -> None:
    """``active_awaiting_free`` is what newer releases document and older ones never said."""
    states = ("active_allocated", "active_pending_free", "active_awaiting_free", "inactive")
    raw = [{"size": 512, "requested_size": 5, "state": state} for state in states]

    (segment,) = parse_segments([make_raw_segment(*raw)])

    assert [block.state for block in segment.blocks] == [
        "active_allocated",
        "active_pending_free",
        "active_pending_free",
        "inactive",
    ]
    assert [block.requested_bytes for block in segment.blocks] == [5, 5, 5, None]
    assert [block.address for block in segment.blocks] == [4096, 4608, 5120, 5632]
    assert (segment.is_private, segment.pool_id) == (False, (0, 0))
    assert (segment.is_small, segment.is_expandable) == (None, False)


@pytest.mark.parametrize(("kind", "is_small"), [("small", True), ("large", False)])
def test_what_a_segment_is_for(kind: str, is_small: bool) -> None:
    """Small requests or large ones, and whether it grows."""
    raw = make_raw_segment(
        {"size": 512, "state": "inactive"}, segment_type=kind, is_expandable=is_small
    )

    (segment,) = parse_segments([raw])

    assert (segment.is_small, segment.is_expandable) == (is_small, is_small)


def test_stacks_are_pythons_alone() -> None:
    """What C++ did is left out: the innermost line of Python comes first."""
    stack = [
        {"filename": "??", "line": 0, "name": "c10::malloc"},
        {"filename": "/build/ceval.c", "line": 7, "name": "_PyEval"},
        {"filename": "/tmp/ipykernel_1/2.py", "line": 3, "name": "train"},
        {"filename": "<frozen runpy>", "line": 4, "name": "run"},
    ]
    block = {"size": 512, "state": "active_allocated", "frames": stack}

    (segment,) = parse_segments([make_raw_segment(block, segment_pool_id=(0, 3))])

    assert segment.blocks[0].frames == (
        Frame("/tmp/ipykernel_1/2.py", 3, "train"),
        Frame("<frozen runpy>", 4, "run"),
    )
    assert (segment.is_private, segment.pool_id) == (True, (0, 3))


class Traced:
    """A simulated torch whose user records a history, and that counts what it was asked for."""

    def __init__(self, allocator: ReplayAllocator, *, is_recorded: bool) -> None:
        self.torch = make_torch(allocator)
        self.torch._C._cuda_isHistoryEnabled = lambda: is_recorded
        self.asked: list[bool] = []
        self._allocator = allocator

    def snapshot_of_today(self, *, include_traces: bool = True) -> Any:
        self.asked.append(include_traces)
        return self._allocator.snapshot()

    def snapshot_of_old(self) -> Any:
        self.asked.append(True)
        return self._allocator.snapshot()


def test_events_of_a_history_are_never_fetched() -> None:
    """Where torch can leave them out it is told to; where not, blocks are read without a history.

    While one is recorded there is a note instead, once.
    """
    allocator = ReplayAllocator()
    allocator.allocate(MIB)
    today, old, quiet = (
        Traced(allocator, is_recorded=True),
        Traced(allocator, is_recorded=True),
        Traced(allocator, is_recorded=False),
    )
    today.torch.cuda.memory.memory_snapshot = today.snapshot_of_today
    old.torch.cuda.memory.memory_snapshot = old.snapshot_of_old
    quiet.torch.cuda.memory.memory_snapshot = quiet.snapshot_of_old
    backends = [CudaBackend(each.torch) for each in (today, old, quiet)]

    found = [backend.read_segments() for backend in backends]
    again = backends[1].read_segments()
    notes = [backend.take_notes() for backend in backends]
    for backend in backends:
        backend.close()

    assert today.asked == [False]
    assert old.asked == []
    assert quiet.asked == [True]
    assert found[0] == found[2] != ()
    assert found[1] == again == ()
    assert notes == [
        (),
        (
            "the allocator's blocks are not read while a memory history is recorded: PyTorch "
            "2.11.0 would fetch all of its events with them",
        ),
        (),
    ]


def test_an_allocator_that_keeps_no_blocks_is_a_note() -> None:
    """A pluggable allocator raises: nothing is read, and it is said."""
    allocator = ReplayAllocator()
    allocator.touch()
    torch = make_torch(allocator)

    def refuse(*, include_traces: bool = True) -> None:
        raise RuntimeError("CUDAPluggableAllocator does not yet support snapshot\nmore")

    torch.cuda.memory = SimpleNamespace(memory_snapshot=refuse)
    backend = CudaBackend(torch)

    found = backend.read_segments()
    notes = backend.take_notes()
    backend.close()

    assert found == ()
    assert notes == (
        "the allocator's blocks can't be read: CUDAPluggableAllocator does not yet support "
        "snapshot",
    )


def test_only_devices_in_use_are_listed() -> None:
    """What the allocator has on another one is nobody's that is shown."""
    allocator = ReplayAllocator(2)
    allocator.allocate(MIB, 1)
    backend = CudaBackend(make_torch(allocator))

    found = backend.read_segments()
    backend.close()

    assert {segment.device for segment in found} == {"cuda:1"}


# -- In files ---------------------------------------------------------------------------------


def make_recording() -> Recording:
    outer, inner = Frame("/a.py", 1, "main"), Frame("/b.py", 2, "f")
    blocks = (
        Block(4096, 1024, 1000, "active_allocated", (inner, outer)),
        Block(5120, 512, None, "inactive"),
        Block(5632, 512, 8, "active_pending_free", (outer,)),
    )
    segments = (
        Segment("cuda:0", 4096, 2048, False, (0, 0), blocks, is_expandable=True, is_small=False),
        Segment("cuda:0", 1 << 30, 512, True, (7, 0), (Block(1 << 30, 512, None, "inactive"),)),
    )
    info = DeviceInfo("cuda:0", "GPU", 1 << 34)
    events = (Event(0.0, "read", ()), Event(1.0, "read", (), (), segments), Event(2.0, "read", ()))
    return Recording((info,), (), events)


def test_a_file_keeps_snapshots_and_their_stacks() -> None:
    """What is written is read back, the frames once each; an event without one has none."""
    recording = make_recording()

    text = format_recording(recording)

    assert parse_recording(text) == recording
    assert text.count("/a.py") == 1
    assert json.loads(text)["stacks"] == [[0, 1], [1]]


def test_files_from_before_segments_told_their_use_are_read() -> None:
    """What they do not tell is not known."""
    data = json.loads(format_recording(make_recording()))
    data["events"][1][4] = [row[:4] for row in data["events"][1][4]]

    _, event, _ = parse_recording(json.dumps(data)).events

    assert event.segments is not None
    assert [(each.is_small, each.is_expandable) for each in event.segments] == [(None, False)] * 2


def test_a_playback_has_the_snapshot_of_its_position() -> None:
    """At an event that has none there is nothing: what stood before need not stand any more."""
    recording = make_recording()
    backend = ReplayBackend(Playback(recording))

    seen = [backend.read_segments()]
    while backend.playback.advance():
        seen.append(backend.read_segments())

    assert seen == [(), recording.events[1].segments, ()]


def test_a_file_without_snapshots_is_as_before() -> None:
    """No table and no column is added."""
    text = format_recording(play_script([Step(1.0, "allocate", 0, "a", MIB)]))

    assert "segments" not in text
    assert "stacks" not in text


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('"inactive"', '"asleep"'),
        ("[512, 8,", "[0, 8,"),
        ("[512, 8,", "[512, -8,"),
        ("[512, 8,", "[512,"),
        ('"stacks": [[0, 1], [1]]', '"stacks": [[0, 1], [2]]'),
        ('"stacks": [[0, 1], [1]]', '"stacks": [[0, 1]]'),
        ('["/a.py", 1, "main"]', '["/a.py", "main"]'),
        ("[7, 0]", "[7]"),
        ('"cuda:0", 4096', '"cuda:1", 4096'),
        ('"cuda:0", 4096', '"cuda:0", "4096"'),
    ],
)
def test_a_damaged_snapshot_is_refused(old: str, new: str) -> None:
    """In one sentence with what to do."""
    text = format_recording(make_recording())
    assert text.count(old) == 1 or old == '"inactive"'

    with pytest.raises(RecordingError, match=r"^f is damaged: .*; record it again$"):
        parse_recording(text.replace(old, new), source="f")


def test_a_recorder_takes_a_snapshot_with_its_reading() -> None:
    """Both are of one event, and the caller gets the snapshot."""
    source = ReplayBackend.from_script(demo_script(1, n_steps=1), snapshots=True)
    source.playback.advance(5)
    recorder = Recorder(source)

    taken = recorder.take_snapshot()

    (event,) = recorder.to_recording().events
    assert taken == event.segments == source.read_segments() != ()
    assert event.action == "read"
    blocks = [block for segment in taken for block in segment.blocks]
    in_use = sum(block.n_bytes for block in blocks if block.state == "active_allocated")
    assert in_use == event.readings[0].allocated_bytes


def test_a_real_gpus_blocks_play_as_they_were() -> None:
    """The blocks of a training step and a CUDA graph on an H100: they add up, and are told apart.

    Those that no object of Python's held there are cuBLAS's (the main thread's, the side stream's,
    the backward thread's, and in the graph's pool what was made while it was captured), and the
    graph's random state.
    """
    path = DATA / "h100-blocks.json"
    backend = ReplayBackend.from_file(path)
    while backend.playback.advance():
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
    owned = BlockMap(segments, workspace_sizes=lambda _: sizes).describe_unclaimed(claimed)
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
