"""A device's memory as a bar: its parts side by side, and below it the figures of other tools.

PyTorch, ``nvidia-smi`` and the error message each give the length of a piece of the same bar, from
its left end; so each is a line below it. Where this process has a small part of the device, that
part is drawn once more in the full width. The bar is a row of patches and no SVG, which a notebook
that is not trusted would lose.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

from gpumemwidget.model.breakdowns import Breakdown, BreakdownPart, PartKey
from gpumemwidget.model.devices import HOST
from gpumemwidget.report.render.blocks import Cell, Column, Picture, Table
from gpumemwidget.report.render.markup import Html, fill_to, h, join_html
from gpumemwidget.report.render.palette import NEUTRAL_COLOR, PEAK_COLOR, name_class
from gpumemwidget.report.render.text import render_table
from gpumemwidget.report.render.wording import OWN_PARTS, find_look, name_library, name_part
from gpumemwidget.units import format_bytes

#: The parts of this process's memory, with what "allocated" may be divided into.
_OWN_LEAVES: frozenset[PartKey] = OWN_PARTS | {"kind", "unnamed", "rounding"}
#: Share of the device below which this process's part is drawn a second time.
_ZOOM_SHARE = 0.5

_CAPTION = "The same memory, as other tools count it"
_ROWS = (Column("", "words"), Column(""), Column("", "words", last="wrap"))


@dataclass(frozen=True, slots=True)
class Ruler:
    """A length of the bar from its left end for which another tool has a name."""

    label: str
    n_bytes: int
    #: The tool that tells it.
    teller: str
    #: A limit or a budget, which is a line across the bar as well.
    is_mark: bool = False


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


def list_rulers(breakdown: Breakdown) -> Iterator[Ruler]:
    """Return the figures of other tools, the smallest first; each sums neighbouring parts."""
    tellers: tuple[tuple[str, int | None, str], ...]
    if breakdown.device == HOST:
        tellers = (
            ("allocated", breakdown.allocated_bytes, "malloc's own count, mallinfo2()"),
            ("resident", breakdown.reserved_bytes, "top, htop: RES of this process"),
            ("used", breakdown.used_bytes, "total less what is available"),
        )
    else:
        library = name_library(breakdown.device)
        driver = [part.n_bytes for part in breakdown.parts if part.key == "driver"]
        # NVML tells of the driver's own part; without it there may be no nvidia-smi either.
        used_by = "nvidia-smi, Memory-Usage" if driver else "the driver: total less free"
        knows_process = any(part.key == "outside" for part in breakdown.parts)
        capacity = breakdown.total_bytes - driver[0] if driver else None
        process = _sum_own(breakdown) if knows_process else None
        tellers = (
            ("allocated", breakdown.allocated_bytes, f"{library}.memory_allocated()"),
            ("reserved", breakdown.reserved_bytes, f"{library}.memory_reserved()"),
            ("this process", process, "nvidia-smi, beside its pid"),
            ("used", breakdown.used_bytes, used_by),
            ("total capacity", capacity, "PyTorch's errors and cudaMemGetInfo"),
        )
    for label, n_bytes, teller in tellers:
        if n_bytes is not None and n_bytes <= breakdown.total_bytes:
            yield Ruler(label, n_bytes, teller)
    if breakdown.limit_bytes is not None:
        words = "%memlimit: the most that this process may reserve"
        yield Ruler("limit", breakdown.limit_bytes, words, is_mark=True)
    if breakdown.budget_bytes is not None:
        words = "%membudget: the most that a cell may allocate"
        yield Ruler("budget", breakdown.budget_bytes, words, is_mark=True)


def _sum_own(breakdown: Breakdown) -> int | None:
    """Return the bytes of this process; ``None`` if they can't be told from those of others."""
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
    """The bar of one device, with a legend or with the figures of other tools.

    Attributes:
        breakdown: the device in parts.
        title: heads a bar with a legend; without it, a table of the parts stands below the bar.
    """

    breakdown: Breakdown
    title: str = ""

    sheet: ClassVar[str] = "bar"
    is_svg: ClassVar[bool] = False

    def to_html(self) -> Html:
        """Return the bar, this process's part of it where that is small, and the lines below."""
        breakdown, total = self.breakdown, self.breakdown.total_bytes
        leaves = list(list_leaves(breakdown.parts))
        bar = self._render_bar(leaves, total, breakdown.device)
        if self.title:
            title = h("p.gmw-eh", h("strong", self.title), " ", h("span", format_bytes(total)))
            keys = [
                h("span", h(f"i.{key}"), f"{name} {format_bytes(n_bytes)}")
                for key, name, n_bytes in self._list_keys()
            ]
            legend = h("p.gmw-el", join_html(keys, " "))
            return join_html([title, h("figure.gmw-bg", bar), legend])
        own = _sum_own(breakdown)
        zoom = None
        if own is not None and 0 < own < _ZOOM_SHARE * total:
            shown = [part for part in leaves if {*(part.merged or (part.key,))} <= _OWN_LEAVES]
            wedge = f"M0 0H{600 * own / total:.4g}L600 100H0z"
            zoom = join_html(
                [
                    h(
                        "svg.gmw-bz",
                        h("path", d=wedge),
                        viewBox="0 0 600 100",
                        preserveAspectRatio="none",
                        aria_hidden="true",
                    ),
                    self._render_bar(shown, own, f"this process's part of {breakdown.device}"),
                ]
            )
        rulers = [_render_ruler(ruler, total) for ruler in list_rulers(breakdown)]
        below = h("div.gmw-br", h("p.gmw-m", _CAPTION), *rulers) if rulers else ""
        return join_html([h("figure.gmw-bg", bar, zoom), below])

    def _render_bar(self, parts: Sequence[BreakdownPart], total: int, title: str) -> Html:
        patches = []
        for part in parts:
            width = f"width:{100 * part.n_bytes / total:.4g}%"
            key = f"i.{name_class(find_look(part))}"
            patches.append(h(key, style=width, title=self._tell(part)))
        lines = [
            h(f"i.gmw-mk{'.gmw-dash' * is_dashed}", style=f"left:{100 * n_bytes / total:.4g}%")
            for n_bytes, is_dashed in list_marks(self.breakdown)
            if n_bytes < total
        ]
        names = ", ".join(map(self._tell, parts))
        is_small = bool(self.title) or total != self.breakdown.total_bytes
        return h(
            f"div.gmw-e{'.gmw-bo' * is_small}",
            *patches,
            *lines,
            role="img",
            aria_label=f"{title} {format_bytes(total)}: {names}",
        )

    def _list_keys(self) -> list[tuple[str, str, int]]:
        """Return the legend: the class of each key, its name and its bytes."""
        keys = [
            (f"gmw-sq.{name_class(find_look(part))}", self._name(part), part.n_bytes)
            for part in list_leaves(self.breakdown.parts)
        ]
        if list_marks(self.breakdown) and self.breakdown.limit_bytes is not None:
            keys.append(("gmw-lm", "limit of this process", self.breakdown.limit_bytes))
        return keys

    def _tell(self, part: BreakdownPart) -> str:
        return f"{self._name(part)} {format_bytes(part.n_bytes)}"

    def _name(self, part: BreakdownPart) -> str:
        return name_part(part, self.breakdown.device, lists_merged=bool(self.title))

    def to_text(self) -> str:
        """Return the legend as a table, or the figures of other tools."""
        if self.title:
            told = [(name, n_bytes, "") for _, name, n_bytes in self._list_keys()]
            caption = f"{self.title}: {format_bytes(self.breakdown.total_bytes)}"
        else:
            rulers = list_rulers(self.breakdown)
            told = [(ruler.label, ruler.n_bytes, ruler.teller) for ruler in rulers]
            caption = _CAPTION
        rows = tuple(
            (Cell(name, level=1), Cell(format_bytes(n_bytes)), Cell(words))
            for name, n_bytes, words in told
        )
        return render_table(Table(caption, _ROWS, (rows,), caption_is_seen=True))


def _render_ruler(ruler: Ruler, total: int) -> Html:
    fill = fill_to(
        min(ruler.n_bytes, total) / total, PEAK_COLOR if ruler.is_mark else NEUTRAL_COLOR
    )
    return h(
        "p",
        h("span", ruler.label),
        " ",
        h("strong", format_bytes(ruler.n_bytes)),
        " ",
        h("span.gmw-m", ruler.teller),
        h("span.gmw-ru", style=fill, aria_hidden="true"),
    )
