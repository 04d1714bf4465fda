"""Recorded processes that the reports are tried on."""

from __future__ import annotations

import time
from dataclasses import replace

from gpumemwidget.model.cells import CellDevice, Span
from gpumemwidget.model.devices import DeviceInfo, DeviceUse, Reading, Sample
from gpumemwidget.model.processes import (
    DevicePeak,
    ProcessInfo,
    ProcessState,
    RunningSpan,
    SpanRecord,
)
from gpumemwidget.remote.reader.recordings import find_skews, share_gpus
from gpumemwidget.report.processes import report_processes
from gpumemwidget.report.render.output import Report
from tests.report import oom_examples as ooms
from tests.report.examples import HOSTILE, MIB

GIB = 1024 * MIB


def report_one() -> Report:
    """A program that has ended, with its spans and its curve."""
    state = make_state(0, peak_gib=21)
    state = replace(state, info=replace(state.info, role="program", number=None))
    samples = [
        Sample(float(second), (replace(state.readings[0], allocated_bytes=(12 + second) * GIB),))
        for second in range(8)
    ]
    return report_processes([state], samples=samples)


def report_many() -> Report:
    """Ranks of which one stands out, one is lost, one ran out of memory and one is hostile."""
    states = [make_state(rank, peak_gib=26 if rank == 2 else 20) for rank in range(4)]
    running = RunningSpan("step", 371.0, 12)
    states[1] = replace(states[1], status="lost", running=running, n_unread=3)
    states[2] = replace(
        states[2], status="failed", error="OutOfMemoryError: CUDA", ooms=(ooms.make_card(),)
    )
    hostile = replace(states[3].info, name=HOSTILE, host=HOSTILE, label=HOSTILE, number=None)
    states[3] = replace(states[3], info=hostile, status="failed", error=HOSTILE)
    return report_processes(states, share_gpus(states), find_skews(states))


def make_state(rank: int, *, peak_gib: int) -> ProcessState:
    """One of several ranks, which all ran the same program."""
    device, peak_bytes = f"cuda:{rank // 2}", peak_gib * GIB
    # Whatever zone the machine is in, it shows the same.
    began = time.mktime((2026, 11, 23, 3, 15, 0, 0, 0, -1))
    return ProcessState(
        info=ProcessInfo(f"{rank}", "node1", 4700 + rank, "python train.py", began, "rank", rank),
        status="ended" if rank == 0 else "running",
        heard_s=372.5,
        devices=(DeviceInfo(device, "NVIDIA H200", 140 * GIB, uuid=f"GPU-6a1f{rank // 2}"),),
        readings=(Reading(device, 12 * GIB, 24 * GIB),),
        uses=(DeviceUse(device, 60 * GIB, 80 * GIB, 140 * GIB),),
        own_bytes=((device, 25 * GIB),),
        peaks=(DevicePeak(device, peak_bytes, 27 * GIB, "exact", "step", 7),),
        spans=(
            _make_span("start to step", 0.0, (1, 1), device, 15 * GIB),
            _make_span("step", 30.0, (2, 5), device, 19 * GIB),
            _make_span("step", 31.1, (7, 5), device, peak_bytes),
            _make_span("epoch", 0.0, (1, 1), device, peak_bytes),
        ),
    )


def _make_span(
    name: str, start_s: float, numbers: tuple[int, int], device: str, peak_bytes: int
) -> SpanRecord:
    number, n_spans = numbers
    counter = Span(12 * GIB, 12 * GIB + 512, peak_bytes)
    reading = CellDevice(device, counter, counter, "exact", 0, 0)
    return SpanRecord(name, start_s, 1.25, "ok", (reading,), number, n_spans)
