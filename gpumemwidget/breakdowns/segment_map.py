"""Build the map of a device's segments, with the owners and lines of their blocks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from gpumemwidget.backends.cuda.releasable import divide_unallocated
from gpumemwidget.model.breakdowns import SegmentMap
from gpumemwidget.model.ownership import BlockNames
from gpumemwidget.model.segments import Frame, Segment


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
    ordered = tuple(sorted(segments, key=lambda each: (-each.n_bytes, each.address)))
    if not ordered:
        return None
    lines: dict[int, str] = {}
    if tell_line is not None:
        in_use = (block for each in ordered for block in each.blocks if block.state != "inactive")
        told = ((block.address, tell_line(block.frames)) for block in in_use)
        lines = {address: line for address, line in told if line}
    return SegmentMap(
        device=ordered[0].device,
        segments=ordered,
        largest_free_block_bytes=divide_unallocated(ordered).largest_free_block_bytes,
        names=names,
        lines=lines,
    )
