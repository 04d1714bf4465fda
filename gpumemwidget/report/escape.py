"""Text of the user's, made harmless for a terminal and for a page.

First lines of cells, names and paths come from anywhere: a downloaded notebook's may hold escape
sequences, HTML, or marks that turn the direction of what follows.
"""

from __future__ import annotations

import html
import unicodedata

__all__ = ["clean", "escape_html"]

# Emoji and several scripts are written with these two; they move nothing else.
_HARMLESS_FORMAT = frozenset("\u200c\u200d")

# Control, format, surrogate, line and paragraph separator.
_ACTING = frozenset(("Cc", "Cf", "Cs", "Zl", "Zp"))


def clean(text: str) -> str:
    r"""Text on one line in which every character that could act on what shows it is spelled out.

    Control characters, direction marks, line separators and lone surrogates become their escapes
    (an ESC is ``\x1b``); tabs and line ends become spaces.
    """
    if text.isascii() and text.isprintable():
        return text
    return "".join(_clean_character(character) for character in text)


def _clean_character(character: str) -> str:
    if character in "\t\n\r":
        return " "
    if character in _HARMLESS_FORMAT or unicodedata.category(character) not in _ACTING:
        return character
    return character.encode("unicode_escape").decode("ascii")


def escape_html(text: str) -> str:
    """``clean`` text with HTML's own characters escaped, for a body and for a quoted attribute."""
    return html.escape(clean(text))
