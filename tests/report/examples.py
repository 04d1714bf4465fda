"""Records as a real session makes them, for the reports' tests."""

from __future__ import annotations

import math
from dataclasses import replace

from gpumemwidget.model.cells import CellDevice, CellRecord, Span
from gpumemwidget.model.devices import DeviceInfo, DeviceState, DeviceUse, Limit, Reading, Sample
from gpumemwidget.model.leaks import Leak, LeakHolder, LeakLine
from gpumemwidget.model.ownership import DeviceBytes, JointRelease, MemoryKind, Owned, Variable
from gpumemwidget.model.releases import (
    Reason,
    ReasonKind,
    ReleaseMove,
    ReleasePlan,
    ReleaseReport,
    ReleaseRequest,
    ReleaseStay,
    ReleaseStep,
    ReleaseStepKind,
    RestorePlan,
    RestoreReport,
    StepResult,
    Stop,
    StopKind,
)

KIB, MIB, GIB = 1024, 1024**2, 1024**3

#: What a hostile notebook puts into a first line.
HOSTILE = (
    "<script>alert('x')</script> `&amp;` \"$x$\" \x1b[31mred\x07\x00 "
    "\u202egnp.exe\u2066 \ud800 </code></td></table>"
)


def on_gpu(n_mib: int) -> DeviceBytes:
    """Mebibytes on the first GPU."""
    return DeviceBytes((("cuda:0", n_mib * MIB),))


def own(
    steps: tuple[str, ...],
    n_bytes: int = MIB,
    kind: MemoryKind = "tensor",
    *rows: str,
    device: str = "cuda:0",
    **more: object,
) -> Owned:
    """What the path of these steps leads to; its first step is its row."""
    values: dict[str, object] = {"root": "name", "rows": rows or steps[:1], **more}
    return Owned(device, n_bytes, kind, steps, **values)  # type: ignore[arg-type]


def make_leak(**changes: object) -> Leak:
    """A loss that is kept with its graph in each run of the cell of ``make_gpu_cell``."""
    leak = Leak(
        device="cuda:0",
        unit="run",
        each_bytes=37 * MIB,
        n_seen=3,
        holders=(
            LeakHolder(
                path='history[…]["loss"]\'s graph',
                each_bytes=37 * MIB,
                n_storages=1,
                tensor="float32[64, 151, 1000]",
                in_graph=True,
                in_model=False,
                row="history",
            ),
        ),
        cell="In [7]",
        line=LeakLine("In [7]", 7, 'history.append({"loss": loss})'),
        n_left=310,
    )
    return replace(leak, **changes)  # type: ignore[arg-type]


def make_gpu_cell(**changes: object) -> CellRecord:
    """A training step on one GPU: 512 MiB more stay, 3.40 GiB at the peak."""
    gpu = CellDevice(
        "cuda:0",
        Span(int(1.2 * GIB), int(1.7 * GIB), int(3.4 * GIB)),
        Span(2 * GIB, 4 * GIB, 4 * GIB),
        "exact",
        0,
        0,
    )
    host = _make_host(Span(812 * MIB, 824 * MIB, None), Span(1536 * MIB, 1548 * MIB, 1600 * MIB))
    record = CellRecord(
        execution_count=7,
        cell_id="c7",
        first_line="loss = train_step(model, batch)",
        started_at=1_790_000_000.0,
        start_s=100.0,
        duration_s=4.56,
        status="ok",
        devices=(gpu, host),
    )
    return replace(record, **changes)  # type: ignore[arg-type]


def _make_host(allocated: Span, resident: Span) -> CellDevice:
    return CellDevice("host", allocated, resident, "exact", None, None)


def make_samples(record: CellRecord, n: int = 46) -> list[Sample]:
    """Readings that rise and fall five times, as a training loop's do."""
    samples = []
    for part in (index / n for index in range(1, n)):
        wave = 0.93 * abs(math.sin(part * math.pi * 5))
        readings = tuple(
            Reading(
                device.device,
                _place(device.allocated, wave),
                _place(device.reserved, min(part * 3, 1.0)),
            )
            for device in record.devices
        )
        samples.append(Sample(record.start_s + part * record.duration_s, readings))
    return samples


def _place(span: Span, share: float) -> int | None:
    """Return an amount between what stood before and the peak."""
    start, top = span.before_bytes, span.peak_bytes or span.after_bytes
    return None if start is None or top is None else round(start + (top - start) * share)


def make_host_cell(**changes: object) -> CellRecord:
    """A cell on a machine without a GPU."""
    host = _make_host(Span(300 * MIB, 312 * MIB, None), Span(700 * MIB, 703 * MIB, 956 * MIB))
    return make_gpu_cell(
        **{"first_line": "x = torch.ones(1024, 1024)", "devices": (host,), **changes}
    )


