"""Which of the objects that a walk has met lead to memory: the rest is left aside from then on."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

__all__ = ["mark_leads"]


def mark_leads(edges: Sequence[Sequence[int]], ends: Iterable[int]) -> bytearray:
    """For each place, 1 where it leads to one of the ends or is one.

    Args:
        edges: for each place where it leads.
        ends: the places of storages.
    """
    leads = bytearray(len(edges))
    for place in ends:
        leads[place] = 1
    # What holds was mostly met before what it holds: backwards, one pass tells nearly all.
    undecided: dict[int, Sequence[int]] = {}
    for place in range(len(leads) - 1, -1, -1):
        targets = edges[place]
        for target in targets:
            if leads[target]:
                leads[place] = 1
                break
        else:
            if targets:
                undecided[place] = targets
    _spread(leads, undecided)
    return leads


def _spread(leads: bytearray, undecided: Mapping[int, Sequence[int]]) -> None:
    """Mark those of the undecided places from which a marked one is reached: cycles, mostly."""
    referrers: dict[int, list[int]] = {}
    pending: list[int] = []
    for place, targets in undecided.items():
        for target in targets:
            if leads[target]:
                pending.append(place)
            else:
                referrers.setdefault(target, []).append(place)
    while pending:
        place = pending.pop()
        if not leads[place]:
            leads[place] = 1
            pending.extend(referrers.get(place, ()))
