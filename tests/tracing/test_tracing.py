"""From a history to the record of a device: random programs, whose truth is known."""

from __future__ import annotations

import dataclasses
import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpumemwidget.allocator.blocks import SimulatedBlock
from gpumemwidget.model.cells import CellDevice, Span
from gpumemwidget.model.devices import Frame
from gpumemwidget.model.traces import (
    Call,
    DeviceTrace,
    LineUse,
    NoteKind,
    Origin,
    PeakPart,
    TraceAction,
    TraceNote,
)
from gpumemwidget.tracing.device_timeline import MAX_MOMENTS
from gpumemwidget.tracing.device_trace import describe_device
from tests.tracing.device import (
    EARLIER,
    MIB,
    START_US,
    Device,
    Moment,
    at,
    make_sources,
    make_trace,
)

TEXT = "\n".join(f"line_{number}()" for number in range(1, 7))
SOURCES = make_sources(TEXT, "def f(x):\n    return g(x)\n\n\ndef g(x):\n    return x * 2\n")

#: What may be running: the cell's line, or ``None``, and the stack.
PLACES: list[tuple[int | None, tuple[Frame, ...]]] = [
    *((line, at(line)) for line in range(1, 5)),
    (5, at(5, Frame(EARLIER, 6, "g"), Frame(EARLIER, 2, "f"))),
    (5, at(5, Frame(EARLIER, 2, "f"))),
    # A thread that runs none of the cell's code.
    (None, (Frame(EARLIER, 6, "g"), Frame("/usr/lib/python3.11/threading.py", 9, "_bootstrap"))),
]

_SIZES = st.one_of(
    st.integers(1, 2000), st.integers(1, 3 * MIB), st.sampled_from([MIB, MIB + 1, 19 * MIB + 5])
)
_STEPS = st.lists(
    st.one_of(
        st.tuples(
            st.just("alloc"),
            _SIZES,
            st.integers(0, len(PLACES) - 1),
            st.integers(0, 1),
            st.integers(0, 1),
        ),
        st.tuples(st.just("free"), st.integers(0, 99), st.booleans()),
        st.tuples(st.just("synchronize")),
        st.tuples(st.just("empty_cache")),
    ),
    max_size=40,
)


#: For each line of the cell, and of the earlier one, the places that are its.
_OWNERS: dict[int | Origin, list[str]] = {
    Origin.BEFORE_CELL: ["before"],
    Origin.OUTSIDE_LINES: ["6"],
    **{
        line: [str(place) for place, (own, _) in enumerate(PLACES) if own == line]
        for line in range(1, 6)
    },
}
_EARLIER_LINES = {2: ["5"], 6: ["4", "6"]}


def play(device: Device, steps: list[tuple[Any, ...]], held: list[SimulatedBlock]) -> None:
    """Let a program run."""
    for action, *values in steps:
        if action == "alloc":
            n_bytes, place, stream, pool = values
            held.append(
                device.allocate(n_bytes, str(place), PLACES[place][1], stream=stream, pool=pool)
            )
        elif action == "free" and held:
            which, is_used_elsewhere = values
            device.free(held.pop(which % len(held)), is_used_elsewhere=is_used_elsewhere)
        elif action == "synchronize":
            device.synchronize()
        elif action == "empty_cache":
            device.empty_cache()


def describe(device: Device, **options: Any) -> DeviceTrace:
    """The record of what happened since the device's start."""
    return describe_device(device.end(**options), sources=SOURCES, start_us=START_US)


def find_use(device: Device, owners: list[str]) -> LineUse | None:
    """The truth about some owners together; ``None`` where they allocated nothing."""
    allocated = [n_bytes for owner in owners for n_bytes in device.allocated.get(owner, [])]
    held = [find_held(moment, owners) for moment in device.moments]
    if not allocated:
        return None
    return LineUse(
        allocated_bytes=sum(allocated),
        net_bytes=held[-1],
        at_peak_bytes=find_held(find_peak(device), owners),
        highest_bytes=max(held),
    )


