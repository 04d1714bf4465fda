"""Run a dashboard's work on the kernel's main thread, when no cell runs."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from IPython.core.getipython import get_ipython

from gpumemwidget.session.session import Session
from gpumemwidget.widgets.messages import Message

#: Seconds to wait after a cell, as cells often come in a row (Run All).
CELL_PAUSE_S = 0.3


def schedule_on_main(action: Callable[[], None], delay_s: float = 0.0) -> None:
    """Run ``action`` on the kernel's main thread, between its messages.

    At once if this is the main thread and no delay is asked for, and if there is no kernel.
    """
    loop = _find_loop()
    if loop is None or (not delay_s and threading.current_thread() is threading.main_thread()):
        action()
    elif delay_s:
        loop.add_callback(loop.call_later, delay_s, action)
    else:
        loop.add_callback(action)


def _find_loop() -> Any | None:
    """Return the event loop of the kernel's main thread, if there is a kernel."""
    kernel = getattr(get_ipython(), "kernel", None)
    return getattr(kernel, "io_loop", None)


class Page:
    """What the parts of the dashboard work with.

    Attributes:
        session: is asked for what the views show.
        send: sends a message to all views.
        guard: runs an action and shows its failure in the views.
    """

    def __init__(
        self,
        session: Session,
        send: Callable[[Message], None],
        guard: Callable[[Callable[[], object]], None],
    ) -> None:
        self.session = session
        self.send = send
        self.guard = guard

    def run_when_idle(self, action: Callable[[], None], delay_s: float = 0.0) -> None:
        """Run ``action`` on the main thread once no cell runs, and show its failure."""
        monitor = self.session.monitor
        schedule_on_main(lambda: monitor.when_idle(lambda: self.guard(action)), delay_s)
