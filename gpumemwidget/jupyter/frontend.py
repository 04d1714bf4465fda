"""The dashboard's JavaScript and style sheet, as the one module that an anywidget takes.

There is no build step: plotly.js is vendored as it was published, our own files are plain
JavaScript that share one scope, and joining them is all there is to do. What only a reader of the
sources needs is left out, because the whole goes through the kernel's socket each time that a
dashboard is opened.
"""

from __future__ import annotations

import functools
import re
from pathlib import Path

__all__ = ["read_css", "read_esm"]

_STATIC = Path(__file__).parent / "static"
#: In this order; ``dashboard.js`` has the module's export.
_SCRIPTS = ("units.js", "store.js", "plot.js", "cells.js", "variables.js", "dashboard.js")
#: plotly.js looks for a CommonJS ``module`` first. It runs when the first plot is drawn, so that
#: the rest of the dashboard is on the screen before its megabyte is read. The page's own
#: ``Plotly``, if it has one, stays what it was.
_PLOTLY = """\
let plotly = null;
function loadPlotly() {
  plotly ??= (() => {
    const module = { exports: {} };
    const before = window.Plotly;
    %s
    window.Plotly = before;
    return module.exports;
  })();
  return plotly;
}
"""
_COMMENTS = re.compile(r"^\s*(?://[^\n]*|/\*.*?\*/\s*)$\n?", re.MULTILINE | re.DOTALL)
_INDENTS = re.compile(r"^\s+", re.MULTILINE)


@functools.lru_cache(maxsize=1)
def read_esm() -> str:
    """The front end as one JavaScript module."""
    plotly = (_STATIC / "plotly-basic.min.js").read_text(encoding="utf-8")
    own = (_squeeze((_STATIC / name).read_text(encoding="utf-8")) for name in _SCRIPTS)
    return "\n".join([_PLOTLY.replace("%s", plotly), *own])


@functools.lru_cache(maxsize=1)
def read_css() -> str:
    """The style sheet."""
    return _squeeze((_STATIC / "dashboard.css").read_text(encoding="utf-8"))


def _squeeze(source: str) -> str:
    """A source without the comments that stand on lines of their own, and without indentation."""
    return _INDENTS.sub("", _COMMENTS.sub("", source))
