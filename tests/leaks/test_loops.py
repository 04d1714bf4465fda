"""Turns of loops: which are reported, when a loop is left alone, and whose errors pass."""

from __future__ import annotations

import itertools
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from types import CodeType
from typing import Any

import pytest
from IPython.core.interactiveshell import InteractiveShell

from gpumemwidget.leaks.steps import LoopEvents

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
    """Open a ``LoopEvents`` for what ``run`` runs, to be closed after the test."""
    opened: list[LoopEvents] = []

    def open_events(
        on_turn: Callable[[tuple[int, int]], object] = lambda _: None, **options: Any
    ) -> LoopEvents:
        opened.append(LoopEvents(lambda key: on_turn(key) is not False, **options))
        opened[-1].open(run_code.__code__)
        return opened[-1]

    yield open_events
    for events in opened:
        events.close()


def run_code(code_obj: CodeType, names: dict[str, Any]) -> None:
    """Run a cell's code, as IPython's function of that name does."""
    exec(code_obj, names)


def run(source: str, **names: object) -> dict[str, Any]:
    """Run a cell; return its namespace."""
    namespace = dict(names)
    run_code(compile(source, FILENAME, "exec"), namespace)
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


@pytest.mark.parametrize("slow_turn", [0, 5, 12, 700])
def test_a_fast_loop_is_left_alone_however_slow_one_turn_is(
    open_events: Open, slow_turn: int
) -> None:
    """After 16 turns in a row that took less than a millisecond on average."""
    clock, turns = FakeClock(), []
    open_events(turns.append, clock=clock)
    n_jumps = count_jumps()

    run(
        "for i in range(2000):\n    go_on(20 if i == slow_turn else 0.0009)\n",
        go_on=clock.go_on,
        slow_turn=slow_turn,
    )

    assert turns == []
    assert n_jumps() <= 17 + 16


@pytest.mark.parametrize(("turn_s", "n_tried"), [(0.002, 16), (0.02, 2)])
def test_a_loop_of_slow_turns_is_reported_once_it_was_slow_twice(
    open_events: Open, turn_s: float, n_tried: int
) -> None:
    """Each further turn."""
    clock, turns = FakeClock(), []
    open_events(turns.append, clock=clock)

    run("\nfor i in range(1000):\n    go_on(turn_s)\n", go_on=clock.go_on, turn_s=turn_s)

    # Python 3.12 and 3.13 jump back once more to end the loop.
    assert len(set(turns)) == 1
    assert len(turns) in (999 - n_tried, 1000 - n_tried)


def test_a_loop_whose_steps_are_known_otherwise_is_left_alone(open_events: Open) -> None:
    """It is called for no further turn."""
    clock, turns = FakeClock(), []

    def refuse(key: tuple[int, int]) -> bool:
        turns.append(key)
        return False

    open_events(refuse, clock=clock)

    run("for i in range(100):\n    go_on(1)\n", go_on=clock.go_on)

    assert len(turns) == 1


def test_functions_of_cells_are_followed_and_no_other_code(open_events: Open) -> None:
    """A function that the cell defines, and calls; not what it imports or is given."""
    clock, turns = FakeClock(), []
    open_events(turns.append, clock=clock)
    given: dict[str, Any] = {"go_on": clock.go_on}
    exec("def given():\n    for i in range(10): go_on(1)\n", given)

    run(
        "def work():\n    for i in range(10):\n        go_on(1)\nwork()\ngiven()\n",
        go_on=clock.go_on,
        given=given["given"],
    )

    assert len(set(turns)) == 1


def test_a_fast_loop_of_another_thread_is_left_alone(open_events: Open) -> None:
    """As one of the cells' own thread is."""
    clock = FakeClock()
    open_events(clock=clock)
    n_jumps = count_jumps()

    run(
        "import threading\n"
        "def work():\n    for i in range(1000): pass\n"
        "for _ in range(2):\n"
        "    thread = threading.Thread(target=work)\n"
        "    thread.start()\n    thread.join()\n",
    )

    assert n_jumps() < 30


def test_code_that_other_threads_run_is_no_matter(open_events: Open) -> None:
    """Neither as a cell begins nor at the end."""
    events = open_events()
    is_done = threading.Event()
    kept: list[CodeType] = []

    def start_code() -> None:
        for k in range(4000):
            kept.append(compile(f"for x in [{k}]: pass", FILENAME, "exec"))
            run_code(kept[-1], {})
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


# -- In a shell ------------------------------------------------------------------------------------


def test_a_training_loop_calls_us_in_its_first_turns_alone(loaded: InteractiveShell) -> None:
    """Its optimizer marks the steps, however slow they are."""
    loaded.run_cell(
        "import torch\noptimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))])"
    )
    n_jumps = count_jumps()

    result = loaded.run_cell("for _ in range(500):\n    optimizer.step()")

    assert result.success
    assert 0 < n_jumps() <= 40


def test_code_of_libraries_runs_as_without_us(loaded: InteractiveShell) -> None:
    """No event is asked for in all code: each function would be changed when it is next called."""
    monitoring: Any = sys.monitoring

    asked = {monitoring.get_tool(tool): monitoring.get_events(tool) for tool in range(6)}

    assert asked.pop("gpumemwidget loops") == 0
    assert set(asked) == {None}


# -- Errors ----------------------------------------------------------------------------------------


def test_an_error_of_ours_is_not_the_cell_s(open_events: Open) -> None:
    """The cell goes on."""
    clock: Any = itertools.repeat(None).__next__  # None - None is an error of our code's.
    turns: list[object] = []
    open_events(turns.append, clock=clock)

    cell = run("for i in range(1000):\n    pass\ndone = True\n")

    assert cell["done"]
    assert turns == []


def test_a_lack_of_stack_within_our_code_is_not_the_cell_s(open_events: Open) -> None:
    """The cell meets its own, if it needs more."""
    clock = FakeClock()

    def recurse(*arguments: object) -> bool:
        return recurse(*arguments)

    open_events(recurse, clock=clock)
    open_events(clock=recurse)

    source = "for i in range(10):\n    go_on(1)\ndone = True\n"
    assert run(source, go_on=clock.go_on)["done"]


def test_an_error_of_a_signal_s_handler_is_the_cell_s(open_events: Open) -> None:
    """Also where the signal arrives within our own code."""

    def handle(*_: object) -> None:
        raise TimeoutError("time is up")

    clock = FakeClock()
    open_events(lambda _: signal.raise_signal(signal.SIGUSR1), clock=clock)
    previous = signal.signal(signal.SIGUSR1, handle)
    try:
        with pytest.raises(TimeoutError):
            run("for i in range(10):\n    go_on(1)\n", go_on=clock.go_on)
    finally:
        signal.signal(signal.SIGUSR1, previous)
