"""Compare two surveys: what has gained storages between them is what grows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from gpumemwidget.growth.levels import MIN_GROWTH_BYTES
from gpumemwidget.growth.survey import KEY, Group, Survey

#: Share of the growth that all holders together must have gained: else others hold it.
_MIN_SHARE = 0.5
#: Share of the growth that one holder of several must have gained to be reported.
_MIN_PART = 0.2
#: Share of the steps in which a holder must have gained a storage.
_MIN_STEPS_SHARE = 0.5
#: Number of keys of one dictionary beyond which they are no part of a holder's name: a cache gets
#: ever new ones.
_N_KEYS = 8


@dataclass(frozen=True, slots=True)
class Gain:
    """A group of storages, and how many bytes and storages it has gained."""

    group: Group
    n_bytes: int
    n_storages: int

    def is_of_most(self, n_steps: int) -> bool:
        """Return whether a storage was gained in most of the steps between the two surveys."""
        return self.n_storages >= _MIN_STEPS_SHARE * n_steps


def find_gains(
    before: Survey | None, after: Survey | None, device: str, grown_bytes: int
) -> list[Gain]:
    """Return the holders that explain a growth, the one that has gained the most first.

    What says how much it keeps at most is left out: it is meant to fill up.

    Args:
        before: an earlier survey; ``None`` for none, and then nothing is known.
        after: a later one.
        device: the device that has grown.
        grown_bytes: by how much it has grown between the two.

    Returns:
        The holders; none if they have gained less than half of it, or a survey was cut short.
    """
    if before is None or after is None or not (before.is_complete and after.is_complete):
        return []
    gains = _list_gains(before, after, device)
    if sum(gain.n_bytes for gain in gains) < _MIN_SHARE * grown_bytes:
        return []
    least = max(MIN_GROWTH_BYTES, _MIN_PART * grown_bytes)
    large = [gain for gain in gains if gain.n_bytes >= least]
    return [gain for gain in _join_parts(large or gains) if gain.n_bytes >= least]


def name_container(holder: str) -> str:
    """Return a holder's name up to its elements: ``runs[…]`` of ``runs[…]["model"].weight``."""
    container, index, _ = holder.partition("[…]")
    return container + index


def _list_gains(before: Survey, after: Survey, device: str) -> list[Gain]:
    """Return what holds more than before; the many keys of a dictionary are one holder."""
    changes: dict[str, list[Gain]] = {}
    for key in {**before.groups, **after.groups}:
        was, now = before.groups.get(key), after.groups.get(key)
        group = now or was
        if group is None or group.device != device or group.is_bounded:
            continue
        n_bytes = (0 if now is None else now.n_bytes) - (0 if was is None else was.n_bytes)
        n_storages = (0 if now is None else now.n_storages) - (0 if was is None else was.n_storages)
        changes.setdefault(KEY.sub("[…]", group.holder), []).append(
            Gain(group, n_bytes, n_storages)
        )
    gains = []
    for holder, members in changes.items():
        gains += [_join(holder, members)] if len(members) > _N_KEYS else members
    return [gain for gain in gains if gain.n_bytes > 0]


def _join(holder: str, members: Sequence[Gain]) -> Gain:
    largest = max(members, key=lambda each: each.group.largest_bytes).group
    group = replace(
        largest,
        holder=holder,
        in_graph=any(each.group.in_graph for each in members),
        in_model=any(each.group.in_model for each in members),
    )
    n_storages = sum(each.n_storages for each in members)
    return Gain(group, sum(each.n_bytes for each in members), n_storages)


def _join_parts(gains: Sequence[Gain]) -> list[Gain]:
    """Return one gain for all whose elements lie in the same container, the most first.

    What is kept may have many small parts: ``runs[…]["model"].weight``, ``runs[…]["optimizer"]``.
    """
    parts: dict[str, list[Gain]] = {}
    for gain in gains:
        parts.setdefault(name_container(gain.group.holder), []).append(gain)
    joined = [
        _join(container, members) if len(members) > 1 else members[0]
        for container, members in parts.items()
    ]
    return sorted(joined, key=lambda gain: -gain.n_bytes)
