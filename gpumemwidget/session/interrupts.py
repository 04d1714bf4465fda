"""Hold a Ctrl-C back while code of ours runs that must not be left half done.

A ``KeyboardInterrupt`` that is raised in a callback of IPython's events is lost: the event manager
catches it, prints a traceback and runs the cell all the same. Raised between two steps of ours it
would also leave our bookkeeping wrong. So SIGINT is only noted while such code runs, and is handed
on when it has ended.

A ``KeyboardInterrupt`` that is raised in the callback of a weak reference, or in a ``__del__``, is
dropped by Python itself; work that frees very many objects raises it again.
"""

from __future__ import annotations

import _thread
import ast
import contextvars
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from types import FrameType, FunctionType, MethodType
from typing import Any, TypeVar

from gpumemwidget.progress import listen

_T = TypeVar("_T")


# ``signal``'s own functions make enums of what goes in and comes out, which takes 3 µs a call and
# not 0.3 µs, three times in each of the two hooks of every cell.
_signal = import_module("_signal")
_get_handler: Callable[[int], Any] = _signal.getsignal
_set_handler: Callable[[int, Any], Any] = _signal.signal
_SIGINT = int(signal.SIGINT)
_SIGNALS = tuple(map(int, signal.valid_signals()))


class InterruptHold:
    """Notes SIGINT in a ``with`` block instead of having it handled, and has it handled behind it.

    Only on the main thread, where Python runs signal handlers; elsewhere it does nothing.

    Attributes:
        is_noted: whether a SIGINT has come.
        is_due: whether what follows the block is to be interrupted: known after it.
    """

    __slots__ = ("_previous", "is_due", "is_noted")

    def __init__(self) -> None:
        self.is_noted = False
        self.is_due = False
        self._previous: Callable[[int, FrameType | None], Any] | None = None

    def __enter__(self) -> InterruptHold:
        try:
            self._begin()
        except KeyboardInterrupt:  # One that came just before is as good as noted.
            self.is_due = True
            self._begin()
        return self

    def _begin(self) -> None:
        if threading.current_thread() is not threading.main_thread():
            return
        handler = _get_handler(_SIGINT)
        # A SIGINT that is ignored, or that ends the process, has no handler of Python: it stays so.
        if self._previous is None and callable(handler):
            self._previous = handler
            _set_handler(_SIGINT, self._note)

    def __exit__(self, *_: object) -> None:
        previous, self._previous = self._previous, None
        if previous is None:
            return
        try:
            # Unless the block itself has set another one.
            if _get_handler(_SIGINT) == self._note:
                _set_handler(_SIGINT, previous)
            if self.is_noted:
                # A handler of the user's own may do without an interrupt.
                previous(_SIGINT, None)
                # ipykernel's for a cell that awaits does not raise, but cancels its task.
                self.is_due |= _is_from_ipykernel(previous)
        except KeyboardInterrupt:
            self.is_due = True

    def _note(self, _signum: int, _frame: FrameType | None) -> None:
        self.is_noted = True


class RaiseInterrupt(ast.NodeTransformer):
    """An AST transformer for a cell that is interrupted before it runs: all that it does is raise.

    The cell then ends as if Ctrl-C had met its first line, also where it awaits.
    """

    def visit(self, node: ast.AST) -> ast.AST:
        """Replace a cell's statements by ``raise KeyboardInterrupt``."""
        if isinstance(node, ast.Module):
            node.body = ast.parse("raise KeyboardInterrupt").body
        return node


def run_uninterrupted(work: Callable[..., _T], *args: Any) -> _T:
    """Return what ``work(*args)`` does; a Ctrl-C that comes meanwhile is sent again behind it."""
    hold = InterruptHold()
    try:
        with hold:
            return work(*args)
    finally:
        if hold.is_due:
            send_later()


def run_to_end(work: Callable[..., _T], *args: Any) -> _T:
    """Return what ``work(*args)`` does; signals that come meanwhile are handled when it has ended.

    What a handler of the user's raises, a timeout say, is raised from here, behind the work: also
    where the handler ran just before.
    """
    # Only the main thread sets it, and no other one has signals to hold back.
    if _SignalHold.is_held:
        return work(*args)
    hold = _hold_signals()
    try:
        return work(*args)
    finally:
        hold.end()


def run_unraised(work: Callable[..., object], *args: Any) -> None:
    """Call ``work(*args)``; signals that come meanwhile are sent again soon after it has ended.

    For what C++ calls, where an exception that a handler raises would be lost or end the process.
    Only what a handler raises just before or after the work is raised from here.
    """
    if _SignalHold.is_held:
        work(*args)
        return
    hold = _hold_signals()
    try:
        work(*args)
    finally:
        hold.put_back()
        for number in hold.noted:
            send_later(number)
        hold.raise_again()


def _hold_signals() -> _SignalHold:
    """Hold signals back from now on; a handler may run just before."""
    hold: _SignalHold | None = None
    raised: BaseException | None = None
    while hold is None or not hold.has_begun:
        try:
            hold = hold or _SignalHold()
            hold.begin()
        except BaseException as exc:  # noqa: BLE001 - raised behind the work
            raised = exc
    hold.raised = raised
    # The traceback of the error has this frame.
    del raised
    return hold


