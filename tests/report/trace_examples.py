"""Traced cells as they are measured, for the reports' tests."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

from gpumemwidget.model.cells import CellDevice, Span
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
from tests.report.examples import GIB, HOSTILE, MIB, make_gpu_cell, make_host_cell

CELL = "In[7]"
FILENAME = "/tmp/ipykernel_1/7.py"
BEFORE = 1200 * MIB

LOOP = """\
losses = []
model.train()
for step, batch in enumerate(loader):
    inputs = batch["input_ids"].to("cuda")
    labels = batch["labels"].to("cuda")
    with torch.autocast("cuda", dtype=torch.bfloat16):
        logits = model(inputs).logits
        loss = cross_entropy(logits.view(-1, vocabulary_size), labels.view(-1))

    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm=1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    losses.append(loss.item())
    if step == 3:
        break\
"""
#: What the loop's lines hold, as the parts of a step: line, from which part to which, MiB.
_HOLDS: tuple[tuple[int, float, float, int], ...] = (
    (4, 0.00, 1.00, 4),
    (5, 0.04, 1.00, 4),
    (7, 0.08, 0.62, 1450),
    (8, 0.34, 0.48, 640),
    (10, 0.46, 0.98, 480),
    (11, 0.70, 0.76, 96),
)
_N_STEPS = 4
_DURATION_S = 4.56


def _use(allocated: float, n_allocs: int, net: float, at_peak: float, highest: float) -> LineUse:
    return LineUse(
        int(allocated * MIB), n_allocs, int(net * MIB), int(at_peak * MIB), int(highest * MIB)
    )


def make_timeline(
    layers: Sequence[tuple[Origin, str, str | None, int | None, Callable[[float], float]]],
    *,
    n: int = 900,
    duration_s: float = _DURATION_S,
    reserved: Callable[[float], float] | None = None,
) -> Timeline:
    """A timeline whose layers are functions of the part of the time, in MiB."""
    times = [duration_s * index / (n - 1) for index in range(n)]
    parts = [index / (n - 1) for index in range(n)]
    drawn = tuple(
        Layer(origin, text, unit, line, tuple(int(hold(part) * MIB) for part in parts))
        for origin, text, unit, line, hold in layers
    )
    allocated = tuple(map(sum, zip(*(layer.held_bytes for layer in drawn), strict=True)))
    most = 0
    held = []
    for part, n_bytes in zip(parts, allocated, strict=True):
        most = max(most, n_bytes + 64 * MIB)
        held.append(most if reserved is None else int(reserved(part) * MIB))
    peak = max(range(n), key=allocated.__getitem__)
    return Timeline(tuple(times), allocated, tuple(held), drawn, peak, 20 * n)


def _hold_in_steps(start: float, end: float, most: int) -> Callable[[float], float]:
    """Rises fast, stays and falls in each step of the loop."""

    def hold(part: float) -> float:
        where = part * _N_STEPS % 1.0 if part < 1 else 1.0
        if not start <= where < end:
            return 0
        rise = min(1.0, (where - start) / max(0.6 * (end - start), 1e-9))
        # A staircase of the model's layers.
        return most * (int(rise * 12) + 1) / 13

    return hold


def _stay(n_mib: float) -> Callable[[float], float]:
    return lambda _: n_mib


def _make_model_calls() -> tuple[Call, ...]:
    linear = "/usr/lib/python3/site-packages/torch/nn/modules/linear.py"
    module = "/usr/lib/python3/site-packages/torch/nn/modules/module.py"
    gpt = "/usr/lib/python3/site-packages/transformers/models/gpt2/modeling_gpt2.py"

    def block(number: int) -> Call:
        mlp = Call(
            "forward",
            linear,
            134,
            _use(4 * 44, 48, 0, 40, 44),
            f"transformer.h.{number}.mlp.c_fc",
        )
        act = Call("forward", gpt, 341, _use(4 * 30, 24, 0, 26, 30), f"transformer.h.{number}.mlp")
        attention = Call(
            "scaled_dot_product_attention",
            gpt,
            58,
            _use(4 * 28, 20, 0, 24, 28),
            f"transformer.h.{number}.attn",
        )
        return Call(
            "_call_impl",
            module,
            1775,
            _use(4 * 102, 92, 0, 90, 102),
            f"transformer.h.{number}",
            (mlp, act, attention),
        )

    blocks = tuple(block(number) for number in range(12))
    head = Call("forward", linear, 134, _use(4 * 226, 4, 0, 226, 226), "lm_head")
    inner = Call("forward", gpt, 1060, _use(4 * 1224, 1104, 0, 1080, 1224), "transformer", blocks)
    forward = Call("forward", gpt, 1190, _use(4 * 1450, 1108, 0, 1306, 1450), None, (inner, head))
    wrapped = Call("_call_impl", module, 1775, forward.use, None, (forward,))
    return (Call("_wrapped_call_impl", module, 1766, forward.use, None, (wrapped,)),)


def make_training_device(**changes: object) -> DeviceTrace:
    """A training loop of sixteen lines on one GPU."""
    lines = LOOP.split("\n")
    layers: list[tuple[str, str, str | None, int | None, Callable[[float], float]]] = [
        (Origin.BEFORE_CELL, "", None, None, _stay(BEFORE / MIB)),
        (Origin.OUTSIDE_LINES, "", None, None, lambda part: 33 if part > 0.05 else 0),
        (Origin.OTHER_LINES, "", None, None, _stay(8)),
    ]
    layers.append((Origin.LINE, lines[11], CELL, 12, lambda part: 950 if part > 0.24 else 0))
    layers.extend(
        (Origin.LINE, lines[line - 1], CELL, line, _hold_in_steps(start, end, most))
        for line, start, end, most in sorted(_HOLDS[2:], key=lambda hold: -hold[3])
    )
    timeline = make_timeline(layers)
    peak = {
        (layer.origin, layer.line): layer.held_bytes[timeline.peak] for layer in timeline.layers
    }
    highest = {line: max(layer.held_bytes) for layer in timeline.layers for line in [layer.line]}
    end = {layer.line: layer.held_bytes[-1] for layer in timeline.layers}
    uses: dict[int, LineUse] = {
        4: LineUse(16 * MIB, 4, 4 * MIB, 4 * MIB, 4 * MIB),
        5: LineUse(16 * MIB, 4, 4 * MIB, 4 * MIB, 4 * MIB),
    }
    n_allocs = {7: 4432, 8: 24, 10: 2960, 11: 600, 12: 296}
    for line, count in n_allocs.items():
        times = 1 if line == 12 else _N_STEPS
        uses[line] = LineUse(
            times * highest[line], count, end[line], peak[Origin.LINE, line], highest[line]
        )
    calls = {
        7: _make_model_calls(),
        8: (Call("cross_entropy", "/x/torch/nn/functional.py", 3504, uses[8]),),
        10: (Call("backward", "/x/torch/_tensor.py", 647, uses[10]),),
        12: (Call("step", "/x/torch/optim/adamw.py", 220, uses[12]),),
    }
    unplaced = LineUse(33 * MIB, 2, 33 * MIB, 33 * MIB, 33 * MIB)
    cell = SourceUnit(
        CELL,
        FILENAME,
        "cell",
        tuple(
            SourceLine(number, text, uses.get(number), calls.get(number, ()))
            for number, text in enumerate(lines, 1)
        ),
    )
    earlier = SourceUnit(
        "In[3]",
        "/tmp/ipykernel_1/3.py",
        "earlier cell",
        (
            SourceLine(4, "def collate(rows):"),
            SourceLine(5, '    ids = torch.stack([row["ids"] for row in rows])', uses[4]),
            SourceLine(6, '    return {"input_ids": ids, "labels": ids.clone()}', uses[5]),
        ),
    )
    file = SourceUnit(
        "/home/someone/project/train/losses.py",
        "/home/someone/project/train/losses.py",
        "file",
        (
            SourceLine(11, "def cross_entropy(logits, labels):"),
            SourceLine(12, "    logits = logits.float()", uses[8]),
            SourceLine(13, "    return F.cross_entropy(logits, labels)"),
            SourceLine(40, "def clip(parameters):"),
            SourceLine(
                41, "    norms = torch.stack([p.grad.norm() for p in parameters])", uses[11]
            ),
        ),
    )
    parts = [
        PeakPart(Origin.LINE, CELL, 7, "saved for backward", "loss.grad_fn", 0, 402),
        PeakPart(Origin.BEFORE_CELL, None, None, "parameter", "model", 475 * MIB, 148),
        PeakPart(Origin.BEFORE_CELL, None, None, "optimizer state", "optimizer", 725 * MIB, 296),
        PeakPart(Origin.LINE, CELL, 12, "optimizer state", "optimizer", 0, 296),
        PeakPart(Origin.LINE, CELL, 8, "freed since", None, 0, 6),
        PeakPart(Origin.LINE, CELL, 10, "gradient", "model", 0, 60),
        PeakPart(Origin.OUTSIDE_LINES, None, None, "cuBLAS workspace", None, 33 * MIB, 2),
        PeakPart(Origin.LINE, CELL, 4, "tensor", "inputs", 4 * MIB, 1),
        PeakPart(Origin.LINE, CELL, 5, "tensor", "labels", 4 * MIB, 1),
    ]
    peak_parts = tuple(
        sorted(
            (
                PeakPart(
                    each.origin,
                    each.unit,
                    each.line,
                    each.kind,
                    each.owner,
                    each.n_bytes or peak[each.origin, each.line],
                    each.n_blocks,
                )
                for each in parts
                if each.n_bytes or peak[each.origin, each.line]
            ),
            key=lambda each: -each.n_bytes,
        )
    )
    peak_bytes = timeline.allocated_bytes[timeline.peak]
    after_bytes = timeline.allocated_bytes[-1]
    values: dict[str, object] = {
        "device": "cuda:0",
        "allocated": Span(BEFORE, after_bytes, peak_bytes),
        "reserved": Span(2 * GIB, timeline.reserved_bytes[-1], timeline.reserved_bytes[-1]),
        "peak_is": "exact",
        "timeline": timeline,
        "units": (cell, file, earlier),
        "before": LineUse(BEFORE, 592, BEFORE, BEFORE, BEFORE),
        "unplaced": unplaced,
        "peak": peak_parts,
        "n_events": 18_432,
        "notes": (TraceNote(NoteKind.BACKWARD_INFERRED, n_bytes=480 * MIB),),
    }
    return DeviceTrace(**{**values, **changes})  # type: ignore[arg-type]


def make_trace(*devices: DeviceTrace, **changes: object) -> CellTrace:
    """A traced cell with these devices, whose counters say what they do."""
    traced = devices or (make_training_device(),)
    others = [each for each in make_gpu_cell().devices if each.device == "host"]
    record = make_gpu_cell(
        first_line="losses = []",
        duration_s=_DURATION_S,
        devices=(
            *(
                CellDevice(each.device, each.allocated, each.reserved, each.peak_is, 0, 0)
                for each in traced
            ),
            *(each for each in others if all(one.device != "host" for one in traced)),
        ),
    )
    values: dict[str, object] = {"record": record, "devices": traced}
    return CellTrace(**{**values, **changes})  # type: ignore[arg-type]


def make_lines_device(
    sources: Sequence[tuple[str, LineUse | None]], device: str = "cuda:0", **changes: object
) -> DeviceTrace:
    """A cell of which each line's use is given; what it holds at its end is its peak."""
    lines = tuple(SourceLine(number, text, use) for number, (text, use) in enumerate(sources, 1))
    uses = [(line, line.use) for line in lines if line.use is not None]
    layers = [
        (Origin.LINE, line.text, CELL, line.line, _begin_at(place / (len(uses) + 1), use))
        for place, (line, use) in enumerate(uses, 1)
    ]
    biggest = sorted(uses, key=lambda each: -each[1].at_peak_bytes)[:8]
    layers = [layer for layer in layers if any(layer[3] == line.line for line, _ in biggest)]
    rest = [use.net_bytes / MIB for line, use in uses if all(line is not one for one, _ in biggest)]
    if rest:
        layers.append(
            (Origin.OTHER_LINES, "", None, None, lambda part: sum(rest[: int(part * len(rest))]))
        )
    layers.insert(0, (Origin.BEFORE_CELL, "", None, None, _stay(64)))
    timeline = make_timeline(layers, n=40)
    peak_bytes = timeline.allocated_bytes[timeline.peak]
    values: dict[str, object] = {
        "device": device,
        "allocated": Span(64 * MIB, timeline.allocated_bytes[-1], peak_bytes),
        "reserved": Span(80 * MIB, timeline.reserved_bytes[-1], timeline.reserved_bytes[-1]),
        "peak_is": "exact",
        "timeline": timeline,
        "units": (SourceUnit(CELL, FILENAME, "cell", lines),),
        "before": LineUse(64 * MIB, 3, 64 * MIB, 64 * MIB, 64 * MIB),
        "unplaced": LineUse(0, 0, 0, 0, 0),
        "peak": (
            PeakPart(Origin.BEFORE_CELL, None, None, "tensor", "x", 64 * MIB, 3),
            *(
                PeakPart(
                    Origin.LINE,
                    CELL,
                    line.line,
                    "tensor",
                    f"t{line.line}",
                    use.at_peak_bytes,
                    1,
                )
                for line, use in uses
            ),
        ),
        "n_events": 12,
    }
    return DeviceTrace(**{**values, **changes})  # type: ignore[arg-type]


