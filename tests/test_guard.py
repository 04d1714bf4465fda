"""The guard against leaks in ``conftest.py`` must itself be able to fail a test."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import gpumemwidget
from gpumemwidget.tracing.line_watch import watch_lines
from tests import conftest


@contextmanager
def running_thread(name: str) -> Iterator[threading.Thread]:
    """A thread that waits until the block is left."""
    leave = threading.Event()
    thread = threading.Thread(target=leave.wait, name=name, daemon=True)
    thread.start()
    try:
        yield thread
    finally:
        leave.set()
        thread.join()


def test_guard_sees_a_running_thread_of_ours() -> None:
    """A sampler that goes on running is found by its name, and others are left alone."""
    with running_thread("gpumemwidget-sampler") as ours, running_thread("Thread-1") as other:
        found = [remain for remain, _ in conftest._list_remains()]

    assert ours in found
    assert other not in found
    assert ours not in [remain for remain, _ in conftest._list_remains()]


def test_guard_sees_an_import_hook_of_ours() -> None:
    """A finder whose class stands in our package is found, whatever it is called."""

    class Finder:
        def find_spec(self, *_: object) -> None:
            return None

    finder = Finder()
    Finder.__module__ = f"{gpumemwidget.__name__}.backends.arrival"

    sys.meta_path.append(finder)
    found = [remain for remain, _ in conftest._list_remains()]
    sys.meta_path.remove(finder)

    assert finder in found


def test_guard_sees_that_lines_are_still_told() -> None:
    """Whichever way this release of Python tells of them."""
    watch = watch_lines(lambda: 0, on_interrupt=lambda: None)
    before = len(conftest._list_remains())

    watch.start_at(lambda _frame: False)
    found = len(conftest._list_remains())
    watch.stop()

    assert found == before + 1
    assert len(conftest._list_remains()) == before
