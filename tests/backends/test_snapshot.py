"""Snapshots and histories, of torch or of a file: they become records, and never run anything."""

from __future__ import annotations

import contextlib
import os
import pickle
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

import gpumemwidget
from gpumemwidget.backends.cuda.backend import CudaBackend, CudaHistory
from gpumemwidget.backends.snapshot import (
    load_snapshot,
    parse_events,
    parse_rules,
    parse_segments,
    parse_traces,
)
from gpumemwidget.errors import FileError
from gpumemwidget.model.devices import Frame
from gpumemwidget.model.traces import (
    AllocatorRules,
    AllocatorTrace,
    NoteKind,
    TraceAction,
    TraceNote,
)
from gpumemwidget.testing import SimulatedGpus, simulate_torch
from tools.recordings.recording import list_allocator_events

MIB = 1 << 20


def make_raw_segment(*blocks: dict[str, Any], **values: Any) -> dict[str, Any]:
    """A segment at 4096, whose blocks lie side by side."""
    ends = list(accumulate((block["size"] for block in blocks), initial=4096))
    placed = [{**block, "address": at} for block, at in zip(blocks, ends, strict=False)]
    total = ends[-1] - 4096
    return {"device": 0, "address": 4096, "total_size": total, "blocks": placed, **values}


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
    assert segment.page_bytes is None


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


@pytest.mark.parametrize(
    ("settings", "environment", "page_bytes"),
    [
        ("", "", 20 << 20),
        ("", "expandable_segments:True,large_segment_size_mb:40", 40 << 20),
        ("large_segment_size_mb: 64", "large_segment_size_mb:40", 64 << 20),
        ("expandable_segments:True", "large_segment_size_mb:40", 40 << 20),
    ],
)
def test_the_size_of_large_segments_is_read(
    monkeypatch: pytest.MonkeyPatch, settings: str, environment: str, page_bytes: int
) -> None:
    """What was set last, else what the environment says; it is about large requests alone."""
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", environment)
    allocator = SimulatedGpus(expandable=True)
    torch = simulate_torch(allocator)
    torch._C._accelerator_getAllocatorSettings = lambda: settings
    for n_bytes in (100, 3 << 20):
        allocator.allocate(n_bytes)

    segments = CudaHistory(torch).read_segments([0])

    assert sorted(each.page_bytes for each in segments) == [2 << 20, page_bytes]


# -- Events ----------------------------------------------------------------------------------------


_LINE = {"name": "<module>", "filename": "cell.py", "line": 3}
_INNER = {"name": "f", "filename": "lib.py", "line": 9}


def _event(action: str, *, time_us: int = 0, **others: Any) -> dict[str, Any]:
    fields = {"action": action, "addr": 4096, "size": 512, "stream": 0, "time_us": time_us}
    return {**fields, "frames": [], **others}


def _segment(address: int, *, device: int = 0) -> dict[str, Any]:
    block = {"address": address, "size": 2 * MIB, "requested_size": 7, "state": "active_allocated"}
    return {"device": device, "address": address, "total_size": 2 * MIB, "blocks": [block]}


def _parse_marked(raw: list[dict[str, Any]]) -> AllocatorTrace:
    """A trace from 100 ms to 200 ms, whose mark was done by 104 ms."""
    (trace,) = parse_traces(
        _snapshot(raw),
        before=parse_segments([_segment(4096)]),
        start_us=100_000,
        end_us=200_000,
        touched={0},
        marked_by_us=104_000,
    )
    return trace


def _snapshot(*device_traces: list[dict[str, Any]]) -> dict[str, Any]:
    return {"segments": [], "device_traces": list(device_traces), "allocator_settings": {}}


def test_each_field_is_a_column() -> None:
    """Events keep their order; an OOM's address is what the driver said is free.

    Kinds that are not about memory, such as a user's own marks, have no row.
    """
    events = parse_events(
        [
            _event("segment_alloc", addr=8192, size=2 * MIB, time_us=1),
            _event("user_defined"),
            _event("alloc", addr=8192, size=700, time_us=2, stream=5, frames=[_INNER, _LINE]),
            {"action": "oom", "device_free": 99, "size": 1 << 40, "stream": 0, "time_us": 3},
            {"action": "snapshot", "addr": 0, "size": 512, "stream": 0, "time_us": 4},
        ]
    )

    assert [TraceAction(code).word for code in events.actions] == [
        "segment_alloc",
        "alloc",
        "oom",
        "snapshot",
    ]
    assert list(events.addresses) == [8192, 8192, 99, 0]
    assert list(events.sizes) == [2 * MIB, 700, 1 << 40, 512]
    assert list(events.times_us) == [1, 2, 3, 4]
    assert list(events.streams) == [0, 5, 0, 0]
    assert list(events.stacks) == [0, 1, 0, 0]
    assert events.stack_table == ((), (Frame("lib.py", 9, "f"), Frame("cell.py", 3, "<module>")))