def make_two_gpu_cell() -> CellRecord:
    """A cell that failed for memory on the second of two GPUs."""
    gpu, host = make_gpu_cell().devices
    allocated, reserved = Span(0, 70 * GIB, int(78.5 * GIB)), Span(0, 79 * GIB, 79 * GIB)
    second = CellDevice("cuda:1", allocated, reserved, "at least", 2, 1)
    return make_gpu_cell(status="error", devices=(second, host, gpu))


def make_many_gpu_cell() -> CellRecord:
    """One of four GPUs at work, beside a host whose malloc tells nothing; in no order."""
    still, unknown = Span(GIB, GIB, GIB), Span(None, None, None)
    host = CellDevice("host", unknown, Span(GIB, 2 * GIB, 2 * GIB), "sampled", None, None)
    names = ("cuda:10", "cuda:2", "cuda:0")
    idle = (CellDevice(name, still, still, "exact", 0, 0) for name in names)
    busy = replace(make_gpu_cell().devices[0], device="cuda:3")
    return make_gpu_cell(devices=(host, *idle, busy))


def make_budget_cell() -> CellRecord:
    """A training step that went beyond 3 GiB on the GPU and 1 GiB on the host."""
    gpu, host = make_gpu_cell().devices
    devices = replace(gpu, budget_bytes=3 * GIB), replace(host, budget_bytes=GIB)
    return make_gpu_cell(execution_count=9, devices=devices)


def make_stat() -> list[DeviceState]:
    """One GPU in use, one that the process has not touched, the host."""
    return [
        DeviceState(
            DeviceInfo("host", "host memory", 64 * GIB),
            Reading("host", 812 * MIB, 1536 * MIB, None, 1600 * MIB, "sampled"),
            DeviceUse("host", 20 * GIB, 44 * GIB, 64 * GIB),
        ),
        DeviceState(
            DeviceInfo("cuda:0", "NVIDIA H200", 140 * GIB, limit_bytes=112 * GIB),
            Reading("cuda:0", int(1.2 * GIB), 2 * GIB, int(3.4 * GIB), 4 * GIB, "exact", 0, 0),
            DeviceUse("cuda:0", 4 * GIB, 136 * GIB, 140 * GIB, 37),
        ),
        DeviceState(
            DeviceInfo("cuda:1", "NVIDIA H200", 140 * GIB),
            None,
            DeviceUse("cuda:1", 90 * GIB, 50 * GIB, 140 * GIB, 100),
        ),
        DeviceState(
            DeviceInfo("cuda:2", "NVIDIA H200", None),
            None,
            DeviceUse("cuda:2", None, None, None, failure="GPU is lost"),
        ),
    ]


def cut_short(variable: Variable) -> Variable:
    """The row as a search that ran out of time tells of it."""
    return replace(
        variable,
        held_bytes=replace(variable.held_bytes, is_at_least=True),
        frees_bytes=replace(variable.frees_bytes, is_at_least=True),
    )


_REFERENCES = ("Out[7]", "_7", "_")
_ASKED = ("names", "keep", "out", "exceptions", "cublas")


def make_plan(**changes: object) -> ReleasePlan:
    """The release of a model, its optimizer and an output, but for some changes."""
    asked = {name: changes.pop(name) for name in _ASKED if name in changes}
    saved = Reason(ReasonKind.SAVED)
    plan = ReleasePlan(
        request=ReleaseRequest(("model", "optimizer", "Out[7]")),
        moves=(
            ReleaseMove(
                "model", "module", "cuda:0", 475 * MIB, Reason(ReasonKind.SHARED, ("trainer",))
            ),
            ReleaseMove(
                "history[3]", "tensor", "cuda:0", 4 * MIB, Reason(ReasonKind.SHARED, ("history",))
            ),
        ),
        drops=_REFERENCES,
        frees_bytes=on_gpu(1429),
        host_needed_bytes=DeviceBytes((("host", 479 * MIB),)),
        host_available_bytes=44 * GIB,
        stays=(ReleaseStay("model", "cuda:0", on_gpu(9), saved),),
    )
    request = replace(plan.request, **asked)  # type: ignore[arg-type]
    return replace(plan, request=request, **changes)  # type: ignore[arg-type]


