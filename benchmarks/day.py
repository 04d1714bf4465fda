"""What eight hours at 10 Hz take: the history in memory, and a recorded program's file.

Eight GPUs and the host are in the history, one GPU and the host in the file, with what a span costs
the program.
"""

from __future__ import annotations

import threading
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter

import gpumemwidget
from benchmarks.rows import Row, format_bytes, judge
from gpumemwidget.model.cells import CellDevice, Span
from gpumemwidget.model.devices import HOST, DeviceInfo, DeviceUse, Reading, Sample
from gpumemwidget.model.processes import ProcessInfo, RunningSpan, SpanRecord
from gpumemwidget.recording.history import History
from gpumemwidget.remote.writer.record_writer import RecordWriter
from gpumemwidget.testing import simulate_gpus

#: Bytes that the history may take, and the file.
MOST_BYTES = {"history": 50e6, "file": 150e6}
_HOURS = 8
_RATE_HZ = 10
_N_GPUS = 8
#: Those in the file.
_DEVICES = ("cuda:0", HOST)
#: What each tenth of a second of training is made of.
_NAMES = ("forward", "backward", "step")


def measure(quick: bool) -> list[Row]:
    """The size of each, and the time of a span."""
    hours = 0.05 if quick else _HOURS
    history_bytes, n_samples = _measure_history(hours)
    history = f"history of {hours:g} h at {_RATE_HZ} Hz, {_N_GPUS} GPUs and the host"
    kept = f", {n_samples} samples kept"
    what = (
        f"file of {hours:g} h at {_RATE_HZ} Hz, a GPU and the host, "
        f"{_RATE_HZ} steps a second with {len(_NAMES) - 1} spans in each"
    )
    return [
        judge(history, history_bytes, MOST_BYTES["history"], format_bytes, kept),
        judge(what, count_bytes(hours), MOST_BYTES["file"], format_bytes),
        Row("a span in a recorded program", f"{_time_span(300 if quick else 5000) * 1e6:.3g} µs"),
    ]


def _measure_history(hours: float) -> tuple[int, int]:
    """The history's bytes at the end, as the interpreter counts them, and its samples."""
    tracemalloc.start()
    before, _ = tracemalloc.get_traced_memory()
    history, lock = History(), threading.RLock()
    for sample in _make_samples(int(hours * 3600 * _RATE_HZ)):
        history.append(sample)
        if len(history) > history.capacity:  # as the monitor does
            history.thin(lock)
    after, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return after - before, len(history)


def _make_samples(count: int) -> Iterator[Sample]:
    """A day of training: every counter moves at every sample, so that nothing can be shared."""
    devices = (*(f"cuda:{index}" for index in range(_N_GPUS)), HOST)
    for index in range(count):
        allocated = 2**30 + _scatter(index)
        yield Sample(
            time_s=index / _RATE_HZ,
            readings=tuple(
                _make_reading(device, allocated + 512 * place)
                for place, device in enumerate(devices)
            ),
        )


def _make_reading(device: str, allocated: int) -> Reading:
    return Reading(
        device=device,
        allocated_bytes=allocated,
        reserved_bytes=allocated + 2**21,
        allocated_peak_bytes=allocated + 2**20,
        reserved_peak_bytes=allocated + 2**22,
        peak_is="exact",
        num_alloc_retries=allocated >> 20,
        num_ooms=allocated >> 21,
    )


def _scatter(index: int) -> int:
    """Return another value below 2**36 for each index.

    Multiplying by an odd number modulo a power of two visits every value, in no visible order, and
    costs far less than a random number.
    """
    return index * 0x9E3779B1 % 2**36


def count_bytes(hours: float) -> int:
    """Return the bytes of the file of a program that trains all the time."""
    infos = tuple(DeviceInfo(device, "NVIDIA H200", 150_754_820_096) for device in _DEVICES)
    sink = _CountingSink()
    process = ProcessInfo("1f", "node1", 4711, "python train.py", 1.8e9)
    writer = RecordWriter(sink, process)
    devices = {info.device: info for info in infos}
    for index in range(int(hours * 3600 * _RATE_HZ)):
        time_s = index / _RATE_HZ
        moved = _scatter(index)
        readings = tuple(
            Reading(device, 2**30 + moved, 2**33 + moved // 2**21 * 2**21, 2**37, 2**37, "exact")
            for device in _DEVICES
        )
        writer.write_sample(time_s, readings, devices)
        writer.write_peaks(time_s, readings, is_last=False)
        if index % (2 * _RATE_HZ) == 0:
            use = DeviceUse("cuda:0", 2**36 + moved, 2**36 - moved, 2**37, index % 100, 0)
            writer.write_use(time_s, (use,), (("cuda:0", 2**33 + moved),))
        for place, name in enumerate(_NAMES):
            start_s = round(time_s + place * 0.031, 6)
            writer.begin_span(RunningSpan(name, start_s, index))
            span = SpanRecord(name, start_s, 0.030251, "ok", _make_devices(moved), index)
            writer.end_span(span, None)
    writer.close(hours * 3600)
    return sink.n_bytes


class _CountingSink:
    """Counts the bytes of the lines."""

    def __init__(self) -> None:
        self.n_bytes = 0

    def write(self, line: bytes) -> None:
        self.n_bytes += len(line)

    def close(self) -> None:
        pass


def _make_devices(moved: int) -> tuple[CellDevice, ...]:
    allocated = Span(2**30 + moved, 2**30 + moved // 2, 2**37 + moved)
    reserved = Span(2**33 + moved, 2**33 + moved, 2**37 + moved)
    return tuple(CellDevice(name, allocated, reserved, "exact", 0, 0) for name in _DEVICES)


def _time_span(n_spans: int) -> float:
    with TemporaryDirectory() as folder, simulate_gpus() as gpus:
        gpus.touch()
        with gpumemwidget.record(Path(folder) / "a.jsonl", steps=False):
            start_s = perf_counter()
            for number in range(n_spans):
                with gpumemwidget.span("step", number):
                    pass
            return (perf_counter() - start_s) / n_spans
