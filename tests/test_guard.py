"""The guard against leaks in ``conftest.py`` must itself be able to fail a test."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

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
