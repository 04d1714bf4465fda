"""From a history to the record of a device: random programs, whose truth is known."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from gpumemwidget.allocator.blocks import SimulatedBlock
from gpumemwidget.model.devices import Frame
from gpumemwidget.model.traces import (
    ACTIONS,
    Call,
    DeviceTrace,
    LineUse,
    NoteKind,
    Origin,
    TraceNote,
)
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
        st.sampled_from(ACTIONS),
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
