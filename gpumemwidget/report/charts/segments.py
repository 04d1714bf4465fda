"""A map of a device's segments as SVG: each block where it lies, in the colour of what it is.

The segments stand one after the other, the largest first, and flow over rows of the same number of
bytes, as text over lines. Blocks that are too small to be seen are drawn together, in the colour of
the most of their bytes.
"""

from __future__ import annotations

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
class _Area:
    """A block where it lies, or the part of a free one that is given back, or is not."""

    #: Counted from the first byte of the first segment.
    start: int
    end: int
    look: str
    block: Block
    #: The path that a person would type for the block, and the line that allocated it.
    owner: str
    line: str

    @property
    def n_bytes(self) -> int:
        return self.end - self.start


@dataclass(frozen=True, slots=True)
class MapPiece:
    """A piece of the map, with the look of most of its bytes and its tooltip."""

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
        sums = [f"{name_look(look)} {format_bytes(n_bytes)}" for look, n_bytes in self.looks]
        keys = [
            h("li", h(f"i.gmw-sq.{name_class(look)}"), words)
            for (look, _), words in zip(self.looks, sums, strict=True)
        ]
        svg = h(
            "svg",
            drawn,
            ". ",
            h("path.gmw-se", d=self._draw_starts()),
            role="img",
            aria_label=(
                f"{self.device}: segments of {format_bytes(self.total_bytes)}: {', '.join(sums)}"
            ),
            viewBox=f"0 0 {_WIDTH} {_HEIGHT}",
            height=self.n_rows * _ROW_PIXELS,
            preserveAspectRatio="none",
        )
        figure = h("figure.gmw-pic", svg, h("figcaption", self._explain()))
        return h("div.gmw-sm", figure, h("ul.gmw-ul", *keys))

    def to_text(self) -> str:
        """Return the sums: text has no picture of the blocks."""
        sums = "; ".join(f"{name_look(look)} {format_bytes(n)}" for look, n in self.looks)
        return fill_text(sums, indent="  ", start="  ")

    def _explain(self) -> str:
        words = (
            f"Each row is {format_bytes(self.row_bytes)}, the largest segment first. A line in the "
            "map marks the start of a segment. Point at a block for its size, owner and line."
        )
        if self.min_bytes:
            words += f" Blocks smaller than {format_bytes(self.min_bytes)} are drawn together."
        return words

    def _draw(self, piece: MapPiece) -> str:
        """Return the path of a piece, which may go over several rows."""
        height = _HEIGHT / self.n_rows
        parts = []
        at = piece.start
        while at < piece.end:
            row, offset = divmod(at, self.row_bytes)
            end = min(piece.end, (row + 1) * self.row_bytes)
            x, y = _WIDTH * offset / self.row_bytes, height * row
            left, right = _round(x), _round(x + _WIDTH * (end - at) / self.row_bytes)
            top, foot = _round(y), _round(y + height * (1 - _GAP))
            parts.append(f"M{left} {top}H{right}V{foot}H{left}z")
            at = end
        return "".join(parts)

    def _draw_starts(self) -> str:
        height = _HEIGHT / self.n_rows
        lines = []
        for start in self.starts:
            row, offset = divmod(start, self.row_bytes)
            x, y = _WIDTH * offset / self.row_bytes, height * row
            lines.append(f"M{_round(x)} {_round(y)}v{_round(height * (1 - _GAP))}")
        return "".join(lines)


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
    groups = _group_small(areas, min_bytes)
    while len(groups) > _MAX_PIECES:
        min_bytes = min_bytes * 3 // 2
        groups = _group_small(areas, min_bytes)
    sums = _sum_looks(areas)
    line_bytes = max(min_bytes, row_bytes * _LINE_STEPS // _WIDTH)
    ends = accumulate(segment.n_bytes for segment in segment_map.segments)
    starts = [
        start
        for start, segment in zip(ends, segment_map.segments[1:], strict=False)
        if segment.n_bytes >= line_bytes
    ]
    return SegmentChart(
        device=segment_map.device,
        row_bytes=row_bytes,
        n_rows=max(-(-total // row_bytes), 1),
        total_bytes=total,
        pieces=tuple(map(_make_piece, groups)),
        starts=tuple(starts),
        min_bytes=min_bytes if len(groups) < len(areas) else 0,
        looks=tuple((look, sums[look]) for look in PART_COLORS if look in sums),
    )


def _iter_areas(segment_map: SegmentMap) -> Iterator[_Area]:
    """Return each block where it lies; a free one of which some is given back is several."""
    at = 0
    for segment in segment_map.segments:
        releasable = list_releasable_ranges(segment)
        for block in segment.blocks:
            start = block.address - segment.address
            kind, owner = (segment_map.names or {}).get(block.address, ("unknown", ""))
            line = segment_map.lines.get(block.address, "")
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
            for first, last, look in pieces:
                yield _Area(at + first, at + last, look, block, owner, line)
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


def _sum_looks(areas: Iterable[_Area]) -> dict[str, int]:
    sums: dict[str, int] = {}
    for area in areas:
        sums[area.look] = sums.get(area.look, 0) + area.n_bytes
    return sums


def _group_small(areas: Sequence[_Area], min_bytes: int) -> list[list[_Area]]:
    """Return the areas of each piece: neighbours smaller than ``min_bytes`` are one."""
    groups: list[list[_Area]] = []
    # The areas before this one take no more.
    is_full = True
    for area in areas:
        is_small = area.n_bytes < min_bytes
        if is_full or not is_small:
            groups.append([])
        groups[-1].append(area)
        is_full = not is_small or area.end - groups[-1][0].start >= min_bytes
    return groups


def _make_piece(group: Sequence[_Area]) -> MapPiece:
    start, end = group[0].start, group[-1].end
    if len(group) == 1:
        return MapPiece(start, end, group[0].look, _describe_area(group[0]))
    sums = sorted(_sum_looks(group).items(), key=lambda item: (-item[1], item[0]))
    words = ", ".join(f"{name_look(look)} {format_bytes(n)}" for look, n in sums[:3])
    tooltip = f"{len(group)} blocks, {format_bytes(end - start)}: {words}"
    return MapPiece(start, end, sums[0][0], tooltip)


def _describe_area(area: _Area) -> str:
    """Return the tooltip of a single block: its size, purpose, owner and line."""
    words = [format_bytes(area.n_bytes), name_look(area.look)]
    if area.block.state == "active_allocated":
        requested = area.block.requested_bytes
        if area.owner:
            words.append(cut(area.owner, SHORT_WIDTH))
        elif area.look not in ("allocated", "unnamed"):
            words.append(name_look("unnamed"))
        if requested is not None and requested < area.block.n_bytes:
            words.append(f"{format_bytes(requested)} requested")
    if area.line:
        words.append(cut(area.line, SHORT_WIDTH))
    return " · ".join(words)