def find_held(moment: Moment, owners: list[str]) -> int:
    """What some owners held then."""
    return sum(moment.held_bytes.get(owner, 0) for owner in owners)


def find_peak(device: Device) -> Moment:
    """The first moment with the most allocated."""
    return max(device.moments, key=lambda each: (each.allocated_bytes, -each.place))


def check_sums(found: DeviceTrace) -> None:
    """What has to add up in every record."""
    timeline = found.timeline
    for place, allocated in enumerate(timeline.allocated_bytes):
        assert allocated == sum(layer.held_bytes[place] for layer in timeline.layers)
    assert list(timeline.times_s) == sorted(timeline.times_s)
    assert timeline.allocated_bytes[timeline.peak] == max(timeline.allocated_bytes)
    assert sum(part.n_bytes for part in found.peak) == max(timeline.allocated_bytes)
    uses = [found.before, found.unplaced]
    uses += [line.use for line in found.units[0].lines if line.use is not None]
    assert sum(use.at_peak_bytes for use in uses) == max(timeline.allocated_bytes)
    assert sum(use.net_bytes for use in uses) == timeline.allocated_bytes[-1]
    for unit in found.units:
        for line in unit.lines:
            if line.use is not None:
                check_calls(line.use, line.calls)


def check_calls(use: LineUse, calls: tuple[Call, ...]) -> None:
    """Calls are parts of what called them."""
    for name in ("allocated_bytes", "net_bytes", "at_peak_bytes"):
        assert sum(getattr(call.use, name) for call in calls) <= getattr(use, name)
    for call in calls:
        assert call.use.highest_bytes <= use.highest_bytes
        check_calls(call.use, call.calls)


@given(
    first=_STEPS,
    second=_STEPS,
    is_expandable=st.booleans(),
    max_split_bytes=st.sampled_from([None, 2 * MIB, 19 * MIB]),
)
def test_random_programs_are_told_as_they_ran(
    first: list[tuple[Any, ...]],
    second: list[tuple[Any, ...]],
    is_expandable: bool,
    max_split_bytes: int | None,
) -> None:
    """Each line's figures, the timeline, the layers, the peak and its parts are the truth."""
    device = Device(is_expandable=is_expandable, max_split_bytes=max_split_bytes)
    held: list[SimulatedBlock] = []
    play(device, first, held)
    device.start()
    play(device, second, held)

    found = describe(device)

    assert found.notes == ()
    start, end, peak = device.moments[0], device.moments[-1], find_peak(device)
    assert found.allocated.before_bytes == start.allocated_bytes
    assert found.allocated.peak_bytes == peak.allocated_bytes
    assert found.allocated.after_bytes == end.allocated_bytes
    assert found.reserved.before_bytes == start.reserved_bytes
    assert found.reserved.peak_bytes == max(each.reserved_bytes for each in device.moments)
    assert found.reserved.after_bytes == end.reserved_bytes
    assert found.peak_is == "exact"
    cell = found.units[0]
    assert [line.text for line in cell.lines] == TEXT.splitlines()
    for line in cell.lines:
        assert line.use == find_use(device, _OWNERS.get(line.line, []))
    assert found.unplaced == (find_use(device, ["6"]) or LineUse(0, 0, 0, 0))
    stood = [each.held_bytes.get("before", 0) for each in device.moments]
    assert found.before == LineUse(stood[0], stood[-1], peak.held_bytes.get("before", 0), stood[0])
    check_sums(found)
    check_functions(found, device)
    check_timeline(found, device)


