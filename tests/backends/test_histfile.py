"""Recordings that hold the allocator's events: the file, and traces that are played from it."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from gpumemwidget.backends.allocator import ReplayAllocator
from gpumemwidget.backends.cuda import CudaBackend
from gpumemwidget.backends.events import parse_events
from gpumemwidget.backends.hardware import Hardware
from gpumemwidget.backends.histfile import join_events
from gpumemwidget.backends.recorder import Recorder
from gpumemwidget.backends.recording import (
    Recording,
    format_recording,
    load_recording,
    parse_recording,
)
from gpumemwidget.backends.replay import Playback, ReplayBackend
from gpumemwidget.backends.script import Step, play_script
from gpumemwidget.backends.simulated import simulate_torch
from gpumemwidget.errors import RecordingError
from gpumemwidget.records import Frame
from gpumemwidget.traces import ACTIONS, AllocatorRules, AllocatorTrace, TraceEvents

DATA = Path(__file__).parent.parent / "data" / "h100-traces"
MIB = 1 << 20
LINE = Frame("train.py", 3, "<module>")
STEPS = [
    Step(1.0, "allocate", 0, "a", 3 * MIB, (LINE,)),
    Step(2.0, "allocate", 0, "b", 100, (Frame("train.py", 4, "<module>"),)),
    Step(2.0, "allocate", 1, "c", MIB),
    Step(3.0, "free", 0, "a"),
    Step(4.0, "free", 0, "b"),
    Step(4.0, "free", 1, "c"),
    Step(4.0, "empty_cache"),
]


def list_events(events: TraceEvents) -> list[tuple[Any, ...]]:
    """Everything that is said of each event."""
    return [
        (ACTIONS[code], *rest[:-1], events.stack_table[rest[-1]])
        for code, *rest in zip(
            events.actions,
            events.addresses,
            events.sizes,
            events.times_us,
            events.streams,
            events.stacks,
            strict=True,
        )
    ]


def trace(
    playback: Playback, first: int, length: int, *, n_events: int = 1000
) -> dict[str, AllocatorTrace]:
    """The traces of a stretch of a playback, by device."""
    backend = ReplayBackend(playback)
    playback.advance(first)
    assert backend.start_trace(n_events=n_events) == ()
    assert backend.is_tracing
    playback.advance(length)
    traces = backend.end_trace()
    assert not backend.is_tracing
    return {each.device: each for each in traces}


def record(source: str = "") -> tuple[Recording, AllocatorTrace]:
    """A recording made of a simulated GPU, and the trace that it was made with."""
    gpu = ReplayAllocator()
    hardware = Hardware([CudaBackend(simulate_torch(gpu))])
    recorder = Recorder(hardware, about=source)
    kept = gpu.allocate(5 * MIB)
    recorder.start_trace()
    first = gpu.allocate(100)
    recorder.tick()
    gpu.free(kept)
    recorder.tick()
    gpu.free(first)
    gpu.empty_cache()
    (made,) = recorder.end_trace()
    return recorder.to_recording(), made


# -- The file ----------------------------------------------------------------------------------


def test_events_survive_the_file() -> None:
    """Every column, each stack, the rules, and that some were lost."""
    recording = dataclasses.replace(
        play_script(STEPS, history=True),
        rules=AllocatorRules(64 * MIB, is_expandable=True, roundup_divisions=((0, 4), (MIB, 0))),
        is_whole=False,
    )

    read = parse_recording(format_recording(recording))

    assert read.rules == recording.rules
    assert read.is_whole is False
    assert [[device for device, _ in event.traced] for event in read.events] == [
        [device for device, _ in event.traced] for event in recording.events
    ]
    for event, known in zip(read.events, recording.events, strict=True):
        assert event.segments == known.segments
        for (_, one), (_, other) in zip(event.traced, known.traced, strict=True):
            assert list_events(one) == list_events(other)
    assert any(event.traced for event in read.events)


def test_a_recording_without_events_is_written_as_before() -> None:
    """Its file says nothing of them."""
    text = format_recording(play_script(STEPS, snapshots=True))

    assert "traced" not in text
    assert "rules" not in text
    assert parse_recording(text).rules == AllocatorRules()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda rows: rows[0].pop(), "an event is not whole"),
        (lambda rows: rows.append(None), "an event is not whole"),
        (lambda rows: rows[0].__setitem__(0, len(ACTIONS)), "an event is not whole"),
        (lambda rows: rows[0].__setitem__(0, "alloc"), "an event is not whole"),
        (lambda rows: rows[0].__setitem__(1, -1), "an event is not whole"),
        (lambda rows: rows[0].__setitem__(1, 1 << 64), "an event is not whole"),
        (lambda rows: rows[0].__setitem__(2, 1 << 63), "an event is not whole"),
        (lambda rows: rows[0].__setitem__(3, True), "an event is not whole"),
        (lambda rows: rows[0].__setitem__(5, 99), "there is no stack 99"),
    ],
)
def test_a_damaged_event_is_refused(change: Any, said: str) -> None:
    """The error says which moment it belongs to."""
    data = json.loads(format_recording(play_script(STEPS, history=True)))
    change(data["events"][1][5][0][1])

    with pytest.raises(RecordingError, match=f"of event 1's snapshot, {said}; record it again"):
        parse_recording(json.dumps(data))


@pytest.mark.parametrize(
    "rules",
    [
        None,
        {},
        {"max_split_bytes": -1, "is_expandable": False, "roundup_divisions": []},
        {"max_split_bytes": None, "is_expandable": 0, "roundup_divisions": []},
        {"max_split_bytes": None, "is_expandable": False, "roundup_divisions": [[1]]},
        {"max_split_bytes": None, "is_expandable": False, "roundup_divisions": [["a", 1]]},
    ],
)
def test_damaged_rules_are_refused(rules: Any) -> None:
    """They decide on every block's bytes."""
    data = json.loads(format_recording(play_script(STEPS, history=True)))
    data["rules"] = rules

    with pytest.raises(RecordingError, match="the allocator's rules are not whole"):
        parse_recording(json.dumps(data))


