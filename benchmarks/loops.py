"""Measure a loop whose steps are followed beside the same loop without the extension.

Loops time themselves, with and without the extension in turns, by the processor time of their own
thread: what follows their steps runs there, and other threads and processes are not counted. Of
each, the fastest run counts: what makes another one slower is the machine.
"""

from __future__ import annotations

import torch
from IPython.core.interactiveshell import InteractiveShell
from IPython.utils.capture import capture_output

from benchmarks.rows import Row, judge
from benchmarks.shell import run, start_shell

MOST = 1.01

_N_RUNS = 15
_TIMED = """
begin = thread_time()
{loop}
spent = thread_time() - begin
"""
_SET_UP = """
import torch
from time import thread_time
torch.set_num_threads(1)
device = {device!r}
def make(width):
    global model, opt, x
    torch.manual_seed(0)
    layers = [torch.nn.Linear(width, width, device=device) for _ in range(4)]
    model = torch.nn.Sequential(*layers)
    opt = torch.optim.AdamW(model.parameters())
    x = torch.randn(64, width, device=device)
def step():
    loss = model(x).square().mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
    return loss
"""
_TRAINING = """
make({width})
for _ in range({n}):
    step()
"""
_LEAKING = """
make({width})
losses = []
for _ in range({n}):
    step()
    losses.append(model(x))
"""
_EVALUATION = """
make({width})
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
    device = "cuda" if torch.cuda.is_available() else "cpu"
    shell = start_shell()
    run(shell, _SET_UP.format(device=device))
    share = 20 if quick else 1
    loops = (
        ("short steps of training", _TRAINING.format(width=32, n=1500 // share)),
        ("longer steps of training", _TRAINING.format(width=512, n=150 // share)),
        ("batches of evaluation", _EVALUATION.format(width=512, n=800 // share)),
        ("turns that touch no tensor", _BARE.format(n=4_000_000 // share)),
    )
    n_runs = 3 if quick else _N_RUNS
    rows = []
    for what, loop in loops:
        plain_s, followed_s = _time_both(shell, loop, n_runs=n_runs)
        title = f"a loop beside one that is not followed: {what}"
        rows.append(judge(title, followed_s / plain_s, MOST, "{:.3f} ×".format))
    n_steps = 150 // share
    plain_s, followed_s = _time_both(shell, _LEAKING.format(width=512, n=n_steps), n_runs=n_runs)
    title = f"looking who holds what, in a loop of {n_steps} steps that leaks"
    return [*rows, Row(title, f"{(followed_s - plain_s) * 1e3:.0f} ms of {followed_s:.1f} s")]


def _time_both(shell: InteractiveShell, loop: str, *, n_runs: int) -> tuple[float, float]:
    """The seconds of a loop without the extension, and with it."""
    plain: list[float] = []
    followed: list[float] = []
    # The first round finds cold caches.
    for number in range(n_runs + 1):
        spent_s = _time(shell, loop)
        run(shell, "%load_ext gpumemwidget")
        followed_s = _time(shell, loop)
        run(shell, "%unload_ext gpumemwidget")
        if number:
            plain.append(spent_s)
            followed.append(followed_s)
    return min(plain), min(followed)


def _time(shell: InteractiveShell, loop: str) -> float:
    with capture_output():
        run(shell, _TIMED.format(loop=loop))
    spent_s: float = shell.user_ns["spent"]
    return spent_s
