"""Plans of workspaces, against the operators of real runs on an H200."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import replace

import pytest
import torch
from torch import nn

from gpumemwidget.prediction.dry.dry_run import carry_out
from gpumemwidget.prediction.operations import (
    H200,
    Bound,
    GpuFacts,
    Operation,
    Phase,
    Step,
    TensorMeta,
    WorkspacePlan,
)
from gpumemwidget.prediction.workspaces import WorkspacePlanner, plan_operation
from tests.prediction.operators import (
    RecordedOperator,
    RecordedRecurrent,
    operation,
    read_operators,
    read_recurrent,
    tensor,
)

MIB = 1 << 20

Compared = tuple[RecordedOperator, WorkspacePlan]


@pytest.fixture(scope="module")
def compared() -> list[Compared]:
    """Every recorded operator with its plan."""
    return [(recorded, plan_operation(recorded.operation, H200)) for recorded in read_operators()]


def _name(recorded: RecordedOperator) -> str:
    return recorded.operation.name.removeprefix("aten::").partition(".")[0]


def _count_peak(plan: WorkspacePlan, bound: Bound = "expected") -> int:
    """Return the most bytes of temporaries that live at once."""
    live: dict[int, int] = {}
    peak = 0
    for step in plan.steps:
        if step.kind == "temporary":
            live[step.index] = step.read_bytes(bound)
            peak = max(peak, sum(live.values()))
        elif step.kind == "free":
            del live[step.index]
    return peak


def _peak_bytes(recorded: RecordedOperator) -> int:
    return _count_peak(WorkspacePlan(recorded.steps, is_known=True))


def _expect(plan: WorkspacePlan) -> tuple[Step, ...]:
    """Return the allocations that take something, without their bounds."""
    return tuple(Step(each.kind, each.index, each.n_bytes) for each in plan.steps if each.n_bytes)


#: Operators whose buffers are planned to the byte: they are split between blocks.
SPLIT = {"sum", "mean", "amax", "prod", "var", "var_mean", "std", "argmax", "max"}

#: Where one signature or two are planned more than 20 MiB off, within their bounds.
FAR = {"convolution_backward": 2, "count_nonzero": 1, "index": 1, "sort": 1}

#: Operators without a rule that allocate more than their outputs.
UNKNOWN = {
    "_embedding_bag_backward",
    "_euclidean_dist",
    "_linalg_check_errors",
    "bincount",
    "im2col",
    "linalg_inv_ex",
    "linalg_qr",
    "multinomial",
}


def test_recorded_operators_take_what_their_bounds_allow(compared: list[Compared]) -> None:
    """None is a mebibyte beside its bounds, but for splits of flash attention of at most 8 MiB."""
    below = [r for r, plan in compared if _peak_bytes(r) < _count_peak(plan, "least") - MIB]
    above = [r for r, plan in compared if _peak_bytes(r) > _count_peak(plan, "most") + MIB]

    assert below == []
    assert {_name(r) for r in above} == {"_scaled_dot_product_flash_attention"}
    assert max(_peak_bytes(r) for r in above) <= 8.1 * MIB


def test_what_is_expected_is_close(compared: list[Compared]) -> None:
    """Of 100 recorded operators 97 take what is expected, to a mebibyte; few are far off."""
    errors = [(_name(r), abs(_count_peak(plan) - _peak_bytes(r))) for r, plan in compared]

    assert sum(error <= MIB for _, error in errors) >= 0.97 * len(errors)
    assert Counter(name for name, error in errors if error > 20 * MIB) == FAR


def test_split_reductions_take_what_is_expected(compared: list[Compared]) -> None:
    """Their buffers, of up to 132 MiB, follow from shapes and strides."""
    split = [pair for pair in compared if _name(pair[0]) in SPLIT and _peak_bytes(pair[0]) > MIB]

    assert [r for r, plan in split if _count_peak(plan) != _peak_bytes(r)] == []
    assert max(_count_peak(plan) for _, plan in split) > 128 * MIB


def test_only_rare_operators_have_no_rule(compared: list[Compared]) -> None:
    """Operators without a rule allocate their outputs alone, but for these."""
    assumed = [(r, plan) for r, plan in compared if not plan.is_known]

    assert {_name(r) for r, plan in assumed if _expect(plan) != r.steps} == UNKNOWN


def test_operators_without_a_rule_are_bounded_by_their_arguments(compared: list[Compared]) -> None:
    """Nothing is expected of them; they took no more than arguments and outputs, but 64 KiB."""
    assumed = [(r, plan) for r, plan in compared if not plan.is_known and r.operation.allocated]

    assert all(_count_peak(plan, "least") == _count_peak(plan) == 0 for _, plan in assumed)
    assert all(_peak_bytes(r) <= _count_peak(plan, "most") for r, plan in assumed)


@pytest.mark.parametrize(
    "gpu",
    [GpuFacts((8, 0), 132, 2048, (2, 11)), replace(H200, torch_version=(2, 14))],
    ids=["older GPU", "newer torch"],
)
def test_bounds_are_wider_where_the_rules_were_not_checked(gpu: GpuFacts) -> None:
    """On another GPU, or with another torch, temporaries may take half or twice as much."""
    matrix = tensor("float32", 50176, 384)
    call = operation("aten::sum.dim_IntList", matrix, (0,), allocated=(1536,))

    plan = plan_operation(call, gpu)

    assert plan.is_known
    assert (_count_peak(plan, "least"), _count_peak(plan, "most")) == (
        sum(step.n_bytes // 2 for step in plan.steps[1:]),
        2 * _count_peak(plan),
    )


def test_an_estimate_may_be_nothing_on_another_gpu() -> None:
    """Its library may choose a kernel that needs no workspace, or a larger one."""
    call = _convolution((8, 256, 28, 28), (256, 256, 3, 3))

    here, there = plan_operation(call, H200), plan_operation(call, replace(H200, capability=(8, 0)))

    assert here.is_estimated
    assert _count_peak(here, "least") > 0
    assert (_count_peak(there, "least"), _count_peak(there, "most")) == (
        0,
        2 * _count_peak(here, "most"),
    )


def test_copies_are_certain_on_every_gpu() -> None:
    """The copy of an argument has its bytes, whoever computes."""
    call = operation(
        "aten::native_layer_norm",
        tensor("float32", 64, 32, stride=(1, 64)),
        (32,),
        allocated=(8192, 256, 256),
    )

    plan = plan_operation(call, GpuFacts((8, 0), 108, 2048, (2, 9)))

    assert (_count_peak(plan, "least"), _count_peak(plan), _count_peak(plan, "most")) == (
        8192,
        8192,
        8192,
    )


def _convolution(tensor_shape: tuple[int, ...], weight_shape: tuple[int, ...]) -> Operation:
    n_result = tensor_shape[0] * weight_shape[0] * tensor_shape[2] * tensor_shape[3]
    return operation(
        "aten::convolution",
        *(tensor("float32", *tensor_shape), tensor("float32", *weight_shape), None),
        *((1, 1), (1, 1), (1, 1), False, (0, 0), 1),
        allocated=(n_result * 4,),
    )


def _channels_last(*shape: int) -> TensorMeta:
    _, channels, height, width = shape
    step = height * width * channels
    return tensor("float32", *shape, stride=(step, 1, width * channels, channels))


def _convolve(
    image: tuple[int, ...], weight: tuple[int, ...], *, padding: int = 0, dilation: int = 1
) -> tuple[WorkspacePlan, WorkspacePlan]:
    """Return the plans of a channels-last convolution that keeps the size, and of its gradients."""
    n_result = image[0] * weight[0] * image[2] * image[3]
    n_weight = weight[0] * weight[1] * weight[2] * weight[3]
    n_image = image[0] * image[1] * image[2] * image[3]
    inputs = (_channels_last(*image), _channels_last(*weight))
    how = ((1, 1), (padding, padding), (dilation, dilation), False, (0, 0), 1)
    forward = operation("aten::convolution", *inputs, None, *how, allocated=(n_result * 4,))
    backward = operation(
        "aten::convolution_backward",
        *(_channels_last(image[0], weight[0], *image[2:]), *inputs, (0,), *how),
        (True, True, False),
        allocated=(n_image * 4, n_weight * 4),
    )
    return plan_operation(forward, H200), plan_operation(backward, H200)


def _sizes(plan: WorkspacePlan) -> list[int]:
    """Return what is expected of the temporaries that take something."""
    return [step.n_bytes for step in plan.steps if step.kind == "temporary" and step.n_bytes]


def test_widely_spread_windows_are_convolved_in_another_layout() -> None:
    """The first size is what a DeepLabv3 took on an H200; the gradients', but for 144 bytes."""
    forward, backward = _convolve((8, 2048, 40, 40), (256, 2048, 3, 3), padding=12, dilation=12)
    narrow, _ = _convolve((8, 2048, 40, 40), (256, 2048, 3, 3), padding=4, dilation=4)

    assert _sizes(forward) == [136839184]
    assert _sizes(backward) == [31981584, 250085520 - 128]
    assert _sizes(narrow) == []


