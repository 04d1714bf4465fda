"""A child that is forked in the middle of everything neither hangs nor samples."""

from __future__ import annotations

import os
import threading

import pytest

from gpumemwidget.recording.monitor import Monitor
from tests.backends.children import run_in_fork
from tests.recording.scripted import ScriptedHardware, gpu, host

PATIENCE_S = 20.0

pytestmark = [
    pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system"),
    # That a fork beside threads is dangerous is what these tests are about.
    pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning"),
]


def use_all(monitor: Monitor) -> str:
    """Everything that takes a lock, and what came of it."""
    before = monitor.is_sampling
    monitor.start_cell(execution_count=1, cell_id=None, source="x = 1")
    monitor.when_idle(lambda: None)
    monitor.read_now()
    monitor.end_cell(status="ok")
    n_samples = len(monitor.history.samples())
    n_cells = len(monitor.ledger.records)
    after = monitor.is_sampling
    monitor.close()
    return f"sampling {before} {after}, {n_samples} samples, {n_cells} cells"


def test_a_child_does_not_hang_on_what_other_threads_held() -> None:
    """Every lock was held by another thread when the child was made; it can use all the same."""
    monitor = Monitor(ScriptedHardware(gpu(1), host(2)), on_failure=pytest.fail)
    held, release = threading.Event(), threading.Event()

    def hold_all() -> None:
        with monitor._wants_lock, monitor._history_lock:
            held.set()
            release.wait(PATIENCE_S)

    holder = threading.Thread(target=hold_all)
    holder.start()
    assert held.wait(PATIENCE_S)

    answer = run_in_fork(lambda: use_all(monitor))
    release.set()
    holder.join()
    monitor.close()

    assert answer == "sampling False False, 3 samples, 1 cells"


def test_a_child_of_a_sampling_session_does_not_sample_until_it_wants_to() -> None:
    """The thread is the parent's; the child can have its own."""
    monitor = Monitor(ScriptedHardware(gpu(1), host(2)), on_failure=pytest.fail, interval_s=0.001)
    monitor.want_samples(monitor)

    def work() -> str:
        before = monitor.is_sampling
        monitor.want_samples(monitor)
        during = monitor.is_sampling
        monitor.close()
        return f"{before} {during} {monitor.is_sampling}"

    answer = run_in_fork(work)
    in_parent = monitor.is_sampling
    monitor.close()

    assert answer == "False True False"
    assert in_parent


def test_a_child_does_nothing_that_waits_in_its_parent() -> None:
    """A click on Release during a cell waits for the parent's end of it, and is not the child's."""
    monitor = Monitor(ScriptedHardware(gpu(1), host(2)), on_failure=pytest.fail)
    done: list[str] = []
    monitor.start_cell(execution_count=1, cell_id=None, source="x = 1")
    monitor.when_idle(lambda: done.append("the parent's"))

    def work() -> str:
        monitor.when_idle(lambda: done.append("the child's"))
        monitor.end_cell(status="ok")
        return ", ".join(done)

    answer = run_in_fork(work)
    monitor.end_cell(status="ok")
    monitor.close()

    assert answer == "the child's"
    assert done == ["the parent's"]
