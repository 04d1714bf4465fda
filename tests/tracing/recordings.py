"""The cells that were recorded on an H100, played and described."""

from __future__ import annotations

import json
from pathlib import Path

from gpumemwidget.model.cells import CellDevice, Span
from gpumemwidget.model.devices import Reading
from gpumemwidget.model.traces import AllocatorTrace, DeviceTrace
from gpumemwidget.tracing.device_trace import describe_device
from gpumemwidget.tracing.sources import Source, Sources
from tools.recordings import RecordingPlayer, ReplayBackend, load_recording

DATA = Path(__file__).parent.parent / "data" / "h100-traces"
CELLS = json.loads((DATA / "cells.json").read_text(encoding="utf-8"))


def play(name: str) -> tuple[AllocatorTrace, CellDevice]:
    """The trace, and the cell as the counters have it."""
    player = RecordingPlayer(load_recording(DATA / f"{name}.json.gz"))
    backend = ReplayBackend(player)
    assert backend.start_trace(n_events=10_000) == ()
    (start,) = _pick(backend.start_span())
    player.advance(1)
    (end,) = _pick(backend.read_exact())
    (trace,) = backend.end_trace()
    cell = CellDevice(
        device=trace.device,
        allocated=Span(start.allocated_bytes, end.allocated_bytes, end.allocated_peak_bytes),
        reserved=Span(start.reserved_bytes, end.reserved_bytes, end.reserved_peak_bytes),
        peak_is=end.peak_is,
        num_alloc_retries=None,
        num_ooms=None,
    )
    return trace, cell


def _pick(readings: tuple[Reading, ...]) -> list[Reading]:
    return [each for each in readings if each.device == "cuda:0"]


def describe(name: str) -> tuple[DeviceTrace, CellDevice]:
    """What is told of a recording."""
    about = CELLS[name]
    texts = {about["before_filename"]: about["before"], about["filename"]: about["source"]}
    sources = Sources(
        Source("In [2]", about["filename"], "cell", about["source"]),
        cells={about["before_filename"]: 1},
        read=lambda filename: texts.get(filename, "").splitlines(keepends=True),
    )
    trace, cell = play(name)
    found = describe_device(trace, sources=sources, start_us=trace.start_us, cell=cell)
    return found, cell
