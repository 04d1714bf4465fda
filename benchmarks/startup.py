"""What ``%load_ext gpumemwidget`` makes a person wait, in fresh processes."""

from __future__ import annotations

import subprocess
import sys
from statistics import median

from benchmarks.rows import Row, format_seconds, judge

#: Seconds until the extension is loaded, where torch is imported already.
MOST_S = 0.3

_CODE = """
import sys, time
from IPython.core.interactiveshell import InteractiveShell
if {with_torch}:
    import torch
shell = InteractiveShell.instance()
start_s = time.perf_counter()
result = shell.run_cell("%load_ext gpumemwidget", store_history=True)
took_s = time.perf_counter() - start_s
result.raise_error()
assert {with_torch} or "torch" not in sys.modules, "loading imported torch"
print()
print(took_s)
"""


def measure(quick: bool) -> list[Row]:
    """The median of several fresh starts, with torch imported before and without."""
    runs = 1 if quick else 7
    with_torch_s = median(_time_load(with_torch=True) for _ in range(runs))
    without_s = median(_time_load(with_torch=False) for _ in range(runs))
    without = "`%load_ext`, torch not in the process (and not imported by it)"
    return [
        judge("`%load_ext`, torch imported before", with_torch_s, MOST_S, format_seconds),
        judge(without, without_s, MOST_S, format_seconds),
    ]


def _time_load(*, with_torch: bool) -> float:
    answer = subprocess.run(
        [sys.executable, "-c", _CODE.format(with_torch=with_torch)],
        capture_output=True,
        text=True,
        check=True,
    )
    return float(answer.stdout.splitlines()[-1])
