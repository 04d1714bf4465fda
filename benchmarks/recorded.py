"""What a recorded program's file takes in a working day, and what a span costs it."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter

import gpumemwidget
from benchmarks.rows import Row, format_bytes, judge
from gpumemwidget.model.cells import CellDevice, Span
from gpumemwidget.model.devices import HOST, DeviceInfo, DeviceUse, Reading
from gpumemwidget.model.processes import ProcessInfo, RunningSpan, SpanRecord
from gpumemwidget.remote.writer.record_writer import RecordWriter
from gpumemwidget.testing import simulate_gpus

#: Bytes that the file may take.
MOST_BYTES = 150e6
_HOURS = 8
_RATE_HZ = 10
_DEVICES = ("cuda:0", HOST)
#: What each tenth of a second of training is made of.
_NAMES = ("forward", "backward", "step")


def measure(quick: bool) -> list[Row]:
    """The size of the file, and the time of a span."""
    hours = 0.05 if quick else _HOURS
    what = (
        f"file of {hours:g} h at {_RATE_HZ} Hz, a GPU and the host, "
        f"{_RATE_HZ} steps a second with {len(_NAMES) - 1} spans in each"
    )
    return [
        judge(what, count_bytes(hours), MOST_BYTES, format_bytes),
        Row("a span in a recorded program", f"{_time_span(300 if quick else 5000) * 1e6:.3g} µs"),
    ]


def count_bytes(hours: float) -> int:
    """Return the bytes of the file of a program that trains all the time."""
    infos = tuple(DeviceInfo(device, "NVIDIA H200", 150_754_820_096) for device in _DEVICES)
    sink = _CountingSink()
    process = ProcessInfo("1f", "node1", 4711, "python train.py", 1.8e9)
    writer = RecordWriter(sink, process)
    devices = {info.device: info for info in infos}
    for index in range(int(hours * 3600 * _RATE_HZ)):
        time_s = index / _RATE_HZ
        # Every value in no visible order, as in the history's row.
        moved = index * 0x9E3779B1 % 2**36
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
