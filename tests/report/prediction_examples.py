"""Predictions for the reports' tests: a small language model's step, made by hand."""

from __future__ import annotations

from dataclasses import replace

from gpumemwidget.model.cells import CellRecord, Span
from gpumemwidget.model.predictions import (
    Bytes,
    PeakPlace,
    PredictedOwner,
    PredictedRemedy,
    PredictionDevice,
    PredictionRecord,
    SourcePlace,
)
from tests.report.examples import HOSTILE, MIB, make_gpu_cell
from tests.report.trace_examples import make_lines_device, use

_T4 = PredictionDevice("T4", 14913 * MIB, 14313 * MIB)
_SMALL = PredictionDevice("2.00 GiB", 2048 * MIB, 1448 * MIB)
_BACKWARD = SourcePlace("", 4)
_PEAK = PeakPlace("aten::_log_softmax_backward_data", "backward", "", _BACKWARD, 2)
_OWNERS = (
    PredictedOwner(
        "saved for backward", "_log_softmax", "forward", SourcePlace("", 3), 600 * MIB, 1
    ),
    PredictedOwner("saved for backward", "head", "forward", SourcePlace("", 2), 480 * MIB, 2),
    PredictedOwner(
        "saved for backward",
        "layers.0.attention",
        "forward",
        SourcePlace("/home/someone/project/train/model.py", 17),
        120 * MIB,
        9,
    ),
    PredictedOwner("temporary", "nll_loss_backward", "backward", _BACKWARD, 256 * MIB, 1),
    PredictedOwner(
        "optimizer state", "model.embedding.weight", "optimizer", SourcePlace("", 5), 125 * MIB, 2
    ),
    PredictedOwner("parameter", "model.embedding.weight", None, None, 62 * MIB, 1),
    PredictedOwner("workspace", "head", "backward", None, 8 * MIB, 1),
    PredictedOwner("tensor", "words", None, None, 65536, 1),
)
REMEDIES = (
    PredictedRemedy(
        "bfloat16 autocast",
        'with torch.autocast("cuda", torch.bfloat16):',
        512 * MIB,
        1212 * MIB,
        1139 * MIB,
        fits=True,
    ),
    PredictedRemedy(
        "checkpointing of model.layers",
        "for block in model.layers: block.forward = functools.partial(checkpoint, block.forward)",
        256 * MIB,
        1468 * MIB,
        1395 * MIB,
        fits=None,
    ),
)
_ASSUMPTIONS = ("line 7 of the cell: a value that is read from a tensor was taken to be 1.0",)


def make_prediction(**changes: object) -> PredictionRecord:
    """A step of three lines that fits on a T4, at its second run."""
    device = make_lines_device(
        [
            ("optimizer.zero_grad()", None),
            ("scores = model(words)", use(900)),
            ("loss = cross_entropy(scores.flatten(0, 1), words.flatten())", use(600)),
            ("loss.backward()", use(87)),
            ("optimizer.step()", None),
        ],
        "T4",
    )
    timeline = replace(device.timeline, unit="operators", times_s=(0.0, 12.0, 40.0, 64.0))
    record = PredictionRecord(
        device=_T4,
        allocated=Bytes(1651 * MIB, 1651 * MIB, 1660 * MIB),
        reserved=Bytes(1704 * MIB, 1724 * MIB, 1744 * MIB),
        fits=True,
        peak=_PEAK,
        owners=_OWNERS,
        trace=replace(device, timeline=timeline),
        runs=((1526 * MIB, 1600 * MIB), (1651 * MIB, 1724 * MIB), (1651 * MIB, 1724 * MIB)),
        assumptions=_ASSUMPTIONS,
    )
    return replace(record, **changes)  # type: ignore[arg-type]


def make_large_prediction() -> PredictionRecord:
    """The same step where it does not fit, with what would need less."""
    return make_prediction(
        device=_SMALL,
        fits=False,
        full_at=replace(_PEAK, line=SourcePlace("", 3), phase="forward", module="head", run=1),
        remedies=REMEDIES,
        untried=("fused optimizer: The step can't be predicted.",),
    )


def make_close_prediction() -> PredictionRecord:
    """One on a device in use, about as large as what is free of it, of one run and a lost line."""
    device = PredictionDevice("cuda:0", 80 << 30, 1730 * MIB, 300 * MIB, 320 * MIB)
    peak = replace(_PEAK, line=None, run=1)
    return make_prediction(device=device, fits=None, peak=peak, runs=((1651 * MIB, 1724 * MIB),))


def make_prediction_without_device() -> PredictionRecord:
    """One on a machine without a GPU, whose paths try to act."""
    device = PredictionDevice("cuda:0", None, None)
    place = SourcePlace(f"/x/{HOSTILE}.py", 3)
    owner = replace(_OWNERS[0], path=HOSTILE, line=place)
    peak = replace(_PEAK, line=place, module=HOSTILE)
    return make_prediction(
        device=device, fits=None, owners=(owner, *_OWNERS[1:]), peak=peak, assumptions=(HOSTILE,)
    )


def make_sizes(room_mib: int = 14313) -> dict[int, PredictionRecord]:
    """What sizes of a batch need: about 107 MiB each, beside what stands."""
    device = replace(_T4, available_bytes=room_mib * MIB)
    sizes = {}
    for size in (16, 128, 131, 132):
        n_mib = 200 + 107 * size
        reserved = Bytes((n_mib - 20) * MIB, n_mib * MIB, (n_mib + 20) * MIB)
        fits = None if abs(n_mib - room_mib) < 20 else n_mib < room_mib
        sizes[size] = make_prediction(device=device, reserved=reserved, fits=fits)
    return sizes


def make_predicted_cell(**changes: object) -> CellRecord:
    """A cell that ran after it was predicted."""
    gpu, host = make_gpu_cell().devices
    span = Span(gpu.allocated.before_bytes, gpu.allocated.after_bytes, 3400 * MIB)
    predicted = replace(gpu, allocated=span, predicted_peak_bytes=3300 * MIB)
    return make_gpu_cell(**{"devices": (predicted, host), **changes})
