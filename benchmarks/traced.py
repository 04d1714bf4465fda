"""What tracing costs the cell that is traced: its own time beside the same cell's without it.

Cells time their own bodies, traced and untraced in turns, so that whatever else the machine does
falls on both.
"""

from __future__ import annotations

import importlib.util
from statistics import median

import torch
from IPython.core.interactiveshell import InteractiveShell
from IPython.utils.capture import capture_output

from benchmarks.rows import Row, judge
from benchmarks.shell import run, start_shell

MOST_LINES = 1.25
MOST_STEP = 1.02
MOST_TINY = 1.25

_N_RUNS = 15
_TRACED = "%%memtrace\n"
_TIMED = """
begin = perf_counter()
{body}
sync()
spent = perf_counter() - begin
"""
_SET_UP = """
import torch
from time import perf_counter
def sync():
    if torch.cuda.is_available():
        torch.cuda.synchronize()
"""

_LINES = """
for i in range({n}):
    j = i
    k = j
"""
_KEEPING_LINES = """
kept = []
for i in range({n}):
    kept.append(bytearray(1000))
    j = i
del kept
"""
_LIBRARY = """
import json
for i in range({n}):
    text = json.dumps(list(range(500)), indent=1)
    back = json.loads(text)
"""
_TINY = """
a = torch.ones(8, device={device!r})
for i in range({n}):
    b = a + 1
"""
_MODEL = """
torch.manual_seed(0)
model = torch.nn.Sequential(*[torch.nn.Linear(512, 512) for _ in range(12)])
opt = torch.optim.AdamW(model.parameters())
x = torch.randn(64, 512)
def step():
    loss = model(x).square().mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
"""
_GPT2 = """
from transformers import GPT2Config, GPT2LMHeadModel
torch.manual_seed(0)
config = GPT2Config()
with torch.device("cuda"):
    model = GPT2LMHeadModel(config)
opt = torch.optim.AdamW(model.parameters())
tokens = torch.randint(0, config.vocab_size, (8, 512), device="cuda")
def step():
    opt.zero_grad()
    loss = model(tokens, labels=tokens).loss
    loss.backward()
    opt.step()
"""


def measure(quick: bool) -> list[Row]:
    """How many times as long traced bodies take, as medians."""
    n_runs = 3 if quick else _N_RUNS
    n_lines = 100_000 if quick else 3_000_000
    shell = start_shell()
    run(shell, "%load_ext gpumemwidget")
    run(shell, _SET_UP)
    rows = [
        _compare(shell, what, body, n_runs=n_runs, most=MOST_LINES)
        for what, body in (
            (f"{n_lines * 3:,} cheap lines", _LINES.format(n=n_lines)),
            (
                f"{n_lines // 3 * 3:,} lines that keep memory",
                _KEEPING_LINES.format(n=n_lines // 3),
            ),
            ("calls of a library in Python", _LIBRARY.format(n=20 if quick else 400)),
            (
                f"{n_lines // 30:,} tiny tensors on the host",
                _TINY.format(device="cpu", n=n_lines // 30),
            ),
        )
    ]
    run(shell, _MODEL)
    rows.append(_compare(shell, "a training step on the host", "step()", n_runs=n_runs))
    if torch.cuda.is_available():
        rows += _measure_gpu(shell, n_runs)
    return rows


def _measure_gpu(shell: InteractiveShell, n_runs: int) -> list[Row]:
    tiny = _TINY.format(device="cuda", n=2000)
    rows = [_compare(shell, "2,000 tiny tensors on a GPU", tiny, n_runs=n_runs, most=MOST_TINY)]
    if importlib.util.find_spec("transformers") is None:
        return rows
    run(shell, _GPT2)
    what = "a training step of GPT-2, 8×512"
    return [*rows, _compare(shell, what, "step()", n_runs=n_runs, most=MOST_STEP)]


def _compare(
    shell: InteractiveShell, what: str, body: str, *, n_runs: int, most: float | None = None
) -> Row:
    plain, traced = _list_times(shell, [body, body], n_runs)
    ratio = median(traced) / median(plain)
    what = f"a traced cell beside an untraced one: {what}"
    show = "{:.2f} ×".format
    return Row(what, show(ratio)) if most is None else judge(what, ratio, most, show)


def _list_times(shell: InteractiveShell, bodies: list[str], n_runs: int) -> list[list[float]]:
    """Seconds of each body's runs, in turns; all but the first are traced."""
    times: list[list[float]] = [[] for _ in bodies]
    # The first round finds cold caches.
    for number in range(n_runs + 1):
        for place, body in enumerate(bodies):
            head = _TRACED if place else ""
            spent_s = _time(shell, head + _TIMED.format(body=body))
            if number:
                times[place].append(spent_s)
    return times


def _time(shell: InteractiveShell, source: str) -> float:
    with capture_output():
        run(shell, source)
    spent_s: float = shell.user_ns["spent"]
    return spent_s
