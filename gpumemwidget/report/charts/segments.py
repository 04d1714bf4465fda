"""A map of a device's segments as SVG: each block where it lies, in the colour of what it is.

The segments stand one after the other, the largest first, and flow over rows of the same number of
bytes, as text over lines. Blocks that are too small to be seen are drawn together, in the colour of
the most of their bytes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import ClassVar

from gpumemwidget.device_parts import list_releasable_ranges
from gpumemwidget.model.breakdowns import SegmentMap
from gpumemwidget.model.devices import Block
from gpumemwidget.report.render.blocks import Picture
from gpumemwidget.report.render.markup import Html, h, join_html
from gpumemwidget.report.render.palette import PART_COLORS, name_class
from gpumemwidget.report.render.text import SHORT_WIDTH, cut, fill_text
from gpumemwidget.report.render.wording import name_look
from gpumemwidget.units import format_bytes

#: The ``viewBox``, stretched to the room that there is.
_WIDTH, _HEIGHT = 1000, 400
_MAX_ROWS = 24
_MIN_ROW_BYTES = 2 * 1024**2
_ROW_PIXELS = 14
#: Share of a row's height that is left blank.
_GAP = 0.14
#: Minimum distance of the lines between segments, in steps of ``_WIDTH``.
_LINE_STEPS = 8
#: Maximum number of pieces in a notebook's HTML; one takes some 130 characters.
_MAX_PIECES = 380


@dataclass(frozen=True, slots=True)
class MapPiece:
    """A block, a part of one, or blocks that are drawn together, with the look of most of it."""

    #: Counted from the first byte of the first segment.
    start: int
    end: int
    look: str
    tooltip: str


@dataclass(frozen=True, slots=True)
class SegmentChart(Picture):
    """The map of one device."""

    device: str
    row_bytes: int
    n_rows: int
    total_bytes: int
    pieces: tuple[MapPiece, ...]
    #: Starts of segments, as far apart as lines can be seen.
    starts: tuple[int, ...]
    #: Blocks smaller than this are drawn together; 0 if all are drawn alone.
    min_bytes: int
    #: The bytes of each look, in the order of the palette.
    looks: tuple[tuple[str, int], ...]

    sheet: ClassVar[str] = "segments"

    def to_html(self) -> Html:
        """Return the rows, how to read them, and what the colours mean."""
        # The text between two pieces is not drawn; it is read where SVG is stripped.
        drawn = join_html(
            (
                h(f"path.{name_class(piece.look)}", h("title", piece.tooltip), d=self._draw(piece))
                for piece in self.pieces
            ),
            "; ",
        )
        lines = []
        for start in self.starts:
            x, y = self._place(start)
            lines.append(f"M{_round(x)} {_round(y)}v{_round(self._height)}")
        sums = [f"{name_look(look)} {format_bytes(n_bytes)}" for look, n_bytes in self.looks]
        total = format_bytes(self.total_bytes)
        svg = h(
            "svg",
            drawn,
            ". ",
            h("path.gmw-se", d="".join(lines)),
            role="img",
            aria_label=f"{self.device}: segments of {total}: {', '.join(sums)}",
            viewBox=f"0 0 {_WIDTH} {_HEIGHT}",
            height=self.n_rows * _ROW_PIXELS,
            preserveAspectRatio="none",
        )
        words = (
            f"Each row is {format_bytes(self.row_bytes)}, the largest segment first. A line in the "
            "map marks the start of a segment. Point at a block for its size, owner and line."
        )
        if self.min_bytes:
            words += f" Blocks smaller than {format_bytes(self.min_bytes)} are drawn together."
        keys = [
            h("li", h(f"i.gmw-sq.{name_class(look)}"), words)
            for (look, _), words in zip(self.looks, sums, strict=True)
        ]
        figure = h("figure.gmw-pic", svg, h("figcaption", words))
        return h("div.gmw-sm", figure, h("ul.gmw-ul", *keys))

    def to_text(self) -> str:
        """Return the sums: text has no picture of the blocks."""
        sums = "; ".join(f"{name_look(look)} {format_bytes(n)}" for look, n in self.looks)
        return fill_text(sums, indent="  ", start="  ")

    @property
    def _height(self) -> float:
        return _HEIGHT / self.n_rows * (1 - _GAP)

    def _place(self, at: int) -> tuple[float, float]:
        """Return the left upper corner of a byte."""
        row, offset = divmod(at, self.row_bytes)
        return _WIDTH * offset / self.row_bytes, _HEIGHT / self.n_rows * row

    def _draw(self, piece: MapPiece) -> str:
        """Return the path of a piece, which may go over several rows."""
        parts = []
        at = piece.start
        while at < piece.end:
            end = min(piece.end, (at // self.row_bytes + 1) * self.row_bytes)
            x, y = self._place(at)
            left, right = _round(x), _round(x + _WIDTH * (end - at) / self.row_bytes)
            parts.append(f"M{left} {_round(y)}H{right}V{_round(y + self._height)}H{left}z")
            at = end
        return "".join(parts)


def _round(number: float) -> str:
    return f"{number:.1f}".removesuffix(".0")


# -- What is drawn ---------------------------------------------------------------------------------


def plot_segments(segment_map: SegmentMap) -> SegmentChart:
    """Return the chart of a device's segments."""
    total = segment_map.reserved_bytes
    row_bytes = _MIN_ROW_BYTES
    while row_bytes * _MAX_ROWS < total:
        row_bytes *= 2
    areas = list(_iter_areas(segment_map))
    # Two of a thousand steps can be seen.
    min_bytes = row_bytes * 2 // _WIDTH
    pieces = list(_join_small(areas, min_bytes))
    while len(pieces) > _MAX_PIECES:
        min_bytes = min_bytes * 3 // 2
        pieces = list(_join_small(areas, min_bytes))
    sums = _sum_looks(areas)
    line_bytes = max(min_bytes, row_bytes * _LINE_STEPS // _WIDTH)
    ends = accumulate(segment.n_bytes for segment in segment_map.segments)
    following = zip(ends, segment_map.segments[1:], strict=False)
    return SegmentChart(
        device=segment_map.device,
        row_bytes=row_bytes,
        n_rows=max(-(-total // row_bytes), 1),
        total_bytes=total,
        pieces=tuple(pieces),
        starts=tuple(start for start, segment in following if segment.n_bytes >= line_bytes),
        min_bytes=min_bytes if len(pieces) < len(areas) else 0,
        looks=tuple((look, sums[look]) for look in PART_COLORS if look in sums),
    )


def _iter_areas(segment_map: SegmentMap) -> Iterator[MapPiece]:
    """Return each block where it lies; a free one of which some is given back is several."""
    at = 0
    for segment in segment_map.segments:
        releasable = list_releasable_ranges(segment)
        for block in segment.blocks:
            start = block.address - segment.address
            kind, owner = (segment_map.names or {}).get(block.address, ("unknown", ""))
            look: str = "unnamed" if kind == "unknown" else kind
            if block.state == "active_pending_free":
                look = "pending"
            elif block.state != "active_allocated":
                look = "pools" if segment.is_private else "fragmented"
            elif segment_map.names is None:
                look = "allocated"
            pieces = [(start, start + block.n_bytes, look)]
            if look == "fragmented":
                pieces = _divide_free(start, start + block.n_bytes, releasable)
            line = segment_map.lines.get(block.address, "")
            for first, last, look in pieces:
                tooltip = _describe_block(block, last - first, look, owner, line)
                yield MapPiece(at + first, at + last, look, tooltip)
        at += segment.n_bytes


def _divide_free(
    start: int, end: int, releasable: Iterable[tuple[int, int]]
) -> list[tuple[int, int, str]]:
    pieces = []
    for first, last in releasable:
        if start <= first < end:
            pieces += [(start, first, "fragmented"), (first, last, "releasable")]
            start = last
    pieces.append((start, end, "fragmented"))
    return [piece for piece in pieces if piece[0] < piece[1]]


def _describe_block(block: Block, n_bytes: int, look: str, owner: str, line: str) -> str:
    words = [format_bytes(n_bytes), name_look(look)]
    if block.state == "active_allocated":
        requested = block.requested_bytes
        if owner:
            words.append(cut(owner, SHORT_WIDTH))
        elif look not in ("allocated", "unnamed"):
            words.append("no variable")
        if requested is not None and requested < block.n_bytes:
            words.append(f"{format_bytes(requested)} requested")
    if line:
        words.append(cut(line, SHORT_WIDTH))
    return " · ".join(words)


def _sum_looks(areas: Iterable[MapPiece]) -> Counter[str]:
    sums: Counter[str] = Counter()
    for area in areas:
        sums[area.look] += area.end - area.start
    return sums


def _join_small(areas: Sequence[MapPiece], min_bytes: int) -> Iterator[MapPiece]:
    """Yield the pieces to draw: neighbours smaller than ``min_bytes`` are one."""
    group: list[MapPiece] = []
    for area in areas:
        is_small = area.end - area.start < min_bytes
        if group and (not is_small or group[-1].end - group[0].start >= min_bytes):
            yield _join(group)
            group = []
        group.append(area)
    if group:
        yield _join(group)


def _join(group: Sequence[MapPiece]) -> MapPiece:
    if len(group) == 1:
        return group[0]
    start, end = group[0].start, group[-1].end
    sums = sorted(_sum_looks(group).items(), key=lambda item: (-item[1], item[0]))
    words = "; ".join(f"{name_look(look)} {format_bytes(n)}" for look, n in sums[:3])
    tooltip = f"{len(group)} blocks, {format_bytes(end - start)}: {words}"
    return MapPiece(start, end, sums[0][0], tooltip)
