"""Choose the moments of a traced device's timeline, and the layers of memory drawn over them."""

from __future__ import annotations

import bisect
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from gpumemwidget.allocator.replay import Replay
from gpumemwidget.model.traces import MAX_LINE_LAYERS, Layer, Origin, Timeline
from gpumemwidget.recording.history import find_extremes
from gpumemwidget.tracing.attribution import AllocatingSource, SiteTotals
from gpumemwidget.tracing.sources import Source

#: Maximum number of moments; of a shorter history all are kept.
MAX_MOMENTS = 800


@dataclass(frozen=True, slots=True, eq=False)
class Moments:
    """The moments of a timeline.

    Attributes:
        timeline: the moments, without layers.
        stops: for each moment the index of the last event up to it; -1 before all events.
        peak: index of the event with the most allocated, the first of equals; -1 before all events.
        peak_bytes: the most that was allocated.
        reserved_peak_bytes: the most that was reserved.
    """

    timeline: Timeline
    stops: list[int]
    peak: int
    peak_bytes: int
    reserved_peak_bytes: int


def choose_moments(replayed: Replay, cell_us: int, first_us: int, last_us: int) -> Moments:
    """Choose moments such that the eye sees no difference and no extreme is lost.

    Args:
        replayed: the device's trace.
        cell_us: when the cell began; this and the others in microseconds on the events' clock.
        first_us: the first moment, before all events.
        last_us: the last moment.
    """
    changes, reserved_changes = replayed.changes, replayed.reserved_changes
    # Before the first event, and after each.
    allocated = array("q", accumulate(changes, initial=replayed.start_allocated_bytes))
    reserved = array("q", accumulate(reserved_changes, initial=replayed.start_reserved_bytes))
    n_unchanged = changes.count(0) + reserved_changes.count(0)
    n_moments = 1 + 2 * len(changes) - n_unchanged
    peak_bytes = max(allocated)
    peak = allocated.index(peak_bytes)
    kept = {0, peak}
    if n_moments < MAX_MOMENTS:
        pairs = zip(changes, reserved_changes, strict=True)
        kept.update(place for place, pair in enumerate(pairs, 1) if any(pair))
    else:
        columns = allocated, reserved
        for stretch in _cut(replayed.events.times_us):
            kept.add(stretch[-1])
            kept.update(find_extremes(stretch, highest=columns, lowest=columns))
    places = sorted(kept)
    times_us = [first_us, *(replayed.events.times_us[place - 1] for place in places if place)]
    # Threads may note their events a moment late.
    times_us = list(accumulate(times_us, max))
    peak_moment = places.index(peak)
    if last_us > times_us[-1]:
        places.append(len(changes))
        times_us.append(last_us)
    timeline = Timeline(
        times_s=tuple([max(0, time_us - cell_us) / 1e6 for time_us in times_us]),
        allocated_bytes=tuple([allocated[place] for place in places]),
        reserved_bytes=tuple([reserved[place] for place in places]),
        layers=(),
        peak=peak_moment,
    )
    stops = [place - 1 for place in places]
    return Moments(timeline, stops, peak - 1, peak_bytes, max(reserved))


def choose_layer_lines(source: AllocatingSource, totals: SiteTotals) -> list[int]:
    """Return the lines to give a layer: those that hold most at the peak, then at the end."""

    def rank(line: int) -> tuple[int, int, int]:
        sites = source.lines[line].sites
        at_peak = sum([totals.at_peak_bytes[site] for site in sites])
        return -at_peak, -sum([totals.net_bytes[site] for site in sites]), line

    return sorted(source.lines, key=rank)[:MAX_LINE_LAYERS]


def make_layers(
    timeline: Timeline, rows: Sequence[Sequence[int]], lines: Sequence[int], cell: Source
) -> tuple[Layer, ...]:
    """Return the layers from the bottom up, without those that never hold anything.

    Args:
        timeline: the moments.
        rows: for each moment the bytes from before the cell, of each line, and outside its lines.
        lines: the lines that have a layer.
        cell: the traced cell.
    """
    texts = cell.lines
    before, *held, outside = (tuple(column) for column in zip(*rows, strict=True))
    others = tuple(
        allocated - sum(row) for allocated, row in zip(timeline.allocated_bytes, rows, strict=True)
    )
    layers = [Layer(Origin.BEFORE_CELL, "", None, before)]
    for line, held_bytes in zip(lines, held, strict=True):
        text = texts[line - 1].strip() if line <= len(texts) else ""
        layers.append(Layer(Origin.LINE, text, line, held_bytes))
    layers.append(Layer(Origin.OTHER_LINES, "", None, others))
    layers.append(Layer(Origin.OUTSIDE_LINES, "", None, outside))
    return tuple([layer for layer in layers if any(layer.held_bytes)])


def _cut(times_us: array[int]) -> Iterator[range]:
    """Cut the moments into stretches that are equal in number or in time, whichever is shorter.

    Equal in number for where events crowd, equal in time for where they are few.
    """
    n_moments = len(times_us) + 1
    first_us, last_us = times_us[0], times_us[-1]
    # Half of the cuts are by number. A stretch keeps five moments at most; the first, the last and
    # the peak's come on top.
    n_cuts = (MAX_MOMENTS - 3) // 10
    cuts = {n_moments * part // n_cuts for part in range(n_cuts)}
    cuts.update(
        1 + bisect.bisect_left(times_us, first_us + (last_us - first_us) * part // n_cuts)
        for part in range(1, n_cuts)
    )
    cuts.add(n_moments)
    return (range(start, stop) for start, stop in pairwise(sorted(cuts)))
