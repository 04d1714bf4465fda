"""Traced cells for the reports' tests: one recorded on an H100, and small ones made by hand."""

from __future__ import annotations

import functools
import random
from collections.abc import Sequence
from dataclasses import replace

from gpumemwidget.model.cells import CellDevice, Span
from gpumemwidget.model.devices import HardwareNote, HardwareNoteKind
from gpumemwidget.model.traces import (
    Call,
    CellTrace,
    DeviceTrace,
    HostLine,
    HostLines,
    Layer,
    LineUse,
    NoteKind,
    Origin,
    PeakPart,
    SourceLine,
    SourceUnit,
    Timeline,
    TraceNote,
)
from tests.report.examples import HOSTILE, MIB, make_gpu_cell, make_host_cell
from tests.tracing.recordings import describe

CELL = "In [7]"
FILENAME = "/tmp/ipykernel_1/7.py"
_BEFORE_BYTES = 64 * MIB
_DURATION_S = 0.3126


def use(n_mib: float) -> LineUse:
    """The use of a line that keeps what it allocated."""
    n_bytes = int(n_mib * MIB)
    return LineUse(n_bytes, n_bytes, n_bytes, n_bytes)


@functools.cache
def make_training_device() -> DeviceTrace:
    """The training loop that was recorded, with owners, a file, and memory outside of its lines."""
    device, _ = describe("training")
    kinds = ("optimizer state", "parameter", "gradient", "freed since", "tensor")
    owners = ("optimizer", "model", "model", None, "inputs")
    told = [
        replace(part, kind=kind, owner=owner)  # type: ignore[arg-type]
        for part, kind, owner in zip(device.peak, kinds, owners, strict=False)
    ]
    path = "/home/someone/project/train/losses.py"
    lines = (
        SourceLine(11, "def cross_entropy(logits, labels):"),
        SourceLine(12, "    logits = logits.float()", use(6)),
        SourceLine(40, "def clip(parameters):"),
        SourceLine(41, "    norms = torch.stack([p.grad.norm() for p in parameters])", use(2)),
    )
    return replace(
        device,
        peak=(*told, *device.peak[len(told) :]),
        units=(*device.units, SourceUnit(path, path, "file", lines)),
    )


def make_trace(*devices: DeviceTrace, **changes: object) -> CellTrace:
    """A traced cell with these devices, whose counters say what they do."""
    traced = devices or (make_training_device(),)
    host = make_gpu_cell().devices[1]
    counted = [
        CellDevice(each.device, each.allocated, each.reserved, each.peak_is, 0, 0)
        for each in traced
    ]
    record = make_gpu_cell(
        first_line="losses = []", duration_s=_DURATION_S, devices=(*counted, host)
    )
    return replace(CellTrace(record, traced), **changes)  # type: ignore[arg-type]


def make_lines_device(
    sources: Sequence[tuple[str, LineUse | None]], device: str = "cuda:0", **changes: object
) -> DeviceTrace:
    """A cell of which each line's use is given; what it holds at its end is its peak."""
    lines = tuple(SourceLine(number, text, used) for number, (text, used) in enumerate(sources, 1))
    used = [(line, line.use) for line in lines if line.use is not None]
    biggest = sorted(line.use.at_peak_bytes for line in lines if line.use is not None)[-8:]
    moments = range(len(used) + 1)
    layers = [Layer(Origin.BEFORE_CELL, "", None, (_BEFORE_BYTES,) * len(moments))]
    parts = [PeakPart(Origin.BEFORE_CELL, None, "tensor", "x", _BEFORE_BYTES, 3)]
    rest = [0] * len(moments)
    for place, (line, amount) in enumerate(used):
        held = [amount.net_bytes if moment > place else 0 for moment in moments]
        if len(layers) <= len(biggest) and amount.at_peak_bytes >= biggest[0]:
            layers.append(Layer(Origin.LINE, line.text, line.line, tuple(held)))
        else:
            rest = list(map(sum, zip(rest, held, strict=True)))
        owner = f"t{line.line}"
        parts.append(PeakPart(Origin.LINE, line.line, "tensor", owner, amount.at_peak_bytes, 1))
    layers.insert(1, Layer(Origin.OTHER_LINES, "", None, tuple(rest)))
    allocated = tuple(map(sum, zip(*(layer.held_bytes for layer in layers), strict=True)))
    reserved = tuple(n_bytes + 16 * MIB for n_bytes in allocated)
    times_s = tuple(_DURATION_S * moment / len(moments) for moment in moments)
    timeline = Timeline(times_s, allocated, reserved, tuple(layers), moments[-1])
    made = DeviceTrace(
        device=device,
        allocated=Span(_BEFORE_BYTES, allocated[-1], allocated[-1]),
        reserved=Span(80 * MIB, reserved[-1], reserved[-1]),
        peak_is="exact",
        timeline=timeline,
        units=(SourceUnit(CELL, FILENAME, "cell", lines),),
        before=LineUse(_BEFORE_BYTES, _BEFORE_BYTES, _BEFORE_BYTES, _BEFORE_BYTES),
        unplaced=LineUse(0, 0, 0, 0),
        peak=tuple(parts),
        n_events=12,
    )
    return replace(made, **changes)  # type: ignore[arg-type]


