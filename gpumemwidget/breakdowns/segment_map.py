"""Build the map of a device's segments, with the owners and lines of their blocks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from gpumemwidget.backends.cuda.releasable import divide_unallocated
from gpumemwidget.model.breakdowns import MapBlock, MapSegment, SegmentMap
from gpumemwidget.model.ownership import BlockNames, MemoryKind
from gpumemwidget.model.segments import Block, Frame, Segment

_UNKNOWN: tuple[MemoryKind, str] = ("unknown", "")


def build_segment_map(
    segments: Iterable[Segment],
    names: BlockNames | None = None,
    *,
    tell_line: Callable[[Sequence[Frame]], str | None] | None = None,
) -> SegmentMap | None:
    """Return the map of one device's segments, the largest first.

    Args:
        segments: all segments of the device.
        names: kind and owner of the blocks, of the same moment; ``None``: not asked for.
        tell_line: returns the line of a stack: ``In[7], line 3``.

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
                page_bytes=segment.page_bytes,
                blocks=tuple(
                    _describe_block(block, segment.address, names, tell_line)
                    for block in segment.blocks
                ),
            )
            for segment in ordered
        ),
    )


def _describe_block(
    block: Block,
    start: int,
    names: BlockNames | None,
    tell_line: Callable[[Sequence[Frame]], str | None] | None,
) -> MapBlock:
    kind: MemoryKind | None = None
    owner = ""
    if block.state == "active_allocated" and names is not None:
        kind, owner = names.get(block.address, _UNKNOWN)
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
