"""A device's memory as pictures: the bar of its parts, and the map of its segments.

**The bar.** PyTorch, ``nvidia-smi`` and the error message each give the length of a piece of the
same bar, from its left end. A small part of this process is drawn once more, enlarged. The bar is a
row of patches and no SVG, which a notebook that is not trusted loses.

**The map.** The segments stand one after the other, the largest first, and flow over rows of the
same number of bytes, as text over lines. Blocks that are too small to be seen are drawn together,
in the colour of the most of their bytes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import ClassVar

from gpumemwidget.device_parts import list_releasable_ranges
from gpumemwidget.model.breakdowns import Breakdown, BreakdownPart, SegmentMap
from gpumemwidget.model.devices import HOST, Block
from gpumemwidget.report.render.blocks import (
    Cell,
    Column,
    Picture,
    Table,
    make_group,
    name_columns,
)
from gpumemwidget.report.render.markup import Html, h, join_html
from gpumemwidget.report.render.palette import PART_COLORS, name_class
from gpumemwidget.report.render.text import SHORT_WIDTH, cut, fill_text, render_table
from gpumemwidget.report.render.wording import (
    OWN_PARTS,
    find_look,
    name_library,
    name_look,
    name_part,
)
from gpumemwidget.units import format_bytes

# -- The bar ---------------------------------------------------------------------------------------


def list_leaves(parts: Iterable[BreakdownPart]) -> Iterator[BreakdownPart]:
    """Return the parts, with the kinds of what is allocated in its place."""
    for part in parts:
        if part.key == "allocated" and part.parts:
            yield from part.parts
        else:
            yield part


def list_marks(breakdown: Breakdown) -> list[tuple[int, bool]]:
    """Return the bytes at which a line crosses the bar, and whether the line is dashed."""
    marks = ((breakdown.limit_bytes, False), (breakdown.budget_bytes, True))
    return [
        (n_bytes, is_dashed)
        for n_bytes, is_dashed in marks
        if n_bytes is not None and 0 < n_bytes < breakdown.total_bytes
    ]


def tabulate_tools(breakdown: Breakdown) -> Table:
    """Return the figures of other tools, the smallest first; each sums neighbouring parts."""
    figures: tuple[tuple[str, int | None, str], ...]
    if breakdown.device == HOST:
        figures = (
            ("allocated", breakdown.allocated_bytes, "malloc's own count, mallinfo2()"),
            ("resident", breakdown.reserved_bytes, "top, htop: RES of this process"),
            ("used", breakdown.used_bytes, "total less what is available"),
        )
    else:
        library = name_library(breakdown.device)
        driver = [part.n_bytes for part in breakdown.parts if part.key == "driver"]
        # NVML knows the driver's own part; without it there may be no nvidia-smi either.
        used_by = "nvidia-smi, Memory-Usage" if driver else "the driver: total less free"
        if breakdown.is_shared:
            used_by = "the system: total less what is available"
        knows_process = any(part.key == "outside" for part in breakdown.parts)
        capacity = breakdown.total_bytes - driver[0] if driver else None
        process = _sum_own(breakdown) if knows_process else None
        figures = (
            ("allocated", breakdown.allocated_bytes, f"{library}.memory_allocated()"),
            ("reserved", breakdown.reserved_bytes, f"{library}.memory_reserved()"),
            ("this process", process, "nvidia-smi, beside its pid"),
            ("used", breakdown.used_bytes, used_by),
            ("total capacity", capacity, "PyTorch's errors and cudaMemGetInfo"),
        )
    listed = [
        *(figure for figure in figures if (figure[1] or 0) <= breakdown.total_bytes),
        ("limit", breakdown.limit_bytes, "%memlimit: the most that this process may reserve"),
        ("budget", breakdown.budget_bytes, "%membudget: the most that a cell may allocate"),
    ]
    rows = [(label, format_bytes(n), words) for label, n, words in listed if n is not None]
    columns = (*name_columns("memory"), Column("bytes"), Column("counted by", "words", last="wrap"))
    groups = [make_group(*rows)] if rows else []
    return Table("The same memory, as other tools count it", columns, groups)


def _sum_own(breakdown: Breakdown) -> int | None:
    """Return the bytes of this process; ``None`` if they can't be separated from others'."""
    own = 0
    for part in breakdown.parts:
        keys = set(part.merged or (part.key,))
        if keys <= OWN_PARTS:
            own += part.n_bytes
        elif keys & OWN_PARTS:
            return None
    return own


@dataclass(frozen=True, slots=True)
class DeviceBar(Picture):
    """The bar of one device; one with a title has a legend as well."""

    breakdown: Breakdown
    title: str = ""

    sheet: ClassVar[str] = "bar"
    is_svg: ClassVar[bool] = False

    def to_html(self) -> Html:
        """Return the bar with its legend; without one, a small part of this process is enlarged."""
        device, total = self.breakdown.device, self.breakdown.total_bytes
        leaves = list(list_leaves(self.breakdown.parts))
        bar = self._render_bar(leaves, total, device, is_small=bool(self.title))
        if self.title:
            title = h("p.gmw-eh", h("strong", self.title), " ", h("span", format_bytes(total)))
            keys = [
                h("span", h(f"i.{key}"), f"{name} {format_bytes(n_bytes)}")
                for key, name, n_bytes in self._list_keys()
            ]
            legend = h("p.gmw-el", join_html(keys, " "))
            return join_html([title, h("figure.gmw-bg", bar), legend])
        own = _sum_own(self.breakdown) or 0
        if not 0 < own < 0.5 * total:
            return h("figure.gmw-bg", bar)
        # With what "allocated" may be divided into.
        shown = [
            part
            for part in leaves
            if {*(part.merged or (part.key,))} <= OWN_PARTS | {"kind", "unnamed", "rounding"}
        ]
        wedge = h("path", d=f"M0 0H{600 * own / total:.4g}L600 100H0z")
        view = {"viewBox": "0 0 600 100", "preserveAspectRatio": "none", "aria_hidden": "true"}
        enlarged = self._render_bar(shown, own, f"this process's part of {device}", is_small=True)
        return h("figure.gmw-bg", bar, h("svg.gmw-bz", wedge, **view), enlarged)

    def _render_bar(
        self, parts: Iterable[BreakdownPart], total: int, title: str, *, is_small: bool
    ) -> Html:
        patches, titles = [], []
        for part in parts:
            titles.append(f"{self._name(part)} {format_bytes(part.n_bytes)}")
            width = f"width:{100 * part.n_bytes / total:.4g}%"
            patches.append(h(f"i.{name_class(find_look(part))}", style=width, title=titles[-1]))
        lines = [
            h(f"i.gmw-mk{'.gmw-dash' * is_dashed}", style=f"left:{100 * n_bytes / total:.4g}%")
            for n_bytes, is_dashed in list_marks(self.breakdown)
            if n_bytes < total
        ]
        return h(
            f"div.gmw-e{'.gmw-bo' * is_small}",
            *patches,
            *lines,
            role="img",
            aria_label=f"{title} {format_bytes(total)}: {', '.join(titles)}",
        )

    def _list_keys(self) -> list[tuple[str, str, int]]:
        keys = [
            (f"gmw-sq.{name_class(find_look(part))}", self._name(part), part.n_bytes)
            for part in list_leaves(self.breakdown.parts)
        ]
        if list_marks(self.breakdown) and self.breakdown.limit_bytes is not None:
            keys.append(("gmw-lm", "limit of this process", self.breakdown.limit_bytes))
        return keys

    def _name(self, part: BreakdownPart) -> str:
        return name_part(part, self.breakdown.device, lists_merged=bool(self.title))

    def to_text(self) -> str:
        """Return the legend as a table; nothing of a bar without one."""
        if not self.title:
            return ""
        rows = [(Cell(name, level=1), format_bytes(n)) for _, name, n in self._list_keys()]
        caption = f"{self.title}: {format_bytes(self.breakdown.total_bytes)}"
        columns = (Column("", "words"), Column(""))
        return render_table(Table(caption, columns, [make_group(*rows)]))


# -- The map of segments ---------------------------------------------------------------------------


#: The ``viewBox``, stretched to the room that there is.
_WIDTH, _HEIGHT = 1000, 400


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
            height=self.n_rows * 14,
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
        # The rest of the row is left blank.
        return 0.86 * _HEIGHT / self.n_rows

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
    row_bytes = 2 * 1024**2
    while row_bytes * 24 < total:
        row_bytes *= 2
    areas = list(_iter_areas(segment_map))
    # Two of a thousand steps can be seen.
    min_bytes = row_bytes * 2 // _WIDTH
    pieces = list(_join_small(areas, min_bytes))
    # A piece takes some 130 characters of a notebook's HTML.
    while len(pieces) > 380:
        min_bytes = min_bytes * 3 // 2
        pieces = list(_join_small(areas, min_bytes))
    sums = _sum_looks(areas)
    # Lines between segments are at least 8 of ``_WIDTH`` steps apart.
    line_bytes = max(min_bytes, row_bytes * 8 // _WIDTH)
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
