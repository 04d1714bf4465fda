"""Sum up what sites allocated, still hold, held at the peak, and held at most."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from gpumemwidget.model.traces import LineUse
from gpumemwidget.tracing.allocator.attribution import Attribution, list_blocks
from gpumemwidget.tracing.allocator.replay import Replay


class SiteTotals:
    """The totals of each site, and of groups of sites.

    Attributes:
        allocated_bytes: for each site, all that it allocated.
        n_allocs: for each site, the number of allocations.
        net_bytes: for each site, what is still in use at the end.
        at_peak_bytes: for each site, what was in use at the peak.

    Args:
        peak: index of the event with the most allocated; -1 if that was before all events.
    """

    def __init__(self, replay: Replay, attribution: Attribution, peak: int) -> None:
        self._replay = replay
        self._block_sites = attribution.block_sites
        n_sites = len(attribution.sites)
        allocated, net, at_peak, initial = ([0] * n_sites for _ in range(4))
        counts = [0] * n_sites
        for site, n_bytes, _, begun_at, freed_at in list_blocks(replay, attribution):
            counts[site] += 1
            allocated[site] += n_bytes
            if begun_at < 0:
                initial[site] += n_bytes
            if freed_at < 0:
                net[site] += n_bytes
            if begun_at <= peak and not 0 <= freed_at <= peak:
                at_peak[site] += n_bytes
        self.allocated_bytes, self.n_allocs = allocated, counts
        self.net_bytes, self.at_peak_bytes = net, at_peak
        self._initial_bytes = initial
        #: For each group the index of its figures in ``_highest``.
        self._groups: dict[tuple[int, ...], int] = {}
        self._highest: list[int] = []

    def sum_allocated(self, sites: Iterable[int]) -> int:
        """Return the bytes that some sites allocated."""
        allocated = self.allocated_bytes
        return sum([allocated[site] for site in sites])

    def follow(
        self,
        groups: Iterable[Sequence[int]],
        layers: Sequence[Sequence[int]],
        stops: Sequence[int],
    ) -> list[list[int]]:
        """Find the most that each group held, which ``describe`` then returns.

        Args:
            groups: groups of sites.
            layers: further groups, whose bytes are returned at each stop.
            stops: indices of events, ascending; -1 is before all of them.

        Returns:
            For each stop the bytes of each layer after that event.
        """
        for group in (*groups, *layers):
            self._groups.setdefault(tuple(group), len(self._groups))
        groups_of_site: list[list[int]] = [[] for _ in self.allocated_bytes]
        held = [0] * len(self._groups)
        for sites, index in self._groups.items():
            for site in sites:
                groups_of_site[site].append(index)
                held[index] += self._initial_bytes[site]
        self._highest = held[:]
        shown = [self._groups[tuple(layer)] for layer in layers]
        rows = []
        first = 0
        for stop in stops:
            self._run(first, stop + 1, groups_of_site, held)
            first = stop + 1
            rows.append([held[index] for index in shown])
        self._run(first, len(self._replay.changes), groups_of_site, held)
        return rows

    def describe(self, sites: Sequence[int]) -> LineUse:
        """Return the figures of a group that was followed."""
        return LineUse(
            allocated_bytes=self.sum_allocated(sites),
            n_allocs=sum([self.n_allocs[site] for site in sites]),
            net_bytes=sum([self.net_bytes[site] for site in sites]),
            at_peak_bytes=sum([self.at_peak_bytes[site] for site in sites]),
            highest_bytes=self._highest[self._groups[tuple(sites)]],
        )

    def _run(
        self, first: int, end: int, groups_of_site: Sequence[Sequence[int]], held: list[int]
    ) -> None:
        """Add the changes of the events from ``first`` to ``end`` to what the groups hold."""
        highest, sites = self._highest, self._block_sites
        blocks = self._replay.event_blocks[first:end]
        for change, block in zip(self._replay.changes[first:end], blocks, strict=True):
            if change > 0:
                for index in groups_of_site[sites[block]]:
                    now = held[index] = held[index] + change
                    if now > highest[index]:  # noqa: PLR1730 - a call of max takes longer
                        highest[index] = now
            elif change:
                for index in groups_of_site[sites[block]]:
                    held[index] += change
