"""The report that each ``report_…`` function returns: it shows itself, as HTML or as text."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from gpumemwidget.report.render.blocks import Block, bound_blocks
from gpumemwidget.report.render.html import render_html
from gpumemwidget.report.render.text import render_text


@dataclass(frozen=True, repr=False)
class Report:
    """A report that shows itself: HTML in a notebook, text in a terminal.

    Attributes:
        blocks: what the report says, long lists cut; text and HTML are made from it on demand.
        classes: further classes of the HTML's outermost element; ``gmw-card`` gives it a frame.
    """

    blocks: Sequence[Block]
    classes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "blocks", bound_blocks(self.blocks))

    @cached_property
    def text(self) -> str:
        """Plain text without a line end."""
        return render_text(self.blocks)

    @cached_property
    def html(self) -> str:
        """Static HTML, one element with its own styles."""
        return render_html(self.blocks, self.classes)

    def __repr__(self) -> str:
        return self.text

    def _repr_html_(self) -> str:
        return self.html


class ShowsReport(ABC):
    """A result that displays itself as its report."""

    @abstractmethod
    def _report(self) -> Report: ...

    def to_html(self) -> str:
        """Return the report as static HTML."""
        return self._report().html

    def to_text(self) -> str:
        """Return the report as plain text."""
        return self._report().text

    def _repr_html_(self) -> str | None:
        return self.to_html()

    def __repr__(self) -> str:
        return self.to_text()
