"""What a recorded cell costs beyond plain IPython, beside the reads that it can't do without.

Blocks of empty cells with and without the extension take turns, so that whatever else the machine
does falls on both. The bare reads are timed where they would stand, before and after a plain cell,
and not in a loop of their own, which would find the caches warm.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib.metadata
import importlib.util
import io
import os
import subprocess
import sys
from collections.abc import Callable
from statistics import median
from time import perf_counter

import torch

from tests.bench.machine import list_devices
from tests.bench.rows import Row, emit
from tests.bench.shell import run, start_shell

#: Beyond this many times the bare reads, recording is not "at a cost that nobody notices".
MOST_TIMES_THE_READS = 3.0
_EMPTY_CELL = "pass"
_BLOCK = 25


class _MallInfo2(ctypes.Structure):
    """``struct mallinfo2``: https://man7.org/linux/man-pages/man3/mallinfo.3.html."""

    _fields_ = tuple((f"field_{index}", ctypes.c_size_t) for index in range(10))


class BareReads:
    """The counter reads of one recorded cell and nothing else.

    At the start: malloc's counters, the process's status, a reset of its high-water mark; for each
    GPU the allocator's counters and a reset of theirs. At the end the same without the resets.
    """

    def __init__(self) -> None:
        self._mallinfo2 = ctypes.CDLL(None).mallinfo2
        self._mallinfo2.restype = _MallInfo2
        # Opened once: the cheapest way there is.
        self._status = os.open("/proc/self/status", os.O_RDONLY)
        self._clear_refs = os.open("/proc/self/clear_refs", os.O_WRONLY)
        self._devices = list_devices()

    def read_start(self) -> None:
        """What must be read before the cell."""
        self.read_end()
        os.write(self._clear_refs, b"5")
        for device in self._devices:
            torch.cuda.reset_peak_memory_stats(device)

    def read_end(self) -> None:
        """What must be read after it."""
        self._mallinfo2()
        os.pread(self._status, 4096, 0)
        for device in self._devices:
            torch.cuda.memory_stats_as_nested_dict(device)


def measure(quick: bool) -> list[Row]:
    """The cost of a recorded cell, in seconds and in bare reads."""
    shell = start_shell()
    for device in list_devices():
        torch.zeros(1, device=device)
    reads = BareReads()
    plain_s: list[float] = []
    ours_s: list[float] = []
    reads_s: list[float] = []
    for _ in range(2 if quick else 40):
        run(shell, "%load_ext gpumemwidget")
        ours_s += _time_block(lambda: run(shell, _EMPTY_CELL))
        run(shell, "%unload_ext gpumemwidget")
        plain_s += _time_block(
            lambda: run(shell, _EMPTY_CELL),
            around=(reads.read_start, reads.read_end),
            around_s=reads_s,
        )
    cost_s = median(ours_s) - median(plain_s)
    times = cost_s / median(reads_s)
    return [
        Row("empty cell in plain IPython", f"{median(plain_s) * 1e6:.0f} µs"),
        Row("the bare counter reads of a cell", f"{median(reads_s) * 1e6:.0f} µs"),
        Row(
            "what a recorded cell costs beyond plain IPython",
            f"{cost_s * 1e6:.0f} µs = {times:.2f} × the reads",
            value=times,
            limit=MOST_TIMES_THE_READS,
            target="≤ 3 × the reads",
        ),
        _measure_ipyexperiments(),
    ]


def _time_block(
    action: Callable[[], None],
    *,
    around: tuple[Callable[[], None], Callable[[], None]] | None = None,
    around_s: list[float] | None = None,
) -> list[float]:
    """Seconds of each run of ``action``; those of ``around`` go to ``around_s``.

    The first run after a change of sides is not counted: it finds cold caches.
    """
    seconds = []
    for index in range(_BLOCK + 1):
        times = [perf_counter()]
        if around:
            around[0]()
        times.append(perf_counter())
        action()
        times.append(perf_counter())
        if around:
            around[1]()
        times.append(perf_counter())
        if index:
            seconds.append(times[2] - times[1])
            if around_s is not None:
                around_s.append(times[1] - times[0] + times[3] - times[2])
    return seconds


def _measure_ipyexperiments() -> Row:
    """The same cell under ipyexperiments, in a process of its own."""
    what = "the same beside ipyexperiments"
    if importlib.util.find_spec("ipyexperiments") is None:
        return Row(what, "not installed here")
    answer = subprocess.run(
        [sys.executable, "-m", "tests.bench.cell", "--ipyexperiments"],
        capture_output=True,
        text=True,
        check=True,
    )
    version = importlib.metadata.version("ipyexperiments")
    return Row(f"{what} {version}", f"{float(answer.stdout.splitlines()[-1]) * 1e3:.0f} ms")


def _run_ipyexperiments() -> None:
    """Print what an empty cell costs beyond plain IPython there, in seconds."""
    shell = start_shell()
    kind = "Pytorch" if list_devices() else "CPU"
    with contextlib.redirect_stdout(io.StringIO()):
        plain_s = median(_time_block(lambda: run(shell, _EMPTY_CELL)))
        run(shell, f"from ipyexperiments import IPyExperiments{kind} as Experiment")
        run(shell, "experiment = Experiment()")
        observed_s = median(_time_block(lambda: run(shell, _EMPTY_CELL)))
        run(shell, "del experiment")
    print(observed_s - plain_s)


if __name__ == "__main__":
    if "--ipyexperiments" in sys.argv[1:]:
        _run_ipyexperiments()
    else:
        emit(measure)
