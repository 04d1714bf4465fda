"""What made a device's peak: the blocks that were held then, by line, kind and name."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal, TypeAlias

from gpumemwidget.measure.placing import BEFORE, Placed
from gpumemwidget.measure.played import Played
from gpumemwidget.records import MemoryKind
from gpumemwidget.traces import BlockNames, PeakPart

__all__ = ["BEFORE_CELL", "NO_LINE", "describe_peak"]

BEFORE_CELL = "before the cell"
NO_LINE = "no line"
#: The most parts; the smallest beyond that are one for each line and kind.
_MOST_PARTS = 200

_Kind: TypeAlias = "MemoryKind | Literal['freed since']"
_Key: TypeAlias = "tuple[str, int | None, _Kind, str | None]"


def describe_peak(
    played: Played, placed: Placed, peak: int, unit: str, names: BlockNames | None
) -> tuple[PeakPart, ...]:
    """The parts, biggest first.

    Args:
        played: the events and what they did.
        placed: the sites of their blocks.
        peak: the place of the event with the most allocated; -1 where that was before all events.
        unit: the traced cell's name.
        names: what the blocks at the end are for, and the paths to them; ``None``: not known.
    """
    parts: dict[_Key, tuple[int, int]] = {}
    for site, n_bytes, address in _list_blocks(played, placed, peak):
        line = placed.table[site].stack.line
        place = NO_LINE if line is None else f"line {line}"
        if site == BEFORE:
            place = BEFORE_CELL
        kind: _Kind = "freed since"
        owner = None
        if address is not None:
            kind, owner = (names or {}).get(address, ("unknown", None))
        _add(parts, (place, line, kind, owner or None), n_bytes, 1)
    ordered = sorted(parts.items(), key=lambda item: (-item[1][0], str(item[0])))
    if len(ordered) > _MOST_PARTS:
        rest: dict[_Key, tuple[int, int]] = {}
        for (place, line, kind, _), (n_bytes, n_blocks) in ordered[_MOST_PARTS:]:
            _add(rest, (place, line, kind, None), n_bytes, n_blocks)
        for key, (n_bytes, n_blocks) in ordered[:_MOST_PARTS]:
            _add(rest, key, n_bytes, n_blocks)
        ordered = sorted(rest.items(), key=lambda item: (-item[1][0], str(item[0])))
    return tuple(
        PeakPart(
            place=place,
            unit=None if line is None else unit,
            line=line,
            kind=kind,
            owner=owner,
            n_bytes=n_bytes,
            n_blocks=n_blocks,
        )
        for (place, line, kind, owner), (n_bytes, n_blocks) in ordered
    )


def _list_blocks(
    played: Played, placed: Placed, peak: int
) -> Iterator[tuple[int, int, int | None]]:
    """Each block's site, bytes and, where it still stands at the end, its address."""
    for block, site in zip(played.standing, placed.standing, strict=True):
        if not 0 <= block.end <= peak:
            yield site, block.n_bytes, block.address if block.end < 0 else None
    addresses, sites = played.events.addresses, placed.sites
    for place, (change, end) in enumerate(
        zip(played.changes[: peak + 1], played.partners[: peak + 1], strict=True)
    ):
        if change > 0 and not 0 <= end <= peak:
            yield sites[place], change, addresses[place] if end < 0 else None


def _add(parts: dict[_Key, tuple[int, int]], key: _Key, n_bytes: int, n_blocks: int) -> None:
    known_bytes, known_blocks = parts.get(key, (0, 0))
    parts[key] = known_bytes + n_bytes, known_blocks + n_blocks
