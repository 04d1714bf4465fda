"""A device's memory in parts that add up to all of it, for the bar on an OOM's card.

What could not be read is what remains of the whole: one part, under the names of all that it may
be. So no part is negative, and none is guessed.
"""

from __future__ import annotations

from collections.abc import Sequence

from gpumemwidget.records import HOST, MemoryKind
from gpumemwidget.report.bridgewords import CACHED, name_key
from gpumemwidget.report.document import Part, UseBar
from gpumemwidget.report.theme import LOOKS
from gpumemwidget.report.words import count_kind, join_words
from gpumemwidget.traces import OomEvent
from gpumemwidget.units import format_bytes

__all__ = ["divide_device"]

#: Kinds beyond so many are one part.
_MOST_KINDS = 6


def divide_device(
    event: OomEvent, kinds: Sequence[tuple[MemoryKind, int]] = ()
) -> tuple[UseBar | None, str]:
    """The bar, and a sentence where what was read does not fit together.

    Args:
        event: what stood when the allocation failed.
        kinds: what is allocated, by kind.

    Returns:
        ``None`` for the bar where too little is known for one.
    """
    on_host = event.device == HOST
    slots = _list_host_parts(event) if on_host else _list_gpu_parts(event, kinds)
    known = [part for _, part in slots if part is not None]
    unknown = [label for label, part in slots if part is None]
    total = event.device_total_bytes
    if not known or total is None or total <= 0:
        return None, ""
    title = "host memory" if on_host else event.device
    n_known = sum(part.n_bytes for part in known)
    rest = total - n_known
    trouble = ""
    if rest < 0:
        trouble = (
            f"These parts are {format_bytes(-rest)} more than {title} has: they were not read at "
            "one moment."
        )
    parts = [part for _, part in slots if part is not None and part.n_bytes]
    if rest > 0:
        where = next((at for at, (_, part) in enumerate(slots) if part is None), len(slots))
        at = sum(1 for _, part in slots[:where] if part is not None and part.n_bytes)
        parts.insert(at, _describe_rest(unknown, rest))
    limit = event.limit_bytes
    has_mark = limit is not None and 0 < limit < total
    return (
        UseBar(
            title=title,
            total_bytes=max(total, n_known),
            parts=tuple(parts),
            mark_bytes=limit if has_mark else None,
            mark_label="limit of this process" if has_mark else "",
        ),
        trouble,
    )


def _list_gpu_parts(
    event: OomEvent, kinds: Sequence[tuple[MemoryKind, int]]
) -> list[tuple[str, Part | None]]:
    allocated, reserved = event.allocated_bytes, event.reserved_bytes
    cached = event.unallocated_bytes
    slots: list[tuple[str, Part | None]]
    if allocated is None and reserved is not None:
        slots = [("", _make_part("reserved by PyTorch", reserved, "allocated"))]
    elif allocated is None:
        slots = [("PyTorch", None)]
    else:
        slots = [("allocated", _divide_allocated(allocated, kinds))]
        detail = ""
        if event.is_fragmented:
            detail = (
                f"fragmented: largest free block {format_bytes(event.largest_free_block_bytes)}"
            )
        label = CACHED
        slots.append((label, _make_part(label, cached, "cached", detail)))
    for label, n_bytes, look in (
        (name_key("outside"), event.outside_bytes, "outside"),
        (name_key("others"), event.others_bytes, "others"),
        # Where it is not told apart it is in what the others take.
        (name_key("unlisted"), event.unlisted_bytes or 0, "rest"),
        (name_key("free"), event.device_free_bytes, "free"),
    ):
        slots.append((label, _make_part(label, n_bytes, look)))
    return slots


def _list_host_parts(event: OomEvent) -> list[tuple[str, Part | None]]:
    """The host knows no reserve: a process has what is resident."""
    return [
        (label, _make_part(label, n_bytes, look))
        for label, n_bytes, look in (
            ("this process", event.reserved_bytes, "allocated"),
            ("other processes", event.others_bytes, "others"),
            ("available", event.device_free_bytes, "free"),
        )
    ]


def _divide_allocated(allocated: int, kinds: Sequence[tuple[MemoryKind, int]]) -> Part | None:
    whole = _make_part("allocated", allocated, "allocated")
    positive = [(kind, n_bytes) for kind, n_bytes in kinds if n_bytes > 0]
    rest = allocated - sum(n_bytes for _, n_bytes in positive)
    if whole is None or not positive or rest < 0:
        return whole
    positive.sort(key=lambda item: -item[1])
    shown, more = positive, 0
    if len(positive) > _MOST_KINDS:
        shown = positive[: _MOST_KINDS - 1]
        more = sum(n_bytes for _, n_bytes in positive[_MOST_KINDS - 1 :])
    parts = [
        Part(count_kind(kind), n_bytes, kind if kind in LOOKS else "other")
        for kind, n_bytes in shown
    ]
    for label, n_bytes, look in (
        ("other kinds", more, "other"),
        ("not accounted for", rest, "unknown"),
    ):
        if n_bytes:
            parts.append(Part(label, n_bytes, look))
    return Part("allocated", allocated, "allocated", parts=tuple(parts))


def _describe_rest(unknown: Sequence[str], rest: int) -> Part:
    if not unknown:
        return Part("not accounted for", rest, "rest")
    detail = "together" if len(unknown) > 1 else "all that remains"
    return Part(join_words(unknown), rest, "rest", detail)


def _make_part(label: str, n_bytes: int | None, look: str, detail: str = "") -> Part | None:
    """A part, where it is known and makes sense."""
    return None if n_bytes is None or n_bytes < 0 else Part(label, n_bytes, look, detail)
