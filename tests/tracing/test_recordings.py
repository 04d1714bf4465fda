"""Histories of a real GPU: what is told of them is what the counters said, to the byte."""

from __future__ import annotations

import pytest

from gpumemwidget.allocator.replay import replay
from gpumemwidget.model.cells import Span
from gpumemwidget.model.traces import NoteKind
from tests.tracing.recordings import CELLS, describe, play
from tests.tracing.test_tracing import check_sums


@pytest.mark.parametrize("name", [name for name in CELLS if name != "ring"])
def test_events_come_to_the_counters(name: str) -> None:
    """Start, peak and end of both, and all of it belongs to a line or was there before."""
    trace, cell = play(name)
    played = replay(trace)

    found, _ = describe(name)

    assert played.agrees
    assert (found.allocated, found.reserved, found.peak_is) == (
        cell.allocated,
        cell.reserved,
        "exact",
    )
    timeline = found.timeline
    assert cell.allocated == Span(
        timeline.allocated_bytes[0], timeline.allocated_bytes[-1], max(timeline.allocated_bytes)
    )
    assert cell.reserved == Span(
        timeline.reserved_bytes[0],
        timeline.reserved_bytes[-1],
        max(each or 0 for each in timeline.reserved_bytes),
    )
    assert NoteKind.COUNTERS_DIFFER not in {note.kind for note in found.notes}
    assert found.unplaced.allocated_bytes == 0
    check_sums(found)


def test_a_ring_that_was_full_has_the_counters_peak() -> None:
    """And the lines say from when on they are complete; what stands at the end is whole."""
    found, cell = describe("ring")

    assert (found.allocated, found.reserved) == (cell.allocated, cell.reserved)
    assert found.notes[0].kind is NoteKind.EVENTS_MISSING
    assert (found.notes[0].seconds or 0) > 0
    assert found.before.net_bytes == cell.allocated.before_bytes
    lines = {line.line: line.use for line in found.units[0].lines if line.use is not None}
    net_bytes = sum(use.net_bytes for use in lines.values())
    assert net_bytes + found.unplaced.net_bytes == cell.allocated.change_bytes
    check_sums(found)


def test_training_is_told_by_its_lines() -> None:
    """Autograd's threads are placed at their backward, the optimizer's state at its step."""
    found, _ = describe("training")

    cell, earlier = found.units
    assert (cell.name, earlier.name) == ("In [2]", "In [1]")
    uses = {line.text.strip(): line.use for line in cell.lines if line.use is not None}
    steps = {line.text.strip(): line.use for line in earlier.lines if line.use is not None}
    # A gradient for each parameter, and twice as much for AdamW.
    parameters = sum(4 * (256 * 1024 + 1024 + 1024 * 256 + 256) for _ in range(3)) + 4 * 2570
    assert uses["loss.backward()"].net_bytes >= parameters
    assert uses["loss.backward()"].net_bytes - parameters < 14 * 512
    # The call with a gradient of its own allocates nothing before autograd's threads do.
    assert "y.backward(g)" not in uses
    assert steps["opt.step()"].net_bytes >= 2 * parameters
    calls = next(line.calls for line in cell.lines if line.text.strip() == "step(data, target)")
    assert {call.functions[0] for call in calls} == {"step"}
    assert [note.kind for note in found.notes] == [NoteKind.BACKWARD_INFERRED]
