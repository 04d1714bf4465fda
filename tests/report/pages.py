"""Reads a report's HTML as a browser would, and complains of what one would only repair."""

from __future__ import annotations

import re
from html.parser import HTMLParser

_VOID = frozenset({"br", "hr", "img", "input", "meta"})
_AMOUNT = re.compile(r"(?:>=|≥|~|\*)?\s?[+-]?\d+(?:\.\d+)?\s?(?:B|KiB|MiB|GiB|TiB|PiB|%)(?![\w/:])")


class Page(HTMLParser):
    """The elements and the visible text of a piece of HTML.

    Attributes:
        elements: each start tag with its attributes, in order.
        text: all text outside of styles and charts, with a space at each tag.
        errors: end tags without a start and the reverse.
    """

    def __init__(self, html: str) -> None:
        super().__init__(convert_charrefs=True)
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.errors: list[str] = []
        self.text = ""
        self._open: list[str] = []
        self.feed(html)
        self.close()
        self.errors.extend(f"<{tag}> is never closed" for tag in self._open)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Take note of an element."""
        if tag == "wbr":
            return  # where a word may break
        self.elements.append((tag, dict(attrs)))
        self.text += " "
        if tag not in _VOID:
            self._open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Take note of an element of SVG that closes itself."""
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        """Check that it closes what was opened last."""
        self.text += " "
        if not self._open or self._open[-1] != tag:
            self.errors.append(f"</{tag}> closes {self._open[-1:]}")
        else:
            self._open.pop()

    def handle_data(self, data: str) -> None:
        """Keep what a reader sees."""
        if "style" not in self._open and "figure" not in self._open:
            self.text += data


def list_amounts(text: str) -> list[str]:
    """All amounts in a text, with their marks, in one spelling, sorted."""
    return sorted(re.sub(r"\s", "", amount).replace("≥", ">=") for amount in _AMOUNT.findall(text))


def list_charts(html: str) -> list[str]:
    """The SVGs of a report, without what says no more than the text beside it."""
    charts = re.findall(r"<svg.*?</svg>", html, flags=re.DOTALL)
    return [chart for chart in charts if 'aria-hidden="true"' not in chart.partition(">")[0]]
