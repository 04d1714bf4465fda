"""A timeout of the user's that lands in code of ours still ends the user's code."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator

import pytest

from gpumemwidget.recording.monitor import Callbacks
from gpumemwidget.session.interrupts import run_unraised

pytestmark = pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="needs POSIX timers")


class TimeLimitError(Exception):
    """What the user's handler raises."""


def _stop(*_: object) -> None:
    raise TimeLimitError


@pytest.fixture(autouse=True)
def handler() -> Iterator[None]:
    """A timeout as the user's code sets one."""
    before = signal.signal(signal.SIGALRM, _stop)
    yield
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)


def _send_alarm() -> None:
    signal.raise_signal(signal.SIGALRM)


def test_work_that_cpp_calls_goes_on_and_the_timeout_comes_behind_it() -> None:
    """Raised within it, the error would be lost in C++."""
    done: list[str] = []

    def work() -> None:
        _send_alarm()
        done.append("work")

    def call() -> None:
        run_unraised(work)
        done.append("behind")
        time.sleep(10)

    with pytest.raises(TimeLimitError):
        call()

    assert done == ["work", "behind"]


def test_no_timeout_is_lost_at_the_edges_of_the_work() -> None:
    """A handler also runs while signals begin or cease to be held back."""
    n_raised = n_arrived = 0

    def reach(*_: object) -> None:
        nonlocal n_raised
        n_raised += 1
        raise TimeLimitError

    signal.signal(signal.SIGALRM, reach)
    for number in range(100):
        try:
            signal.setitimer(signal.ITIMER_REAL, 0.0003 + number % 13 * 0.0001)
            while n_raised == number:
                run_unraised(int)
        except TimeLimitError:
            n_arrived += 1

    assert (n_raised, n_arrived) == (100, 100)


def test_a_timeout_in_a_function_that_is_called_back_is_raised() -> None:
    """It is no failure of ours."""
    failures: list[str] = []
    callbacks = Callbacks[None](lambda name, _error: failures.append(name))
    callbacks.add(lambda _: _send_alarm())

    with pytest.raises(TimeLimitError):
        callbacks.call(None)

    assert failures == []
