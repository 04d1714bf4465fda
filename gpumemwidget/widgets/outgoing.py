"""Send a widget's messages in the form that its front end takes.

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
import json
import sys
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from anywidget import AnyWidget

from gpumemwidget.recording.monitor import Monitor
from gpumemwidget.widgets.page import Message

#: Maximum number of messages that wait for the page's question, and of their characters.
MAX_KEPT = 1000
MAX_KEPT_CHARS = 1 << 20


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
        while len(self._kept) > 1 and (
            len(self._kept) > MAX_KEPT or self._n_chars > MAX_KEPT_CHARS
        ):
            self._n_chars -= self._kept.popleft()[1]

    def _is_shown(self) -> bool:
        """Return whether Colab shows what this thread sends now."""
        if getattr(self._thread, "answers", False):
            return True
        is_main = threading.current_thread() is threading.main_thread()
        return is_main and self._monitor.running is not None
