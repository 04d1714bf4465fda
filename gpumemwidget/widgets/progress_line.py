"""Show how far long work has got, below the cell that waits for it or where a click was.

Work of less than half a second shows nothing. Below a cell the figures are one output, which the
magic's report takes the place of when it is there; so nothing of them stays in the notebook.
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
from IPython.display import display as display_anew

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


class _Pace:
    """Passes on the words for a progress, not too soon and not too often."""

    def __init__(
        self, show: Callable[[str], None], clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self._show = show
        self._clock = clock
        self._due_s = clock() + _PATIENCE_S
        self._last: Progress | None = None

    def take(self, progress: Progress) -> None:
        """Note how far the work has got; called by its loops."""
        self._last = progress
        now_s = self._clock()
        if now_s >= self._due_s:
            self._due_s = now_s + _INTERVAL_S
            self._show(format_progress(progress))

    def describe(self) -> str | None:
        """Return how far the work had got when it was last heard of."""
        return None if self._last is None else format_progress(self._last)


class _Line:
    """The output below a cell that shows the figures until something takes its place."""

    def __init__(self) -> None:
        self._handle: Any = None

    def show(self, words: str) -> None:
        """Show the words in place of those before."""
        bundle = {"text/plain": f"{words} ({_HINT})"}
        if self._handle is None:
            self._handle = display_anew(bundle, raw=True, display_id=True)  # type: ignore[no-untyped-call]
        else:
            self._handle.update(bundle, raw=True)

    def replace(self, thing: object) -> None:
        """Display a thing, instead of the figures if there are any."""
        handle, self._handle = self._handle, None
        if handle is None:
            display_anew(thing)  # type: ignore[no-untyped-call]
        else:
            handle.update(thing)

    def clear(self) -> None:
        """Take the figures away."""
        handle, self._handle = self._handle, None
        if handle is not None:
            handle.update(NOTHING, raw=True)


_line: ContextVar[_Line | None] = ContextVar("line", default=None)


@contextmanager
def show_progress(what: str) -> Iterator[None]:
    """Show below the running cell how far the work in the ``with`` block has got.

    In a terminal, and within another such block, nothing is shown.

    Raises:
        WorkInterrupt: a Ctrl-C came in the block; it says how far the work was.
    """
    shell = get_ipython()
    if _line.get() is not None or shell is None:
        yield
        return
    line = _Line()
    pace = _Pace(line.show if hasattr(shell, "kernel") else lambda _words: None)
    token = _line.set(line)
    try:
        with listen(pace.take):
            yield
    except KeyboardInterrupt as exc:
        if type(exc) is not KeyboardInterrupt:
            raise
        # Before the work there are only imports of ours.
        raise WorkInterrupt(f"{what} was stopped. {pace.describe() or ''}".rstrip()) from None
    finally:
        _line.reset(token)
        line.clear()


def display(thing: object) -> None:
    """Display a thing below the cell, instead of the figures of ``show_progress``."""
    line = _line.get() or _Line()
    line.replace(thing)


@contextmanager
def pass_progress(
    show: Callable[[str], None], *, clock: Callable[[], float] = time.perf_counter
) -> Iterator[None]:
    """Pass on in words how far the work in the ``with`` block has got, and let a Ctrl-C stop it.

    ``show`` is given the words, at most four times a second.

    Raises:
        KeyboardInterrupt: a Ctrl-C came in the block.
    """
    pace = _Pace(lambda words: show(f"{words} ({_HINT})"), clock)
    with _heed_interrupts(), listen(pace.take):
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