def check_functions(found: DeviceTrace, device: Device) -> None:
    """The earlier cell's lines, and the calls below the line that calls its functions."""
    told = {line.line: line.use for unit in found.units[1:] for line in unit.lines}
    for line, owners in _EARLIER_LINES.items():
        assert told.get(line) == find_use(device, owners)
    told_calls = [
        (call.functions, call.line, call.use)
        for outer in found.units[0].lines[4].calls
        for call in (outer, *outer.calls)
    ]
    whole = find_use(device, ["4", "5"])
    if "5" not in device.allocated:
        assert told_calls == ([(("f", "g"), 6, whole)] if whole else [])
    else:
        inner = find_use(device, ["4"])
        # A call with less than two hundredths of the line is not told.
        is_told = whole and inner and inner.allocated_bytes >= int(0.02 * whole.allocated_bytes)
        assert told_calls == [(("f",), 2, whole), *([(("g",), 6, inner)] if is_told else [])]


def check_timeline(found: DeviceTrace, device: Device) -> None:
    """Every moment is there, with what each layer held."""
    timeline = found.timeline
    truth = {moment.place: moment for moment in device.moments}
    places = [round(time_s * 1e6) - 1 for time_s in timeline.times_s]
    last = truth.pop(-1)
    told = set()
    for index, place in enumerate(places):
        last = truth.get(place, last)
        told.add(place)
        assert timeline.allocated_bytes[index] == last.allocated_bytes
        assert timeline.reserved_bytes[index] == last.reserved_bytes
        for layer in timeline.layers:
            # The other lines' is what the rest leaves, as all of them add up.
            if layer.origin is not Origin.OTHER_LINES:
                owners = _OWNERS[layer.line or layer.origin]
                assert layer.held_bytes[index] == find_held(last, owners)
    assert truth.keys() <= told


@given(first=_STEPS, second=_STEPS, is_expandable=st.booleans(), data=st.data())
def test_what_is_left_of_a_ring_is_reported_as_at_least_what_ran(
    first: list[tuple[Any, ...]],
    second: list[tuple[Any, ...]],
    is_expandable: bool,
    data: st.DataObject,
) -> None:
    """The end and what is reserved are exact; a large block that is gone may lack its unsplit rest.

    That is 1 MiB at most.
    """
    device = Device(is_expandable=is_expandable)
    held: list[SimulatedBlock] = []
    play(device, first, held)
    device.start()
    play(device, second, held)
    n_lost = data.draw(st.integers(0, len(device.events)))

    found = describe(device, n_lost=n_lost, is_whole=False)

    assert found.notes[0] == TraceNote(NoteKind.EVENTS_MISSING, seconds=(n_lost + 1) / 1e6)
    assert found.allocated.after_bytes == device.moments[-1].allocated_bytes
    uses = {line.line: line.use for line in found.units[0].lines if line.use is not None}
    for line in range(1, 6):
        net_bytes = find_held(device.moments[-1], _OWNERS[line])
        assert (uses[line].net_bytes if line in uses else 0) <= net_bytes
    check_sums(found)
    timeline = found.timeline
    truth = {moment.place: moment for moment in device.moments}
    last = max(
        (each for each in device.moments if each.place < n_lost), key=lambda each: each.place
    )
    for index, time_s in enumerate(timeline.times_s[1:], 1):
        last = truth.get(round(time_s * 1e6) - 1, last)
        assert timeline.reserved_bytes[index] == last.reserved_bytes
        missing = last.allocated_bytes - timeline.allocated_bytes[index]
        assert 0 <= missing <= last.n_large * MIB


_ADDRESSES = [1 << 40, (1 << 40) + 512, (1 << 40) + 2 * MIB, (1 << 40) + 20 * MIB, 0, 2**63]
_EVENTS = st.lists(
    st.tuples(
        st.sampled_from(TraceAction),
        st.sampled_from(_ADDRESSES),
        st.sampled_from([0, 1, 512, 2 * MIB, 20 * MIB, 1 << 50, 2**63 - 1, -1]),
        st.just(0),
        st.sampled_from([(), *(frames for _, frames in PLACES)]),
    ),
    max_size=30,
)


