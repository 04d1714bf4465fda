"""Snapshots and histories: torch's dictionaries become records and columns."""

from __future__ import annotations

from itertools import accumulate
from typing import Any

import pytest

from gpumemwidget.backends.cuda.history import CudaHistory
from gpumemwidget.backends.snapshot import parse_events, parse_rules, parse_segments, parse_traces
from gpumemwidget.model.devices import Frame
from gpumemwidget.model.traces import ACTIONS, AllocatorRules, AllocatorTrace
from gpumemwidget.testing import SimulatedGpus, simulate_torch

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

    assert [ACTIONS[code] for code in events.actions] == [
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
