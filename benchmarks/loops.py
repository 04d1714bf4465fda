"""Measure loops whose steps are followed beside the same loops without the extension.

Judged is the time within what the extension has Python and PyTorch call in a loop, as a share of
the loop's own: two runs of one loop differ by 5 % and more on a busy machine. Beside it stand the
loops' times with and without the extension, in turns, which have all else that it could slow: on a
GPU by the clock, once the GPU has finished; elsewhere by the processor time of their own thread.
Before Python 3.12 loops are followed by their optimizers alone, so that nothing is to be seen there
of what their turns cost.
"""

from __future__ import annotations

import functools
import gc
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
from IPython.core.interactiveshell import InteractiveShell
from IPython.utils.capture import capture_output

from benchmarks.rows import Row, format_seconds, judge
from benchmarks.shell import run, start_shell
from gpumemwidget.leaks.steps import LoopEvents
from gpumemwidget.session.leak_watch import LeakWatch

MOST = 1.01

_N_RUNS = 6
_TIMED = """
begin = read_clock()
{loop}
spent = read_clock() - begin
"""
_SET_UP = """
import torch
from time import perf_counter, thread_time
torch.set_num_threads(1)
device = {device!r}
def read_clock():
    if device == "cpu":
        return thread_time()
    torch.cuda.synchronize()
    return perf_counter()
def make(n_layers, width):
    global model, opt, x
    torch.manual_seed(0)
    layers = [torch.nn.Linear(width, width, device=device) for _ in range(n_layers)]
    model = torch.nn.Sequential(*layers)
    opt = torch.optim.AdamW(model.parameters())
    x = torch.randn(64, width, device=device)
    step()
def step():
    loss = model(x).square().mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
    return loss
"""
_TRAINING = """
for _ in range({n}):
    step()
"""
_ONE_STEP = "loss = step()"
_OPERATORS = """
y = x[0, :4]
for _ in range({n}):
    y = y + 1
"""
_LEAKING = """
losses = []
for _ in range({n}):
    step()
    losses.append(model(x))
"""
_EVALUATION = """
with torch.no_grad():
    for _ in range({n}):
        total = model(x).sum()
"""
_BARE = """
total = 0
for number in range({n}):
    total += number
"""


def measure(quick: bool) -> list[Row]:
    """How many times as long followed loops take, and how much longer one that leaks."""
    shell = start_shell()
    has_gpu = torch.cuda.is_available()
    run(shell, _SET_UP.format(device="cuda" if has_gpu else "cpu"))
    calls = _Calls(time.perf_counter if has_gpu else time.thread_time)
    share = 20 if quick else 1
    n_runs = 3 if quick else _N_RUNS
    # A GPU is to wait for Python: what it computes meanwhile would hide what Python does.
    short, long = "make(4, 32)", "make(200, 64)"
    # What is short is run so many times in a row.
    loops = (
        ("600 short steps of training", short, _TRAINING.format(n=600 // share), 1),
        ("60 longer steps of training", long, _TRAINING.format(n=60 // share), 1),
        ("one longer step of training", long, _ONE_STEP, 10),
        ("2,000 operators", short, _OPERATORS.format(n=2000 // share), 10),
        ("batches of evaluation", long, _EVALUATION.format(n=100 // share), 1),
        ("turns that touch no tensor", short, _BARE.format(n=4_000_000 // share), 1),
    )
    rows = []
    for what, prepare, loop, n_times in loops:
        run(shell, prepare)
        calls.spent_s = 0.0
        plain, followed = _time_both(shell, loop, n_runs=n_runs, n_times=n_times)
        # Each time one more run warms up.
        followed_s = median(followed) * n_runs * (n_times + 1)
        shown = format_seconds(median(plain))
        title = f"a loop beside one that is not followed: {what} ({shown})"
        more = (
            f"; fastest runs {min(followed) / min(plain):.3f} ×, "
            f"medians {median(followed) / median(plain):.3f} ×"
        )
        ratio = 1 + calls.spent_s / followed_s
        rows.append(judge(title, ratio, MOST, "{:.4f} ×".format, more))
    n_steps = 150 // share
    run(shell, "make(4, 512)")
    leaking = _LEAKING.format(n=n_steps)
    plain, followed = _time_both(shell, leaking, n_runs=min(n_runs, 5), n_times=1)
    title = f"looking who holds what, in a loop of {n_steps} steps that leaks"
    more_s = min(followed) - min(plain)
    return [*rows, Row(title, f"{more_s * 1e3:.0f} ms of {format_seconds(min(followed))}")]


class _Calls:
    """The seconds that were spent within the extension's calls in loops, by a clock."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.spent_s = 0.0
        self._clock = clock
        for owner, name in ((LeakWatch, "_end_optimizer_step"), (LoopEvents, "_see_jump")):
            setattr(owner, name, self._count(getattr(owner, name)))

    def _count(self, call: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(call)
        def counted(*args: Any) -> Any:
            begin_s = self._clock()
            try:
                return call(*args)
            finally:
                self.spent_s += self._clock() - begin_s

        return counted


def _time_both(
    shell: InteractiveShell, loop: str, *, n_runs: int, n_times: int
) -> tuple[list[float], list[float]]:
    """The seconds of each run of a loop without the extension, and with it."""
    plain: list[float] = []
    followed: list[float] = []
    for _ in range(n_runs):
        for command, times in (("%unload_ext", plain), ("%load_ext", followed)):
            run(shell, f"{command} gpumemwidget")
            # The command leaves cold caches and garbage, which are not the loop's.
            gc.collect()
            _time(shell, loop)
            times += [_time(shell, loop) for _ in range(n_times)]
    run(shell, "%unload_ext gpumemwidget")
    return plain, followed


def _time(shell: InteractiveShell, loop: str) -> float:
    with capture_output():
        run(shell, _TIMED.format(loop=loop))
    spent_s: float = shell.user_ns["spent"]
    return spent_s
