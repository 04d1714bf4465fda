"""A device's memory as a bar of SVG: its parts side by side, and below it what others tell of them.

PyTorch, ``nvidia-smi`` and the error message each tell the length of a piece of the same bar, from
its left end; so each is a line below it. Where this process has a small part of the device, that
part stands below once more, as wide as there is room. The table of the parts is the legend.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from gpumemwidget.devices import Bridge, BridgePart, PartKey
from gpumemwidget.records import HOST
from gpumemwidget.report.bridgetheme import name_class
from gpumemwidget.report.bridgewords import find_look, name_library, name_part
from gpumemwidget.report.escape import escape_html
from gpumemwidget.report.theme import SPARKLINE_HEIGHT, SPARKLINE_WIDTH
from gpumemwidget.units import format_bytes

__all__ = ["BridgeChart", "Mark", "Piece", "Ruler", "list_leaves", "plot_bridge", "render_bridge"]

#: What this process has of a GPU stands at the bar's left end.
_OWN: frozenset[PartKey] = frozenset(
    {"allocated", "pending", "releasable", "fragmented", "pools", "cached", "outside"}
)
#: Where it has less than this part of the device, it is drawn a second time.
_ZOOM_PART = 0.5


@dataclass(frozen=True, slots=True)
class Piece:
    """A part as it is drawn."""

    label: str
    n_bytes: int
    look: str


@dataclass(frozen=True, slots=True)
class Mark:
    """A line across the bar."""

    label: str
    n_bytes: int
    look: str


@dataclass(frozen=True, slots=True)
class Ruler:
    """A piece of the bar, from its left end, for which somebody has a name."""

    label: str
    n_bytes: int
    #: Who tells it.
    teller: str
    #: The class of its mark, where it is one.
    look: str = ""


@dataclass(frozen=True, slots=True)
class BridgeChart:
    """What is drawn of one device."""

    device: str
    caption: str
    total_bytes: int
    pieces: tuple[Piece, ...]
    #: What this process has; 0 where that needs no bar of its own.
    zoom_bytes: int
    marks: tuple[Mark, ...]
    rulers: tuple[Ruler, ...]


def list_leaves(parts: Iterable[BridgePart]) -> Iterator[BridgePart]:
    """The parts, those of what is allocated in its place."""
    for part in parts:
        if part.key == "allocated" and part.parts:
            yield from part.parts
        else:
            yield part


def plot_bridge(bridge: Bridge) -> BridgeChart:
    """The chart of one device."""
    pieces = tuple(
        Piece(name_part(part, bridge.device), part.n_bytes, find_look(part))
        for part in list_leaves(bridge.parts)
    )
    own = _sum_own(bridge)
    has_zoom = own is not None and 0 < own < _ZOOM_PART * bridge.total_bytes
    marks = [
        Mark(label, n_bytes, look)
        for label, n_bytes, look in (
            ("limit", bridge.limit_bytes, "gmw-li"),
            ("budget", bridge.budget_bytes, "gmw-bu"),
        )
        if n_bytes is not None and 0 < n_bytes < bridge.total_bytes
    ]
    return BridgeChart(
        device=bridge.device,
        caption="The same memory, as others count it",
        total_bytes=bridge.total_bytes,
        pieces=pieces,
        zoom_bytes=own or 0 if has_zoom else 0,
        marks=tuple(marks),
        rulers=tuple(_list_rulers(bridge, own)),
    )


def _sum_own(bridge: Bridge) -> int | None:
    """What this process has, from the bar's left end on; ``None`` where that is not known."""
    own = 0
    for part in bridge.parts:
        keys = set(part.merged or (part.key,))
        if keys <= _OWN:
            own += part.n_bytes
        elif keys & _OWN:
            return None
    return own


def _list_rulers(bridge: Bridge, own: int | None) -> Iterator[Ruler]:
    """What others tell, the shortest first; each is the sum of parts that stand side by side."""
    tellers: tuple[tuple[str, int | None, str], ...]
    if bridge.device == HOST:
        tellers = (
            ("allocated", bridge.allocated_bytes, "malloc's own count, mallinfo2()"),
            ("resident", bridge.reserved_bytes, "top, htop: RES of this process"),
            ("used", bridge.used_bytes, "total less what is available"),
        )
    else:
        library = name_library(bridge.device)
        driver = [part.n_bytes for part in bridge.parts if part.key == "driver"]
        used_by = f"{library}.mem_get_info(): the total less what is free"
        if library == "torch.cuda":
            # NVML tells of the driver's own part; without it there may be no nvidia-smi either.
            used_by = "nvidia-smi, Memory-Usage" if driver else "the driver: total less free"
        knows_process = own is not None and any(part.key == "outside" for part in bridge.parts)
        tellers = (
            ("allocated", bridge.allocated_bytes, f"{library}.memory_allocated()"),
            ("reserved", bridge.reserved_bytes, f"{library}.memory_reserved()"),
            ("this process", own if knows_process else None, "nvidia-smi, beside its pid"),
            ("used", bridge.used_bytes, used_by),
            (
                "total capacity",
                bridge.total_bytes - driver[0] if driver else None,
                "PyTorch's errors and cudaMemGetInfo",
            ),
        )
    for label, n_bytes, teller in tellers:
        if n_bytes is not None and n_bytes <= bridge.total_bytes:
            yield Ruler(label, n_bytes, teller)
    for label, n_bytes, teller, look in (
        ("limit", bridge.limit_bytes, "%memlimit: what this process may reserve", "gmw-li"),
        ("budget", bridge.budget_bytes, "%membudget: what a cell may allocate", "gmw-bu"),
    ):
        if n_bytes is not None:
            yield Ruler(label, n_bytes, teller, look)