def test_a_stack_is_told_once() -> None:
    """Stacks with the same lines have one number, whether torch shares the dictionaries or not."""
    stacks = [[_INNER, _LINE], [_INNER, _LINE], [dict(_INNER), dict(_LINE)], [_LINE], []]

    events = parse_events([_event("alloc", frames=stack) for stack in stacks])

    assert list(events.stacks) == [1, 1, 1, 2, 0]


def test_chunks_join_without_a_seam() -> None:
    """More events than are turned into columns at once keep their order."""
    n_events = 20_000

    events = parse_events([_event("alloc", time_us=each) for each in range(n_events)])

    assert list(events.times_us) == list(range(n_events))
    assert len(events) == n_events


@pytest.mark.parametrize(("max_entries", "is_whole"), [(None, True), (11, True), (10, False)])
def test_the_span_begins_by_time_where_nothing_marks_it(
    max_entries: int | None, is_whole: bool
) -> None:
    """A ring with as many events as it holds may have lost the oldest ones."""
    snapshot = _snapshot([_event("alloc", time_us=each, size=each) for each in range(10)])

    (trace,) = parse_traces(
        snapshot, before=(), start_us=4, end_us=20, touched={0}, max_entries=max_entries
    )

    assert list(trace.events.sizes) == [4, 5, 6, 7, 8, 9]
    assert trace.is_whole == is_whole


def test_the_span_begins_at_the_snapshot_that_marks_it() -> None:
    """What came between the start and the mark stands in the snapshot that the mark is of."""
    raw = [
        _event("snapshot", time_us=50_000),
        _event("alloc", time_us=101_000, size=1),
        _event("snapshot", time_us=102_000),
        _event("alloc", time_us=103_000, size=2),
        _event("snapshot", time_us=104_000),
        _event("alloc", time_us=105_000, size=3),
    ]

    trace = _parse_marked(raw)

    assert list(trace.events.sizes) == [2, 512, 3]
    assert trace.is_whole
    assert [each.address for each in trace.before] == [4096]


@pytest.mark.parametrize("oldest", ["alloc", "snapshot"])
def test_a_mark_that_was_lost_leaves_the_trace_not_whole(oldest: str) -> None:
    """The ring has lost the oldest events; a later snapshot of the user's is no mark."""
    raw = [_event(oldest, time_us=150_000), _event("alloc", time_us=151_000)]

    trace = _parse_marked(raw)

    assert not trace.is_whole
    assert len(trace.events) == 2


def test_a_device_that_was_first_touched_within_the_span_has_no_mark() -> None:
    """Its history begins with its first event."""
    raw = [_event("segment_alloc", time_us=150_000), _event("alloc", time_us=151_000)]

    traces = parse_traces(
        _snapshot([], raw, [_event("alloc")]),
        before=(),
        start_us=100_000,
        end_us=200_000,
        touched={1},
        marked_by_us=104_000,
        max_entries=10,
    )

    assert [trace.device for trace in traces] == ["cuda:1"]
    assert traces[0].is_whole
    assert len(traces[0].events) == 2


def test_the_rules_are_read_from_the_settings() -> None:
    """Sizes below the first interval are rounded as it is; no limit is told as -1."""
    divisions = {str(1 << power): 0 for power in range(16)}
    plain = {"max_split_size": -1, "expandable_segments": False}

    assert parse_rules({}) == AllocatorRules()
    assert parse_rules({**plain, "roundup_power2_divisions": divisions}) == AllocatorRules()
    assert parse_rules({"max_split_size": 64 * MIB, "expandable_segments": True}) == (
        AllocatorRules(max_split_bytes=64 * MIB, is_expandable=True)
    )
    assert parse_rules(
        {"roundup_power2_divisions": {**divisions, "1": 8, "2": 8, "4": 4, "16": 1}}
    ).roundup_divisions == ((0, 8), (4 * MIB, 4), (8 * MIB, 0), (16 * MIB, 1), (32 * MIB, 0))


# -- Files of PyTorch's memory viewer --------------------------------------------------------------


@pytest.fixture
def written(tmp_path: Path) -> tuple[Path, AllocatorTrace]:
    """A file that a trace has written, and that trace."""
    gpu = SimulatedGpus()
    backend = CudaBackend(simulate_torch(gpu))
    kept = gpu.allocate(3 * MIB)
    backend.start_trace(n_events=100)
    gpu.allocate(100)
    gpu.free(kept)
    path = tmp_path / "snapshot.pickle"
    (trace,) = backend.end_trace(snapshot_to=path)
    return path, trace


def rewrite(path: Path, change: Any) -> None:
    """Change what a file holds."""
    snapshot = pickle.loads(path.read_bytes())
    changed = change(snapshot)
    is_new = isinstance(changed, dict) and "segments" in changed
    path.write_bytes(pickle.dumps(changed if is_new else snapshot))


