"""A trace's moments, thinned so that the eye sees no difference and no extreme is lost."""

from __future__ import annotations

import bisect
from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate, pairwise

from gpumemwidget.measure.played import Played

__all__ = ["MOST_MOMENTS", "Moments", "choose_moments"]

#: Up to so many moments all are kept, and of more no more than that.
MOST_MOMENTS = 800
#: Each stretch keeps five moments at most; the first, the last and the peak's come on top.
_N_CUTS = (MOST_MOMENTS - 3) // 10


@dataclass(frozen=True, slots=True, eq=False)
class Moments:
    """The moments that are kept."""

    #: For each the place of the last event up to it; -1 before all of them.
    stops: list[int]
    #: Microseconds on the clock of the events, ascending.
    times_us: list[int]
    allocated_bytes: list[int]
    reserved_bytes: list[int]
    #: The place of the event with the most allocated, the first of equals; -1 before all of them.
    peak: int
    #: The place of its moment among those kept.
    peak_moment: int
    n_moments: int

    @property
    def peak_bytes(self) -> int:
        """The most that was allocated."""
        return self.allocated_bytes[self.peak_moment]


def choose_moments(played: Played, start_us: int, end_us: int) -> Moments:
    """The moments to keep.

    Args:
        played: the events and what they did.
        start_us: when what stood before the first event is taken to have stood.
        end_us: when what stood at the end is taken to have stood.
    """
    # What stood before the first event, and after each.
    allocated = array("q", accumulate(played.changes, initial=played.start_allocated_bytes))
    reserved = array("q", accumulate(played.reserved_changes, initial=played.start_reserved_bytes))
    n_same = sum(column.count(0) for column in (played.changes, played.reserved_changes))
    n_moments = 1 + 2 * len(played.changes) - n_same
    peak = allocated.index(max(allocated))
    if n_moments < MOST_MOMENTS:
        kept = {
            place
            for place, changes in enumerate(
                zip(played.changes, played.reserved_changes, strict=True), 1
            )
            if any(changes)
        }
    else:
        kept = set()
        for first, end in _cut(played.events.times_us):
            kept.add(end - 1)
            for values in (allocated[first:end], reserved[first:end]):
                kept.update((first + values.index(max(values)), first + values.index(min(values))))
    places = sorted(kept | {0, peak})
    times_us = [start_us, *(played.events.times_us[place - 1] for place in places if place)]
    # Threads may note their events a moment late.
    times_us = list(accumulate(times_us, max))
    peak_moment = places.index(peak)
    if end_us > times_us[-1]:
        places.append(len(allocated) - 1)
        times_us.append(end_us)
    return Moments(
        stops=[place - 1 for place in places],
        times_us=times_us,
        allocated_bytes=[allocated[place] for place in places],
        reserved_bytes=[reserved[place] for place in places],
        peak=peak - 1,
        peak_moment=peak_moment,
        n_moments=n_moments,
    )


def _cut(times_us: array[int]) -> Iterator[tuple[int, int]]:
    """Stretches of the moments that are alike in number or in time, whichever is shorter.

    In number for where events crowd, in time for where they are few.
    """
    n_moments = len(times_us) + 1
    first_us, last_us = times_us[0], times_us[-1]
    cuts = {n_moments * part // _N_CUTS for part in range(_N_CUTS)}
    cuts.update(
        1 + bisect.bisect_left(times_us, first_us + (last_us - first_us) * part // _N_CUTS)
        for part in range(1, _N_CUTS)
    )
    cuts.add(n_moments)
    ordered = sorted(cuts)
    return pairwise(ordered)
