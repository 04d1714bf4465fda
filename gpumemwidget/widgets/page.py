"""Give pages their scripts and styles, and do what they ask for when no cell runs.

The scripts' sources are the modules in ``js/`` of the repository. ``npm run build`` makes one file
for each widget, which is kept in ``static/``: nobody needs Node to install the package. plotly.js
is vendored as it was published, and goes to the page compressed.
"""

from __future__ import annotations

import base64
import functools
import gzip
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from string import Template
from typing import Any

from IPython.core.getipython import get_ipython

from gpumemwidget.errors import GpuMemError, describe_exception
from gpumemwidget.recording.monitor import Monitor
from gpumemwidget.report.render.palette import PART_COLORS, list_properties, name_class
from gpumemwidget.session.session import Session

#: A message's content: JSON.
Message = dict[str, Any]

#: Seconds to wait after a cell, as cells often come in a row (Run All).
CELL_PAUSE_S = 0.3
_STATIC = Path(__file__).parent / "static"
_STYLES = ("dashboard.css", "device.css", "processes.css")
#: A third of the size in some 15 ms; the best level takes twice as long for 3% more.
_GZIP_LEVEL = 4
#: A module that unpacks another: nbclient saves a widget's script with the notebook.
_PACKED = Template("""\
const bytes = Uint8Array.from(atob("$packed"), (char) => char.charCodeAt(0));
const unpacked = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
const script = new Response(unpacked, { headers: { "Content-Type": "text/javascript" } });
const url = URL.createObjectURL(await script.blob());
const module = await import(url);
URL.revokeObjectURL(url);
export default module.default;
""")


# -- Script and styles -----------------------------------------------------------------------------


@functools.lru_cache(maxsize=1)
def read_esm() -> str:
    """Return the dashboard's module, compressed."""
    return _PACKED.substitute(packed=base64.b64encode(_compress("dashboard.js")).decode("ascii"))


@functools.lru_cache(maxsize=1)
def read_plotly() -> bytes:
    """Return plotly.js, compressed with gzip."""
    return _compress("plotly-basic.min.js")


@functools.lru_cache(maxsize=1)
def read_css() -> str:
    """Return the dashboard's style sheet."""
    colors = "".join(f"{name}: {color};" for name, color in list_properties().items())
    looks = (
        f'.gmd [data-look="{look}"] {{ --look: var(--{name_class(look)}) }}' for look in PART_COLORS
    )
    return "\n".join([f".gmd {{ {colors} }}", *map(read_static, _STYLES), *looks, ""])


def _compress(name: str) -> bytes:
    return gzip.compress((_STATIC / name).read_bytes(), compresslevel=_GZIP_LEVEL, mtime=0)


def read_static(name: str) -> str:
    """Return a file of ``static/``: a module or a style sheet."""
    return (_STATIC / name).read_text(encoding="utf-8")


# -- Work ------------------------------------------------------------------------------------------


def schedule_on_main(action: Callable[[], None], delay_s: float = 0.0) -> None:
    """Run ``action`` on the kernel's main thread, between its messages.

    At once if this is the main thread and no delay is asked for, and if there is no kernel.
    """
    loop = getattr(getattr(get_ipython(), "kernel", None), "io_loop", None)
    if loop is None or (not delay_s and threading.current_thread() is threading.main_thread()):
        action()
    elif delay_s:
        loop.add_callback(loop.call_later, delay_s, action)
    else:
        loop.add_callback(action)


def run_when_idle(monitor: Monitor, action: Callable[[], None], delay_s: float = 0.0) -> None:
    """Run ``action`` on the kernel's main thread once no cell runs."""
    schedule_on_main(partial(monitor.when_idle, action), delay_s)


def attempt(work: Callable[[], Message]) -> Message:
    """Return what some work comes to, or why it failed; ``state`` is ``done`` or ``failed``."""
    try:
        return {"state": "done", **work()}
    except (Exception, KeyboardInterrupt) as exc:  # noqa: BLE001 - shown where the click was
        return {"state": "failed", "message": describe_failure(exc)}


class Page:
    """What all parts of the dashboard work with: the session, and its messages to the views."""

    def __init__(self, session: Session, send: Callable[..., None]) -> None:
        self.session = session
        self.send = send

    def guard(self, action: Callable[[], object]) -> None:
        """Show a failure in the views: what a widget's callback raises is seen nowhere else."""
        try:
            action()
        except (Exception, KeyboardInterrupt) as exc:  # noqa: BLE001 - shown
            self.send({"kind": "trouble", "message": describe_failure(exc)})

    def run_when_idle(self, action: Callable[[], None], delay_s: float = 0.0) -> None:
        """Run ``action`` on the main thread once no cell runs, and show its failure."""
        run_when_idle(self.session.monitor, partial(self.guard, action), delay_s)


# -- Messages --------------------------------------------------------------------------------------


def describe_failure(exc: BaseException) -> str:
    """Return a line on a failure: our own message, or the kind and message of another error."""
    if isinstance(exc, KeyboardInterrupt):
        return "interrupted; nothing was changed"
    if isinstance(exc, ModuleNotFoundError):
        return f"{exc}. Install gpumemwidget in the kernel's environment."
    return str(exc) if isinstance(exc, GpuMemError) else describe_exception(exc)
