"""What other processes cost the notebook's kernel: 64 of them in the dashboard, 1,000 on 128 hosts.

The 64 are simulated ranks, which another process records into files at 10 Hz. The 1,000 are
messages as an engine passes them on, fed into one collector as fast as it takes them.
"""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

import psutil

from benchmarks.rows import Row, format_bytes, format_seconds, judge
from gpumemwidget.model.cells import CellDevice, Span
from gpumemwidget.model.devices import DeviceInfo, DeviceUse
from gpumemwidget.model.processes import ProcessInfo, ProcessState, SpanRecord
from gpumemwidget.remote.messages import (
    Began,
    Counters,
    Devices,
    Figures,
    Message,
    SpanEnded,
    Uses,
    decode,
    encode,
)
from gpumemwidget.remote.reader.collector import Collector
from gpumemwidget.widgets.processes_panel import MAX_PROCESSES, ProcessLines, describe_processes

if TYPE_CHECKING:
    from benchmarks.kernel import CountedKernel

N_RANKS = 64
MOST_SHARE = 0.02
N_MANY, N_HOSTS = 1000, 128

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
    """The kernel beside 64 processes, then one collector with 1,000."""
    rows = [*_measure_many(seconds=15 if quick else 120)]
    if importlib.util.find_spec("jupyter_client") is None:
        return [Row(f"{N_RANKS} processes' cost to the kernel", "no Jupyter kernel here"), *rows]
    from benchmarks.kernel import start_kernel

    with tempfile.TemporaryDirectory() as folder, _record_ranks(folder), start_kernel() as kernel:
        kernel.run(_SETUP)
        kernel.run("%load_ext gpumemwidget")
        kernel.open_dashboard()
        sizes = {"pairs": 1 if quick else 4, "seconds": 3 if quick else 8}
        return [_measure_kernel(kernel, folder, **sizes), *rows]


# -- 64 processes in a kernel ----------------------------------------------------------------------


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


# -- 1,000 processes in a collector ----------------------------------------------------------------


class _Cluster:
    """A source of ``N_MANY`` processes, whose messages of the next half second each read has."""

    name = "a cluster"
    n_left_out = 0
    failures = ()

    def __init__(self) -> None:
        self.now_s = 0.0
        self.n_messages = 0

    def read(self) -> Iterator[tuple[str, Message]]:
        lines = list(self._list_lines())
        for n in range(N_MANY):
            if self.now_s == 0:
                yield str(n), decode(encode(Began(_describe(n))))
            for line in lines:
                yield str(n), decode(line)
        self.n_messages += N_MANY * len(lines)
        self.now_s += 0.5

    def _list_lines(self) -> Iterator[bytes]:
        if self.now_s == 0:
            gpu = DeviceInfo("cuda:0", "NVIDIA H100", 80 << 30, uuid="GPU-0")
            yield encode(Devices((gpu, DeviceInfo("host", "host memory", 512 << 30))))
        tick = round(10 * self.now_s)
        for n in range(tick, tick + 5):
            moved = (n % 7) << 28
            used = Figures((20 << 30) + moved, (20 << 30) + moved)
            counters = {"cuda:0": used, "host": Figures(4096, moved)}
            yield encode(Counters(100 * n, counters))
        if tick % 20 == 0:
            use = DeviceUse("cuda:0", (40 << 30) + tick, 40 << 30, 80 << 30)
            yield encode(Uses(self.now_s, (use,), (("cuda:0", (40 << 30) + tick),)))
        if tick % 10 == 0:
            yield encode(SpanEnded(_make_span(self.now_s)))

    def is_alive(self, _key: str, _info: ProcessInfo) -> bool:
        return True

    def close(self) -> None:
        pass


def _describe(n: int) -> ProcessInfo:
    host = f"node{n % N_HOSTS}"
    return ProcessInfo(f"id {n}", host, n, "python train.py", time.time(), "rank", n)


def _make_span(now_s: float) -> SpanRecord:
    counter = Span(20 << 30, 20 << 30, 30 << 30)
    devices = (CellDevice("cuda:0", counter, counter, "exact", 0, 0),)
    return SpanRecord("step", now_s, 1.0, "ok", devices, round(now_s))


def _measure_many(*, seconds: int) -> Iterator[Row]:
    """Processor time and memory of a collector, and of what the tab tells once a second."""
    cluster, lines = _Cluster(), dict[str, ProcessLines]()
    collector = Collector(_fail)
    collector.add(cluster)
    before_bytes = psutil.Process().memory_info().rss
    read_s, told_s, message_bytes = 0.0, [], 0

    def find_line(state: ProcessState, device: str) -> list[int | None]:
        if state.info.id not in lines:
            lines[state.info.id] = ProcessLines(collector.find_history(state))
        lines[state.info.id].update(state.heard_s)
        return lines[state.info.id].list_points(device)

    for half in range(2 * seconds):
        begin_s = time.process_time()
        collector.read()
        read_s += time.process_time() - begin_s
        if half % 2:
            begin_s = time.process_time()
            states = collector.processes
            told = describe_processes(states, find_line=find_line, wall_s=time.time())
            told_s.append(time.process_time() - begin_s)
    taken_bytes = psutil.Process().memory_info().rss - before_bytes
    n_kept = sum(len(collector.find_history(state)) for state in collector.processes)
    message_bytes = len(json.dumps(told))
    what = f"{N_MANY:,} processes on {N_HOSTS} hosts at 10 Hz in one collector"
    share = read_s / seconds
    yield Row(f"{what}: processor time", f"{share:.1%} of a core", share)
    yield Row(
        f"{what}: memory",
        f"{format_bytes(taken_bytes)} after {seconds} s; {n_kept:,} of "
        f"{10 * seconds * N_MANY:,} samples are kept",
        taken_bytes,
    )
    yield Row(
        f"{N_MANY:,} processes described for the Processes tab, once a second",
        f"{format_seconds(median(told_s))}, {format_bytes(message_bytes)}; the "
        f"{MAX_PROCESSES} that matter most have a row",
        median(told_s),
    )


def _fail(_what: str, exc: Exception) -> None:
    raise exc