def make_release(**changes: object) -> ReleaseReport:
    """That release, done."""
    kinds = ReleaseStepKind
    steps = (
        ReleaseStep(
            kinds.MOVE,
            "done",
            StepResult(n_tensors=2, n_bytes=479 * MIB),
            (("cuda:0", 479 * MIB), ("host", -479 * MIB)),
            (("cuda:0", 0), ("host", -481 * MIB)),
        ),
        ReleaseStep(
            kinds.UNBIND,
            "done",
            StepResult(names=("model", "optimizer")),
            (("cuda:0", 950 * MIB),),
        ),
        ReleaseStep(kinds.DROP_REFERENCES, "done", StepResult(references=_REFERENCES)),
        ReleaseStep(kinds.COLLECT, "done", StepResult(n_objects=12)),
        ReleaseStep(
            kinds.EMPTY_CACHE, "done", StepResult(), (("cuda:0", 0),), (("cuda:0", 1480 * MIB),)
        ),
    )
    report = ReleaseReport(
        plan=make_plan(),
        steps=steps,
        before=(
            Reading("cuda:0", 1800 * MIB, 2048 * MIB),
            Reading("host", 812 * MIB, 1536 * MIB),
        ),
        after=(Reading("cuda:0", 371 * MIB, 568 * MIB), Reading("host", 1291 * MIB, 2017 * MIB)),
        allocated_freed_bytes=(("cuda:0", 1429 * MIB), ("host", -479 * MIB)),
        reserved_freed_bytes=(("cuda:0", 1480 * MIB), ("host", -481 * MIB)),
    )
    return replace(report, **changes)  # type: ignore[arg-type]


def make_joint_plan() -> ReleasePlan:
    """A name that frees nothing by itself, with what has to go with it."""
    names = ("x", "model", "Out[7]", "last exception")
    freed = DeviceBytes((("cuda:0", 66 * MIB),), is_at_least=True)
    return make_plan(names=("x",), frees_bytes=DeviceBytes(), joint=JointRelease(names, freed))


def make_stopped_release() -> ReleaseReport:
    """A release that stopped at its first step, with nothing changed."""
    failed, *others = make_release().steps
    failed = ReleaseStep(failed.kind, "failed", StepResult(error="model: OutOfMemoryError"))
    nothing = (("cuda:0", 0), ("host", 0))
    return make_release(
        stopped=Stop(StopKind.FAILED, step=failed.kind, error=failed.result.error),
        steps=(failed, *(ReleaseStep(step.kind, "not reached") for step in others)),
        after=make_release().before,
        allocated_freed_bytes=nothing,
        reserved_freed_bytes=nothing,
        remains=(),
    )


def make_restore_plan() -> RestorePlan:
    """The way back of a model and its optimizer, of which one part was made on the CPU."""
    saved = Reason(ReasonKind.SAVED)
    return RestorePlan(
        names=("model", "optimizer"),
        moves=(
            ReleaseMove("model", "module", "cuda:0", 475 * MIB, None),
            ReleaseMove("optimizer", "optimizer", "cuda:1", 950 * MIB, None),
        ),
        needs_bytes=DeviceBytes((("cuda:0", 475 * MIB), ("cuda:1", 950 * MIB))),
        stays=(ReleaseStay("model", "host", DeviceBytes((("host", 4 * MIB),)), saved),),
    )


def make_restore() -> RestoreReport:
    """That, done."""
    before = (("cuda:0", 0, 0), ("cuda:1", 8, 20), ("host", 1912, 2560))
    after = (("cuda:0", 475, 480), ("cuda:1", 958, 970), ("host", 487, 1100))
    return RestoreReport(
        plan=make_restore_plan(),
        result=StepResult(n_tensors=297, n_bytes=1423 * MIB),
        before=tuple(Reading(device, one * MIB, two * MIB) for device, one, two in before),
        after=tuple(Reading(device, one * MIB, two * MIB) for device, one, two in after),
    )


#: What an H100 has to PyTorch.
H100_BYTES = 85_017_493_504


def make_limits() -> list[Limit]:
    """With room, none, waiting for CUDA, set before the device is in use, and exceeded."""
    return [
        Limit("cuda:10", None, None, None),
        Limit("cuda:0", 12 * GIB, H100_BYTES, 10 * GIB + 5 * MIB),
        Limit("cuda:1", None, H100_BYTES, 3 * GIB),
        Limit("cuda:2", None, None, None, is_waiting=True, share=0.8),
        Limit("cuda:3", 12 * GIB, None, None, is_waiting=True),
        Limit("cuda:4", 12 * GIB, H100_BYTES, None),
        Limit("cuda:5", 12 * GIB, H100_BYTES, 12 * GIB),
        Limit("cuda:6", 8 * GIB, H100_BYTES, 10 * GIB),
    ]


def make_peaks() -> list[Reading]:
    """What the user's own calls told: exact, cut short, and unknown."""
    return [
        Reading("cuda:0", 5, 6, 3 * GIB, 4 * GIB, "exact"),
        Reading("cuda:1", 5, 6, 2 * GIB, 3 * GIB, "at least"),
        Reading("cuda:2", None, None),
    ]
