"""The timeline's moments, the parts of the peak, and what is said where figures differ."""

from __future__ import annotations

import dataclasses
import random

import pytest

from gpumemwidget.allocator.blocks import SimulatedBlock
from gpumemwidget.model.cells import CellDevice, Span
from gpumemwidget.model.devices import Frame
from gpumemwidget.model.traces import DeviceTrace, NoteKind, Origin, PeakPart, TraceNote
from gpumemwidget.tracing.device_trace import MAX_MOMENTS, describe_device
from tests.tracing.device import MIB, START_US, Device, at, make_sources
from tests.tracing.test_tracing import check_sums

SOURCES = make_sources("a = 1\nb = 2\nc = 3")


def describe(device: Device, **options: object) -> DeviceTrace:
    return describe_device(device.end(), sources=SOURCES, start_us=START_US, **options)


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

    found = describe(device)

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

    found = describe(device)

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

    found = describe(device, names=names)

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

    found = describe(device, cell=count(device, allocated=Span(512, MIB, 6 * MIB)))

    assert found.allocated == Span(512, MIB, 6 * MIB)
    assert found.notes == (TraceNote(NoteKind.COUNTERS_DIFFER, "allocated", 512, 0),)


def test_a_peak_before_the_oldest_event_is_the_counters() -> None:
    """The record says so, and of which moment the peak's lines are told."""
    device = make_short()
    trace = device.end(n_lost=5)

    found = describe_device(trace, sources=SOURCES, start_us=START_US, cell=count(device))

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

    found = describe_device(file, sources=SOURCES, start_us=first_us)

    assert found.notes == ()
    assert found.allocated == Span(5 * MIB, 4 * MIB, 5 * MIB)
    assert found.reserved == Span(20 * MIB, 22 * MIB, 22 * MIB)
    assert (found.before.allocated_bytes, found.before.net_bytes) == (5 * MIB, 3 * MIB)
    assert found.unplaced.allocated_bytes == 0
    check_sums(found)