@given(events=_EVENTS, is_whole=st.booleans(), steps=_STEPS, is_expandable=st.booleans())
def test_events_that_cannot_have_been_so_give_notes(
    events: list[tuple[str, int, int, int, tuple[Frame, ...]]],
    is_whole: bool,
    steps: list[tuple[Any, ...]],
    is_expandable: bool,
) -> None:
    """Whatever stands in a history, there is a record, its sums hold, and it says what is wrong."""
    device = Device(is_expandable=is_expandable)
    device.start()
    play(device, steps, [])
    after = device.list_segments()
    trace = make_trace(events, device.before, after, rules=device.rules, is_whole=is_whole)

    found = describe_device(trace, sources=SOURCES, start_us=START_US)

    stands = sum(
        block.n_bytes
        for each in after
        for block in each.blocks
        if block.state == "active_allocated"
    )
    assert found.n_events == len(events)
    assert found.allocated.after_bytes == stands
    is_told = found.timeline.allocated_bytes[-1] == stands
    assert is_told or found.notes
    if is_told:
        check_sums(found)


# -- The timeline's moments, the parts of the peak, figures that differ ----------------------------

THREE_LINES = make_sources("a = 1\nb = 2\nc = 3")


def describe_cell(device: Device, **options: object) -> DeviceTrace:
    return describe_device(device.end(), sources=THREE_LINES, start_us=START_US, **options)


@pytest.mark.parametrize("seed", range(2))
def test_thinning_keeps_every_extreme(seed: int) -> None:
    """The first and last moment, the peak, and both extremes of each stretch are there."""
    chance = random.Random(seed)
    device = Device()
    held: list[SimulatedBlock] = []
    device.start()
    for _ in range(1500 + 200 * seed):
        if held and chance.random() < 0.5:
            device.free(held.pop(chance.randrange(len(held))))
        elif chance.random() < 0.01:
            device.empty_cache()
        else:
            held.append(
                device.allocate(chance.randrange(1, 2 * MIB), "", at(chance.randrange(1, 4)))
            )

    found = describe_cell(device)

    timeline = found.timeline
    assert len(device.moments) > MAX_MOMENTS
    assert 100 < len(timeline.times_s) <= MAX_MOMENTS + 1
    allocated = [each.allocated_bytes for each in device.moments]
    reserved = [each.reserved_bytes for each in device.moments]
    assert (timeline.allocated_bytes[0], timeline.allocated_bytes[-1]) == (
        allocated[0],
        allocated[-1],
    )
    assert timeline.allocated_bytes[timeline.peak] == max(allocated)
    assert max(each or 0 for each in timeline.reserved_bytes) == max(reserved)
    check_sums(found)


def test_a_cell_that_allocates_nothing_has_a_timeline() -> None:
    """What stood before, from its start to its end."""
    device = Device()
    device.allocate(3 * MIB)
    device.start()

    found = describe_cell(device)

    timeline = found.timeline
    assert timeline.times_s == (0.0, 1e-6)
    assert timeline.allocated_bytes == (3 * MIB, 3 * MIB)
    assert timeline.reserved_bytes == (20 * MIB, 20 * MIB)
    assert [(layer.origin, layer.held_bytes) for layer in timeline.layers] == [
        (Origin.BEFORE_CELL, (3 * MIB, 3 * MIB))
    ]
    assert timeline.peak == 0
    assert [line.use for line in found.units[0].lines] == [None, None, None]


