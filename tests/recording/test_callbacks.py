"""Actions wait for the end of a cell, one at a time and in order."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from gpumemwidget.recording.callbacks import IdleQueue

#: Far more than anything here takes: a test that waits so long has failed.
PATIENCE_S = 20.0


@pytest.fixture
def errors() -> list[Exception]:
    return []


@pytest.fixture
def queue(errors: list[Exception]) -> IdleQueue:
    return IdleQueue(errors.append)


@pytest.fixture
def restless_threads() -> Iterator[None]:
    """Threads take turns every 10 µs instead of every 5 ms."""
    before_s = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before_s)


@contextmanager
def long_action(queue: IdleQueue, done: list[str]) -> Iterator[None]:
    """An action that is under way on another thread until the block is left."""
    entered, release = threading.Event(), threading.Event()

    def act() -> None:
        entered.set()
        release.wait(PATIENCE_S)
        done.append("long")

    click = threading.Thread(target=queue.add, args=(act,), name="clicker")
    click.start()
    assert entered.wait(PATIENCE_S)
    yield
    release.set()
    click.join(PATIENCE_S)


def test_runs_at_once_when_no_cell_runs(queue: IdleQueue) -> None:
    """A click between cells acts before the call returns, on the caller's thread."""
    threads: list[threading.Thread] = []

    queue.add(lambda: threads.append(threading.current_thread()))

    assert threads == [threading.current_thread()]


def test_an_action_may_add_another(queue: IdleQueue) -> None:
    """It runs after those that wait already, in the same go."""
    done: list[str] = []

    def first() -> None:
        queue.add(lambda: done.append("added"))
        done.append("first")

    queue.start_cell()
    queue.add(first)
    queue.add(lambda: done.append("second"))

    queue.end_cell()

    assert done == ["first", "second", "added"]


def test_an_interrupt_leaves_the_queue_usable(queue: IdleQueue) -> None:
    """Ctrl-C in an action gets through to the user, and what is behind it is not lost."""
    done: list[str] = []

    def interrupt() -> None:
        raise KeyboardInterrupt

    queue.start_cell()
    queue.add(interrupt)
    queue.add(lambda: done.append("behind"))

    with pytest.raises(KeyboardInterrupt):
        queue.end_cell()
    queue.add(lambda: done.append("later"))

    assert done == ["behind", "later"]


class TestTwoThreads:
    """Clicks come on other threads than the cell's."""

    def test_a_cells_start_does_not_wait_for_an_action(self, queue: IdleQueue) -> None:
        """The cell starts beside an action that is under way; the next one waits for its end."""
        done: list[str] = []

        with long_action(queue, done):
            queue.start_cell()  # would hang here
            queue.add(lambda: done.append("queued"))
        during = list(done)
        queue.end_cell()

        assert during == ["long"]
        assert done == ["long", "queued"]

    def test_two_actions_never_run_at_the_same_time(self, queue: IdleQueue) -> None:
        """The second of two clicks is done by the thread that is at the first."""
        done: list[str] = []

        with long_action(queue, done):
            queue.add(lambda: done.append(threading.current_thread().name))
            before = list(done)

        assert before == []
        assert done == ["long", "clicker"]

    @pytest.mark.usefixtures("restless_threads")
    def test_every_action_runs_once_and_none_begins_within_a_cell(self, queue: IdleQueue) -> None:
        """Thousands of clicks against as many cells as fit: none lost, doubled, late or early."""
        n_actions = 2000
        done: list[int] = []
        begun_within: list[int] = []

        in_first_cell = threading.Event()

        def click_all() -> None:
            in_first_cell.wait(PATIENCE_S)
            for number in range(n_actions):
                queue.add(lambda number=number: done.append(number))

        clicker = threading.Thread(target=click_all)
        clicker.start()
        n_cells = 0
        while clicker.is_alive():
            queue.start_cell()
            while queue._acting:  # One that began before the cell goes on beside it.
                pass
            in_first_cell.set()
            n_before, n_waiting = len(done), len(queue._actions)
            while clicker.is_alive() and len(queue._actions) < n_waiting + 10:
                pass
            begun_within.append(len(done) - n_before)
            queue.end_cell()
            n_cells += 1
        clicker.join(PATIENCE_S)

        assert done == list(range(n_actions))
        assert begun_within == [0] * n_cells
