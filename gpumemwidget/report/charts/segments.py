"""A map of a device's segments as SVG: each block where it lies, in the colour of what it is.

The segments stand one after the other, the largest first, and flow over rows of the same number of
bytes, as text over lines. Blocks that are too small to be seen are drawn together: what is in use
at the bottom, what is free above it. So each area is as large as its bytes are.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import ClassVar

from gpumemwidget.breakdowns import list_releasable_ranges
from gpumemwidget.model.breakdowns import SegmentMap
from gpumemwidget.model.devices import Block
from gpumemwidget.report.render.blocks import Picture
from gpumemwidget.report.render.markup import Html, h, join_html
from gpumemwidget.report.render.palette import BLOCK_STATES, PART_COLORS, name_class
from gpumemwidget.report.render.text import fill_text
from gpumemwidget.report.render.wording import cut_words, name_look
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
_MAX_OWNER_WIDTH = 48


@dataclass(frozen=True, slots=True)
class MapPiece:
    """A block, a part of one, or neighbouring blocks that are too small to be drawn alone."""

    #: Counted from the first byte of the first segment.
    start: int
    end: int
    #: The bytes of each look in the piece, the most first.
    sums: tuple[tuple[str, int], ...]
    #: ``None`` for several.
    block: Block | None
    #: The path that a person would type for the block, and the line that allocated it.
    owner: str = ""
    line: str = ""
    n_blocks: int = 1

    @property
    def n_bytes(self) -> int:
        """Bytes of the piece."""
        return self.end - self.start

    @property
    def looks(self) -> tuple[tuple[str, int], ...]:
        """The parts in use, then the free ones, each with its bytes in its largest part's look."""
        used = [each for each in self.sums if each[0] not in BLOCK_STATES]
        free = [each for each in self.sums if each[0] in BLOCK_STATES]
        return tuple((each[0][0], sum(n for _, n in each)) for each in (used, free) if each)

    @property
    def told(self) -> str:
        """The tooltip."""
        if self.block is None:
            sums = ", ".join(f"{name_look(look)} {format_bytes(n)}" for look, n in self.sums[:3])
            return f"{self.n_blocks} blocks, {format_bytes(self.n_bytes)}: {sums}"
        [(look, n_bytes)] = self.sums
        words = [format_bytes(n_bytes), name_look(look)]
        if self.block.state == "active_allocated":
            requested = self.block.requested_bytes
            if self.owner:
                words.append(cut_words(self.owner, _MAX_OWNER_WIDTH))
            elif look not in ("allocated", "unnamed"):
                words.append(name_look("unnamed"))
            if requested is not None and requested < self.block.n_bytes:
                words.append(f"{format_bytes(requested)} requested")
        if self.line:
            words.append(cut_words(self.line, _MAX_OWNER_WIDTH))
        return " · ".join(words)


@dataclass(frozen=True, slots=True)
class SegmentChart(Picture):
    """The map of one device."""

    device: str
    row_bytes: int
    n_rows: int
    total_bytes: int
    pieces: tuple[MapPiece, ...]
    #: Starts of segments, as far as the lines can be told apart.
    starts: tuple[int, ...]
    #: Blocks smaller than this are drawn together; 0 if all are drawn alone.
    min_bytes: int
    #: The bytes of each look, in the order of the palette.
    looks: tuple[tuple[str, int], ...]

    sheet: ClassVar[str] = "segments"

    def to_html(self) -> Html:
        """Return the rows, how to read them, and what the colours mean."""
        # The text between two pieces is not drawn; it is read where SVG is stripped.
        drawn = join_html(map(self._draw_piece, self.pieces), "; ")
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
            words += (
                f" Blocks smaller than {format_bytes(self.min_bytes)} are drawn together: used "
                "memory below, free memory above."
            )
        return words

    def _draw_piece(self, piece: MapPiece) -> Html:
        """Return the piece: what is in use stands at the foot of its rows, what is free above."""
        paths = []
        low = 0.0
        for look, n_bytes in piece.looks:
            high = low + n_bytes / piece.n_bytes
            paths.append((look, self._draw_rows(piece, low, high)))
            low = high
        title = h("title", piece.told)
        if len(paths) == 1:
            [(look, path)] = paths
            return h(f"path.{name_class(look)}", title, d=path)
        return h("g", title, *(h(f"path.{name_class(look)}", d=path) for look, path in paths))

    def _draw_rows(self, piece: MapPiece, low: float, high: float) -> str:
        """Return a path over the piece's rows, from one share of their height to another."""
        height = _HEIGHT / self.n_rows
        full = height * (1 - _GAP)
        parts = []
        at = piece.start
        while at < piece.end:
            row, offset = divmod(at, self.row_bytes)
            end = min(piece.end, (row + 1) * self.row_bytes)
            x, y = _WIDTH * offset / self.row_bytes, height * row
            left, right = _round(x), _round(x + _WIDTH * (end - at) / self.row_bytes)
            top, foot = _round(y + full * (1 - high)), _round(y + full * (1 - low))
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
    blocks = list(_iter_blocks(segment_map))
    # Two of a thousand steps can be seen.
    min_bytes = row_bytes * 2 // _WIDTH
    pieces = _join_small(blocks, min_bytes)
    while sum(len(piece.looks) for piece in pieces) > _MAX_PIECES:
        min_bytes = min_bytes * 3 // 2
        pieces = _join_small(blocks, min_bytes)
    sums = _sum_looks(blocks)
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
        pieces=tuple(pieces),
        starts=tuple(starts),
        min_bytes=min_bytes if len(pieces) < len(blocks) else 0,
        looks=tuple((look, sums[look]) for look in PART_COLORS if look in sums),
    )


def _iter_blocks(segment_map: SegmentMap) -> Iterator[MapPiece]:
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
                yield MapPiece(at + first, at + last, ((look, last - first),), block, owner, line)
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


def _sum_looks(pieces: Iterable[MapPiece]) -> dict[str, int]:
    sums: dict[str, int] = {}
    for piece in pieces:
        for look, n_bytes in piece.sums:
            sums[look] = sums.get(look, 0) + n_bytes
    return sums


def _join_small(blocks: Sequence[MapPiece], min_bytes: int) -> list[MapPiece]:
    """Return the pieces of the map: neighbours smaller than ``min_bytes`` are one."""
    groups: list[list[MapPiece]] = []
    # The blocks before this one take no more.
    is_full = True
    for block in blocks:
        is_small = block.n_bytes < min_bytes
        if is_full or not is_small:
            groups.append([])
        groups[-1].append(block)
        is_full = not is_small or block.end - groups[-1][0].start >= min_bytes
    return [group[0] if len(group) == 1 else _join(group) for group in groups]


def _join(group: Sequence[MapPiece]) -> MapPiece:
    sums = sorted(_sum_looks(group).items(), key=lambda item: (-item[1], item[0]))
    return MapPiece(group[0].start, group[-1].end, tuple(sums), None, n_blocks=len(group))