def test_the_peak_is_told_by_line_kind_and_name() -> None:
    """What still stands has the name it has now; what is gone was freed since."""
    device = Device()
    old = [device.allocate(size * MIB) for size in (3, 2)]
    device.start()
    kept = device.allocate(4 * MIB, "", at(1))
    gone = device.allocate(5 * MIB, "", at(1))
    other = [device.allocate(MIB, "", at(2)) for _ in range(2)]
    device.allocate(512, "", (Frame("/usr/lib/python3.11/threading.py", 9, "_bootstrap"),))
    device.free(gone)
    device.free(old[1])
    names = {
        kept.address: ("parameter", "model.weight"),
        other[0].address: ("tensor", "xs[0]"),
        old[0].address: ("unknown", ""),
    }

    found = describe_cell(device, names=names)

    def part(
        origin: Origin, line: int | None, kind: str, owner: str | None, n_bytes: int
    ) -> PeakPart:
        return PeakPart(origin, line, kind, owner, n_bytes, 1)

    assert found.peak == (
        part(Origin.LINE, 1, "freed since", None, 5 * MIB),
        part(Origin.LINE, 1, "parameter", "model.weight", 4 * MIB),
        part(Origin.BEFORE_CELL, None, "unknown", None, 3 * MIB),
        part(Origin.BEFORE_CELL, None, "freed since", None, 2 * MIB),
        part(Origin.LINE, 2, "tensor", "xs[0]", MIB),
        part(Origin.LINE, 2, "unknown", None, MIB),
        part(Origin.OUTSIDE_LINES, None, "unknown", None, 512),
    )


def count(device: Device, **change: Span | str | None) -> CellDevice:
    """The cell as the counters have it."""
    allocated = [each.allocated_bytes for each in device.moments]
    reserved = [each.reserved_bytes for each in device.moments]
    spans = [Span(each[0], each[-1], max(each)) for each in (allocated, reserved)]
    cell = CellDevice("cuda:0", *spans, "exact", num_alloc_retries=0, num_ooms=0)
    return dataclasses.replace(cell, **change)


def make_short() -> Device:
    """5 MiB for a moment, and 1 MiB that stays."""
    device = Device()
    device.start()
    gone = device.allocate(5 * MIB, "", at(1))
    device.free(gone)
    device.allocate(MIB, "", at(2))
    return device


def test_counters_that_differ_are_shown_and_said() -> None:
    """The figures are the counters', and the note has the first that differ."""
    device = make_short()

    found = describe_cell(device, cell=count(device, allocated=Span(512, MIB, 6 * MIB)))

    assert found.allocated == Span(512, MIB, 6 * MIB)
    assert found.notes == (TraceNote(NoteKind.COUNTERS_DIFFER, "allocated", 512, 0),)


def test_a_peak_before_the_oldest_event_is_the_counters() -> None:
    """The record says so, and of which moment the peak's lines are told."""
    device = make_short()
    trace = device.end(n_lost=5)

    found = describe_device(trace, sources=THREE_LINES, start_us=START_US, cell=count(device))

    assert trace.events.actions == b"\0"
    assert found.allocated == Span(0, MIB, 5 * MIB)
    assert found.peak_is == "exact"
    assert found.notes == (
        TraceNote(NoteKind.EVENTS_MISSING, seconds=6e-6),
        TraceNote(NoteKind.PEAK_NOT_IN_EVENTS, "", 5 * MIB, MIB),
    )
    assert [(part.line, part.n_bytes) for part in found.peak] == [(2, MIB)]


def test_a_span_that_begins_with_its_first_event_misses_nothing() -> None:
    """Of a file that has no beginning, what stood at its first event is what was before."""
    device = Device()
    old = [device.allocate(size * MIB) for size in (3, 2)]
    device.start()
    device.free(old[1])
    device.allocate(MIB, "", at(2))
    trace = device.end(is_whole=False)
    first_us = trace.events.times_us[0]
    file = dataclasses.replace(trace, before=(), start_us=first_us)

    found = describe_device(file, sources=THREE_LINES, start_us=first_us)

    assert found.notes == ()
    assert found.allocated == Span(5 * MIB, 4 * MIB, 5 * MIB)
    assert found.reserved == Span(20 * MIB, 22 * MIB, 22 * MIB)
    assert (found.before.allocated_bytes, found.before.net_bytes) == (5 * MIB, 3 * MIB)
    assert found.unplaced.allocated_bytes == 0
    check_sums(found)
