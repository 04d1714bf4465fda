"""A device's memory as a bar: its parts side by side, and the figures that other tools give for it.

PyTorch, ``nvidia-smi`` and the error message each give the length of a piece of the same bar, from
its left end. A small part of this process is drawn once more, enlarged. The bar is a row of patches
and no SVG, which a notebook that is not trusted loses.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import ClassVar

from gpumemwidget.model.breakdowns import Breakdown, BreakdownPart, PartKey
from gpumemwidget.model.devices import HOST
from gpumemwidget.report.render.blocks import (
    Cell,
    Column,
    Picture,
    Table,
    make_group,
    name_columns,
)
from gpumemwidget.report.render.markup import Html, h, join_html
from gpumemwidget.report.render.palette import name_class
from gpumemwidget.report.render.text import render_table
from gpumemwidget.report.render.wording import OWN_PARTS, find_look, name_library, name_part
from gpumemwidget.units import format_bytes

#: The parts of this process's memory, with what "allocated" may be divided into.
_OWN_LEAVES: frozenset[PartKey] = OWN_PARTS | {"kind", "unnamed", "rounding"}
#: Share of the device below which this process's part is drawn a second time.
_ZOOM_SHARE = 0.5


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
        if not 0 < own < _ZOOM_SHARE * total:
            return h("figure.gmw-bg", bar)
        shown = [part for part in leaves if {*(part.merged or (part.key,))} <= _OWN_LEAVES]
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
