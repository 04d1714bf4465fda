"""The guard against leaks in ``conftest.py`` must itself be able to fail a test."""

from __future__ import annotations

import threading

from tests import conftest


def test_guard_sees_a_running_thread_of_ours() -> None:
    """A sampler that goes on running is found by its name, and others are left alone."""
    leave = threading.Event()
    ours, other = (
        threading.Thread(target=leave.wait, name=name, daemon=True)
        for name in ("gpumemwidget-sampler", "Thread-1")
    )
    ours.start()
    other.start()

    found = [remain for remain, _ in conftest._list_remains()]
    leave.set()
    ours.join()
    other.join()

    assert ours in found
    assert other not in found
    assert ours not in [remain for remain, _ in conftest._list_remains()]