def refuse(path: Path) -> str:
    """What is said of a file that is refused: one line that begins with its name."""
    with pytest.raises(FileError) as caught:
        gpumemwidget.load_trace(path)
    said = str(caught.value)
    assert said.startswith(str(path))
    assert "\n" not in said
    return said.removeprefix(str(path))


# -- What is read ------------------------------------------------------------------------------


def test_a_trace_comes_back_from_its_file(written: tuple[Path, AllocatorTrace]) -> None:
    """Its events and its end; what stood before is not in a file."""
    path, trace = written

    (read,) = load_snapshot(path)

    # The file has what was noted before the span's own first event, too.
    assert list_allocator_events(read.events)[-len(trace.events) :] == list_allocator_events(
        trace.events
    )
    assert read.after == trace.after
    assert (read.device, read.rules) == (trace.device, trace.rules)
    assert (read.before, read.is_whole) == ((), False)
    assert read.start_us == read.events.times_us[0]
    assert read.end_us == read.events.times_us[-1]
    assert read.notes == (TraceNote(NoteKind.START_WORKED_OUT),)


# -- What is refused ---------------------------------------------------------------------------


class Evil:
    """Runs something when it is read by anything that runs."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return (Path.touch, (self.path,))


def test_nothing_in_a_file_is_run(tmp_path: Path, written: tuple[Path, AllocatorTrace]) -> None:
    """Wherever in it the request stands; the line says what it asked for."""
    path, _ = written
    mark = tmp_path / "ran"
    rewrite(path, lambda snapshot: {**snapshot, "extra": Evil(mark)})

    assert "was to be run, and was not" in refuse(path)

    assert not mark.exists()


@pytest.mark.parametrize(
    "body",
    [
        b"cos\nsystem\n(S'touch ran'\ntR.",
        b"\x80\x04\x8c\x02os\x8c\x06system\x93\x8c\x09touch ran\x85R.",
        b"(ios\nsystem\n.",
        b"\x80\x02cbuiltins\nexec\nX\x01\x00\x00\x001\x85\x81.",
        b"Pid\n.",
        b"]Q.",
    ],
)
def test_no_operation_of_pickle_runs_anything(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, body: bytes
) -> None:
    """Each way in which a pickle can call something."""
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "evil.pickle"
    path.write_bytes(body)

    assert "is damaged, or no memory snapshot" in refuse(path)

    assert [each.name for each in tmp_path.iterdir()] == ["evil.pickle"]


def test_files_of_other_kinds_and_cut_anywhere_are_refused(
    tmp_path: Path, written: tuple[Path, AllocatorTrace]
) -> None:
    """Whatever they are, and wherever they end."""
    whole = written[0].read_bytes()
    path = tmp_path / "cut.pickle"
    parts = (whole[:length] for length in range(0, len(whole), 97))
    for body in (b"PK\x03\x04zip", b"{}", b"hello", b"\x1f\x8b", b"\x80\x04", *parts):
        path.write_bytes(body)
        assert "is damaged, or no memory snapshot" in refuse(path)


@pytest.mark.parametrize(
    ("held", "said"),
    [
        ({"a": 1}, "is damaged, or no memory snapshot of PyTorch's (KeyError: 'device_traces')"),
        ([], "is damaged, or no memory snapshot of PyTorch's (TypeError"),
        ({"segments": [], "device_traces": []}, "holds no events: record a history before"),
        ({"segments": [], "device_traces": [[], []]}, "holds no events: record a history"),
    ],
)
def test_other_things_are_refused(tmp_path: Path, held: Any, said: str) -> None:
    """What is no snapshot, and snapshots without a history."""
    path = tmp_path / "other.pickle"
    path.write_bytes(pickle.dumps(held))

    assert said in refuse(path)


def test_a_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    """And so are a folder, and a pipe, which would be waited for without end."""
    os.mkfifo(tmp_path / "pipe")

    assert "can't be read: No such file" in refuse(tmp_path / "missing")
    assert "is no regular file" in refuse(tmp_path)
    assert "is no regular file" in refuse(tmp_path / "pipe")


def test_too_large_a_file_is_refused(tmp_path: Path) -> None:
    """Before it is read."""
    path = tmp_path / "large.pickle"
    with path.open("wb") as file:
        file.truncate((2 << 30) + 1)

    assert refuse(path) == " holds more than 2 GiB: record fewer events (max_entries)"


# Not "r", an index into the memo: pickle takes as much memory as that says.
@given(place=st.integers(0, 1 << 20), value=st.integers(0, 255).filter(lambda n: n != ord("r")))
@example(place=0, value=0)
def test_a_changed_byte_is_read_or_refused(
    written: tuple[Path, AllocatorTrace], place: int, value: int
) -> None:
    """Nothing else comes out of it."""
    path, _ = written
    body = bytearray(path.read_bytes())
    body[place % len(body)] = value
    other = path.with_name("changed.pickle")
    other.write_bytes(bytes(body))

    with contextlib.suppress(FileError):
        assert gpumemwidget.load_trace(other).to_text()
