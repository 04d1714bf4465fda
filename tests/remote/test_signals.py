"""A program's own signal handlers: what they raise reaches the program, wherever they run."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.remote.programs import RUN, load_one, run_python, write_script

#: Each timeout is set anew once the one before has arrived, so that every one can be counted.
_COUNTING = """
import signal, sys, threading, time

class TimeoutReached(Exception):
    pass

n_raised = 0

def reach(number, frame):
    global n_raised
    assert frame is not None
    n_raised += 1
    raise TimeoutReached(n_raised)

def count(step, n_timeouts):
    signal.signal(signal.SIGALRM, reach)
    n_arrived, until = 0, time.monotonic() + 120
    while n_arrived < n_timeouts and time.monotonic() < until:
        try:
            signal.setitimer(signal.ITIMER_REAL, 0.0005 + (n_arrived % 17) * 0.0003)
            while n_raised == n_arrived:
                step()
            # It was raised, and the step did not pass it on.
            print("lost", flush=True)
            n_arrived += 1
        except TimeoutReached:
            n_arrived += 1
    print(n_raised, n_arrived, signal.getsignal(signal.SIGALRM) is reach, flush=True)
"""
_STEPS = """
import torch
from counting import count
layer = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
layer(torch.ones(4)).sum().backward()
optimizer.step()  # The first one imports, and torch keeps what is raised meanwhile.
count(optimizer.step, 100)
"""
_SPANS = """
import gpumemwidget
from counting import count

def nest():
    with gpumemwidget.span("epoch", 1), gpumemwidget.span("step", 2), gpumemwidget.span("part"):
        pass

count(nest, 200)
"""


@pytest.mark.parametrize(
    ("program", "n_timeouts"), [(_STEPS, 100), (_SPANS, 200)], ids=["steps", "spans"]
)
def test_every_timeout_arrives(program: str, n_timeouts: int, tmp_path: Path) -> None:
    """Also one that comes within our hooks: after them, and with their bookkeeping done."""
    write_script(tmp_path, _COUNTING, "counting.py")
    script = write_script(tmp_path, program)

    ended = run_python(tmp_path, *RUN, "--to", "a.jsonl", script, timeout_s=150)

    assert ended.status == 0, ended.err
    assert ended.out == f"{n_timeouts} {n_timeouts} True\n", ended.err
    assert "the program goes on" not in ended.err
    state = load_one(tmp_path / "a.jsonl")
    assert (state.status, state.n_unread) == ("ended", 0)


_IN_A_THREAD = """
import signal, threading, gpumemwidget

def work():
    for number in range(300):
        with gpumemwidget.span("work", number):
            pass

handlers = [signal.getsignal(number) for number in signal.valid_signals()]
thread = threading.Thread(target=work)
thread.start()
thread.join()
assert [signal.getsignal(number) for number in signal.valid_signals()] == handlers
print("the same")
"""


def test_spans_of_other_threads_change_no_handler(tmp_path: Path) -> None:
    """Python runs handlers on the main thread alone."""
    script = write_script(tmp_path, _IN_A_THREAD)

    ended = run_python(tmp_path, *RUN, "--to", "a.jsonl", script)

    assert (ended.status, ended.out) == (0, "the same\n"), ended.err