def _begin_at(start: float, use: LineUse) -> Callable[[float], float]:
    return lambda part: use.net_bytes / MIB if part >= start else 0


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
        name=CELL,
        filename=FILENAME,
        kind="cell",
        lines=tuple(HostLine(line, text, n) for line, (text, n) in enumerate(sources, 1)),
        before_bytes=300 * MIB,
        after_bytes=503 * MIB,
        outside_bytes=MIB // 2 - 320,
        unread_bytes=20 * MIB + MIB // 2,
        unread_lines=(5, 6),
        n_readings=60,
        notes=(TraceNote(NoteKind.OTHER_THREADS),),
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
            ('x = torch.ones(1, device="cuda:1")', _use(2, 1, 2, 2, 2)),
            ("y = x.expand(400, 1024).clone()", _use(512, 1, 512, 512, 512)),
        ],
        "cuda:1",
        peak_is="at least",
        complete_since_s=0.9,
        notes=(TraceNote(NoteKind.EVENTS_MISSING, seconds=0.9),),
    )
    return make_trace(second, make_training_device(notes=()))


def make_untraced() -> CellTrace:
    """A device that can't be traced, and why."""
    return make_trace(
        devices=(),
        notes=("cuda:0: the allocator cudaMallocAsync keeps no history of single blocks.",),
    )