def test_events_of_a_device_that_is_not_listed_are_refused() -> None:
    """As readings of one are."""
    data = json.loads(format_recording(play_script(STEPS, history=True)))
    data["events"][1][5][0][0] = "cuda:7"

    with pytest.raises(RecordingError, match="event 1 reads cuda:7, which is not listed"):
        parse_recording(json.dumps(data))


def test_joined_events_share_their_stacks() -> None:
    """Stretches with tables of their own become one, whose oldest events may be left out."""
    frames = [{"name": "f", "filename": "a.py", "line": 1}]
    other = [{"name": "g", "filename": "b.py", "line": 2}]
    raw = {"action": "alloc", "addr": 1, "stream": 0}
    first = parse_events([{**raw, "size": 1, "time_us": 5, "frames": frames}])
    second = parse_events(
        [
            {**raw, "size": 2, "time_us": 6, "frames": other},
            {**raw, "size": 3, "time_us": 7, "frames": frames},
        ]
    )

    joined = join_events([(first, 0), (second, 100)], at_most=2)

    assert list(joined.sizes) == [2, 3]
    assert list(joined.times_us) == [106, 107]
    assert [joined.stack_table[place][0].function for place in joined.stacks] == ["g", "f"]


# -- Playing it --------------------------------------------------------------------------------


def test_a_trace_is_what_happened_between_its_ends() -> None:
    """With what stood at both, and the lines of the script."""
    traces = trace(Playback(play_script(STEPS, history=True)), 1, 2)

    first, second = traces["cuda:0"], traces["cuda:1"]
    assert [each[0] for each in list_events(first.events)] == [
        "segment_alloc",
        "alloc",
        "free_requested",
        "free_completed",
    ]
    assert first.events.stack_table[first.events.stacks[1]] == (Frame("train.py", 4, "<module>"),)
    assert [each.n_bytes for each in first.before] == [20 * MIB]
    assert [each.n_bytes for each in first.after] == [20 * MIB, 2 * MIB]
    assert second.before == ()
    assert [each[0] for each in list_events(second.events)] == ["segment_alloc", "alloc"]
    assert first.is_whole
    assert second.is_whole


