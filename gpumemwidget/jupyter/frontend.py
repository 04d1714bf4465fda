"""JavaScript and style sheets, as an anywidget takes them.

There is no build step: plotly.js is vendored as it was published and goes to the page compressed,
our own files are plain JavaScript that share one scope, and joining them is all there is to do.
What only a reader of the sources needs is left out, because the whole goes through the kernel's
socket each time that a dashboard is opened.
"""

from __future__ import annotations

import functools
import gzip
import re
from collections.abc import Sequence
from pathlib import Path

from gpumemwidget.report.bridgetheme import PART_COLORS

__all__ = ["read_card_esm", "read_css", "read_esm", "read_plotly"]

_STATIC = Path(__file__).parent / "static"
#: In this order; ``dashboard.js`` has the module's export.
_SCRIPTS = (
    "units.js",
    "store.js",
    "unpack.js",
    "theme.js",
    "row.js",
    "lane.js",
    "plot.js",
    "chips.js",
    "cells.js",
    "tree.js",
    "variables.js",
    "bridge.js",
    "segmentmap.js",
    "device.js",
    "sight.js",
    "dashboard.js",
)
_STYLES = ("dashboard.css", "device.css")
_CARD_SCRIPTS = ("units.js", "oomcard.js")
#: A third of the size in some 15 ms; the best level takes twice as long for 3% more.
_GZIP_LEVEL = 4
_COMMENTS = re.compile(r"^\s*(?://[^\n]*|/\*.*?\*/\s*)$\n?", re.MULTILINE | re.DOTALL)
_INDENTS = re.compile(r"^\s+", re.MULTILINE)


@functools.lru_cache(maxsize=1)
def read_esm() -> str:
    """The dashboard's own front end as one JavaScript module."""
    return _join(_SCRIPTS)


@functools.lru_cache(maxsize=1)
def read_card_esm() -> str:
    """The module that puts buttons into the cards of OOMs."""
    return _join(_CARD_SCRIPTS)


@functools.lru_cache(maxsize=1)
def read_plotly() -> bytes:
    """plotly.js, compressed with gzip."""
    source = (_STATIC / "plotly-basic.min.js").read_bytes()
    return gzip.compress(source, compresslevel=_GZIP_LEVEL, mtime=0)


@functools.lru_cache(maxsize=1)
def read_css() -> str:
    """The style sheets as one."""
    return _join(_STYLES) + "".join(
        f'.gmd [data-look="{look}"] {{ --look: {color} }}\n' for look, color in PART_COLORS.items()
    )


def _join(names: Sequence[str]) -> str:
    return "\n".join(_squeeze((_STATIC / name).read_text(encoding="utf-8")) for name in names)


def _squeeze(source: str) -> str:
    """A source without the comments that stand on lines of their own, and without indentation."""
    return _INDENTS.sub("", _COMMENTS.sub("", source))