def make_still_trace() -> CellTrace:
    """A cell that allocated nothing."""
    device = make_lines_device([("print(1)", None), ("", None), ("y = 2", None)])
    return make_trace(device)


def make_host_trace() -> CellTrace:
    """A cell on the host, read at each line, and one line of it in part."""
    sources = [
        ("rows = [load(name) for name in names]", 300 * MIB),
        ("table = pd.concat(rows)", 180 * MIB),
        ("del rows", -300 * MIB),
        ("seen = 0", 320),
        ("for row in table.itertuples():", 0),
        ("    kept.append(row)", 2 * MIB),
        ("table.describe()", 0),
    ]
    host = HostLines(
        lines=tuple(HostLine(line, text, n) for line, (text, n) in enumerate(sources, 1)),
        before_bytes=300 * MIB,
        after_bytes=503 * MIB,
        outside_bytes=MIB // 2 - 320,
        unread_bytes=20 * MIB + MIB // 2,
        notes=(TraceNote(NoteKind.LINES_UNREAD),),
    )
    device = CellDevice(
        "host",
        Span(300 * MIB, 503 * MIB, None),
        Span(700 * MIB, 1060 * MIB, 1060 * MIB),
        "exact",
        None,
        None,
    )
    return CellTrace(make_host_cell(devices=(device,)), (), host)


def make_two_gpu_trace() -> CellTrace:
    """Two devices, one of which lost the start of its history."""
    second = make_lines_device(
        [
            ('x = torch.ones(1, device="cuda:1")', use(2)),
            ("y = x.expand(400, 1024).clone()", use(512)),
        ],
        "cuda:1",
        peak_is="at least",
        notes=(TraceNote(NoteKind.EVENTS_MISSING, seconds=0.09),),
    )
    return make_trace(second, replace(make_training_device(), notes=()))


def make_untraced() -> CellTrace:
    """A device that can't be traced, and why."""
    return make_trace(
        devices=(),
        notes=(HardwareNote(HardwareNoteKind.NO_HISTORY, "cudaMallocAsync"),),
    )


def make_hostile_trace() -> CellTrace:
    """Text that tries to act, and lines that are too long."""
    long = "x = [" + ", ".join(f"torch.ones({n})" for n in range(500)) + "]"
    sources = [
        (HOSTILE, use(64)),
        ("\tif True:\t# ein Tabulator, naïve", None),
        ("\t\tz = '$x$ and $$y$$' + '%{y} &lt;'", use(12)),
        (long, use(128)),
        ("    " * 30 + "deep = 1", None),
    ]
    device = make_lines_device(sources, notes=(TraceNote(NoteKind.FAILED, HOSTILE),))
    [cell] = device.units
    call = Call((HOSTILE,), f"/x/{HOSTILE}.py", 1, use(64), (HOSTILE,))
    first = replace(cell.lines[0], calls=(call,))
    part = PeakPart(Origin.LINE, 1, "tensor", HOSTILE * 3, 64 * MIB, 1)
    units = (
        replace(cell, lines=(first, *cell.lines[1:])),
        SourceUnit(f"/x/{HOSTILE}.py", f"/x/{HOSTILE}.py", "file", (first,)),
    )
    return make_trace(replace(device, units=units, peak=(part, *device.peak[2:])))


def make_long_trace(n_lines: int = 200) -> CellTrace:
    """A cell of hundreds of lines, of which every ninth allocates."""
    chance = random.Random(4)
    sources: list[tuple[str, LineUse | None]] = []
    for number in range(1, n_lines + 1):
        size = chance.choice([1, 2, 4, 8, 16, 64])
        amount = use(size) if number % 9 == 0 else None
        sources.append((f"value_{number} = compute(value_{number - 1}, size={size})", amount))
    return make_trace(make_lines_device(sources))


def make_odd_trace() -> CellTrace:
    """A sum that the counters do not say, calls that are alike, ten files, and still GPUs."""
    modules = tuple(f"model.h.{n}.mlp" for n in range(12))
    layers = Call(("forward",), "/x/a.py", 3, use(48), modules, 12)
    calls = (
        Call(("forward",), "/x/a.py", 9, use(52), ("model",), calls=(layers,)),
        Call(("outer", "inner"), "/x/a.py", 3, use(12)),
        Call((), "", 0, use(1)),
    )
    lines = (SourceLine(1, "x = 1", use(1)),)
    files = (SourceUnit(f"/a/m{n}.py", f"/a/m{n}.py", "file", lines) for n in range(3))
    device = make_lines_device([("run()", use(65))])
    [unit] = device.units
    cell = replace(unit, lines=(replace(unit.lines[0], calls=calls),))
    allocated = replace(device.allocated, after_bytes=200 * MIB)
    device = replace(device, allocated=allocated, units=(cell, *files))
    [still] = make_still_trace().devices
    return make_trace(device, *(replace(still, device=f"cuda:{n}") for n in (3, 1, 2)))
