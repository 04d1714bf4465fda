"""Divide a device's total into known parts and one remainder."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from gpumemwidget.model.breakdowns import BreakdownPart, PartKey

#: Parts of the memory that is reserved but unallocated.
UNALLOCATED_KEYS: tuple[PartKey, ...] = ("pending", "releasable", "fragmented", "pools")


@dataclass(frozen=True, slots=True)
class PartGroup:
    """Parts that are read together, and so are known or unknown together.

    Attributes:
        keys: the parts of the group, such as ``("children", "others")``.
        parts: the parts with their sizes; ``None`` if they are unknown.
    """

    keys: tuple[PartKey, ...]
    parts: tuple[BreakdownPart, ...] | None = None

    @property
    def known_bytes(self) -> int:
        """Sum of the known parts; 0 for an unknown group."""
        return sum(part.n_bytes for part in self.parts or ())


def divide_total(total_bytes: int, groups: Sequence[PartGroup]) -> tuple[BreakdownPart, ...] | None:
    """Return parts that add up to ``total_bytes``, in the order of ``groups``.

    All unknown groups together become one remainder, at the place of the first of them.

    Returns:
        ``None`` if the readings contradict each other: the known parts exceed the total, or fall
        short of it although no group is unknown.
    """
    remainder_bytes = total_bytes - sum(group.known_bytes for group in groups)
    unknown_keys = tuple(key for group in groups if group.parts is None for key in group.keys)
    if remainder_bytes < 0 or (remainder_bytes and not unknown_keys):
        return None
    parts: list[BreakdownPart] = []
    for group in groups:
        if group.parts is not None:
            parts.extend(part for part in group.parts if part.n_bytes)
        elif remainder_bytes:
            parts.append(merge_parts(unknown_keys, remainder_bytes))
            remainder_bytes = 0
    return tuple(parts)


def merge_parts(keys: tuple[PartKey, ...], n_bytes: int) -> BreakdownPart:
    """Return one part that stands for all parts with these keys."""
    if len(keys) == 1:
        return BreakdownPart(keys[0], n_bytes)
    return BreakdownPart("rest", n_bytes, merged=keys)


def make_group(key: PartKey, n_bytes: int | None) -> PartGroup:
    """Return a group of one part; ``None`` bytes make it unknown."""
    if n_bytes is None:
        return PartGroup((key,))
    return PartGroup((key,), (BreakdownPart(key, n_bytes),))


def forget_all(groups: Iterable[PartGroup]) -> list[PartGroup]:
    """Return the groups with all of their parts unknown."""
    return [PartGroup(group.keys) for group in groups]


def drop_impossible(n_bytes: int | None) -> int | None:
    """Return a figure, or ``None`` where it is negative and so can't be one."""
    return None if n_bytes is None or n_bytes < 0 else n_bytes
