"""A map of a device's segments as SVG: each block where it lies, in the colour of what it is.

The segments stand one after the other, the largest first, and flow over rows of the same number of
bytes, as text over lines. Where blocks are too small to be seen they are drawn together: from the
bottom up what of them is in use, above it what is free. So each area is as large as its bytes are.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from gpumemwidget.backends.unallocated import list_given
from gpumemwidget.devices import MapBlock, MapSegment, SegmentMap
from gpumemwidget.report.bridgetheme import PART_COLORS, name_class
from gpumemwidget.report.bridgewords import name_key, name_kind
from gpumemwidget.report.escape import escape_html
from gpumemwidget.report.words import cut_words
from gpumemwidget.units import format_bytes

__all__ = [
    "ROW_WIDTH",
    "MapPiece",
    "SegmentChart",
    "list_looks",
    "name_look",
    "plot_segments",
    "render_segments",
    "tell_rows",
]

#: The ``viewBox``, stretched to the room that there is.
ROW_WIDTH = 1000
_HEIGHT = 400
_MOST_ROWS = 24
_LEAST_ROW_BYTES = 2 * 1024**2
#: Pixels.
_ROW_HEIGHT = 14
_GAP_PART = 0.14
#: Lines stand so far apart at least, of ``ROW_WIDTH``.
_LINE_STEPS = 8
#: Areas in a notebook's HTML; one takes some 130 characters.
_MOST_PIECES = 380
_MOST_OWNER = 48

_STATES = {
    "pending": "pending free",
    "releasable": "free, releasable",
    "fragmented": "free, beside blocks in use",
    "pools": "free, in a private pool",
}


@dataclass(frozen=True, slots=True)
class MapPiece:
    """A block, or blocks side by side that are too small for themselves."""

    #: From the first byte of the first segment, as they stand one after the other.
    start: int
    end: int
    #: The looks of what is in it and their bytes: what is in use, then what is free.
    looks: tuple[tuple[str, int], ...]
    told: str


@dataclass(frozen=True, slots=True)
class _Atom:
    """What is of one state in one block."""

    start: int
    end: int
    look: str
    block: MapBlock

    @property
    def n_bytes(self) -> int:
        return self.end - self.start


@dataclass(frozen=True, slots=True)
class SegmentChart:
    """What is drawn of one device."""

    device: str
    row_bytes: int
    n_rows: int
    total_bytes: int
    pieces: tuple[MapPiece, ...]
    #: Where segments begin, those that can be told apart.
    starts: tuple[int, ...]
    #: Smaller ones are drawn together; 0 where all are drawn.
    least_bytes: int
    #: Of all that is drawn.
    looks: tuple[tuple[str, int], ...]


def plot_segments(found: SegmentMap, *, most: int = _MOST_PIECES) -> SegmentChart:
    """The chart of one device.

    Args:
        found: the map.
        most: how many pieces to draw.
    """
    total = found.reserved_bytes
    row = _LEAST_ROW_BYTES
    while row * _MOST_ROWS < total:
        row *= 2
    atoms = list(_list_atoms(found.segments))
    # Two of a thousand steps can be seen.
    least = row * 2 // ROW_WIDTH
    groups = _group(atoms, least)
    while (n_areas := sum(map(_count_areas, groups))) > most:
        least = max(least * 5 // 4, least * n_areas // (2 * most))
        groups = _group(atoms, least)
    sums: dict[str, int] = {}
    for atom in atoms:
        sums[atom.look] = sums.get(atom.look, 0) + atom.n_bytes
    return SegmentChart(
        device=found.device,
        row_bytes=row,
        n_rows=max(-(-total // row), 1),
        total_bytes=total,
        pieces=tuple(map(_make_piece, groups)),
        starts=tuple(_list_starts(found.segments, max(least, row * _LINE_STEPS // ROW_WIDTH))),
        least_bytes=least if len(groups) < len(atoms) else 0,
        looks=tuple((look, sums[look]) for look in PART_COLORS if look in sums),
    )


def _list_starts(segments: Sequence[MapSegment], least: int) -> Iterator[int]:
    at = last = 0
    for segment in segments:
        if at and at - last >= least and segment.n_bytes >= least:
            yield at
            last = at
        at += segment.n_bytes


def _list_atoms(segments: Iterable[MapSegment]) -> Iterator[_Atom]:
    """Each block; a free one of which some is given back is several."""
    at = 0
    for segment in segments:
        for block, start, end, look in list_looks(segment):
            yield _Atom(at + start, at + end, look, block)
        at += segment.n_bytes


def list_looks(segment: MapSegment) -> Iterator[tuple[MapBlock, int, int, str]]:
    """Each block with where it begins and ends in its segment, and its look.

    A free one of which ``empty_cache`` gives only some back is several.
    """
    given = _list_given(segment)
    for block in segment.blocks:
        for start, end, look in _split(block, segment, given):
            yield block, start, end, look


def _list_given(segment: MapSegment) -> Sequence[tuple[int, int]]:
    if segment.is_private:
        return ()
    return (
        list_given(
            [(each.offset_bytes, each.n_bytes, each.state) for each in segment.blocks],
            is_expandable=segment.is_expandable,
            is_small=segment.is_small,
        )
        or ()
    )


def _split(
    block: MapBlock, segment: MapSegment, given: Sequence[tuple[int, int]]
) -> Iterator[tuple[int, int, str]]:
    start, end = block.offset_bytes, block.offset_bytes + block.n_bytes
    if block.state == "active_allocated":
        # Called and coloured as in the table of parts.
        kind = block.kind or "allocated"
        yield start, end, "unnamed" if kind == "unknown" else kind
        return
    if block.state == "active_pending_free":
        yield start, end, "pending"
        return
    if segment.is_private:
        yield start, end, "pools"
        return
    at = start
    for first, last in given:
        if start <= first < end:
            if at < first:
                yield at, first, "fragmented"
            yield first, last, "releasable"
            at = last
    if at < end:
        yield at, end, "fragmented"


def _tell_block(atom: _Atom) -> str:
    block = atom.block
    words = [format_bytes(atom.n_bytes), name_look(atom.look)]
    if block.state == "active_allocated":
        if block.owner:
            words.append(cut_words(block.owner, _MOST_OWNER))
        elif block.kind not in (None, "unknown"):
            words.append(name_key("unnamed"))
        if block.requested_bytes is not None and block.requested_bytes < block.n_bytes:
            words.append(f"{format_bytes(block.requested_bytes)} asked for")
    if block.allocated_at:
        words.append(cut_words(block.allocated_at, _MOST_OWNER))
    return " · ".join(words)


def name_look(look: str) -> str:
    """What a colour of the map stands for."""
    if look in _STATES:
        return _STATES[look]
    if look in ("allocated", "unnamed"):
        return name_key(look)  # type: ignore[arg-type]  # these are parts
    return name_kind(look)  # type: ignore[arg-type]  # all others are kinds of memory


def _group(atoms: Sequence[_Atom], least: int) -> list[list[_Atom]]:
    """What is smaller than ``least`` goes together with what is beside it and small too."""
    groups: list[list[_Atom]] = []
    group: list[_Atom] = []
    for atom in atoms:
        is_small = atom.n_bytes < least
        if group and (not is_small or group[-1].end - group[0].start >= least):
            groups.append(group)
            group = []
        if is_small:
            group.append(atom)
        else:
            groups.append([atom])
    if group:
        groups.append(group)
    return groups


def _count_areas(group: Sequence[_Atom]) -> int:
    return len({atom.look in _STATES for atom in group})


def _make_piece(group: Sequence[_Atom]) -> MapPiece:
    first, last = group[0], group[-1]
    if first is last:
        return MapPiece(first.start, first.end, ((first.look, first.n_bytes),), _tell_block(first))
    sums: dict[str, int] = {}
    for atom in group:
        sums[atom.look] = sums.get(atom.look, 0) + atom.n_bytes
    ordered = sorted(sums.items(), key=lambda item: (-item[1], item[0]))
    told = f"{len(group)} blocks, {format_bytes(last.end - first.start)}: " + ", ".join(
        f"{name_look(look)} {format_bytes(n_bytes)}" for look, n_bytes in ordered[:3]
    )
    used = [item for item in ordered if item[0] not in _STATES]
    free = [item for item in ordered if item[0] in _STATES]
    # What there is most of gives each of the two its colour.
    looks = tuple((each[0][0], sum(n for _, n in each)) for each in (used, free) if each)
    return MapPiece(first.start, last.end, looks, told)


# -- As HTML ---------------------------------------------------------------------------------------


def render_segments(chart: SegmentChart) -> str:
    """One ``<div>``: the rows with how to read them, and below what the colours are."""
    height = _HEIGHT / chart.n_rows
    # As in a device's bar: the text in between is not drawn.
    drawn = "; ".join(_render_piece(piece, chart, height) for piece in chart.pieces)
    lines = "".join(
        f"M{_round(x)} {_round(y)}v{_round(height * (1 - _GAP_PART))}"
        for x, y in (_place(start, chart, height) for start in chart.starts)
    )
    names = ", ".join(f"{name_look(look)} {format_bytes(n)}" for look, n in chart.looks)
    label = escape_html(f"{chart.device}: segments of {format_bytes(chart.total_bytes)}: {names}")
    keys = "".join(
        f'<li><i class="{name_class(look)}"></i>{escape_html(name_look(look))} '
        f"{format_bytes(n_bytes)}</li>"
        for look, n_bytes in chart.looks
    )
    return (
        f'<div class="gmw-sm"><figure><svg role="img" aria-label="{label}" '
        f'viewBox="0 0 {ROW_WIDTH} {_HEIGHT}" height="{chart.n_rows * _ROW_HEIGHT}" '
        f'preserveAspectRatio="none">{drawn}. <path class="gmw-se" d="{lines}"/></svg>'
        f"<figcaption>{escape_html(_explain(chart))}</figcaption></figure>"
        f"<p>{escape_html(tell_rows(chart))}</p><ul>{keys}</ul></div>"
    )


def tell_rows(chart: SegmentChart) -> str:
    """What a row of the map is, in HTML and in text."""
    return f"A row of the map is {format_bytes(chart.row_bytes)}, the largest segment first."


def _explain(chart: SegmentChart) -> str:
    """What is seen of it in HTML alone."""
    words = (
        "A line in the map stands where a segment begins. Point at a block for its size, owner and "
        "line."
    )
    if chart.least_bytes:
        words += (
            f" What is smaller than {format_bytes(chart.least_bytes)} is drawn together: below "
            "what is in use, above what is free."
        )
    return words


def _place(at: int, chart: SegmentChart, height: float) -> tuple[float, float]:
    return ROW_WIDTH * (at % chart.row_bytes) / chart.row_bytes, height * (at // chart.row_bytes)


def _render_piece(piece: MapPiece, chart: SegmentChart, height: float) -> str:
    title = f"<title>{escape_html(piece.told)}</title>"
    if len(piece.looks) == 1:
        path = _draw(piece, chart, height, 0.0, 1.0)
        return f'<path class="{name_class(piece.looks[0][0])}" d="{path}">{title}</path>'
    parts = []
    low, total = 0.0, piece.end - piece.start
    for look, n_bytes in piece.looks:
        high = low + n_bytes / total
        path = _draw(piece, chart, height, low, high)
        parts.append(f'<path class="{name_class(look)}" d="{path}"/>')
        low = high
    return f"<g>{title}{''.join(parts)}</g>"


def _draw(piece: MapPiece, chart: SegmentChart, height: float, low: float, high: float) -> str:
    """Its rows, each from a part of the height to another, counted from below."""
    full = height * (1 - _GAP_PART)
    parts = []
    at = piece.start
    while at < piece.end:
        end = min(piece.end, (at // chart.row_bytes + 1) * chart.row_bytes)
        x, y = _place(at, chart, height)
        left, right = _round(x), _round(x + ROW_WIDTH * (end - at) / chart.row_bytes)
        top, foot = _round(y + full * (1 - high)), _round(y + full * (1 - low))
        parts.append(f"M{left} {top}H{right}V{foot}H{left}z")
        at = end
    return "".join(parts)


def _round(number: float) -> str:
    """With one decimal, where it needs one."""
    return f"{number:.1f}".removesuffix(".0")
