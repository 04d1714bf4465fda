"""What it costs to know who owns what: the full account, the cheap refresh, and a cell without.

The full account is taken of a process whose collector knows half a million objects, most of them
the user's and reached by names, ten thousand tensors among them. The refresh after a cell is that
of an ordinary notebook: a transformer of twelve layers in training, with some results kept.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from statistics import median
from time import perf_counter

from IPython.core.interactiveshell import InteractiveShell

from benchmarks.rows import Row, format_seconds, judge
from benchmarks.shell import run, start_shell, time_cells
from gpumemwidget.ownership.account import list_variables, take_memory_account
from gpumemwidget.session.session import current_session

MOST_ACCOUNT_S = 0.5
MOST_REFRESH_S = 20e-3
#: A plain cell pays nothing: so much is the noise of the ratio of two medians.
MOST_CELL_RATIO = 1.05

_N_OBJECTS = 500_000
_N_TENSORS = 10_000

_ORDINARY = """
import torch
layer = torch.nn.TransformerEncoderLayer(64, 4, 256, batch_first=True)
model = torch.nn.TransformerEncoder(layer, 12, enable_nested_tensor=False)
optimizer = torch.optim.AdamW(model.parameters())
scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
history = []
for step in range(20):
    batch = torch.randn(8, 16, 64)
    output = model(batch)
    loss = output.square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    history.append({"step": step, "loss": loss.item(), "output": output.detach()})
config = {"lr": 1e-3, "layers": list(range(12)), "names": [f"layer {n}" for n in range(12)]}
"""

#: A run's records, as a person keeps them: so many tensors, and so many objects beside them.
_HEAP = """
import torch
records = []
def grow(n_tensors, n_objects):
    for number in range(n_tensors):
        records.append({"logits": torch.ones(16), "meta": {"id": number, "tags": [str(number)]}})
    rows = []
    while n_objects > 0:
        rows.append({"row": [n_objects, [n_objects]], "more": ({"a": [n_objects]}, "x")})
        n_objects -= 6
    records.append(rows)
"""


def measure(quick: bool) -> list[Row]:
    """The cost of each, as medians."""
    n_runs = 2 if quick else 9
    shell = start_shell()
    run(shell, "%load_ext gpumemwidget")
    session = current_session()
    run(shell, _ORDINARY)
    gc.collect()
    refresh_s = _time(lambda: list_variables(session.shell), n_runs)
    n_rows = len(list_variables(session.shell))

    n_objects, n_tensors = fill_heap(shell, quick=quick)
    hardware = session.monitor.hardware
    account = take_memory_account(session.shell, hardware)
    if not account.is_complete:
        raise RuntimeError("the account stopped at its budget of time")
    account_s = _time(lambda: take_memory_account(session.shell, hardware), n_runs)
    ratio = _compare_cells(shell, n_runs)
    full = f"the full account of {n_objects:,} objects with {n_tensors:,} tensors"
    refresh = f"the refresh after a cell: a 12-layer transformer in training, {n_rows} names"
    cell = "a recorded cell beside names that hold all that, to one without them"
    return [
        judge(full, account_s, MOST_ACCOUNT_S, format_seconds),
        judge(refresh, refresh_s, MOST_REFRESH_S, format_seconds),
        judge(cell, ratio, MOST_CELL_RATIO, "{:.3f}".format),
    ]


def fill_heap(shell: InteractiveShell, *, quick: bool) -> tuple[int, int]:
    """Bind names to many objects; return how many the collector knows, and how many tensors."""
    n_tensors = 500 if quick else _N_TENSORS
    run(shell, _HEAP)
    run(shell, f"grow({n_tensors}, 0)")
    missing = (250_000 if quick else _N_OBJECTS) - len(gc.get_objects())
    run(shell, f"grow(0, {missing})")
    gc.collect()
    return len(gc.get_objects()), n_tensors


def _time(call: Callable[[], object], n_runs: int) -> float:
    """The median of its runs, without the first, which finds cold caches."""
    seconds = []
    for _ in range(n_runs + 1):
        start_s = perf_counter()
        call()
        seconds.append(perf_counter() - start_s)
    return median(seconds[1:])


def _compare_cells(shell: InteractiveShell, n_runs: int) -> float:
    """How much longer an empty recorded cell takes while the names are bound, no panel being open.

    Blocks with and without take turns; the objects are there in both, so that the collector's work
    is the same.
    """
    names = [name for name in shell.user_ns if not name.startswith("_")]
    values = {name: shell.user_ns[name] for name in names if name not in {"In", "Out"}}
    with_s: list[float] = []
    without_s: list[float] = []
    for _ in range(n_runs):
        for name in values:
            del shell.user_ns[name]
        without_s += time_cells(shell)
        shell.user_ns.update(values)
        with_s += time_cells(shell)
    return median(with_s) / median(without_s)
