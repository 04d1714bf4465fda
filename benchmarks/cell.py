"""What a recorded cell costs beyond plain IPython, beside the reads that it can't do without.

Blocks of empty cells take turns: plain, with the extension, and with nothing but the counter reads
in the same two events, so that whatever else the machine does falls on all three.
"""

from __future__ import annotations

import ctypes
import os
from statistics import median
from unittest.mock import patch

import torch

import gpumemwidget
from benchmarks.machine import list_devices
from benchmarks.rows import Row, judge
from benchmarks.shell import run, start_shell, time_cells

#: Beyond this many times the bare reads, recording is not "at a cost that nobody notices".
MOST_TIMES_THE_READS = 3.0
#: What asking the driver may cost, in microseconds for a cell and GPU that this process is on.
MOST_ASKING_US = 40


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

    def read_start(self, _info: object) -> None:
        """What must be read before the cell."""
        self._read()
        os.write(self._clear_refs, b"5")
        for device in self._devices:
            torch.cuda.reset_peak_memory_stats(device)

    def read_end(self, _result: object) -> None:
        """What must be read after it."""
        self._read()

    def _read(self) -> None:
        self._mallinfo2()
        status = os.pread(self._status, 4096, 0)
        _find_number(status, b"VmHWM:")
        _find_number(status, b"VmRSS:")
        for device in self._devices:
            torch.cuda.memory_stats_as_nested_dict(device)


def _find_number(status: bytes, key: bytes) -> int:
    start = status.index(key) + len(key)
    return int(status[start : status.index(b"kB", start)])


def measure(quick: bool) -> list[Row]:
    """The cost of a recorded cell, in seconds and in bare reads; what of it the driver costs."""
    shell = start_shell()
    run(shell, "import torch")
    for device in list_devices():
        torch.zeros(1, device=device)
    reads = BareReads()
    plain_s: list[float] = []
    read_s: list[float] = []
    recorded_s: list[float] = []
    asked_s: list[float] = []
    unasked_s: list[float] = []
    for _ in range(2 if quick else 40):
        plain_s += time_cells(shell)
        shell.events.register("pre_run_cell", reads.read_start)
        shell.events.register("post_run_cell", reads.read_end)
        read_s += time_cells(shell)
        shell.events.unregister("pre_run_cell", reads.read_start)
        shell.events.unregister("post_run_cell", reads.read_end)
        run(shell, "%load_ext gpumemwidget")
        recorded_s += time_cells(shell)
        hardware = gpumemwidget.monitor().hardware
        n_gpus = len(hardware.read_own_uses())
        if n_gpus:
            allocating = f"x = torch.zeros(1, device='{list_devices()[0]}')"
            asked_s += time_cells(shell, allocating)
            with patch.object(hardware, "read_own_uses", lambda: ()):
                unasked_s += time_cells(shell, allocating)
        run(shell, "%unload_ext gpumemwidget")
    reads_cost_s = median(read_s) - median(plain_s)
    cost_s = median(recorded_s) - median(plain_s)
    asking = "asking the driver what this process has of each GPU, for a cell that allocates"
    return [
        Row("empty cell in plain IPython", f"{median(plain_s) * 1e6:.0f} µs"),
        Row("the bare counter reads of a cell", f"{reads_cost_s * 1e6:.0f} µs"),
        judge(
            f"what a recorded cell costs beyond plain IPython ({cost_s * 1e6:.0f} µs)",
            cost_s / reads_cost_s,
            MOST_TIMES_THE_READS,
            "{:.3g} × the reads".format,
        ),
        judge(
            asking,
            (median(asked_s) - median(unasked_s)) / n_gpus * 1e6,
            MOST_ASKING_US,
            "{:.0f} µs".format,
        )
        if n_gpus
        else Row(asking, "no GPU here"),
    ]
