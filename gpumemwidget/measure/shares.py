"""Parts of a whole of which some are known: what is not known is what remains."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gpumemwidget.devices import BridgePart, PartKey

__all__ = ["Slot", "check_bytes", "make_rest", "make_slot", "solve"]


@dataclass(frozen=True, slots=True)
class Slot:
    """Where parts stand that are known, or that are not."""

    keys: tuple[PartKey, ...]
    #: ``None``: not known.
    parts: tuple[BridgePart, ...] | None = None

    @property
    def n_bytes(self) -> int:
        """What is known of it."""
        return sum(part.n_bytes for part in self.parts or ())

    def forget(self) -> Slot:
        """The same, not known."""
        return Slot(self.keys)


def solve(total_bytes: int, slots: Sequence[Slot]) -> tuple[BridgePart, ...] | None:
    """The known parts, and at the first that is not known all that remains, if anything does.

    Returns:
        Parts that are the whole together; ``None`` where the known ones are more than it, or less
        and nothing is unknown.
    """
    rest = total_bytes - sum(slot.n_bytes for slot in slots)
    unknown = tuple(key for slot in slots if slot.parts is None for key in slot.keys)
    if rest < 0 or (rest and not unknown):
        return None
    parts: list[BridgePart] = []
    for slot in slots:
        if slot.parts is not None:
            parts.extend(part for part in slot.parts if part.n_bytes)
        elif rest:
            parts.append(make_rest(unknown, rest))
            rest = 0
    return tuple(parts)


def make_rest(keys: tuple[PartKey, ...], n_bytes: int) -> BridgePart:
    """One part that stands for all of these."""
    if len(keys) == 1:
        return BridgePart(keys[0], n_bytes)
    return BridgePart("rest", n_bytes, merged=keys)


def make_slot(key: PartKey, n_bytes: int | None) -> Slot:
    """Where one part stands."""
    return Slot((key,)) if n_bytes is None else Slot((key,), (BridgePart(key, n_bytes),))


def check_bytes(n_bytes: int | None) -> int | None:
    """A figure, where it can be one."""
    return None if n_bytes is None or n_bytes < 0 else n_bytes
