"""Compare two surveys: what has gained storages between them is what grows."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from gpumemwidget.leaks.levels import MIN_GROWTH_BYTES
from gpumemwidget.leaks.survey import Group, Survey
from gpumemwidget.model.leaks import LeakHolder
from gpumemwidget.ownership.labels import KEY

#: Number of keys of one dictionary, and of parts of one container, beyond which they are no part of
#: a holder's name: a cache gets ever new ones.
_N_KEYS = 8


@dataclass(frozen=True, slots=True)
class Gain:
    """A group of storages, and how many bytes and storages it has gained.

    ``parts`` are the groups in one container that were added up: ``items[…].out``, ``items[…].x``.
    """

    group: Group
    n_bytes: int
    n_storages: int
    parts: tuple[Gain, ...] = ()

    def is_of_most(self, n_steps: int) -> bool:
        """Return whether a storage was gained in most of the steps between the two surveys."""
        return self.n_storages >= 0.5 * n_steps


def find_gains(
    before: Survey | None, after: Survey | None, device: str, grown_bytes: int
) -> list[Gain]:
    """Return the holders that explain a growth, the one that has gained the most first.

    What says how much it keeps at most is left out: it is meant to fill up. Without an earlier
    survey nothing is known.

    Returns:
        The holders; none if they have gained less than half of it, or a survey was cut short.
    """
    if before is None or after is None or not (before.is_complete and after.is_complete):
        return []
    gains = _list_gains(before, after, device)
    if sum(gain.n_bytes for gain in gains) < 0.5 * grown_bytes:
        return []
    # A holder that has gained less than a fifth of it is not reported beside others.
    least = max(MIN_GROWTH_BYTES, 0.2 * grown_bytes)
    large = [gain for gain in gains if gain.n_bytes >= least]
    return [gain for gain in _join_parts(_join_graphs(large or gains)) if gain.n_bytes >= least]


def make_holders(gains: Iterable[Gain], n_times: int = 1) -> tuple[LeakHolder, ...]:
    """Return what has grown over ``n_times`` runs or steps, with the bytes of one of them."""
    parts = [part for gain in gains for part in gain.parts or (gain,)]
    return tuple(
        LeakHolder(
            path=part.group.holder,
            each_bytes=part.n_bytes // n_times,
            n_storages=max(1, round(part.n_storages / n_times)),
            tensor=part.group.tensor,
            in_graph=part.group.in_graph,
            in_model=part.group.in_model,
            row=part.group.row,
            container=part.group.container,
            module=part.group.module,
            slice_bytes=part.group.slice_bytes,
            storage_bytes=part.group.largest_bytes,
        )
        for part in sorted(parts, key=lambda part: -part.n_bytes)
    )


def _list_gains(before: Survey, after: Survey, device: str) -> list[Gain]:
    """Return what holds more than before; the many keys of a dictionary are one holder."""
    both = {**before.groups, **after.groups}.values()
    are_known = before.has_libraries and after.has_libraries
    groups = [
        group
        for group in both
        if group.device == device and not group.is_bounded and (are_known or not group.in_library)
    ]
    by_holder = {group.holder: group for group in groups}
    changes: dict[str, tuple[int, int]] = {}
    for group in groups:
        key = device, group.holder
        was, now = before.groups.get(key), after.groups.get(key)
        n_bytes = (0 if now is None else now.n_bytes) - (0 if was is None else was.n_bytes)
        n_storages = (0 if now is None else now.n_storages) - (0 if was is None else was.n_storages)
        # A loop's variable holds an element of what the loop went through.
        holder = group.element if group.element in by_holder else group.holder
        known_bytes, n_known = changes.get(holder, (0, 0))
        changes[holder] = known_bytes + n_bytes, n_known + n_storages
    by_pattern: dict[str, list[Gain]] = {}
    for holder, change in changes.items():
        by_pattern.setdefault(KEY.sub("[…]", holder), []).append(Gain(by_holder[holder], *change))
    gains = []
    for pattern, members in by_pattern.items():
        gains += [_join(pattern, members)] if len(members) > _N_KEYS else members
    return [gain for gain in gains if gain.n_bytes > 0]


def _join(holder: str, members: Sequence[Gain]) -> Gain:
    largest = max(members, key=lambda gain: gain.group.largest_bytes).group
    group = replace(
        largest,
        holder=holder,
        in_graph=any(gain.group.in_graph for gain in members),
        in_model=any(gain.group.in_model for gain in members),
    )
    n_storages = sum(gain.n_storages for gain in members)
    return Gain(group, sum(gain.n_bytes for gain in members), n_storages)


def _join_graphs(gains: Sequence[Gain]) -> list[Gain]:
    """Return one gain for a tensor and its graph: ``items[…].out's graph``."""
    found = {gain.group.holder: gain for gain in gains}
    for gain in gains:
        graph = f"{gain.group.holder}'s graph"
        if graph in found:
            found[graph] = _join(graph, [found[graph], found.pop(gain.group.holder)])
    return list(found.values())


def _join_parts(gains: Sequence[Gain]) -> list[Gain]:
    """Return one gain for all whose elements lie in the same container, the most first."""
    parts: dict[str, list[Gain]] = {}
    for gain in gains:
        begin, index, _ = gain.group.holder.partition("[…]")
        parts.setdefault(begin + index, []).append(gain)
    joined = []
    for container, members in parts.items():
        gain = _join(container, members)
        # What is added as a whole has many parts, as a model has: then the container says more.
        named = tuple(members) if len(members) <= _N_KEYS else ()
        joined.append(members[0] if len(members) == 1 else replace(gain, parts=named))
    return sorted(joined, key=lambda gain: -gain.n_bytes)
