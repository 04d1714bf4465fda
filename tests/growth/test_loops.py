"""Turns of loops: which are told, when a loop is left alone, and whose errors pass."""

from __future__ import annotations

import itertools
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from gpumemwidget.growth.loops import LoopEvents

pytestmark = pytest.mark.skipif(
    sys.version_info < (3, 12), reason="Python tells of loops from 3.12 on"
)
FILENAME = "<cell-7>"

Open = Callable[..., LoopEvents]


class FakeClock:
    """A clock that goes on when a cell says so."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s

    def go_on(self, seconds: float) -> None:
        self.now_s += seconds


@pytest.fixture
def open_events() -> Iterator[Open]:
    """Open a ``LoopEvents`` for the cells' file, to be closed after the test."""
    opened: list[LoopEvents] = []

    def open_events(
        on_turn: Callable[[tuple[str, int]], object] = lambda _: None, **options: Any
    ) -> LoopEvents:
        options.setdefault("is_cell", lambda name: name == FILENAME)
        opened.append(LoopEvents(on_turn=on_turn, **options))
        opened[-1].open()
        return opened[-1]

    yield open_events
    for events in opened:
        events.close()


def run(source: str, **names: object) -> dict[str, Any]:
    """Run a cell; return its namespace."""
    namespace = dict(names)
    exec(compile(source, FILENAME, "exec"), namespace)
    return namespace


def count_jumps() -> Callable[[], int]:
    """Return what tells how often Python has told of a jump since now."""
    monitoring: Any = sys.monitoring
    counter = itertools.count()
    tool = next(n for n in (3, 4, 5) if monitoring.get_tool(n) == "gpumemwidget loops")
    ours = monitoring.register_callback(tool, monitoring.events.JUMP, None)

    def see_jump(*arguments: object) -> object:
        next(counter)
        return ours(*arguments)

    monitoring.register_callback(tool, monitoring.events.JUMP, see_jump)
    return lambda: next(counter)


@pytest.mark.parametrize("slow_turn", [0, 30, 100, 700])
def test_a_fast_loop_is_left_alone_however_slow_one_turn_is(
    open_events: Open, slow_turn: int
) -> None:
    """At the latest two windows of 64 turns after the slow one."""
    clock, turns = FakeClock(), []
    open_events(turns.append, clock=clock)

    run(
        "for i in range(1000):\n    go_on(20 if i == slow_turn else 0.0001)\n",
        go_on=clock.go_on,
        slow_turn=slow_turn,
    )

    assert set(turns) == {(FILENAME, 1)}
    assert len(turns) <= (64 if slow_turn >= 64 else slow_turn + 130)


def test_a_loop_of_slow_turns_is_told_of_each(open_events: Open) -> None:
    """However many they are, and at which line the loop begins."""
    clock, turns = FakeClock(), []
    open_events(turns.append, clock=clock)

    run("\nfor i in range(1000):\n    go_on(0.001)\n", go_on=clock.go_on)

    # Python 3.12 and 3.13 jump back once more to end the loop.
    assert turns == [(FILENAME, 2)] * len(turns)
    assert len(turns) in (999, 1000)


def test_a_fast_loop_of_another_thread_is_left_alone(open_events: Open) -> None:
    """And never told, be it slow or fast."""
    clock, turns = FakeClock(), []
    open_events(turns.append, clock=clock)
    n_jumps = count_jumps()

    run(
        "import threading\n"
        "def work(seconds, n):\n    for i in range(n):\n        go_on(seconds)\n"
        "for args in (1, 100), (0, 1000):\n"
        "    thread = threading.Thread(target=work, args=args)\n"
        "    thread.start()\n    thread.join()\n",
        go_on=clock.go_on,
    )

    assert {line for _, line in turns} == {5}
    assert 100 < n_jumps() < 300


def test_code_that_other_threads_start_is_no_matter(open_events: Open) -> None:
    """Neither as a cell begins nor at the end."""
    events = open_events()
    is_done = threading.Event()
    kept: list[object] = []

    def start_code() -> None:
        for k in range(4000):
            kept.append(compile(f"x = {k}", FILENAME, "exec"))
            exec(kept[-1], {})  # type: ignore[arg-type]
        is_done.set()

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    thread = threading.Thread(target=start_code)
    try:
        thread.start()
        while not is_done.is_set():
            events.start_cell()
    finally:
        sys.setswitchinterval(interval)
        thread.join()

    events.close()


# -- Errors ----------------------------------------------------------------------------------------


def test_an_error_of_ours_is_not_the_cell_s(open_events: Open) -> None:
    """The cell goes on."""
    clock: Any = itertools.repeat(None).__next__  # None - None is an error of our code's.
    turns: list[object] = []
    open_events(turns.append, clock=clock)

    cell = run("for i in range(1000):\n    pass\ndone = True\n")

    assert cell["done"]
    assert len(turns) == 64


def test_a_lack_of_stack_within_our_code_is_not_the_cell_s(open_events: Open) -> None:
    """The cell meets its own, if it needs more."""

    def recurse(*arguments: object) -> bool:
        return recurse(*arguments)

    open_events(recurse)
    open_events(is_cell=recurse)

    assert run("for i in range(10):\n    pass\ndone = True\n")["done"]


def test_an_error_of_a_signal_s_handler_is_the_cell_s(open_events: Open) -> None:
    """Also where the signal arrives within our own code."""

    def handle(*_: object) -> None:
        raise TimeoutError("time is up")

    open_events(lambda _: signal.raise_signal(signal.SIGUSR1))
    previous = signal.signal(signal.SIGUSR1, handle)
    try:
        with pytest.raises(TimeoutError):
            run("for i in range(10):\n    pass\n")
    finally:
        signal.signal(signal.SIGUSR1, previous)