# -- As HTML ---------------------------------------------------------------------------------------


def render_bridge(chart: BridgeChart) -> str:
    """The bar, this process's part of it once more where it is small, and the lines below."""
    total = chart.total_bytes
    bars = _render_bar(chart, chart.pieces, chart.marks, total, chart.device)
    if chart.zoom_bytes:
        end = f"{_scale(chart.zoom_bytes, total):.4g}"
        own = list(_take_until(chart.pieces, chart.zoom_bytes))
        marks = [mark for mark in chart.marks if mark.n_bytes < chart.zoom_bytes]
        bars += (
            f'<svg class="gmw-bz" viewBox="0 0 {SPARKLINE_WIDTH} {SPARKLINE_HEIGHT}" '
            f'preserveAspectRatio="none" aria-hidden="true"><path d="M0 0H{end}'
            f'L{SPARKLINE_WIDTH} {SPARKLINE_HEIGHT}H0z"/></svg>'
        ) + _render_bar(
            chart, own, marks, chart.zoom_bytes, f"this process's part of {chart.device}"
        )
    rulers = "".join(_render_ruler(ruler, total) for ruler in chart.rulers)
    caption = f'<p class="gmw-m">{escape_html(chart.caption)}</p>' if rulers else ""
    return (
        f'<figure class="gmw-bg">{bars}</figure>'
        + f'<div class="gmw-br">{caption}{rulers}</div>' * bool(rulers)
    )


def _take_until(pieces: Iterable[Piece], n_bytes: int) -> Iterator[Piece]:
    for piece in pieces:
        if n_bytes <= 0:
            return
        n_bytes -= piece.n_bytes
        yield piece


def _render_bar(
    chart: BridgeChart,
    pieces: Sequence[Piece],
    marks: Sequence[Mark],
    total: int,
    title: str,
) -> str:
    drawn = []
    at = 0
    for piece in pieces:
        x, width = _scale(at, total), _scale(piece.n_bytes, total)
        at += piece.n_bytes
        told = escape_html(f"{piece.label} {format_bytes(piece.n_bytes)}")
        drawn.append(
            f'<rect class="{name_class(piece.look)}" x="{x:.5g}" width="{width:.4g}" '
            f'height="{SPARKLINE_HEIGHT}"><title>{told}</title></rect>'
        )
    lines = "".join(
        f'<path class="{mark.look}" d="M{_scale(mark.n_bytes, total):.5g} 0V{SPARKLINE_HEIGHT}"/>'
        for mark in marks
    )
    label = f"{title} {format_bytes(total)}: " + ", ".join(
        f"{piece.label} {format_bytes(piece.n_bytes)}" for piece in pieces
    )
    zoom = ' class="gmw-bo"' if total != chart.total_bytes else ""
    # Text in between is not drawn. It parts the names where a page that is not trusted leaves them
    # of the picture alone.
    names = f"{escape_html(title)}: {'; '.join(drawn)}. "
    return (
        f'<svg{zoom} role="img" aria-label="{escape_html(label)}" viewBox="0 0 {SPARKLINE_WIDTH} '
        f'{SPARKLINE_HEIGHT}" preserveAspectRatio="none">{names}{lines}</svg>'
    )


def _render_ruler(ruler: Ruler, total: int) -> str:
    look = f' class="{ruler.look}"' if ruler.look else ""
    width = _scale(min(ruler.n_bytes, total), total)
    return (
        f"<p><span>{escape_html(ruler.label)}</span> <strong>{format_bytes(ruler.n_bytes)}</strong>"
        f' <span class="gmw-m">{escape_html(ruler.teller)}</span>'
        f'<svg viewBox="0 0 {SPARKLINE_WIDTH} 1" preserveAspectRatio="none" aria-hidden="true">'
        f'<rect{look} width="{width:.4g}" height="1"/></svg></p>'
    )


def _scale(n_bytes: int, total: int) -> float:
    return SPARKLINE_WIDTH * n_bytes / total