def make_hostile_trace() -> CellTrace:
    """Text that tries to act, and lines that are too long."""
    long = "x = [" + ", ".join(f"torch.ones({n})" for n in range(500)) + "]"
    sources = [
        (HOSTILE, _use(64, 1, 64, 64, 64)),
        ("\tif True:\t# ein Tabulator, naïve", None),
        ("\t\tz = '$x$ and $$y$$' + '%{y} &lt;'", _use(12, 1, 12, 12, 12)),
        (long, _use(128, 500, 128, 128, 128)),
        ("    " * 30 + "deep = 1", None),
    ]
    device = make_lines_device(sources, notes=(TraceNote(NoteKind.MESSAGE, HOSTILE),))
    call = Call(HOSTILE, f"/x/{HOSTILE}.py", 1, _use(64, 1, 64, 64, 64), HOSTILE)
    cell = device.units[0]
    lines = (SourceLine(1, HOSTILE, cell.lines[0].use, (call,)), *cell.lines[1:])
    part = PeakPart(Origin.LINE, CELL, 1, "tensor", HOSTILE * 3, 64 * MIB, 1)
    units = (
        SourceUnit(CELL, FILENAME, "cell", lines),
        SourceUnit(f"/x/{HOSTILE}.py", f"/x/{HOSTILE}.py", "file", (lines[0],)),
    )
    return make_trace(
        make_lines_device(
            sources,
            units=units,
            notes=(TraceNote(NoteKind.MESSAGE, HOSTILE),),
            peak=(part, *device.peak[2:]),
        )
    )


def make_long_trace(n_lines: int = 200) -> CellTrace:
    """A cell of hundreds of lines, of which every ninth allocates."""
    chance = random.Random(4)
    sources: list[tuple[str, LineUse | None]] = []
    for number in range(1, n_lines + 1):
        size = chance.choice([1, 2, 4, 8, 16, 64])
        use = _use(size, 1, size, size, size) if number % 9 == 0 else None
        sources.append((f"value_{number} = compute(value_{number - 1}, size={size})", use))
    return make_trace(make_lines_device(sources))