def test_played_events_happen_now() -> None:
    """Their times lie between the trace's ends, as far apart as they were recorded."""
    traces = trace(Playback(play_script(STEPS, history=True)), 1, 2)

    found = traces["cuda:0"]
    assert found.end_us - found.start_us == 2_000_000
    assert [each - found.start_us for each in found.events.times_us] == [
        1_000_000,
        1_000_000,
        2_000_000,
        2_000_000,
    ]


def test_a_trace_goes_on_over_turns() -> None:
    """A script that ends as it began has no seam."""
    playback = Playback(play_script(STEPS, history=True), loop=True)

    found = trace(playback, 3, playback.n_events)["cuda:0"]

    assert found.is_whole
    assert [each[0] for each in list_events(found.events)].count("alloc") == 2
    assert list(found.events.times_us) == sorted(found.events.times_us)


def test_a_turn_that_does_not_fit_leaves_the_trace_not_whole() -> None:
    """What stood at the end is gone at the next beginning."""
    playback = Playback(play_script(STEPS[:3], history=True), loop=True)

    assert not trace(playback, 1, playback.n_events)["cuda:0"].is_whole


def test_the_newest_events_are_kept() -> None:
    """The bound is shared by the devices."""
    traces = trace(Playback(play_script(STEPS, history=True)), 0, 4, n_events=4)

    assert len(traces["cuda:0"].events) == 2
    assert not traces["cuda:0"].is_whole


def test_a_recording_without_events_says_so() -> None:
    """Nothing runs then."""
    backend = ReplayBackend.from_script(STEPS, snapshots=True)

    (note,) = backend.start_trace(n_events=10)

    assert "holds no history" in note
    assert not backend.is_tracing
    assert backend.end_trace() == ()


# -- Recording it ------------------------------------------------------------------------------


def test_what_is_recorded_is_played_as_it_was_traced() -> None:
    """From start to end: the same events, and the same blocks at both ends."""
    recording, made = record()

    played = trace(Playback(parse_recording(format_recording(recording))), 0, 10)["cuda:0"]

    assert [each[:3] + each[5:] for each in list_events(played.events)] == [
        each[:3] + each[5:] for each in list_events(made.events)
    ]
    assert played.before == made.before
    assert played.after == made.after


def test_events_are_recorded_with_the_moment_they_lead_to() -> None:
    """A trace that is played from a tick on has only what came after it."""
    recording, _ = record()

    counts = [[len(events) for _, events in event.traced] for event in recording.events]

    assert counts == [[], [2], [2], [4]]
    assert [event.segments is not None for event in recording.events] == [True, False, False, True]


def test_a_recorder_that_is_full_keeps_no_part_of_a_trace() -> None:
    """What it has is whole without it, and the trace is given all the same."""
    gpu = ReplayAllocator()
    recorder = Recorder(Hardware([CudaBackend(simulate_torch(gpu))]), max_events=2)
    gpu.touch()
    recorder.start_trace()
    recorder.tick()
    gpu.allocate(100)

    (made,) = recorder.end_trace()

    assert len(made.events) == 2
    assert [event.traced for event in recorder.to_recording().events] == [(), ()]


# -- The goldens -------------------------------------------------------------------------------


@pytest.mark.parametrize("name", sorted({each.stem for each in DATA.glob("*.json")} - {"cells"}))
def test_real_recordings_are_whole(name: str) -> None:
    """Blocks come to the counters at both ends, and each event stands in its order."""
    recording = load_recording(DATA / f"{name}.json")
    first, last = recording.events
    (found,) = trace(Playback(recording), 0, 1).values()

    for event, segments in ((first, found.before), (last, found.after)):
        blocks = [block for each in segments for block in each.blocks]
        allocated = sum(each.n_bytes for each in blocks if each.state == "active_allocated")
        (reading,) = event.readings
        assert allocated == reading.allocated_bytes
        assert sum(each.n_bytes for each in segments) == reading.reserved_bytes
    assert list(found.events.times_us) == sorted(found.events.times_us)
    assert found.is_whole == (name != "ring")
    cell = json.loads((DATA / "cells.json").read_text())[name]
    files = {frame.filename for stack in found.events.stack_table for frame in stack}
    assert cell["filename"] in files
