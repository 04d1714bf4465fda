"""What a report function gives: the same report as text and as HTML."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

__all__ = ["Report"]


@dataclass(frozen=True, slots=True, repr=False)
class Report:
    """A report that shows itself: HTML in a notebook, text in a terminal.

    Attributes:
        text: plain text without a line end.
        html: static HTML, one element with its own styles.
    """

    text: str
    html: str

    def __repr__(self) -> str:
        return self.text

    def __str__(self) -> str:
        return self.text

    def _repr_html_(self) -> str:
        return self.html

    def _repr_mimebundle_(
        self,
        include: object = None,  # noqa: ARG002 - IPython's protocol
        exclude: object = None,  # noqa: ARG002
    ) -> dict[str, Any]:
        return {"text/plain": self.text, "text/html": self.html}
