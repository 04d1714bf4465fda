"""The reserved peak over the size of a batch: a point for each size that was predicted.

The room that there is is a line across, and the largest size that fits a dashed line, as the peak
of a timeline is; its style sheet and its scales are the timeline's.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from gpumemwidget.report.charts.timeline import (
    HEIGHT,
    WIDTH,
    choose_ticks,
    find_place,
    format_tick,
    render_key,
    write_peak,
    write_ticks,
)
from gpumemwidget.report.render.blocks import Picture
from gpumemwidget.report.render.markup import Html, h
from gpumemwidget.units import format_bytes

#: Sizes that need more than this many times the room are not drawn if others need less: the line
#: of the room would lie at the bottom.
_MAX_NEED = 2
#: Share of each scale that is drawn beyond its last point.
_MARGIN = 0.05


@dataclass(frozen=True, slots=True)
class SizesChart(Picture):
    """The chart of the sizes that were predicted.

    Attributes:
        peaks: sizes, ascending, each with its reserved peak in bytes.
        largest: the largest size that fits; 0: none of them does.
        room_bytes: bytes that PyTorch may reserve.
    """

    peaks: tuple[tuple[int, int], ...]
    largest: int
    room_bytes: int

    sheet: ClassVar[str] = "timeline"

    def to_html(self) -> Html:
        """Return the chart with its scale, its sizes below and its legend beside it."""
        near = [each for each in self.peaks if each[1] <= _MAX_NEED * self.room_bytes]
        peaks = near or list(self.peaks)
        top = round((1 + _MARGIN) * max(self.room_bytes, *(n_bytes for _, n_bytes in peaks)))
        right = (1 + _MARGIN) * peaks[-1][0]
        ticks = [(1 - find_place(tick, 0, top), format_tick(tick)) for tick in choose_ticks(top)]
        x = find_place(self.largest, 0, right)
        words = f"{self.largest:,} fits" if self.largest else ""
        names = ", ".join(f"{size:,}: {format_bytes(n_bytes)}" for size, n_bytes in peaks)
        return h(
            "figure.gmw-tl",
            h("div.gmw-tp.gmw-pic", write_peak(words, x)),
            h("div.gmw-ty.gmw-pic", write_ticks(ticks)),
            h(
                "div.gmw-tv.gmw-pic",
                h(
                    "svg",
                    *(h("path.gmw-ti", d=f"M0 {round(HEIGHT * y)}H{WIDTH}") for y, _ in ticks),
                    *self._draw(peaks, right, top),
                    role="img",
                    aria_label=f"Reserved peak of each size: {names}",
                    viewBox=f"0 0 {WIDTH} {HEIGHT}",
                    preserveAspectRatio="none",
                ),
            ),
            h("div.gmw-tx.gmw-pic", h("span", "0"), " ", h("span", f"size {peaks[-1][0]:,}")),
            self._render_legend(),
        )

    def _draw(self, peaks: list[tuple[int, int]], right: float, top: int) -> Iterator[Html]:
        def place(size: float, n_bytes: int) -> str:
            x = round(WIDTH * find_place(size, 0, right))
            return f"{x} {round(HEIGHT * (1 - find_place(n_bytes, 0, top)))}"

        points = [place(size, n_bytes) for size, n_bytes in peaks]
        yield h("path.gmw-rm", d=f"M{place(0, self.room_bytes)}H{WIDTH}")
        if self.largest:
            yield h("path.gmw-p", d=f"M{place(self.largest, 0)}V0")
        yield h("path.gmw-v", d=f"M{'L'.join(points)}")
        # A line without a length has round ends, and the picture is stretched: a circle would be
        # none.
        yield h("path.gmw-v.gmw-dt", d="".join(f"M{point}h0" for point in points))

    def _render_legend(self) -> Html:
        size = self.largest or self.peaks[0][0]
        peak_bytes = dict(self.peaks)[size]
        return h(
            "ul.gmw-ul",
            render_key("gmw-sh", "PyTorch may reserve", None, self.room_bytes),
            render_key("gmw-sv", f"reserved peak of {size:,}", None, peak_bytes),
        )
