"""HTML elements that escape their text and carry the styles which an untrusted notebook keeps.

A notebook that is not trusted yet, which is how everybody sees somebody else's notebook first,
loses each ``<style>`` and each ``<svg>``, and JupyterLab's own rules align all table cells to the
right. ``h`` therefore writes what a report needs to be readable on the elements themselves:
alignment, line breaks, the bars and their colours. Everything else stays in the style sheets.

JupyterLab's sanitizer keeps a declaration when it knows the property and its pattern allows the
value. ``var()``, ``calc()`` and ``inherit`` are not allowed, so colours are plain ones that can be
seen on a light and on a dark page.
https://github.com/jupyterlab/jupyterlab/blob/main/packages/apputils/src/sanitizer.ts
"""

from __future__ import annotations

import functools
import html
import unicodedata
from collections.abc import Iterable

from gpumemwidget.report.render.palette import (
    BAND_COLORS,
    COLORS,
    PART_COLORS,
    name_class,
)


def clean(text: str) -> str:
    r"""Return a user's text on one line, without characters that act on a terminal or a page.

    First lines of cells, names and paths come from anywhere: those of a downloaded notebook may
    hold escape sequences or marks that turn the direction of what follows. Control characters,
    direction marks, line separators and lone surrogates become their escapes (an ESC is ``\x1b``);
    tabs and line ends become spaces.
    """
    if text.isascii() and text.isprintable():
        return text
    return "".join(_clean_character(character) for character in text)


def _clean_character(character: str) -> str:
    if character in "\t\n\r":
        return " "
    # Emoji and several scripts are written with these two joiners, which move nothing else.
    is_joiner = character in "\u200c\u200d"
    # Control, format, surrogate, line and paragraph separator.
    if is_joiner or unicodedata.category(character) not in ("Cc", "Cf", "Cs", "Zl", "Zp"):
        return character
    return character.encode("unicode_escape").decode("ascii")


class Html(str):
    """Markup, which ``h`` puts in as it is; any other text is escaped."""

    __slots__ = ()


def h(name: str, /, *children: object, **attributes: object) -> Html:
    """Return an element with its attributes, its children and the styles of its classes.

    Args:
        name: the tag, with its classes behind dots: ``td.gmw-r``.
        children: what stands within; all but ``Html`` is cleaned and escaped, ``None`` left out.
        attributes: an underscore is a hyphen; those that are ``None`` are left out.
    """
    tag, start, style = _read_name(name)
    inner = "".join(
        child if isinstance(child, Html) else escape(str(child))
        for child in children
        if child is not None
    )
    parts = [start]
    if tag in ("td", "th") and not inner:
        style = ""
    for key, value in attributes.items():
        if value is None:
            continue
        if key == "style":
            style = f"{style};{value}" if style else str(value)
        else:
            parts.append(f' {key.replace("_", "-")}="{escape(str(value))}"')
    if style:
        parts.append(f' style="{escape(style)}"')
    if tag == "path" and not inner:
        return Html(f"<{''.join(parts)}/>")
    return Html(f"<{''.join(parts)}>{inner}</{tag}>")


def join_html(parts: Iterable[str], separator: str = "") -> Html:
    """Return the parts one behind the other; all but ``Html`` is cleaned and escaped."""
    shown = (part if isinstance(part, Html) else escape(part) for part in parts)
    return Html(escape(separator).join(shown))


def escape(text: str) -> str:
    """Return a text cleaned and escaped, for a body and for a quoted attribute."""
    return html.escape(clean(text))


_EDGE = f"1px solid {COLORS['neutral']}8c"

