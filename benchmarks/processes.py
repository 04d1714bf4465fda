"""What other processes cost the notebook's kernel: 64 of them in the dashboard.

They are simulated ranks, which another process records into files at 10 Hz.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median

from benchmarks.kernel import CountedKernel, start_kernel
from benchmarks.rows import Row, format_bytes, judge

N_RANKS = 64
MOST_SHARE = 0.02

_ROOT = Path(__file__).parents[1]
#: Records until it is killed: eight hosts, the first one this machine, with eight GPUs each.
_RECORD = f"""
import os, socket, sys, time
from pathlib import Path
from tests.ranks import MIB, Rank
hosts = [socket.gethostname(), *(f"node{{n}}" for n in range(1, {N_RANKS} // 8))]
ranks = [
    Rank(Path(sys.argv[1]), n, host=hosts[n // 8], gpu=n % 8, n_gpus=8, pid=os.getpid(), ago_s=0)
    for n in range({N_RANKS})
]
for rank in ranks:
    rank.take(20 * 1024 * MIB)
spans = [rank.begin("step", 1) for rank in ranks]
print("ready", flush=True)
due_s = time.monotonic()
for tick in range(1, 10**6):
    for rank in ranks:
        if tick % 2:
            rank.take((tick % 7 + 1) * 512 * MIB)
        else:
            rank.drop()
        rank.sample(0.1)
        if tick % 20 == 0:
            rank.write_use()
    if tick % 10 == 0:
        for rank, span in zip(ranks, spans):
            rank.end(span)
        spans = [rank.begin("step", tick // 10) for rank in ranks]
    due_s += 0.1
    time.sleep(max(0, due_s - time.monotonic()))
"""
_SETUP = """
import gc, json, time
import gpumemwidget
def measure(seconds):
    # The garbage collector goes through what the first look at the files has left; not here.
    gc.collect()
    cpu_s = time.process_time()
    time.sleep(seconds)
    return time.process_time() - cpu_s
"""


def measure(quick: bool) -> list[Row]:
    """The kernel beside 64 processes."""
    with tempfile.TemporaryDirectory() as folder, _record_ranks(folder), start_kernel() as kernel:
        kernel.run(_SETUP)
        kernel.run("%load_ext gpumemwidget")
        kernel.open_dashboard()
        sizes = {"pairs": 1 if quick else 4, "seconds": 3 if quick else 8}
        return [_measure_kernel(kernel, folder, **sizes)]


@contextmanager
def _record_ranks(folder: str) -> Iterator[None]:
    command = [sys.executable, "-c", _RECORD, folder]
    with subprocess.Popen(command, cwd=_ROOT, stdout=subprocess.PIPE, text=True) as recording:
        try:
            assert recording.stdout is not None
            assert recording.stdout.readline() == "ready\n"
            yield
        finally:
            recording.kill()


def _measure_kernel(kernel: CountedKernel, folder: str, *, pairs: int, seconds: int) -> Row:
    """What the watched processes add to a visible dashboard, read alone and with their tab open."""
    read, shown, message_bytes = [], [], []
    cell = f"print(json.dumps(measure({seconds})))"
    for _ in range(pairs):
        kernel.set_visible(True)
        without_s = kernel.read_printed(kernel.run(cell))
        kernel.run(f"watched = gpumemwidget.watch({folder!r})\ntime.sleep(2)")
        read.append((kernel.read_printed(kernel.run(cell)) - without_s) / seconds)
        kernel.set_visible(True, processes=True)
        time.sleep(2)
        messages = kernel.run(cell)
        shown.append((kernel.read_printed(messages) - without_s) / seconds)
        message_bytes += [each.n_bytes for each in messages if each.is_of("processes")]
        kernel.run("watched.close()")
    size = format_bytes(median(message_bytes)) if message_bytes else "nothing"
    more = f", {median(read):.1%} with the tab closed; {size} a second to a page"
    what = f"kernel's processor time for {N_RANKS} recorded processes, the Processes tab open"
    return judge(what, median(shown), MOST_SHARE, "{:.1%} of a core".format, more)
