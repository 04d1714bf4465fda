"""Hold a Ctrl-C back while code of ours runs that must not be left half done.

A ``KeyboardInterrupt`` that is raised in a callback of IPython's events is lost: the event manager
catches it, prints a traceback and runs the cell all the same. Raised between two steps of ours it
would also leave our bookkeeping wrong. So SIGINT is only noted while such code runs, and is handed
on when it has ended.
"""

from __future__ import annotations

import _thread
import ast
import contextvars
import signal
import sys
import threading
import time
from collections.abc import Callable
from importlib import import_module
from types import FrameType, FunctionType, MethodType
from typing import Any, Generic, TypeVar

__all__ = [
    "InterruptHold",
    "ProtectedCallback",
    "RaiseInterrupt",
    "run_uninterrupted",
    "send_later",
]

_T = TypeVar("_T")

#: Seconds until a noted interrupt is sent again: by then the user's code runs on, and few notice
#: so short a delay.
_SEND_AGAIN_AFTER_S = 0.02

# ``signal``'s own functions make enums of what goes in and comes out, which takes 3 µs a call and
# not 0.3 µs, three times in each of the two hooks of every cell.
_signal = import_module("_signal")
_get_handler: Callable[[int], Any] = _signal.getsignal
_set_handler: Callable[[int, Any], Any] = _signal.signal
_SIGINT = int(signal.SIGINT)


class InterruptHold:
    """Notes SIGINT instead of having it handled, from ``begin`` to ``end``.

    Only on the main thread, where Python runs signal handlers.

    Attributes:
        is_noted: whether a SIGINT has come since ``begin``.
    """

    __slots__ = ("_previous", "is_noted")

    def __init__(self) -> None:
        self.is_noted = False
        self._previous: Callable[[int, FrameType | None], Any] | None = None

    def begin(self) -> None:
        """Note SIGINT from now on; nothing where it is noted already.

        Where SIGINT is ignored or ends the process it stays so: Python would not handle it.

        Raises:
            KeyboardInterrupt: one came just before; call this again.
        """
        handler = _get_handler(_SIGINT)
        if self._is_mine(handler):
            return
        self.is_noted = False
        self._previous = None
        if callable(handler):
            self._previous = handler
            _set_handler(_SIGINT, self._note)

    def end(self) -> bool:
        """Have SIGINT handled as before, also the one that was noted.

        Returns:
            Whether one was noted and its handler, which is ipykernel's for a cell that awaits,
            cancels what the loop does next instead of raising.

        Raises:
            KeyboardInterrupt: one was noted, or came just now, and Python's own handler raises.
        """
        previous = self._previous
        if previous is None:
            return False
        if self._is_mine(_get_handler(_SIGINT)):
            _set_handler(_SIGINT, previous)
        if not self.is_noted:
            return False
        # A handler of the user's own may do without an interrupt.
        previous(_SIGINT, None)
        return _is_from_ipykernel(previous)

    def _note(self, _signum: int, _frame: FrameType | None) -> None:
        self.is_noted = True

    def _is_mine(self, handler: object) -> bool:
        return type(handler) is MethodType and handler.__self__ is self


class ProtectedCallback(Generic[_T]):
    """A callback for one of IPython's events that Ctrl-C neither cuts short nor is lost in.

    In the few instructions before SIGINT is noted a Ctrl-C still ends the callback, but then its
    work has not begun. So there are two callbacks to register, one right behind the other: ``run``
    does the work, and ``settle`` makes up for a ``run`` that was cut and hands the interrupt on.
    Both do nothing on other threads than the main one.

    Args:
        work: what the event is for.
        on_interrupt: called after the work if a Ctrl-C came meanwhile.
    """

    def __init__(self, work: Callable[[_T], object], on_interrupt: Callable[[_T], object]) -> None:
        self._work = work
        self._on_interrupt = on_interrupt
        self._hold = InterruptHold()
        self._has_begun = False
        self._was_cut = False
        self._thread = threading.main_thread().ident

    @property
    def is_interrupted(self) -> bool:
        """True if a Ctrl-C has come since the work began."""
        return self._was_cut or self._hold.is_noted

    def run(self, argument: _T) -> None:
        """Do the work, and leave SIGINT noted: the first callback."""
        if threading.get_ident() == self._thread:
            self._hold.begin()
            self._has_begun = True
            try:
                self._work(argument)
            except (Exception, KeyboardInterrupt):
                raise  # IPython prints it, and calls ``settle``.
            except BaseException:
                self._has_begun = False
                self._hold.end()
                raise

    def settle(self, argument: _T) -> None:
        """Do the work if a Ctrl-C kept ``run`` from it, and hand Ctrl-C on: the second callback."""
        if threading.get_ident() == self._thread:
            self._hold.begin()
            was_cut = self._was_cut = not self._has_begun
            if was_cut:
                self._work(argument)
            self._has_begun = self._was_cut = False
            try:
                is_due = self._hold.end() or was_cut
            except KeyboardInterrupt:
                is_due = True
            if is_due:
                self._on_interrupt(argument)


class RaiseInterrupt(ast.NodeTransformer):
    """An AST transformer for a cell that is interrupted before it runs: all that it does is raise.

    The cell then ends as if Ctrl-C had met its first line, also where it awaits.
    """

    def visit(self, node: ast.AST) -> ast.AST:
        """Replace a cell's statements by ``raise KeyboardInterrupt``."""
        if isinstance(node, ast.Module):
            node.body = ast.parse("raise KeyboardInterrupt").body
        return node


def run_uninterrupted(work: Callable[..., object], *args: object) -> None:
    """Run ``work`` to its end, and send a Ctrl-C that came meanwhile again a moment later.

    Only on the main thread, where Python runs signal handlers.

    Args:
        work: short.
        args: its arguments.
    """
    hold = InterruptHold()
    is_due = False
    try:
        hold.begin()
    except KeyboardInterrupt:
        is_due = True
        hold.begin()
    try:
        work(*args)
    finally:
        try:
            is_due |= hold.end()
        except KeyboardInterrupt:
            is_due = True
        if is_due:
            send_later()


def send_later() -> None:
    """Send SIGINT to the main thread soon after the code that calls this has returned."""
    context = contextvars.copy_context()
    threading.Thread(
        target=context.run, args=(_send,), name="gpumemwidget-interrupt", daemon=True
    ).start()


def _send() -> None:
    time.sleep(_SEND_AGAIN_AFTER_S)
    if sys.platform == "win32":
        # A blocking call goes on to its end: Python has no signal there that would wake it.
        _thread.interrupt_main()
    else:
        # A true signal, so that a blocking call of the main thread (sleep, select) wakes up too.
        ident = threading.main_thread().ident
        if ident is not None:
            signal.pthread_kill(ident, signal.SIGINT)


def _is_from_ipykernel(handler: object) -> bool:
    """Tell whether a handler cancels the task of a cell that awaits, instead of raising."""
    return type(handler) is FunctionType and handler.__module__.startswith("ipykernel.")
