"""JavaScript and style sheets, as an anywidget takes them.

The sources are the modules in ``js/`` of the repository. ``npm run build`` makes one file of them,
which is kept in ``static/``: nobody needs Node to install the package. plotly.js is vendored as it
was published, and goes to the page compressed.
"""

from __future__ import annotations

import functools
import gzip
from pathlib import Path

from gpumemwidget.report.render.palette import PART_COLORS, list_properties, name_class

_STATIC = Path(__file__).parent / "static"
_STYLES = ("dashboard.css", "device.css")
#: A third of the size in some 15 ms; the best level takes twice as long for 3% more.
_GZIP_LEVEL = 4


@functools.lru_cache(maxsize=1)
def read_esm() -> str:
    """Return the module of all widgets; a model's trait ``widget`` says which of them it is."""
    return _read("widgets.js")


@functools.lru_cache(maxsize=1)
def read_plotly() -> bytes:
    """Return plotly.js, compressed with gzip."""
    source = (_STATIC / "plotly-basic.min.js").read_bytes()
    return gzip.compress(source, compresslevel=_GZIP_LEVEL, mtime=0)


@functools.lru_cache(maxsize=1)
def read_css() -> str:
    """Return the dashboard's style sheet."""
    colors = "".join(f"{name}: {color};" for name, color in list_properties().items())
    looks = (
        f'.gmd [data-look="{look}"] {{ --look: var(--{name_class(look)}) }}' for look in PART_COLORS
    )
    return "\n".join([f".gmd {{ {colors} }}", *map(_read, _STYLES), *looks, ""])


def _read(name: str) -> str:
    return (_STATIC / name).read_text(encoding="utf-8")
