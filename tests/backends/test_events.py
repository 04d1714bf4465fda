"""The allocator's history as columns, from dictionaries as torch gives them."""

from __future__ import annotations

from typing import Any

import pytest

from gpumemwidget.backends.cuda.snapshot import (
    StackTable,
    parse_events,
    parse_rules,
    parse_segments,
    parse_traces,
)
from gpumemwidget.model.segments import Frame
from gpumemwidget.model.traces import ACTIONS, AllocatorRules, AllocatorTrace

_MIB = 1 << 20
_LINE = {"name": "<module>", "filename": "cell.py", "line": 3}
_INNER = {"name": "f", "filename": "lib.py", "line": 9}
_FOREIGN = {"name": "at::empty", "filename": "/src/Tensor.cpp", "line": 1}


def _event(action: str, *, time_us: int = 0, **others: Any) -> dict[str, Any]:
    fields = {"action": action, "addr": 4096, "size": 512, "stream": 0, "time_us": time_us}
    return {**fields, "frames": [], **others}


def _segment(address: int, *, device: int = 0) -> dict[str, Any]:
    block = {"address": address, "size": 2 * _MIB, "requested_size": 7, "state": "active_allocated"}
    return {"device": device, "address": address, "total_size": 2 * _MIB, "blocks": [block]}


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
    """Events keep their order; an OOM's address is what the driver said is free."""
    events = parse_events(
        [
            _event("segment_alloc", addr=8192, size=2 * _MIB, time_us=1),
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
    assert list(events.sizes) == [2 * _MIB, 700, 1 << 40, 512]
    assert list(events.times_us) == [1, 2, 3, 4]
    assert list(events.streams) == [0, 5, 0, 0]
    assert list(events.stacks) == [0, 1, 0, 0]
    assert events.stack_table == ((), (Frame("lib.py", 9, "f"), Frame("cell.py", 3, "<module>")))


def test_a_stack_is_told_once() -> None:
    """Stacks with the same lines have one number, whether torch shares the dictionaries or not."""
    stacks = [[_INNER, _LINE], [_INNER, _LINE], [dict(_INNER), dict(_LINE)], [_LINE], []]

    events = parse_events([_event("alloc", frames=stack) for stack in stacks])

    assert list(events.stacks) == [1, 1, 1, 2, 0]


def test_frames_that_are_not_shared_are_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """A history whose dictionaries are all different takes no more memory than its stacks."""
    monkeypatch.setattr("gpumemwidget.backends.cuda.snapshot._MAX_KNOWN", 100)
    table = StackTable()

    places = [table.place([[dict(_LINE)] for _ in range(10)]) for _ in range(50)]

    assert {place for each in places for place in each} == {1}
    assert len(table._parsed) <= 100


def test_events_of_other_kinds_are_left_out() -> None:
    """Kinds that are not about memory, such as a user's own marks, have no row."""
    events = parse_events([_event("user_defined"), _event("alloc", size=5), _event("user_defined")])

    assert [ACTIONS[code] for code in events.actions] == ["alloc"]
    assert list(events.sizes) == [5]


def test_chunks_join_without_a_seam() -> None:
    """More events than are turned into columns at once keep their order."""
    n_events = 20_000

    events = parse_events([_event("alloc", time_us=each) for each in range(n_events)])

    assert list(events.times_us) == list(range(n_events))
    assert len(events) == n_events


def test_the_span_begins_by_time_where_nothing_marks_it() -> None:
    """Events before the start belong to something else."""
    snapshot = _snapshot([_event("alloc", time_us=each, size=each) for each in range(10)])

    (trace,) = parse_traces(snapshot, before=(), start_us=4, end_us=20, touched={0})

    assert list(trace.events.sizes) == [4, 5, 6, 7, 8, 9]
    assert trace.is_whole


def test_a_full_ring_is_not_whole() -> None:
    """A ring with as many events as it holds may have lost the oldest ones."""
    for n_events, is_whole in ((9, True), (10, False)):
        snapshot = _snapshot([_event("alloc", time_us=each) for each in range(n_events)])

        (trace,) = parse_traces(
            snapshot, before=(), start_us=0, end_us=20, touched={0}, max_entries=10
        )

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


def test_a_mark_that_was_lost_leaves_the_trace_not_whole() -> None:
    """The ring holds the newest events; without the mark the oldest of the span are gone."""
    raw = [_event("alloc", time_us=each * 1000) for each in range(150, 160)]

    trace = _parse_marked(raw)

    assert not trace.is_whole
    assert len(trace.events) == 10


def test_a_snapshot_of_the_users_is_no_mark() -> None:
    """One that was taken later in the span does not stand in for the mark that was lost."""
    raw = [_event("snapshot", time_us=150_000), _event("alloc", time_us=151_000)]

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
    assert parse_rules({"max_split_size": 64 * _MIB, "expandable_segments": True}) == (
        AllocatorRules(max_split_bytes=64 * _MIB, is_expandable=True)
    )
    assert parse_rules(
        {"roundup_power2_divisions": {**divisions, "1": 8, "2": 8, "4": 4, "16": 1}}
    ).roundup_divisions == ((0, 8), (4 * _MIB, 4), (8 * _MIB, 0), (16 * _MIB, 1), (32 * _MIB, 0))
