"""Ctrl-C that lands in our hooks, handed on to the cell that it was meant for.

IPython's event manager catches a ``KeyboardInterrupt`` that a callback raises, prints a traceback
and runs the cell all the same: the interrupt would be lost, and our own bookkeeping left half done.
So the hooks hold SIGINT back while they work and send it again a moment after they have returned,
when the user's code is what it meets.

An interrupt that we send ourselves (a budget's) is another matter: it must never meet what comes
after its cell, so who has sent it takes it back within the hook of the cell's end.
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
from types import FrameType, MethodType
from typing import Any

__all__ = [
    "change_handler",
    "find_handler",
    "run_uninterrupted",
    "send_interrupt",
    "send_later",
    "take_back_interrupt",
]

#: How long after a hook a held interrupt is sent on: IPython needs about 0.1 ms from its last
#: callback to the cell's first line, and a person waits no longer than this for a Ctrl-C anyway.
_SEND_ON_AFTER_S = 0.02
#: A signal that another thread has sent arrives within microseconds, unless it is blocked.
_ARRIVES_WITHIN_S = 0.05


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

    __slots__ = ("noted", "previous")

    def __init__(self) -> None:
        self.noted = False
        self.previous: Callable[[int, FrameType | None], Any] | None = None

    def __enter__(self) -> None:
        self.noted = False
        previous = _get_handler(_SIGINT)
        # Ignored, or not handled by Python: nothing of it could be held, or put back.
        self.previous = previous if callable(previous) else None
        if self.previous is not None:
            _set_handler(_SIGINT, self.note)

    def __exit__(self, *_exc_info: object) -> None:
        if self.previous is None:
            return
        _set_handler(_SIGINT, self.previous)
        if self.noted:
            # The handler itself: for a cell that awaits, ipykernel's cancels the cell's task; the
            # usual one raises KeyboardInterrupt here, which the caller sends on.
            self.previous(_SIGINT, None)

    def note(self, _signum: int, _frame: FrameType | None) -> None:
        self.noted = True


def _find_hold(handler: Any) -> _Hold | None:
    """The hold that a handler belongs to."""
    is_ours = type(handler) is MethodType and handler.__func__ is _Hold.note
    hold: _Hold | None = handler.__self__ if is_ours else None
    return hold


def find_handler() -> Callable[[int, FrameType | None], Any] | None:
    """What SIGINT meets now; from any thread.

    ``None`` while a hook of ours holds it back, and where Python does not handle it: it is ignored,
    or would end the process.
    """
    handler = _get_handler(_SIGINT)
    if not callable(handler) or _find_hold(handler) is not None:
        return None
    found: Callable[[int, FrameType | None], Any] = handler
    return found


def change_handler(change: Callable[[Any], Any]) -> None:
    """Change what handles SIGINT; within a hook of ours it counts from the hook's end on.

    Only on the main thread.

    Args:
        change: from the handler, or what else ``signal.getsignal`` gives, to another or the same.
    """
    handler = _get_handler(_SIGINT)
    hold = _find_hold(handler)
    if hold is not None:
        hold.previous = change(hold.previous)
        return
    changed = change(handler)
    if changed is not handler:
        _set_handler(_SIGINT, changed)


def take_back_interrupt(is_due: Callable[[], bool]) -> None:
    """Let a SIGINT that was sent from here arrive, and forget it: what it was meant for has ended.

    Only on the main thread.

    Args:
        is_due: whether the handler has not met it yet.
    """
    hold = _find_hold(_get_handler(_SIGINT))
    deadline_s = time.perf_counter() + _ARRIVES_WITHIN_S
    while is_due() and not (hold is not None and hold.noted):
        if time.perf_counter() > deadline_s:
            return
        time.sleep(0.0005)
    if hold is not None:
        hold.noted = False


def send_later() -> None:
    """Send SIGINT to the main thread again, soon after the hook that calls this has returned."""
    context = contextvars.copy_context()
    threading.Thread(
        target=context.run, args=(_send,), name="gpumemwidget-interrupt", daemon=True
    ).start()


def _send() -> None:
    time.sleep(_SEND_ON_AFTER_S)
    send_interrupt()


def send_interrupt() -> None:
    """Send SIGINT to the main thread, from another one.

    On Windows a blocking call goes on to its end: Python has no signal there that would wake it.
    """
    if sys.platform == "win32":
        _thread.interrupt_main()
    else:
        # A true signal, so that a blocking call of the main thread (sleep, select) wakes up too.
        ident = threading.main_thread().ident
        if ident is not None:
            signal.pthread_kill(ident, signal.SIGINT)