def test_an_image_in_another_layout_is_copied_before_all_else() -> None:
    """Only then are the result and the workspace allocated."""
    call = operation(
        "aten::convolution",
        *(tensor("float32", 8, 1280, 40, 40), _channels_last(256, 1280, 1, 1), None),
        *((1, 1), (0, 0), (1, 1), False, (0, 0), 1),
        allocated=(13107200,),
    )

    plan = plan_operation(call, H200)

    assert _expect(plan) == (Step("temporary", 0, 65536000), Step("output", 0, 13107200))


def _carry_out_recurrent(recorded: RecordedRecurrent) -> list[Operation]:
    """Return cuDNN's operators of one step of a recorded network."""
    options = {"num_layers": recorded.layers, "bidirectional": recorded.bidirectional}
    dtype = getattr(torch, recorded.dtype)
    with torch.device("meta"):
        model = getattr(nn, recorded.mode)(
            *(recorded.input, recorded.hidden),
            **options,
            batch_first=recorded.batch_first,
            dropout=recorded.dropout,
            dtype=dtype,
        )
    model = model.to_empty(device="cpu")
    words = torch.empty(recorded.times, recorded.batch, recorded.input, dtype=dtype)
    if recorded.batch_first:
        words = words.transpose(0, 1).contiguous()
    lengths = recorded.choose_lengths()

    def step(words: torch.Tensor) -> None:
        if lengths:
            packed = nn.utils.rnn.pack_padded_sequence(
                words, torch.tensor(lengths), batch_first=recorded.batch_first
            )
            output = model(packed)[0].data
        else:
            output = model(words)[0]
        output.backward(torch.ones_like(output))

    def infer(words: torch.Tensor) -> None:
        with torch.no_grad():
            model(words)

    model.train(recorded.backward is not None)
    run = carry_out(infer if recorded.backward is None else step, (words,), steps=1)
    names = ("aten::_cudnn_rnn", "aten::_cudnn_rnn_backward")
    return [each for each in run.operations if each.name in names]