class _SignalHold:
    """Notes each signal that Python code handles, and has it handled at the end.

    Only on the main thread, where Python runs signal handlers; elsewhere it does nothing. Each step
    of ``begin`` and ``end`` may be followed by a handler, and by what that raises.
    """

    __slots__ = ("_handlers", "_holds", "has_begun", "noted", "raised")

    #: True while the main thread holds them back.
    is_held = False

    def __init__(self) -> None:
        self.has_begun = self._holds = False
        self._handlers: dict[int, Callable[[int, FrameType | None], Any]] = {}
        self.noted: dict[int, None] = {}
        #: What a handler raised at the begin or the end of the hold.
        self.raised: BaseException | None = None

    def begin(self) -> None:
        """Hold the signals back from now on; called again, it goes on where it was interrupted."""
        if threading.current_thread() is threading.main_thread():
            for number in _SIGNALS:
                handler = _get_handler(number)
                # A handler of ours, which notes its signal, interrupts nothing.
                if callable(handler) and not _only_notes(handler):
                    # Before it is replaced: what is put back is then what was there in any case.
                    self._handlers[number] = handler
                    _set_handler(number, self._note)
            _SignalHold.is_held = self._holds = True
        self.has_begun = True

    def end(self) -> None:
        """Handle the signals as before, and those that were noted; raise what a handler raised."""
        self.put_back()
        while self.noted:
            try:
                while self.noted:
                    number, _ = self.noted.popitem()
                    # A handler may look at the frame that it has interrupted.
                    self._handlers[number](number, sys._getframe(1))  # noqa: SLF001 - public by its documentation
            except BaseException as exc:  # noqa: BLE001 - raised below
                self.raised = exc
        self.raise_again()

    def put_back(self) -> None:
        """Handle the signals as before."""
        if self._holds:
            _SignalHold.is_held = False
        held = list(self._handlers)
        while held:
            try:
                while held:
                    # Unless the work itself has set another one.
                    if _get_handler(held[-1]) == self._note:
                        _set_handler(held[-1], self._handlers[held[-1]])
                    held.pop()
            except BaseException as exc:  # noqa: BLE001 - raised by ``raise_again``
                self.raised = exc

    def raise_again(self) -> None:
        """Raise what a handler raised at the begin or the end of the hold."""
        raised, self.raised = self.raised, None
        if raised is not None:
            try:
                raise raised
            finally:
                # Its traceback has this frame, which would keep it, and all that it holds.
                del raised

    def _note(self, number: int, _frame: FrameType | None) -> None:
        self.noted[number] = None


def _only_notes(handler: object) -> bool:
    if type(handler) is not MethodType:
        return False
    return type(handler.__self__) in (InterruptHold, _SignalHold)


@contextmanager
def raise_lost_interrupts() -> Iterator[None]:
    """Raise a Ctrl-C that Python drops in the ``with`` block again, at the next report of progress.

    One that arrives where PyTorch's C++ can't take it waits for the report, too; a second one does
    not. It does nothing outside the main thread, where no Ctrl-C arrives.

    Raises:
        KeyboardInterrupt: Python dropped one in the block; at the latest at its end.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    hook, handler = sys.unraisablehook, signal.getsignal(signal.SIGINT)
    is_lost = False

    def note(dropped: sys.UnraisableHookArgs) -> None:
        nonlocal is_lost
        if dropped.exc_type is KeyboardInterrupt:
            is_lost = True
        else:
            hook(dropped)

    def raise_again(_: object = None) -> None:
        if is_lost:
            raise KeyboardInterrupt

    def delay(number: int, frame: FrameType | None) -> None:
        # A KeyboardInterrupt from Python code that PyTorch's C++ calls where it expects no
        # exception, as ``torch._library.simple_registry``, would end the process.
        nonlocal is_lost
        name = "" if frame is None else str(frame.f_globals.get("__name__", ""))
        prediction = "gpumemwidget.prediction"
        may_be_torchs = name.startswith(("torch", f"{prediction}.dry.", f"{prediction}.recurrent"))
        # Only Python code calls this one, and it may be busy for long.
        if not is_lost and may_be_torchs and name != f"{prediction}.dry.copies":
            is_lost = True
        else:
            signal.default_int_handler(number, frame)

    sys.unraisablehook = note
    # Another handler than Python's own is the user's, and does what the user wants.
    if handler is signal.default_int_handler:
        signal.signal(signal.SIGINT, delay)
    try:
        with listen(raise_again):
            yield
        raise_again()
    finally:
        if sys.unraisablehook is note:
            sys.unraisablehook = hook
        if signal.getsignal(signal.SIGINT) is delay:
            signal.signal(signal.SIGINT, handler)


def send_later(number: int = _SIGINT) -> None:
    """Send a signal to the main thread soon after the code that calls this has returned."""
    context = contextvars.copy_context()
    threading.Thread(
        target=context.run, args=(_send, number), name="gpumemwidget-interrupt", daemon=True
    ).start()


def _send(number: int) -> None:
    # The user's code runs on by then, and few notice so short a delay.
    time.sleep(0.02)
    if sys.platform == "win32":
        # A blocking call goes on to its end: Python has no signal there that would wake it.
        _thread.interrupt_main(number)
    else:
        # A true signal, so that a blocking call of the main thread (sleep, select) wakes up too.
        ident = threading.main_thread().ident
        if ident is not None:
            signal.pthread_kill(ident, number)


def _is_from_ipykernel(handler: object) -> bool:
    return type(handler) is FunctionType and handler.__module__.startswith("ipykernel.")
