"""Show how far long work has got, below the cell that waits for it or where a click was.

Work of less than half a second shows nothing. Below a cell the figures are one output, which is
empty when the work is done.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from types import FrameType
from typing import Any

from IPython.core.getipython import get_ipython
from IPython.display import display

from gpumemwidget.progress import Progress, listen
from gpumemwidget.report.render.wording import format_progress

#: An output that takes no room in a page.
NOTHING = {"text/plain": "", "text/html": ""}

#: Seconds of work before its progress is shown, and seconds between two figures.
_PATIENCE_S = 0.5
_INTERVAL_S = 0.25
_HINT = "interrupting the kernel stops it"


class WorkInterrupt(KeyboardInterrupt):
    """A Ctrl-C stopped the work of a magic; IPython shows it as one line."""

    def _render_traceback_(self) -> list[str]:
        return [f"KeyboardInterrupt: {self}"]


def _make_listener(
    show: Callable[[str], None], clock: Callable[[], float]
) -> Callable[[Progress], None]:
    """Return a listener that shows progress in words, not too soon and not too often."""
    due_s = clock() + _PATIENCE_S

    def take(progress: Progress) -> None:
        nonlocal due_s
        now_s = clock()
        if now_s >= due_s:
            due_s = now_s + _INTERVAL_S
            show(f"{format_progress(progress)} ({_HINT})")

    return take


_is_shown: ContextVar[bool] = ContextVar("is_shown", default=False)


@contextmanager
def show_progress(what: str, *, clock: Callable[[], float] = time.perf_counter) -> Iterator[None]:
    """Show below the running cell how far the work in the ``with`` block has got.

    Outside of a notebook, and within another such block, nothing is shown.

    Args:
        what: the work, as in ``%memvars``.
        clock: returns seconds.

    Raises:
        WorkInterrupt: a Ctrl-C came in the block.
    """
    if _is_shown.get() or not hasattr(get_ipython(), "kernel"):
        yield
        return
    handle: Any = None

    def show(words: str) -> None:
        nonlocal handle
        bundle = {"text/plain": words}
        if handle is None:
            handle = display(bundle, raw=True, display_id=True)  # type: ignore[no-untyped-call]
        else:
            handle.update(bundle, raw=True)

    token = _is_shown.set(True)
    try:
        with listen(_make_listener(show, clock)):
            yield
    except KeyboardInterrupt as exc:
        if type(exc) is not KeyboardInterrupt:
            raise
        raise WorkInterrupt(f"{what} was stopped") from None
    finally:
        _is_shown.reset(token)
        if handle is not None:
            handle.update(NOTHING, raw=True)


@contextmanager
def tell_progress(
    tell: Callable[[str], None], *, clock: Callable[[], float] = time.perf_counter
) -> Iterator[None]:
    """Tell in words how far the work in the ``with`` block has got, and let a Ctrl-C stop it.

    Args:
        tell: is given the words, at most four times a second.
        clock: seconds.

    Raises:
        KeyboardInterrupt: a Ctrl-C came in the block.
    """
    with _heed_interrupts(), listen(_make_listener(tell, clock)):
        yield


@contextmanager
def _heed_interrupts() -> Iterator[None]:
    """Let a Ctrl-C stop the work in the ``with`` block where ipykernel ignores it.

    It does so between its messages, where a dashboard's work may run. It is only noted there, and
    raised where the work says how far it is: raised in the kernel's loop it would end the kernel.
    """
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        yield
        return
    is_noted = False

    def note(_signum: int, _frame: FrameType | None) -> None:
        nonlocal is_noted
        is_noted = True

    def raise_noted(_progress: Progress) -> None:
        if is_noted:
            raise KeyboardInterrupt

    signal.signal(signal.SIGINT, note)
    try:
        with listen(raise_noted):
            yield
    finally:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