def _list_events(steps: Iterable[Step], bound: Bound) -> list[tuple[str, int]]:
    """Return the kind and the bytes of each allocation; of a free, the number of what is freed."""
    numbers: dict[int, int] = {}
    events: list[tuple[str, int]] = []
    for n_allocated, step in enumerate(each for each in steps if each.kind != "free"):
        if step.kind == "temporary":
            numbers[step.index] = n_allocated
    for step in steps:
        events.append(
            (step.kind, numbers[step.index] if step.kind == "free" else step.read_bytes(bound))
        )
    return events


@pytest.mark.parametrize("recorded", read_recurrent(), ids=str)
def test_recurrent_networks_take_what_cudnn_took(recorded: RecordedRecurrent) -> None:
    """Allocations and frees come in order; all sizes are exact but the workspace's.

    Small networks of sequences that are not packed may have kernels that take more.
    """
    operations = _carry_out_recurrent(recorded)
    real = [each for each in (recorded.forward, recorded.backward) if each is not None]
    is_single = recorded.dtype == "float16" and recorded.layers == 1 and not recorded.bidirectional
    is_small = recorded.hidden <= (1024 if is_single else 384) and recorded.words is None

    assert len(operations) == len(real)
    for call, expected in zip(operations, real, strict=True):
        bounds = [
            _list_events(plan_operation(call, H200).steps, bound)
            for bound in ("least", "expected", "most")
        ]
        for (kind, least), (_, planned), (_, most), event in zip(*bounds, expected, strict=True):
            if kind == "free":
                assert planned == -1 - event
            elif kind == "output":
                assert planned == event
            else:
                assert least <= event <= most
                assert is_small or planned == pytest.approx(event, rel=0.06)


