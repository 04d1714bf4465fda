"""Where each block lies: a device's segments with what is known of their blocks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from gpumemwidget.backends.unallocated import divide_unallocated
from gpumemwidget.devices import MapBlock, MapSegment, SegmentMap
from gpumemwidget.records import Block, Frame, MemoryKind, Segment
from gpumemwidget.traces import BlockNames

__all__ = ["build_segment_map"]

_NOTHING: tuple[MemoryKind, str] = ("unknown", "")


def build_segment_map(
    segments: Iterable[Segment],
    names: BlockNames | None = None,
    *,
    tell_line: Callable[[Sequence[Frame]], str | None] | None = None,
) -> SegmentMap | None:
    """The segments of one device, the largest first.

    Args:
        segments: all that the device has.
        names: what is in each block, of the same moment; ``None``: nobody was asked.
        tell_line: names the line of a stack: ``In[7], line 3``.

    Returns:
        ``None`` where there are no segments.
    """
    segments = tuple(segments)
    if not segments:
        return None
    sums = divide_unallocated(segments)
    ordered = sorted(segments, key=lambda each: (-each.n_bytes, each.address))
    return SegmentMap(
        device=segments[0].device,
        reserved_bytes=sums.reserved_bytes,
        allocated_bytes=sums.allocated_bytes,
        fragmented_bytes=sums.fragmented_bytes,
        largest_free_block_bytes=sums.largest_free_block_bytes,
        segments=tuple(
            MapSegment(
                address=segment.address,
                n_bytes=segment.n_bytes,
                is_private=segment.is_private,
                is_expandable=segment.is_expandable,
                is_small=segment.is_small,
                blocks=tuple(
                    _describe(block, segment.address, names, tell_line) for block in segment.blocks
                ),
            )
            for segment in ordered
        ),
    )


def _describe(
    block: Block,
    start: int,
    names: BlockNames | None,
    tell_line: Callable[[Sequence[Frame]], str | None] | None,
) -> MapBlock:
    kind: MemoryKind | None = None
    owner = ""
    if block.state == "active_allocated" and names is not None:
        kind, owner = names.get(block.address, _NOTHING)
    line = tell_line(block.frames) if tell_line is not None and block.state != "inactive" else None
    return MapBlock(
        offset_bytes=block.address - start,
        n_bytes=block.n_bytes,
        requested_bytes=block.requested_bytes,
        state=block.state,
        kind=kind,
        owner=owner,
        allocated_at=line or "",
    )