#: An element gets the styles of each key that is its tag, one of its classes, or both; of two the
#: later wins, and an empty value takes the property away.
_STYLES = {
    # Pictures: only the style sheets show them.
    ".gmw-pic": "display:none",
    ".gmw-bad": f"color:{COLORS['bad']}",
    ".gmw-warn": f"color:{COLORS['warn']}",
    # Tables. JupyterLab centres them and aligns their cells to the right.
    ".gmw-w": "overflow-x:auto",
    "table": "margin:0;table-layout:auto",
    ".gmw-u": "max-width:72em;width:100%",
    "caption": "caption-side:top;font-weight:600;text-align:left;white-space:nowrap",
    ".gmw-h": "height:1px;overflow:hidden;position:absolute;width:1px",
    "td": "text-align:left;white-space:nowrap",
    "th": "text-align:left;white-space:nowrap",
    # Numbers are aligned to the right there already, and reports have many.
    ".gmw-r": "text-align:",
    ".gmw-f": "white-space:normal",
    ".gmw-z": "min-width:15em;white-space:normal",
    ".gmw-c": "max-width:0;min-width:8em;overflow:hidden;text-overflow:ellipsis;width:100%",
    # Source beside its amounts.
    ".gmw-ix": "text-align:",
    ".gmw-src": "white-space:pre",
    ".gmw-wd": "white-space:normal",
    ".gmw-cs": "background:none;font-weight:400;white-space:pre",
    # Bars.
    ".gmw-y": "display:inline-block;height:8px;margin-left:6px;width:48px",
    ".gmw-ly": "float:left;height:8px;margin:5px 6px 0 0;width:40px",
    ".gmw-e": f"border:{_EDGE};border-radius:3px;box-sizing:border-box;display:flex;height:30px;"
    "margin:0;overflow:hidden;position:relative",
    ".gmw-bg": "margin:4px 0 0",
    ".gmw-bo": "height:22px",
    ".gmw-mk": "border-left:2px solid;height:100%;position:absolute",
    ".gmw-dash": "border-left:2px dashed",
    # Patches of colour in legends and tables.
    ".gmw-sq": f"border:{_EDGE};display:inline-block;height:10px;margin-right:5px;width:10px",
    ".gmw-lm": "border-left:2px solid;display:inline-block;height:12px;margin-right:5px;width:3px",
    ".gmw-sv": f"border-top:2px solid {COLORS['reserved']};display:inline-block;margin-right:5px;"
    "vertical-align:middle;width:10px",
    ".gmw-eh": "display:flex;justify-content:space-between;margin:10px 0 3px",
    ".gmw-tl": "margin:2px 0 10px",
    ".gmw-ul": "list-style-type:none;margin:6px 0 0;padding:0",
    # The card of an OOM.
    ".gmw-card": f"border:1px solid {COLORS['neutral']}59;border-left:3px solid {COLORS['bad']};"
    "border-radius:4px;box-sizing:border-box;margin:6px 0;max-width:76em;padding:10px 14px 8px",
    ".gmw-warning": f"border-left:3px solid {COLORS['warn']}",
    **{f"i.{name_class(look)}": f"background:{color}" for look, color in PART_COLORS.items()},
    **{f"i.gmw-k{key}": f"background:{color}" for key, color in BAND_COLORS.items()},
    **{f"td.gmw-k{key}": f"border-left:3px solid {color}" for key, color in BAND_COLORS.items()},
}


@functools.lru_cache(maxsize=1024)
def _read_name(name: str) -> tuple[str, str, str]:
    """Return the tag, the beginning of the start tag, and the declarations of its styles."""
    tag, *classes = filter(None, name.split("."))
    keys = {tag, *(f".{name}" for name in classes), *(f"{tag}.{name}" for name in classes)}
    found: dict[str, str] = {}
    for key in sorted(keys & _STYLES.keys(), key=[*_STYLES].index):
        for declaration in _STYLES[key].split(";"):
            prop, value = declaration.split(":", 1)
            found[prop] = value
    style = ";".join(f"{prop}:{value}" for prop, value in found.items() if value)
    start = f'{tag} class="{" ".join(classes)}"' if classes else tag
    return tag, start, style


#: Shows only where the style sheet, which hides it, is stripped.
UNTRUSTED_NOTE = h("p.gmw-no", "Trust this notebook to see the chart.")


def render_share(share: float, class_: str) -> Html:
    """Return a bar filled to ``share`` (0 to 1); the number beside it says the same."""
    # The second colour begins where the first ends.
    fill = (
        f"linear-gradient(90deg,{COLORS['allocated']} {100 * share:.3g}%,{COLORS['neutral']}2e 0)"
    )
    return h(f"span.{class_}", style=f"background:{fill}")


def indent(inner: Html, level: int) -> Html:
    """Return a row of a tree, moved to the right by its depth."""
    return h("div", inner, style=f"padding-left:{1.1 * level:.3g}em")
