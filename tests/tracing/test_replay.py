"""A history played again: each block's bytes, and what is said where they do not agree."""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate

from gpumemwidget.allocator.replay import replay
from gpumemwidget.model.devices import Block, Segment
from gpumemwidget.model.traces import TraceAction
from tests.tracing.device import MIB, Device, make_trace


def test_a_history_that_lacks_an_event_does_not_agree() -> None:
    """Its beginning is known, and does not lead to its end."""
    device = Device()
    device.start()
    pieces = [device.allocate(5 * MIB), device.allocate(6 * MIB)]
    device.free(pieces[0])
    device.allocate(3 * MIB)
    (segment, missing, *events) = device.events
    trace = make_trace([segment, *events], device.before, device.list_segments())

    found = replay(trace)

    assert (segment[0], missing[0]) == (TraceAction.SEGMENT_ALLOC, TraceAction.ALLOC)
    assert not found.agrees


def test_what_lost_events_allocated_is_found_from_the_end() -> None:
    """What is in use at the end has its bytes; what was freed meanwhile those of its request."""
    device = Device()
    device.allocate(30 * MIB)
    device.start()
    gone, _ = device.allocate(5 * MIB), device.allocate(6 * MIB)
    device.free(gone)
    device.allocate(3 * MIB)

    found = replay(device.end(n_lost=3))

    assert found.agrees
    sizes = {found.blocks.sizes[block] for block in found.lost}
    assert sizes == {5 * MIB, 6 * MIB}
    assert list(found.changes) == [-5 * MIB, 0, 3 * MIB]
    assert (found.start_allocated_bytes, found.start_reserved_bytes) == (41 * MIB, 50 * MIB)


def test_a_file_whose_history_began_with_the_process_is_exact() -> None:
    """Nothing stood before it: what large blocks have beyond their requests is known, too."""
    device = Device()
    for size in (7, 5):
        device.allocate(size * MIB)
    block = device.allocate(8 * MIB)
    device.free(block)
    # Of the 8 MiB so little is left that it is not split off.
    device.free(device.allocate(15 * MIB // 2))
    trace = replace(device.end(is_whole=False), before=())

    found = replay(trace)

    assert found.agrees
    assert [*found.changes][-3:] == [8 * MIB, -8 * MIB, 0]


def test_what_lies_across_a_segments_edge_is_not_joined() -> None:
    """Segments may lie side by side; a block never reaches into the next one."""
    first, second = 1 << 40, (1 << 40) + 2 * MIB
    segments = tuple(
        Segment("cuda:0", start, 2 * MIB, False, (0, 0), (Block(start, 2 * MIB, None, "inactive"),))
        for start in (first, second)
    )
    events = [
        (TraceAction.ALLOC, first, 2 * MIB, 0, ()),
        (TraceAction.FREE_REQUESTED, first, 2 * MIB, 0, ()),
        (TraceAction.FREE_COMPLETED, first, 2 * MIB, 0, ()),
        (TraceAction.SEGMENT_FREE, first, 2 * MIB, 0, ()),
        (TraceAction.ALLOC, second, 512, 0, ()),
    ]
    blocks = (
        Block(second, 512, None, "active_allocated"),
        Block(second + 512, 2 * MIB - 512, None, "inactive"),
    )
    after = (replace(segments[1], blocks=blocks),)

    found = replay(make_trace(events, segments, after))

    assert found.agrees
    assert [*accumulate(found.reserved_changes, initial=4 * MIB)][-1] == 2 * MIB