def test_the_workspace_of_a_bidirectional_network_is_estimated() -> None:
    """Three layers of 768, both ways, over 4,492 packed words of 300 took 364,855,552 bytes."""
    shapes = [(3072, 300 if layer == 0 else 1536) for layer in range(3)]
    weights = tuple(
        tensor("float32", *shape) for wide in shapes for shape in (wide, (3072, 768)) * 2
    )
    words, state = tensor("float32", 4492, 300), tensor("float32", 6, 64, 768)
    call = operation(
        "aten::_cudnn_rnn",
        *(words, weights, 4, None, state, state, 2, 768, 0, 3, False, 0.3, True, True, (64,)),
        allocated=(27598848, 1179648, 1179648, 475078912),
    )

    plan = plan_operation(call, H200)

    assert _count_peak(plan) == 364855552
    assert _count_peak(plan, "least") < 364855552 < _count_peak(plan, "most")


def test_a_reduction_on_a_smaller_gpu_is_shared_by_fewer_blocks() -> None:
    """The staging buffer follows the number of multiprocessors."""
    matrix = tensor("float32", 50176, 384)
    call = operation("aten::sum.dim_IntList", matrix, (0,), allocated=(1536,))
    small = GpuFacts((7, 5), 40, 1024, (2, 11))

    on_h200, on_small = plan_operation(call, H200), plan_operation(call, small)

    assert on_h200.steps[1].n_bytes == 138412032
    assert 0 < on_small.steps[1].n_bytes < on_h200.steps[1].n_bytes


def _mm(phase: Phase) -> Operation:
    return operation(
        "aten::mm",
        tensor("float32", 8, 16),
        tensor("float32", 16, 32),
        allocated=(1024,),
        phase=phase,
    )


def test_cublas_workspaces_are_kept_once_for_each_thread() -> None:
    """The first product takes 32 MiB; backward has its own, unless the process has both."""
    phases: list[Phase] = ["forward", "forward", "backward", "optimizer", "backward"]
    planners = [WorkspacePlanner(H200, n_workspaces) for n_workspaces in range(3)]

    kept = [[planner.plan(_mm(phase)).steps[1:] for phase in phases] for planner in planners]

    workspace = (Step("kept", 0, 32 * MIB),)
    assert kept == [
        [workspace, (), workspace, (), ()],
        [(), (), workspace, (), ()],
        [()] * 5,
    ]


def test_an_older_gpu_keeps_the_smaller_cublas_workspace() -> None:
    """Below compute capability 9 it is 8,519,680 bytes."""
    planner = WorkspacePlanner(GpuFacts((8, 0), 108, 2048, (2, 11)))

    plan = planner.plan(_mm("forward"))

    assert plan.steps == (Step("output", 0, 1024), Step("kept", 0, 8519680))


def test_the_user_may_choose_the_size_of_a_workspace(monkeypatch: pytest.MonkeyPatch) -> None:
    """The environment, which the device would read too, says how large it is."""
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    planner = WorkspacePlanner(GpuFacts((8, 0), 108, 2048, (2, 11)))

    assert planner.plan(_mm("forward")).steps[-1] == Step("kept", 0, 32 * MIB)
