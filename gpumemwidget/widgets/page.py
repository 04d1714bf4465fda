"""Speak with pages: scripts and styles, messages, who looks, and work for when no cell runs.

The scripts' sources are the modules in ``js/`` of the repository. ``npm run build`` makes one file
for each widget, which is kept in ``static/``: nobody needs Node to install the package. plotly.js
is vendored as it was published, and goes to the page compressed.

JupyterLab, Notebook 7 and VS Code take binary buffers, and messages from any thread at any time:
there a message goes out as it is. Colab drops the buffers of the message that makes a widget, and
shows no update that does not belong to a request of the page's own, as one from a background thread
(https://github.com/googlecolab/colab-cdn-widget-manager/issues/33,
https://github.com/googlecolab/colabtools/issues/3373). So where the kernel runs in Colab, binary
data travels as base64 text within the JSON, and a message that would not be shown is kept until the
page asks, once a second; the answer is sent while the page's question is being handled.

``js/incoming.js`` is the page's side. ``docs/front-ends.md`` lists what each front end does.
"""

from __future__ import annotations

import base64
import functools
import gzip
import json
import math
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from string import Template
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from IPython.core.getipython import get_ipython

from gpumemwidget.errors import GpuMemError, describe_exception
from gpumemwidget.recording.monitor import Monitor
from gpumemwidget.report.render.palette import PART_COLORS, list_properties, name_class
from gpumemwidget.session.session import Session

if TYPE_CHECKING:
    from anywidget import AnyWidget

#: A message's content: JSON.
Message = dict[str, Any]

#: Seconds to wait after a cell, as cells often come in a row (Run All).
CELL_PAUSE_S = 0.3
_STATIC = Path(__file__).parent / "static"
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
    sheets = map(read_static, ("dashboard.css", "device.css", "processes.css"))
    return "\n".join([f".gmd {{ {colors} }}", *sheets, *looks, ""])


def _compress(name: str) -> bytes:
    # A third of the size in some 15 ms; the best level takes twice as long for 3% more.
    return gzip.compress((_STATIC / name).read_bytes(), compresslevel=4, mtime=0)


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


# -- Sending ---------------------------------------------------------------------------------------


#: Maximum number of characters of the messages that wait for the page's question.
MAX_KEPT_CHARS = 1 << 20


def describe_failure(exc: BaseException) -> str:
    """Return a line on a failure: our own message, or the kind and message of another error."""
    if isinstance(exc, KeyboardInterrupt):
        return "interrupted; nothing was changed"
    if isinstance(exc, ModuleNotFoundError):
        return f"{exc}. Install gpumemwidget in the kernel's environment."
    return str(exc) if isinstance(exc, GpuMemError) else describe_exception(exc)


def is_colab() -> bool:
    """Return whether the kernel runs in Colab: its kernels have loaded ``google.colab``."""
    return "google.colab" in sys.modules


def encode(data: bytes) -> bytes | str:
    """Return binary data of a widget's state as the front end takes it: in Colab, base64 text."""
    return base64.b64encode(data).decode("ascii") if is_colab() else data


class Outgoing:
    """Sends one widget's messages; all methods may be called from any thread.

    Args:
        widget: sends them to its pages.
        monitor: knows whether a cell runs: what the cell's own thread sends is shown at once.

    Attributes:
        is_polled: whether the page has to ask for what is kept here.
    """

    def __init__(self, widget: AnyWidget, monitor: Monitor) -> None:
        self.is_polled = is_colab()
        self._widget = widget
        self._monitor = monitor
        #: Messages that wait, the oldest first, each with its number of characters.
        self._kept: deque[tuple[Message, int]] = deque()
        self._n_chars = 0
        # One batch at a time, so that messages go out in order.
        self._lock = threading.RLock()
        self._thread = threading.local()

    def send(self, message: Message, buffers: Sequence[bytes] = ()) -> None:
        """Send a message, or keep it until the page asks."""
        if not self.is_polled:
            self._widget.send(message, [*buffers])
            return
        if buffers:
            message = {**message, "buffers": [encode(data) for data in buffers]}
        with self._lock:
            self._keep(message)
            if self._is_shown():
                self.send_kept()

    def send_kept(self) -> None:
        """Send all that waits as one message, also where nothing does: the page's question ends."""
        with self._lock:
            messages = [message for message, _ in self._kept]
            self._kept.clear()
            self._n_chars = 0
            self._widget.send({"kind": "batch", "messages": messages})

    @contextmanager
    def answering(self) -> Iterator[None]:
        """Send at once, in the ``with`` block, what this thread sends: it answers a page."""
        self._thread.answers = True
        try:
            yield
        finally:
            self._thread.answers = False

    def _keep(self, message: Message) -> None:
        """Keep a message, and drop the oldest beyond the bounds: a page notices gaps, and asks."""
        n_chars = len(json.dumps(message, default=str))
        self._kept.append((message, n_chars))
        self._n_chars += n_chars
        while len(self._kept) > 1 and self._n_chars > MAX_KEPT_CHARS:
            self._n_chars -= self._kept.popleft()[1]

    def _is_shown(self) -> bool:
        """Return whether Colab shows what this thread sends now."""
        if getattr(self._thread, "answers", False):
            return True
        is_main = threading.current_thread() is threading.main_thread()
        return is_main and self._monitor.running is not None


# -- Who looks -------------------------------------------------------------------------------------


_T = TypeVar("_T")

#: Seconds of silence after which a viewer that could be heard is gone: views speak up every 10, and
#: pages after each cell.
_LOST_AFTER_S = 25.0


class Viewers(Generic[_T]):
    """The dashboard's views, or the pages that have JupyterLab's panel, by their names.

    A notebook that is closed cuts its line to the kernel before it can say a word, so whoever falls
    silent is gone. ipykernel 6 hears nothing until a cell has ended, other releases may: silence
    while a cell runs does not count. Whoever owns this locks it.

    Args:
        speak_when_idle: whether viewers speak up all the time, or only after each cell.

    Attributes:
        said: what each has said last.
    """

    def __init__(self, *, speak_when_idle: bool) -> None:
        self._speak_when_idle = speak_when_idle
        self.said: dict[str, _T] = {}
        #: The moment by which each has to speak again, those that spoke last at the end.
        self._due_s: dict[str, float] = {}

    def hear(self, name: str, said: _T, now_s: float) -> None:
        """Note that a viewer is there."""
        self.said[name] = said
        self._due_s.pop(name, None)
        self._due_s[name] = now_s + _LOST_AFTER_S if self._speak_when_idle else math.inf
        # Those that spoke last are remembered.
        while len(self._due_s) > 200:
            silent = next(iter(self._due_s))
            del self._due_s[silent]
            self.said.pop(silent, None)

    def wait_anew(self, now_s: float) -> None:
        """Give each viewer its time to speak: a cell has ended, from when on each can be heard."""
        choose = max if self._speak_when_idle else min
        self._due_s = {
            name: choose(due_s, now_s + _LOST_AFTER_S)
            for name, due_s in self._due_s.items()
            if name in self.said
        }

    def drop_lost(self, now_s: float) -> None:
        """Forget those that should have spoken; no cell runs."""
        self.said = {name: said for name, said in self.said.items() if now_s <= self._due_s[name]}
