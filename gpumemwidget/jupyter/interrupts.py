"""Ctrl-C that lands in our hooks, handed on to the cell that it was meant for.

IPython's event manager catches a ``KeyboardInterrupt`` that a callback raises, prints a traceback
and runs the cell all the same: the interrupt would be lost, and our own bookkeeping left half done.
So the hooks hold SIGINT back while they work and send it again a moment after they have returned,
when the user's code is what it meets.
"""

from __future__ import annotations

import _thread
import contextvars
import signal
import sys
import threading
import time
from collections.abc import Callable
from importlib import import_module
from types import FrameType
from typing import Any

__all__ = ["run_uninterrupted", "send_later"]

#: How long after a hook a held interrupt is sent on: IPython needs about 0.1 ms from its last
#: callback to the cell's first line, and a person waits no longer than this for a Ctrl-C anyway.
_SEND_ON_AFTER_S = 0.02


# What the functions of ``signal`` call. Those make enums of what goes in and comes out, which takes
# 3 µs a call and 0.3 µs here, three times in each of the two hooks of every cell.
_signal = import_module("_signal")
_get_handler: Callable[[int], Any] = _signal.getsignal
_set_handler: Callable[[int, Any], Any] = _signal.signal
_SIGINT = int(signal.SIGINT)


def run_uninterrupted(work: Callable[..., object], *args: object) -> None:
    """Run ``work`` to its end, exactly once, and let an interrupt wait for it.

    Only on the main thread, where Python runs signal handlers.

    Args:
        work: short, and not raising.
        args: its arguments.
    """
    hold = _Hold()
    done = False
    interrupted = False
    while not done:
        # A signal may still arrive in the few instructions around the held part: hence the loop.
        try:
            with hold:
                if not done:
                    work(*args)
                    done = True
        except KeyboardInterrupt:
            interrupted = True
    if interrupted:
        send_later()


class _Hold:
    """SIGINT is noted instead of handled while this is entered."""

    __slots__ = ("_noted", "_previous")

    def __init__(self) -> None:
        self._noted = False
        self._previous: Callable[[int, FrameType | None], Any] | None = None

    def __enter__(self) -> None:
        self._noted = False
        previous = _get_handler(_SIGINT)
        # Ignored, or not handled by Python: nothing of it could be held, or put back.
        self._previous = previous if callable(previous) else None
        if self._previous is not None:
            _set_handler(_SIGINT, self._note)

    def __exit__(self, *_exc_info: object) -> None:
        if self._previous is None:
            return
        _set_handler(_SIGINT, self._previous)
        if self._noted:
            # The handler itself: for a cell that awaits, ipykernel's cancels the cell's task; the
            # usual one raises KeyboardInterrupt here, which the caller sends on.
            self._previous(_SIGINT, None)

    def _note(self, _signum: int, _frame: FrameType | None) -> None:
        self._noted = True


def send_later() -> None:
    """Send SIGINT to the main thread again, soon after the hook that calls this has returned."""
    context = contextvars.copy_context()
    threading.Thread(
        target=context.run, args=(_send,), name="gpumemwidget-interrupt", daemon=True
    ).start()


def _send() -> None:
    time.sleep(_SEND_ON_AFTER_S)
    if sys.platform == "win32":
        _thread.interrupt_main()
    else:
        # A true signal, so that a blocking call of the main thread (sleep, select) wakes up too.
        ident = threading.main_thread().ident
        if ident is not None:
            signal.pthread_kill(ident, signal.SIGINT)
