"""What sampling at 10 Hz costs a busy cell: a loop of small torch operations, with and without.

Blocks with and without the sampler take turns within one cell, in the order A B B A, so that a
machine that grows slower or faster favours neither. The samples are counted, so that a sampler that
does not run can't pass for a cheap one.
"""

from __future__ import annotations

from collections.abc import Callable
from statistics import median
from time import perf_counter

import torch

import gpumemwidget
from benchmarks.machine import list_devices
from benchmarks.rows import Row, judge
from benchmarks.shell import run, start_shell

__all__ = ["SmallOperations", "measure_pairs"]

#: The share of a busy cell's time that may be lost.
MOST_SLOWDOWN = 0.01
_BLOCK_S = 0.5


class SmallOperations:
    """A training loop's worst case for an observer: nothing but tiny operations from Python."""

    def __init__(self, device: str) -> None:
        self.device = device
        self._kept: list[torch.Tensor] = []
        self._steps = 2000
        # The first operations of a process take far longer than those that follow.
        self.time_block()
        # So many steps that a block holds several samples.
        self._steps = round(self._steps * _BLOCK_S / min(self.time_block() for _ in range(5)))

    def time_block(self) -> float:
        """Seconds for one block."""
        self._kept.clear()
        start_s = perf_counter()
        for step in range(self._steps):
            value = torch.ones(16, device=self.device)
            value.add_(1).mul_(2)
            if step % 64 == 0:
                self._kept.append(torch.empty(4096, device=self.device))
        if self.device != "cpu":
            torch.cuda.synchronize(self.device)
        return perf_counter() - start_s


def measure(quick: bool) -> list[Row]:
    """The slow-down by the sampler alone, with nothing that draws."""
    shell = start_shell()
    run(shell, "%load_ext gpumemwidget")
    devices = list_devices()
    work = SmallOperations(devices[0] if devices else "cpu")
    found: list[Row] = []
    shell.user_ns["measure"] = lambda: found.append(_measure_in_cell(work, quick=quick))
    run(shell, "measure()")
    run(shell, "%unload_ext gpumemwidget")
    return found


def _measure_in_cell(work: SmallOperations, *, quick: bool) -> Row:
    monitor = gpumemwidget.monitor()
    sampled = 0
    sampling_s = 0.0

    def time_sampled() -> float:
        nonlocal sampled, sampling_s
        before = len(monitor.history)
        monitor.want_samples(work)
        took_s = work.time_block()
        monitor.unwant_samples(work)
        sampled += len(monitor.history) - before
        sampling_s += took_s
        return took_s

    slowdown = measure_pairs(work.time_block, time_sampled, pairs=2 if quick else 60)
    rate = f" at {sampled / sampling_s:.1f} Hz"
    what = "slow-down of a busy cell by the sampler alone"
    return judge(what, slowdown, MOST_SLOWDOWN, "{:+.1%}".format, rate)


def measure_pairs(
    plain: Callable[[], float], observed: Callable[[], float], *, pairs: int
) -> float:
    """The median slow-down over pairs of neighbouring blocks, as a share."""
    ratios = []
    for index in range(pairs):
        if index % 2:
            observed_s, plain_s = observed(), plain()
        else:
            plain_s, observed_s = plain(), observed()
        ratios.append(observed_s / plain_s)
    return median(ratios) - 1
