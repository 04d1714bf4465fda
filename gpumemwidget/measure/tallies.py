"""How much sites allocated, still hold, held at the peak and held at most, in few passes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from gpumemwidget.measure.placing import Placed
from gpumemwidget.measure.played import Played
from gpumemwidget.traces import LineUse

__all__ = ["Tallies"]


@dataclass(slots=True, eq=False)
class Tallies:
    """The figures of sites, and of any of them together.

    Args:
        played: the events and what they did.
        placed: the sites of their blocks.
        peak: the place of the event with the most allocated; -1 where that was before all events.
    """

    played: Played
    placed: Placed
    peak: int
    #: For each site, in the order of the table.
    allocated_bytes: list[int] = field(init=False)
    n_allocs: list[int] = field(init=False)
    net_bytes: list[int] = field(init=False)
    at_peak_bytes: list[int] = field(init=False)
    start_bytes: list[int] = field(init=False)
    _groups: dict[tuple[int, ...], int] = field(init=False, default_factory=dict)
    _highest: list[int] = field(init=False, default_factory=list)

    def __post_init__(self) -> None:
        n_sites = len(self.placed.table)
        allocated, net, at_peak, start = ([0] * n_sites for _ in range(4))
        counts = [0] * n_sites
        peak = self.peak
        for block, site in zip(self.played.standing, self.placed.standing, strict=True):
            n_bytes, end = block.n_bytes, block.end
            counts[site] += 1
            allocated[site] += n_bytes
            start[site] += n_bytes
            if end < 0:
                net[site] += n_bytes
            if not 0 <= end <= peak:
                at_peak[site] += n_bytes
        for place, (change, partner, site) in enumerate(
            zip(self.played.changes, self.played.partners, self.placed.sites, strict=True)
        ):
            if change > 0:
                counts[site] += 1
                allocated[site] += change
                if partner < 0:
                    net[site] += change
                    if place <= peak:
                        at_peak[site] += change
                elif place <= peak < partner:
                    at_peak[site] += change
        self.allocated_bytes, self.n_allocs = allocated, counts
        self.net_bytes, self.at_peak_bytes, self.start_bytes = net, at_peak, start

    def sum_allocated(self, sites: Iterable[int]) -> int:
        """What some sites allocated."""
        allocated = self.allocated_bytes
        return sum([allocated[site] for site in sites])

    def follow(
        self,
        groups: Iterable[Sequence[int]],
        layers: Sequence[Sequence[int]] = (),
        stops: Sequence[int] = (),
    ) -> list[list[int]]:
        """Find the most that each group of sites held, before it can be asked for.

        Args:
            groups: the groups.
            layers: groups whose bytes are told at each stop.
            stops: places of events, ascending; -1 is before all of them.

        Returns:
            For each stop the bytes of each layer after that event.
        """
        for group in (*groups, *layers):
            self._groups.setdefault(_key(group), len(self._groups))
        of_site: list[list[int]] = [[] for _ in self.placed.table]
        held = [0] * len(self._groups)
        for group, index in self._groups.items():
            for site in group:
                of_site[site].append(index)
                held[index] += self.start_bytes[site]
        highest = held[:]
        shown = [self._groups[_key(layer)] for layer in layers]
        rows = []
        place = 0
        for stop in stops:
            self._run(place, stop + 1, of_site, held, highest)
            place = stop + 1
            rows.append([held[index] for index in shown])
        self._run(place, len(self.played.changes), of_site, held, highest)
        self._highest = highest
        return rows

    def describe(self, sites: Sequence[int]) -> LineUse:
        """The figures of a group that was followed."""
        return LineUse(
            allocated_bytes=self.sum_allocated(sites),
            n_allocs=sum([self.n_allocs[site] for site in sites]),
            net_bytes=sum([self.net_bytes[site] for site in sites]),
            at_peak_bytes=sum([self.at_peak_bytes[site] for site in sites]),
            highest_bytes=self._highest[self._groups[_key(sites)]],
        )

    def _run(
        self,
        first: int,
        end: int,
        of_site: Sequence[Sequence[int]],
        held: list[int],
        highest: list[int],
    ) -> None:
        """Let the events of a stretch change what the groups hold."""
        changes, sites = self.played.changes, self.placed.sites
        if end - first < len(changes):
            changes, sites = changes[first:end], sites[first:end]
        for change, site in zip(changes, sites, strict=True):
            if change > 0:
                for index in of_site[site]:
                    now = held[index] = held[index] + change
                    if now > highest[index]:  # noqa: PLR1730 - a call of max takes longer
                        highest[index] = now
            elif change:
                for index in of_site[site]:
                    held[index] += change


def _key(sites: Sequence[int]) -> tuple[int, ...]:
    return tuple(sorted(sites))
