"""Rules of what PyTorch's CUDA operators allocate inside, by class of operator.

Each rule follows the public source of the kernels (``aten/src/ATen/native/cuda``, ``native/cudnn``,
CUB's dispatch layer) as of PyTorch 2.11 and was checked on an H200. Sizes are those requested,
before the caching allocator rounds them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Final, Literal, TypeAlias

from gpumemwidget.prediction.operations import Argument, Operation, TensorMeta

#: What a step of a plan does. ``kept`` is allocated and never freed.
StepKind: TypeAlias = Literal["output", "temporary", "free", "kept"]

#: How a plan is known. ``assumed``: no rule knows the operator; only its outputs are planned.
Source: TypeAlias = Literal["measured", "rule", "estimated", "assumed"]

MIB: Final = 1 << 20

#: Bytes of the cuBLAS workspace of a thread on GPUs of compute capability 9.
_CUBLAS_HOPPER_BYTES: Final = 32 * MIB

#: Bytes of the cuBLAS workspace of a thread on other GPUs: ``:4096:2:16:8``.
_CUBLAS_BYTES: Final = 8_519_680

#: Bytes of the cuBLASLt workspace of a thread.
CUBLASLT_BYTES: Final = MIB


@dataclass(frozen=True, slots=True)
class GpuFacts:
    """Facts of a GPU and of PyTorch that decide the size of workspaces."""

    #: Compute capability: ``(9, 0)``.
    capability: tuple[int, int]
    n_multiprocessors: int
    threads_per_multiprocessor: int
    #: Version of PyTorch: ``(2, 11)``.
    torch_version: tuple[int, int]

    @property
    def cublas_bytes(self) -> int:
        """The size of the cuBLAS workspace of a thread, in bytes."""
        return _CUBLAS_HOPPER_BYTES if self.capability[0] == 9 else _CUBLAS_BYTES


#: An NVIDIA H200 with PyTorch 2.11, which the rules were checked on.
H200: Final = GpuFacts((9, 0), 132, 2048, (2, 11))


@dataclass(frozen=True, slots=True)
class Step:
    """An allocation or a free within an operator."""

    kind: StepKind
    #: ``output``: the position in ``Operation.allocated``; ``temporary``, ``free``: the number of
    #: the temporary within the operator; ``kept``: 0.
    index: int
    #: Bytes allocated, before the allocator rounds; 0 for a free.
    n_bytes: int


@dataclass(frozen=True, slots=True)
class WorkspacePlan:
    """The allocations and frees within an operator, in order.

    Temporaries that no step frees are freed at the operator's end. An output without a step is no
    allocation on the device: the fake operator shows a tensor where the real one has none.
    """

    steps: tuple[Step, ...]
    source: Source
    #: Maximum bytes of temporaries that live at once; the same as planned unless estimated.
    at_most_bytes: int

    @property
    def peak_bytes(self) -> int:
        """The most bytes of temporaries that live at once by this plan."""
        return peak_of_temporaries(self.steps)


def peak_of_temporaries(steps: Iterable[Step]) -> int:
    """Return the most bytes of temporaries that live at once in ``steps``."""
    live: dict[int, int] = {}
    peak = 0
    for step in steps:
        if step.kind == "temporary":
            live[step.index] = step.n_bytes
            peak = max(peak, sum(live.values()))
        elif step.kind == "free":
            del live[step.index]
    return peak


_FLOATS: Final = frozenset({"float16", "bfloat16", "float32", "float64"})
_ITEM_BYTES: Final = {
    "bool": 1,
    "uint8": 1,
    "int8": 1,
    "int16": 2,
    "float16": 2,
    "bfloat16": 2,
    "int32": 4,
    "float32": 4,
    "int64": 8,
    "float64": 8,
}


class _Draft:
    """A plan being written: the steps so far, and how well they are known."""

    def __init__(self, operation: Operation, gpu: GpuFacts) -> None:
        self.operation = operation
        self.gpu = gpu
        self.steps: list[Step] = []
        self.estimated = False
        #: Bytes beyond the planned peak that an estimate may lack.
        self.slack_bytes = 0
        self._n_temporaries = 0
        self._options = dict(operation.options)

    def argument(self, index: int, option: str = "") -> Argument:
        """Return the argument at ``index``, else that of the name ``option``, else None."""
        if index < len(self.operation.arguments):
            return self.operation.arguments[index]
        return self._options.get(option)

    def tensor(self, index: int) -> TensorMeta | None:
        """Return the argument at ``index`` if it is a tensor."""
        argument = self.argument(index)
        return argument if isinstance(argument, TensorMeta) else None

    def needed(self, index: int) -> TensorMeta:
        """Return the tensor at ``index``.

        Raises:
            _UnknownFormError: no tensor is there.
        """
        tensor = self.tensor(index)
        if tensor is None:
            raise _UnknownFormError
        return tensor

    def output(self, index: int, n_bytes: int | None = None) -> None:
        """Allocate an output, of ``n_bytes`` where the fake tensor's size is not the real one."""
        allocated = self.operation.allocated
        if index < len(allocated) and allocated[index].n_bytes:
            size = allocated[index].n_bytes if n_bytes is None else n_bytes
            self.steps.append(Step("output", index, size))

    def outputs(self, *order: int) -> None:
        """Allocate outputs in ``order``; without one, all of them in their own."""
        for index in order or range(len(self.operation.allocated)):
            self.output(index)

    def temporary(self, n_bytes: int) -> int:
        """Allocate a temporary, and return its number."""
        number = self._n_temporaries
        self._n_temporaries += 1
        if n_bytes > 0:
            self.steps.append(Step("temporary", number, n_bytes))
        return number

    def free(self, *numbers: int) -> None:
        """Free temporaries."""
        allocated = {step.index for step in self.steps if step.kind == "temporary"}
        for number in numbers:
            if number in allocated:
                self.steps.append(Step("free", number, 0))

    def contiguous(self, tensor: TensorMeta | None) -> int | None:
        """Allocate a contiguous copy of ``tensor`` if it is not contiguous; return its number."""
        if tensor is None or _is_contiguous(tensor.shape, tensor.stride):
            return None
        return self.temporary(_tensor_bytes(tensor))

    def estimate(self, slack_bytes: int) -> None:
        """Mark the plan as an estimate that may lack ``slack_bytes``."""
        self.estimated = True
        self.slack_bytes = max(self.slack_bytes, slack_bytes)

    def finish(self, known: bool) -> WorkspacePlan:
        """Return the plan."""
        # What is freed last is freed at the operator's end.
        while self.steps and self.steps[-1].kind == "free":
            self.steps.pop()
        # Temporaries are numbered by their allocations, without those of no bytes.
        numbers = [step.index for step in self.steps if step.kind == "temporary"]
        steps = tuple(
            step
            if step.kind == "output"
            else Step(step.kind, numbers.index(step.index), step.n_bytes)
            for step in self.steps
        )
        source: Source = "assumed"
        if known:
            source = "estimated" if self.estimated else "rule"
        return WorkspacePlan(steps, source, peak_of_temporaries(steps) + self.slack_bytes)


class _UnknownFormError(Exception):
    """An operator is called in a form that its rule does not know."""


_Rule: TypeAlias = Callable[[_Draft], None]
_RULES: Final[dict[str, _Rule]] = {}


def _rule(*names: str) -> Callable[[_Rule], _Rule]:
    """Register the decorated rule for operators; a name without overload stands for them all."""

    def register(rule: _Rule) -> _Rule:
        for name in names:
            _RULES[name] = rule
        return rule

    return register


def plan_operation(operation: Operation, gpu: GpuFacts) -> WorkspacePlan:
    """Return the allocations and frees within ``operation`` by rule, without kept workspaces."""
    name = operation.name.removeprefix("aten::")
    base = name.partition(".")[0]
    rule = _RULES.get(name) or _RULES.get(base)
    draft = _Draft(operation, gpu)
    if rule is not None:
        try:
            rule(draft)
        except _UnknownFormError:
            rule = None
            draft = _Draft(operation, gpu)
    if rule is None:
        draft.outputs()
    return draft.finish(rule is not None or base in _WITHOUT_TEMPORARIES)


def list_blas_libraries(operation: Operation) -> tuple[str, ...]:
    """Return which of ``cublas`` and ``cublaslt`` an operator takes a workspace of."""
    base = operation.name.removeprefix("aten::").partition(".")[0]
    if not any(use.n_bytes for use in operation.allocated) and not base.endswith("_"):
        return ()
    if base in ("addmm", "_addmm_activation") and _is_fused_addmm(operation):
        return ("cublas", "cublaslt")
    return ("cublas",) if base.rstrip("_") in _BLAS else ()


#: Operators that multiply matrices with cuBLAS.
_BLAS: Final = frozenset(
    {"addmm", "_addmm_activation", "mm", "bmm", "baddbmm", "addbmm", "mv", "addmv", "dot", "linear"}
)


def _is_fused_addmm(operation: Operation) -> bool:
    """Return whether ``addmm`` adds its bias within cuBLASLt's matrix product."""
    tensors = [argument for argument in operation.arguments if isinstance(argument, TensorMeta)]
    if len(tensors) < 3 or dict(operation.options).get("beta", 1) != 1:
        return False
    bias, _, second = tensors[:3]
    return (
        bias.dtype in _FLOATS
        and len(bias.shape) == 1
        and bias.shape[0] == second.shape[1]
        and bias.stride == (1,)
        and min(second.shape) > 1
    )


# Shapes and strides


def _tensor_bytes(tensor: TensorMeta) -> int:
    return tensor.n_elements * tensor.item_bytes


def _product(sizes: Iterable[int]) -> int:
    product = 1
    for size in sizes:
        product *= size
    return product


def _ceil_div(dividend: int, divisor: int) -> int:
    return -(-dividend // divisor)


def _round_up(n: int, multiple: int) -> int:
    return _ceil_div(n, multiple) * multiple


def _floor_power_of_2(n: int) -> int:
    return 1 << max(0, n.bit_length() - 1)


def _is_contiguous(shape: Sequence[int], stride: Sequence[int]) -> bool:
    expected = 1
    for size, step in zip(reversed(shape), reversed(stride), strict=True):
        if size != 1:
            if step != expected:
                return _product(shape) == 0
            expected *= size
    return True


def _is_channels_last(tensor: TensorMeta) -> bool:
    """Return whether ``tensor`` is laid out with its channels (dimension 1) last, and only so."""
    n_dims = len(tensor.shape)
    if n_dims not in (4, 5) or _is_contiguous(tensor.shape, tensor.stride):
        return False
    order = (0, *range(2, n_dims), 1)
    return _is_contiguous([tensor.shape[d] for d in order], [tensor.stride[d] for d in order])


def _is_dense(tensor: TensorMeta) -> bool:
    """Return whether the elements of ``tensor`` fill its storage without overlap."""
    order = sorted(range(len(tensor.shape)), key=lambda d: (-tensor.stride[d], -tensor.shape[d]))
    return _is_contiguous([tensor.shape[d] for d in order], [tensor.stride[d] for d in order])


def _transposed(tensor: TensorMeta, first: int, second: int) -> tuple[list[int], list[int]]:
    """Return the shape and the strides of ``tensor`` with two dimensions exchanged."""
    shape, stride = list(tensor.shape), list(tensor.stride)
    for sizes in (shape, stride):
        sizes[first], sizes[second] = sizes[second], sizes[first]
    return shape, stride


def _int_tuple(argument: Argument) -> tuple[int, ...] | None:
    if isinstance(argument, int) and not isinstance(argument, bool):
        return (argument,)
    if isinstance(argument, tuple):
        return tuple(item for item in argument if isinstance(item, int))
    return None


def _reduced_dims(tensor: TensorMeta, dims: Argument) -> frozenset[int]:
    """Return the dimensions that a reduction over ``dims`` reduces: all, for none given."""
    n_dims = len(tensor.shape)
    given = _int_tuple(dims)
    return (
        frozenset(dim % n_dims for dim in given) if given and n_dims else frozenset(range(n_dims))
    )


# Reductions follow Reduce.cuh of ATen's CUDA kernels


@dataclass(frozen=True, slots=True)
class _ReductionDim:
    """A dimension of a reduction, as ATen's iterator sees it; strides in elements."""

    size: int
    input_stride: int
    output_stride: int


def _iterate_reduction(
    shape: Sequence[int], stride: Sequence[int], reduced: frozenset[int]
) -> list[_ReductionDim]:
    """Return the dimensions of a reduction, fastest first, reduced ones first, merged."""
    dims = []
    output_stride = 1
    for d in reversed(range(len(shape))):
        if d in reduced:
            dims.append(_ReductionDim(shape[d], stride[d], 0))
        else:
            dims.append(_ReductionDim(shape[d], stride[d], output_stride))
            output_stride *= shape[d]
    for i in range(1, len(dims)):
        j = i
        for k in reversed(range(i)):
            order = _compare_dims(dims[k], dims[j])
            if order > 0:
                dims[k], dims[j] = dims[j], dims[k]
                j = k
            elif order < 0:
                break
    merged: list[_ReductionDim] = []
    for dim in dims:
        last = merged[-1] if merged else None
        if last is not None and (
            last.size == 1
            or dim.size == 1
            or (
                last.size * last.input_stride == dim.input_stride
                and last.size * last.output_stride == dim.output_stride
            )
        ):
            first = dim if last.size == 1 else last
            merged[-1] = replace(first, size=last.size * dim.size)
        else:
            merged.append(dim)
    return merged


def _compare_dims(first: _ReductionDim, second: _ReductionDim) -> int:
    """Return 1 if ``second`` comes before ``first``, -1 if after, 0 if it does not matter."""
    if (first.output_stride == 0) != (second.output_stride == 0):
        return 1 if second.output_stride == 0 else -1
    for one, other in (
        (first.output_stride, second.output_stride),
        (first.input_stride, second.input_stride),
    ):
        if one == 0 or other == 0:
            continue
        if one != other:
            return -1 if one < other else 1
        if first.size > second.size:
            return 1
    return 0


def _plan_reduction(
    shape: Sequence[int],
    stride: Sequence[int],
    reduced: frozenset[int],
    gpu: GpuFacts,
    *,
    accumulator_bytes: int = 4,
    n_unrolled: int = 4,
) -> tuple[int, int] | None:
    """Return the bytes of a reduction's staging buffer and semaphores, or None for neither.

    A reduction with few outputs and many inputs each is shared by several blocks, which pass their
    partial results through global memory. ``n_unrolled``: elements that a thread loads at once.
    """
    if _product(shape) == 0:
        return None
    dims = _iterate_reduction(shape, stride, reduced)
    n_reduced = sum(dim.output_stride == 0 for dim in dims)
    n_outputs = _product(dim.size for dim in dims if dim.output_stride)
    n_inputs = _product(dim.size for dim in dims) // n_outputs
    along_input = n_reduced == len(dims) or dims[0].input_stride < dims[n_reduced].input_stride
    width, height = (n_inputs, n_outputs) if along_input else (n_outputs, n_inputs)
    fastest = dims[0 if along_input else n_reduced].input_stride if dims else 1
    n_vector = 1
    if fastest == 1 and along_input and width >= 128 and n_reduced == 1:
        width //= n_unrolled
    elif fastest == 1 and not along_input:
        n_vector = 4
        strides = (dim.input_stride for i, dim in enumerate(dims) if i != n_reduced)
        for n in (dims[n_reduced].size, *strides):
            while n % n_vector:
                n_vector //= 2
        width //= n_vector
    n_max = 512 // n_vector
    block_x_most, block_y_most = (min(_floor_power_of_2(n), n_max) for n in (width, height))
    block_x = min(block_x_most, 32)
    block_y = min(block_y_most, n_max // block_x)
    block_x = min(block_x_most, n_max // block_y)
    step_input, step_output = (block_x, 1) if along_input else (1, block_x)
    if _ceil_div(n_inputs, step_input) < min(block_y * 16, 256):
        return None
    step_input *= block_y
    n_values = _ceil_div(n_inputs, step_input)
    grid = _ceil_div(n_outputs // n_vector if n_vector > 1 else n_outputs, step_output)
    most_blocks = gpu.n_multiprocessors * (gpu.threads_per_multiprocessor // (block_x * block_y))
    if n_values < 256 or grid > most_blocks:
        return None
    n_shares = max(
        min(_ceil_div(most_blocks, grid), _ceil_div(n_values, 16)), _ceil_div(n_values, 256)
    )
    if n_shares == 1:
        return None
    staging = accumulator_bytes * n_outputs * n_shares
    if not along_input:
        staging *= block_x * n_vector
    return staging, 4 * grid


def _reduce(
    draft: _Draft,
    tensor: TensorMeta,
    dims: Argument = None,
    *,
    accumulator_bytes: int = 4,
    n_unrolled: int = 4,
) -> tuple[int, ...]:
    """Allocate what a reduction of ``tensor`` needs; return the temporaries' numbers."""
    plan = _plan_reduction(
        tensor.shape,
        tensor.stride,
        _reduced_dims(tensor, dims),
        draft.gpu,
        accumulator_bytes=accumulator_bytes,
        n_unrolled=n_unrolled,
    )
    if plan is None:
        return ()
    # Beyond 32-bit offsets ATen splits the reduction, with a buffer for the parts.
    if tensor.n_elements * tensor.item_bytes >= 2**31:
        draft.estimate(sum(plan) + _tensor_bytes(tensor) // 2)
    return tuple(draft.temporary(n_bytes) for n_bytes in plan)


def _accumulator_bytes(dtype: str) -> int:
    return 8 if dtype in ("float64", "int64") else 4


def _dense_like(tensor: TensorMeta, dtype: str | None = None) -> TensorMeta:
    """Return a contiguous tensor of the shape of ``tensor``."""
    dtype = dtype or tensor.dtype
    stride = []
    step = 1
    for size in reversed(tensor.shape):
        stride.append(step)
        step *= max(1, size)
    return TensorMeta(
        dtype, tensor.shape, tuple(reversed(stride)), tensor.device, -1, _ITEM_BYTES.get(dtype, 4)
    )


def _like(tensor: TensorMeta, dtype: str | None = None) -> TensorMeta:
    """Return what ``empty_like(tensor)`` makes: its strides where they are dense."""
    if dtype is None or dtype == tensor.dtype:
        return tensor if _is_dense(tensor) else _dense_like(tensor)
    converted = replace(tensor, dtype=dtype, item_bytes=_ITEM_BYTES.get(dtype, 4))
    return converted if _is_dense(tensor) else _dense_like(converted)


@_rule("sum", "sum.dim_IntList", "nansum")
def _plan_sum(draft: _Draft) -> None:
    tensor = draft.needed(0)
    draft.outputs()
    dims = draft.argument(1, "dim")
    if tensor.dtype not in _FLOATS:
        # Integers are summed as int64, from a converted copy.
        if tensor.dtype != "int64":
            tensor = _like(tensor, "int64")
            draft.temporary(_tensor_bytes(tensor))
    elif dict(draft.operation.options).get("dtype", f"torch.{tensor.dtype}") not in (
        f"torch.{tensor.dtype}",
        "torch.float32",
        None,
    ):
        raise _UnknownFormError
    _reduce(draft, tensor, dims, accumulator_bytes=_accumulator_bytes(tensor.dtype))


@_rule("count_nonzero")
def _plan_count_nonzero(draft: _Draft) -> None:
    draft.outputs()
    counted = _like(draft.needed(0), "int64")
    if draft.needed(0).dtype != "bool":
        draft.temporary(draft.needed(0).n_elements)
    draft.temporary(_tensor_bytes(counted))
    _reduce(draft, counted, draft.argument(1), accumulator_bytes=8)


@_rule("mean", "mean.dim", "amax", "amin", "max", "min", "linalg_vector_norm", "norm")
def _plan_float_reduction(draft: _Draft) -> None:
    tensor = draft.needed(0)
    if draft.tensor(1) is not None:
        draft.outputs()
        return
    draft.outputs()
    base = draft.operation.name.removeprefix("aten::").partition(".")[0]
    dims = draft.argument(2 if base in ("linalg_vector_norm", "norm") else 1, "dim")
    _reduce(draft, tensor, dims, accumulator_bytes=_accumulator_bytes(tensor.dtype))


@_rule("prod", "prod.dim_int")
def _plan_prod(draft: _Draft) -> None:
    tensor = draft.needed(0)
    if tensor.dtype not in _FLOATS:
        raise _UnknownFormError
    draft.outputs()
    _reduce(draft, tensor, draft.argument(1), accumulator_bytes=_accumulator_bytes(tensor.dtype))


@_rule("any", "all")
def _plan_any(draft: _Draft) -> None:
    draft.outputs()
    tensor = draft.needed(0)
    dims = draft.argument(1, "dim") if "." in draft.operation.name else None
    _reduce(draft, tensor, dims, accumulator_bytes=1)


@_rule("argmax", "argmin", "max.dim", "min.dim")
def _plan_arg_reduction(draft: _Draft) -> None:
    tensor = draft.needed(0)
    draft.outputs()
    # The largest element and its position.
    _reduce(draft, tensor, draft.argument(1, "dim"), accumulator_bytes=16)


@_rule("var", "std", "var_mean", "std_mean")
def _plan_variance(draft: _Draft) -> None:
    tensor = draft.needed(0)
    if tensor.dtype == "float64":
        raise _UnknownFormError
    draft.outputs()
    # The mean, the sum of squares and the count twice.
    _reduce(draft, tensor, draft.argument(1, "dim"), accumulator_bytes=16, n_unrolled=2)


@_rule("logsumexp")
def _plan_logsumexp(draft: _Draft) -> None:
    tensor = draft.needed(0)
    if tensor.dtype not in _FLOATS or not draft.operation.allocated:
        raise _UnknownFormError
    reduced_bytes = draft.operation.allocated[0].n_bytes
    dims = draft.argument(1)
    item = _accumulator_bytes(tensor.dtype)
    draft.temporary(reduced_bytes)
    draft.free(*reversed(_reduce(draft, tensor, dims, accumulator_bytes=item)))
    magnitude = draft.temporary(reduced_bytes)
    infinite = draft.temporary(reduced_bytes // tensor.item_bytes)
    draft.free(infinite, magnitude)
    shifted = _like(tensor)
    draft.temporary(_tensor_bytes(shifted))
    draft.outputs()
    _reduce(draft, shifted, dims, accumulator_bytes=item)


# Losses


def _reduction_mode(draft: _Draft, index: int) -> int:
    mode = draft.argument(index, "reduction")
    return mode if isinstance(mode, int) else 1


@_rule("mse_loss", "smooth_l1_loss")
def _plan_pointwise_loss(draft: _Draft) -> None:
    tensor, target = draft.needed(0), draft.needed(1)
    if _reduction_mode(draft, 2) == 0:
        draft.outputs()
        return
    if tensor.shape != target.shape:
        raise _UnknownFormError
    losses = _like(tensor)
    # The result is first given the storage of all losses, and keeps it as a scalar.
    draft.output(0, _tensor_bytes(losses))
    draft.temporary(_tensor_bytes(losses))
    _reduce(draft, losses)


@_rule("huber_loss")
def _plan_huber_loss(draft: _Draft) -> None:
    tensor = draft.needed(0)
    if _reduction_mode(draft, 2) == 0:
        draft.outputs()
        return
    losses = _like(tensor)
    draft.temporary(_tensor_bytes(losses))
    draft.outputs()
    _reduce(draft, losses)


@_rule("binary_cross_entropy")
def _plan_binary_cross_entropy(draft: _Draft) -> None:
    tensor = draft.needed(0)
    if _reduction_mode(draft, 3) == 0:
        draft.outputs()
        return
    losses = _like(tensor)
    # The mean is written into the storage of the losses.
    draft.output(0, _tensor_bytes(losses))
    draft.temporary(tensor.item_bytes)
    _reduce(draft, losses)


@_rule("binary_cross_entropy_with_logits")
def _plan_binary_cross_entropy_with_logits(draft: _Draft) -> None:
    tensor = draft.needed(0)
    if draft.tensor(2) is not None or draft.tensor(3) is not None:
        raise _UnknownFormError
    losses = _like(tensor)
    if _reduction_mode(draft, 4) == 0:
        draft.temporary(_tensor_bytes(losses))
        draft.outputs()
        return
    draft.temporary(_tensor_bytes(losses))
    draft.temporary(_tensor_bytes(losses))
    draft.outputs()
    _reduce(draft, losses)


@_rule("nll_loss2d_forward", "native_dropout")
def _plan_second_output_first(draft: _Draft) -> None:
    # native_dropout makes its mask, and nll_loss2d its total weight, before the result.
    draft.outputs(1, 0)


@_rule("_embedding_bag")
def _plan_embedding_bag(draft: _Draft) -> None:
    draft.outputs(2, 1, 0, 3)


# Softmax


@_rule("_softmax_backward_data")
def _plan_softmax_backward(draft: _Draft) -> None:
    gradient, result = draft.needed(0), draft.needed(1)
    if not _is_contiguous(gradient.shape, gradient.stride):
        raise _UnknownFormError
    draft.outputs()
    draft.temporary(max(_tensor_bytes(gradient), _tensor_bytes(result)))


@_rule("_safe_softmax")
def _plan_safe_softmax(draft: _Draft) -> None:
    tensor = draft.needed(0)
    dim = draft.argument(1)
    if not isinstance(dim, int) or not tensor.shape:
        raise _UnknownFormError
    draft.outputs()
    # Which elements, and which rows, are masked; and a zero to fill these with.
    draft.temporary(tensor.n_elements)
    draft.temporary(tensor.n_elements // max(1, tensor.shape[dim]))
    draft.temporary(tensor.item_bytes)


# Normalisation


@_rule("native_layer_norm")
def _plan_layer_norm(draft: _Draft) -> None:
    draft.contiguous(draft.needed(0))
    draft.outputs()


@_rule("native_layer_norm_backward")
def _plan_layer_norm_backward(draft: _Draft) -> None:
    gradient, tensor = draft.needed(0), draft.needed(1)
    normalized = _int_tuple(draft.argument(2)) or ()
    draft.contiguous(tensor)
    draft.outputs()
    draft.contiguous(gradient)
    n_columns = _product(normalized)
    n_rows = tensor.n_elements // max(1, n_columns)
    if n_rows > 65536 and n_columns // 32 < draft.gpu.n_multiprocessors // 2:
        # The gradients of scale and shift are added up in parts, one per block of rows.
        draft.estimate(2 * 4 * n_columns * _ceil_div(n_rows, 256))


@_rule("native_group_norm")
def _plan_group_norm(draft: _Draft) -> None:
    n, channels = draft.argument(3), draft.argument(4)
    if not isinstance(n, int) or not isinstance(channels, int):
        raise _UnknownFormError
    draft.outputs()
    item = _accumulator_bytes(draft.needed(0).dtype)
    for _ in range(2):
        draft.temporary(n * channels * item)


@_rule("native_group_norm_backward")
def _plan_group_norm_backward(draft: _Draft) -> None:
    n, channels, groups = (draft.argument(index) for index in (5, 6, 8))
    if not (isinstance(n, int) and isinstance(channels, int) and isinstance(groups, int)):
        raise _UnknownFormError
    item = _accumulator_bytes(draft.needed(1).dtype)
    draft.outputs()
    for size in (n * channels, n * channels, n * groups, n * groups, n * channels):
        draft.temporary(size * item)


def _batch_norm_shares(n_rows: int, channels: int) -> tuple[int, int]:
    """Return the blocks per column and the columns of a channels-last batch norm."""
    block_x = min(_floor_power_of_2(channels), 32)
    block_y = min(_floor_power_of_2(_ceil_div(n_rows, 16)), 512 // block_x)
    if block_x * block_y != 512:
        block_x = min(_floor_power_of_2(channels), 512 // block_y)
    grid_y = min(_ceil_div(n_rows, block_y * 16), 128)
    return (1 if grid_y < 8 else grid_y), _ceil_div(channels, block_x)


def _has_channels_innermost(tensor: TensorMeta) -> bool:
    if len(tensor.shape) == 2:
        return _is_contiguous(tensor.shape, tensor.stride)
    return _is_channels_last(tensor)


@_rule("native_batch_norm")
def _plan_batch_norm(draft: _Draft) -> None:
    tensor = draft.needed(0)
    draft.outputs()
    if draft.argument(5) is True and _has_channels_innermost(tensor):
        channels = tensor.shape[1]
        n_shares, n_columns = _batch_norm_shares(tensor.n_elements // max(1, channels), channels)
        if n_shares > 1:
            draft.temporary(4 * channels * n_shares * 4)
            draft.temporary(4 * n_columns)


@_rule("native_batch_norm_backward")
def _plan_batch_norm_backward(draft: _Draft) -> None:
    tensor = draft.needed(1)
    if draft.operation.allocated and _has_channels_innermost(tensor):
        channels = tensor.shape[1]
        statistics = draft.tensor(5)
        if statistics is None or statistics.n_elements == 0:
            draft.temporary(channels * 4)
        for _ in range(2):
            draft.temporary(channels * 4)
        draft.outputs(*range(1, len(draft.operation.allocated)))
        n_shares, n_columns = _batch_norm_shares(tensor.n_elements // max(1, channels), channels)
        if n_shares > 1:
            staging = draft.temporary(2 * channels * n_shares * 4)
            semaphores = draft.temporary(4 * n_columns)
            draft.free(semaphores, staging)
        draft.output(0)
    else:
        draft.outputs()


@_rule("cudnn_batch_norm", "cudnn_batch_norm_backward")
def _plan_cudnn_batch_norm(draft: _Draft) -> None:
    tensor = draft.needed(0)
    draft.outputs()
    if _is_channels_last(tensor):
        # cuDNN's kernel for channels-last tensors adds up parts per multiprocessor.
        n_bytes = 4 * tensor.shape[1] * draft.gpu.n_multiprocessors * 4
        draft.temporary(min(n_bytes, _tensor_bytes(tensor) // 16))
        draft.estimate(n_bytes)


# Attention


def _plan_flash_splits(n_rows: int, length_q: int, length_k: int, head: int, gpu: GpuFacts) -> int:
    """Return the parts that flash attention splits keys and values into."""
    block_n = 256 if head <= 64 else 128 if head <= 128 else 64
    n_blocks = _ceil_div(length_k, block_n)
    n_tiles = n_rows * _ceil_div(length_q, 64)
    n_places = gpu.n_multiprocessors * 2
    if n_tiles >= 0.8 * n_places:
        return 1
    efficiencies = {}
    for n in range(1, min(128, n_places, n_blocks) + 1):
        if n == 1 or _ceil_div(n_blocks, n) != _ceil_div(n_blocks, n - 1):
            n_waves = n_tiles * n / n_places
            efficiencies[n] = n_waves / math.ceil(n_waves)
    best = max(efficiencies.values(), default=0.0)
    return next((n for n, value in efficiencies.items() if value >= 0.85 * best), 1)


@_rule("_scaled_dot_product_flash_attention")
def _plan_flash_attention(draft: _Draft) -> None:
    query, key = draft.needed(0), draft.needed(1)
    batch, heads, length_q, head = query.shape
    draft.outputs(0, 1)
    if not draft.argument(3, "dropout_p"):
        n_splits = _plan_flash_splits(batch * heads, length_q, key.shape[2], head, draft.gpu)
        if n_splits > 1:
            rows = n_splits * batch * heads * length_q
            draft.temporary(rows * 4)
            draft.temporary(rows * _round_up(head, 32) * 4)
    draft.outputs(*range(2, len(draft.operation.allocated)))


@_rule("_scaled_dot_product_flash_attention_backward")
def _plan_flash_attention_backward(draft: _Draft) -> None:
    gradient, query, key, result = (draft.needed(index) for index in (0, 1, 2, 4))
    batch, heads, length_q, head = query.shape
    for tensor in (gradient, result):
        if not _is_contiguous(*_transposed(tensor, 1, 2)):
            draft.temporary(_tensor_bytes(tensor))
    draft.outputs()
    rows = batch * heads * _round_up(length_q, 128)
    draft.temporary(rows * 4)
    draft.temporary(rows * _round_up(head, 32) * 4)
    if key.shape[1] != heads:
        for _ in range(2):
            draft.temporary(batch * heads * key.shape[2] * head * query.item_bytes)


@_rule("_scaled_dot_product_efficient_attention")
def _plan_efficient_attention(draft: _Draft) -> None:
    query, value = draft.needed(0), draft.needed(2)
    # The seed and the offset of the dropout are on the CPU, whatever a fake tensor says.
    draft.outputs(0, 1)
    if query.dtype != "float32" and value.shape[-1] > 128:
        draft.temporary(_product(query.shape[:-1]) * value.shape[-1] * 4)


@_rule("_scaled_dot_product_efficient_attention_backward")
def _plan_efficient_attention_backward(draft: _Draft) -> None:
    gradient, query, key, value = (draft.needed(index) for index in range(4))
    batch, heads, length_q, _ = query.shape
    rows = batch * heads * length_q
    if not _is_contiguous(*_transposed(gradient, 1, 2)):
        draft.temporary(_tensor_bytes(gradient))
    draft.outputs()
    if query.dtype == "float32":
        product = draft.temporary(rows * value.shape[-1] * 4)
        total = draft.temporary(rows * 4)
        draft.temporary(rows * 4)
        draft.free(total, product)
    else:
        draft.temporary(rows * 4)
    head = max(query.shape[-1], value.shape[-1])
    n_columns = 64 if head <= 64 else _round_up(head, 128)
    n_tile_rows = 128 if head > 64 and head <= 128 and query.dtype != "float32" else 64
    tile_bytes = n_tile_rows * n_columns * 4 + 16
    n_bytes = batch * heads * _ceil_div(length_q, n_tile_rows) * tile_bytes
    if head > 128:
        if query.dtype != "float32":
            n_bytes += 2 * batch * heads * _round_up(key.shape[2], 128) * n_columns * 4
        draft.estimate(n_bytes)
    elif head <= 32:
        draft.estimate(0)
    draft.temporary(n_bytes)


@_rule("_scaled_dot_product_cudnn_attention")
def _plan_cudnn_attention(draft: _Draft) -> None:
    if len(draft.operation.allocated) < 3:
        raise _UnknownFormError
    draft.outputs(*range(2, len(draft.operation.allocated)), 0, 1)
    draft.temporary(256)


@_rule("_scaled_dot_product_cudnn_attention_backward")
def _plan_cudnn_attention_backward(draft: _Draft) -> None:
    query, key = draft.needed(1), draft.needed(2)
    batch, heads, length_q, head = query.shape
    draft.outputs()
    n_bytes = batch * heads * length_q * (head + 1) * 4 + 256
    if key.shape[1] != heads:
        n_bytes += 2 * batch * heads * key.shape[2] * head * query.item_bytes
    draft.temporary(n_bytes)


# Sorting and scanning with CUB: temporary storage is laid out in parts aligned to 256 bytes


def _align(n_bytes: int) -> int:
    return _round_up(n_bytes, 256)


def _radix_sort_bytes(n: int, key_bytes: int, value_bytes: int, n_bits: int | None = None) -> int:
    """Return the temporary storage of a radix sort of ``n`` pairs, in bytes."""
    widest = max(key_bytes, value_bytes)
    if n <= 256 * max(1, 19 * 4 // widest):
        return 1
    n_passes = _ceil_div(n_bits if n_bits is not None else key_bytes * 8, 8)
    tile = {(4, 8): 5376, (8, 8): 4608}.get((key_bytes, value_bytes), 5376)
    parts = [n_passes * 256 * 8, _ceil_div(n, tile) * 256 * 4, n_passes * 4]
    if n_passes > 1:
        parts += [n * key_bytes, n * value_bytes]
    return sum(_align(part) for part in parts) + 255


def _scan_bytes(n: int, tile: int, word_bytes: int) -> int:
    """Return the temporary storage of a scan of ``n`` elements, in bytes."""
    states = _align((_ceil_div(n, tile) + 32) * word_bytes) + 255
    return _align(states) + 255


def _prefix_sum_bytes(n: int, item_bytes: int) -> int:
    return _scan_bytes(n, 896, 16) if item_bytes == 8 else _scan_bytes(n, 1920, 8)


def _select_bytes(n: int) -> int:
    return _scan_bytes(n, 4224, 8)


def _count_bytes(n: int, gpu: GpuFacts) -> int:
    """Return the temporary storage of a count of the elements that are not zero, in bytes."""
    if n <= 4096:
        return 1
    most_blocks = gpu.n_multiprocessors * (gpu.threads_per_multiprocessor // 256) * 5
    return _align(most_blocks * 4) + 255


@_rule("cumsum", "cumprod")
def _plan_cumsum(draft: _Draft) -> None:
    tensor = draft.needed(0)
    dim = draft.argument(1)
    if not isinstance(dim, int):
        raise _UnknownFormError
    draft.outputs()
    dtype = dict(draft.operation.options).get("dtype")
    target = dtype.removeprefix("torch.") if isinstance(dtype, str) else None
    if target is None:
        target = tensor.dtype if tensor.dtype in _FLOATS else "int64"
    item = _ITEM_BYTES.get(target, 4)
    converted = tensor
    if tensor.dtype != target:
        converted = _like(tensor, target)
        draft.temporary(_tensor_bytes(converted))
    if tensor.shape and tensor.n_elements == tensor.shape[dim]:
        draft.temporary(_prefix_sum_bytes(tensor.n_elements, item))


@_rule("sort", "sort.stable")
def _plan_sort(draft: _Draft) -> None:
    tensor = draft.needed(0)
    arguments = draft.operation.arguments[1:]
    dims = [a for a in arguments if isinstance(a, int) and not isinstance(a, bool)]
    given = dict(draft.operation.options).get("dim")
    dim = dims[0] if dims else given if isinstance(given, int) else -1
    draft.outputs()
    if not tensor.shape:
        return
    dim %= len(tensor.shape)
    n, length, item = tensor.n_elements, tensor.shape[dim], tensor.item_bytes
    if length <= 4096:
        draft.temporary(length * 8)
        return
    n_segments = n // length
    if tensor.stride[dim] != 1 and n_segments > 1:
        for n_bytes in (n * item, n * item, n * 8):
            draft.temporary(n_bytes)
    if item < 4:
        draft.estimate(n * (item + 8) * 2)
    draft.temporary(n * 8)
    if n_segments == 1:
        draft.temporary(_radix_sort_bytes(n, item, 8))
    elif n_segments < 128:
        draft.temporary(n * 8)
        keys = draft.temporary(n * item)
        storage = draft.temporary(_radix_sort_bytes(n, item, 8))
        draft.free(storage, keys)
        parts = (256 * 8, _ceil_div(n, 5760) * 256 * 4, 4)
        draft.temporary(sum(_align(part) for part in parts) + 255)
    else:
        draft.temporary(n * (item + 8))
        draft.estimate(n * (item + 8) * 2)


#: From how long a slice ``topk`` shares it among blocks, by the greatest number of slices.
_SHARED_TOPK: Final = ((20, 20000), (40, 10000), (80, 8000), (200, 5000), (800, 3000), (4000, 800))


@_rule("topk")
def _plan_topk(draft: _Draft) -> None:
    tensor = draft.needed(0)
    dim = draft.argument(2, "dim")
    draft.outputs()
    if not tensor.shape:
        return
    length = tensor.shape[dim if isinstance(dim, int) else -1]
    n_slices = tensor.n_elements // max(1, length)
    shortest = next((least for most, least in _SHARED_TOPK if n_slices <= most), 400)
    k = draft.argument(1, "k")
    if isinstance(k, int) and k > 4096:
        draft.estimate(4 * tensor.n_elements * 8)
    if length < shortest:
        return
    n_threads = draft.gpu.n_multiprocessors * 6 * 256
    n_items = min(64, max(4, _ceil_div(tensor.n_elements, n_threads)))
    n_blocks = _ceil_div(length, n_items * 256) * n_slices
    # The k-th value and its place in each slice, then counts of digits per block and per slice.
    for n_bytes in (
        n_slices * tensor.item_bytes,
        n_slices * 8,
        n_slices * 8,
        n_blocks * 512,
        n_slices * 1024,
        n_blocks * 4,
        n_blocks * 4,
    ):
        draft.temporary(n_bytes)
    draft.free(draft.temporary(1279))
    draft.temporary(1279)
    if n_blocks > 6304:
        draft.estimate(16 * n_blocks)


def _select_nonzero(draft: _Draft, tensor: TensorMeta) -> tuple[int, int]:
    """Allocate what finds the elements that are not zero, up to the place of their indices."""
    n_found = draft.temporary(4)
    counting = draft.temporary(_count_bytes(tensor.n_elements, draft.gpu))
    draft.free(counting)
    return n_found, counting


@_rule("nonzero")
def _plan_nonzero(draft: _Draft) -> None:
    tensor = draft.needed(0)
    _select_nonzero(draft, tensor)
    draft.outputs()
    draft.temporary(_select_bytes(tensor.n_elements))


@_rule("index")
def _plan_index(draft: _Draft) -> None:
    tensor = draft.needed(0)
    indices = draft.argument(1)
    masks = [
        index
        for index in (indices if isinstance(indices, tuple) else ())
        if isinstance(index, TensorMeta) and index.dtype in ("bool", "uint8")
    ]
    if not masks:
        draft.outputs()
        return
    if len(masks) > 1 or not draft.operation.allocated:
        raise _UnknownFormError
    (mask,) = masks
    n_found, _ = _select_nonzero(draft, mask)
    slice_bytes = _tensor_bytes(tensor) // max(1, mask.n_elements)
    n_rows = draft.operation.allocated[0].n_bytes // max(1, slice_bytes)
    draft.temporary(n_rows * len(mask.shape) * 8)
    selecting = draft.temporary(_select_bytes(mask.n_elements))
    draft.free(selecting, n_found)
    draft.outputs()


@_rule("masked_scatter")
def _plan_masked_scatter(draft: _Draft) -> None:
    draft.outputs()
    n = draft.needed(0).n_elements
    draft.temporary(n * 8)
    draft.temporary(_prefix_sum_bytes(n, 8))


@_rule("randperm")
def _plan_randperm(draft: _Draft) -> None:
    n = draft.argument(0)
    if not isinstance(n, int) or n < 1:
        raise _UnknownFormError
    draft.outputs()
    # Random keys of just so many bits that two are hardly ever equal.
    n_bits = min(64, math.ceil(math.log2(n - (6 * n * n + 1) / (math.log(0.9) * 12))))
    key_bytes = 4 if n_bits <= 32 else 8
    draft.free(draft.temporary(8))
    draft.temporary(n * 8)
    draft.temporary(n * key_bytes)
    draft.temporary(n * key_bytes)
    draft.temporary(_radix_sort_bytes(n, key_bytes, 8, n_bits))


@_rule("_unique2")
def _plan_unique(draft: _Draft) -> None:
    tensor = draft.needed(0)
    if tensor.dtype != "int64" or draft.argument(2) is True or draft.argument(3) is True:
        raise _UnknownFormError
    n = tensor.n_elements
    draft.output(0)
    draft.free(draft.temporary(_radix_keys_bytes(n)))
    draft.temporary(n * 8)
    draft.temporary(8)
    draft.temporary(_select_bytes(n))
    draft.estimate(n * 8)


def _radix_keys_bytes(n: int) -> int:
    """Return the temporary storage of a radix sort of ``n`` 8-byte keys, in bytes."""
    if n <= 2304:
        return 1
    parts = (8 * 256 * 8, _ceil_div(n, 5760) * 256 * 4, 8 * 4, n * 8)
    return sum(_align(part) for part in parts) + 255


# Embeddings and indexed writes


@_rule("embedding")
def _plan_embedding(draft: _Draft) -> None:
    draft.contiguous(draft.needed(1))
    draft.outputs()


@_rule("embedding_dense_backward")
def _plan_embedding_backward(draft: _Draft) -> None:
    gradient, indices = draft.needed(0), draft.needed(1)
    n_weights, by_frequency = draft.argument(2), draft.argument(4)
    if not isinstance(n_weights, int) or by_frequency is True:
        raise _UnknownFormError
    draft.contiguous(gradient)
    draft.contiguous(indices)
    n, columns = indices.n_elements, gradient.shape[-1]
    if n <= 3072:
        draft.outputs()
        return
    item = indices.item_bytes
    for _ in range(2):
        draft.temporary(n * item)
    order = draft.temporary(n * item)
    sorting = draft.temporary(_radix_sort_bytes(n, item, item))
    draft.free(sorting, order)
    draft.outputs()
    # Each index that occurs is a segment of the sorted ones, added up in parts of 10 rows.
    n_segments = min(n, n_weights)
    draft.temporary(n * item)
    draft.temporary(8)
    unused = draft.temporary(n * item)
    selecting = draft.temporary(_scan_bytes(n, 4224, 16))
    draft.free(selecting, unused)
    draft.temporary(n_segments * item)
    draft.temporary(n_segments * item)
    draft.free(draft.temporary(_prefix_sum_bytes(n_segments, item)))
    draft.temporary(8)
    n_parts = n // 10 + n_segments
    draft.temporary(n_parts * item)
    accumulator = 8 if gradient.dtype == "float64" else 4
    columns_rounded = _round_up(columns, 32)
    block = min(columns_rounded, 1024)
    n_blocks = _ceil_div(n_segments * columns_rounded, block)
    if n_blocks < draft.gpu.n_multiprocessors * 4 and n_parts > n_blocks * 4:
        # Few long segments: added up at once, in the precision of the accumulator.
        draft.temporary(n_parts * item)
        if gradient.item_bytes < accumulator:
            draft.temporary(n_weights * columns * accumulator)
    else:
        draft.temporary(n_parts * columns * accumulator)


@_rule("index_put", "index_put_", "_index_put_impl_", "_unsafe_index_put")
def _plan_index_put(draft: _Draft) -> None:
    tensor, values = draft.needed(0), draft.needed(2)
    indices = draft.argument(1)
    given = [
        index
        for index in (indices if isinstance(indices, tuple) else ())
        if isinstance(index, TensorMeta)
    ]
    if any(index.dtype in ("bool", "uint8") for index in given) or not given:
        raise _UnknownFormError
    draft.outputs()
    if draft.argument(3, "accumulate") is not True:
        return
    draft.contiguous(values)
    linear = None
    n = max(index.n_elements for index in given)
    for index in given:
        for _ in range(2):
            # Whether all indices are within bounds.
            extreme = draft.temporary(8)
            staging = _reduce(draft, _dense_like(index, "int64"), accumulator_bytes=8)
            draft.free(*reversed(staging))
            draft.free(draft.temporary(1), extreme)
        wrapped = draft.temporary(index.n_elements * 8)
        scaled = draft.temporary(index.n_elements * 8)
        draft.free(wrapped)
        if linear is not None:
            draft.free(scaled)
        linear = scaled if linear is None else linear
    if len(given) > 1 or not isinstance(draft.operation.arguments[1][0], TensorMeta):  # type: ignore[index]
        draft.estimate(n * 8 + _tensor_bytes(tensor))
    for _ in range(3):
        draft.temporary(n * 8)
    n_indexed = _product(tensor.shape[: len(given)])
    draft.temporary(_radix_sort_bytes(n, 8, 8, max(1, n_indexed.bit_length())))


# Products of matrices


def _needs_clone(matrix: TensorMeta) -> bool:
    """Return whether cuBLAS takes a copy of a matrix: neither rows nor columns are dense."""
    if len(matrix.shape) < 2:
        return False
    rows, columns = matrix.shape[-2:]
    row_step, column_step = matrix.stride[-2:]
    if len(matrix.shape) == 2 and _is_dense(matrix):
        return False
    return not (
        (column_step == 1 and row_step >= max(1, columns))
        or (row_step == 1 and column_step >= max(1, rows))
    )


@_rule("mm", "bmm", "addmm", "baddbmm", "_addmm_activation")
def _plan_matrix_product(draft: _Draft) -> None:
    draft.outputs()
    first = 0 if draft.operation.name.partition(".")[0] in ("aten::mm", "aten::bmm") else 1
    for index in (first, first + 1):
        matrix = draft.needed(index)
        if _needs_clone(matrix):
            draft.temporary(_tensor_bytes(matrix))


@_rule("_grouped_mm")
def _plan_grouped_mm(draft: _Draft) -> None:
    offsets = draft.argument(2, "offs")
    first, second = draft.needed(0), draft.needed(1)
    if isinstance(offsets, TensorMeta):
        n_groups = offsets.n_elements
    else:
        n_groups = first.shape[0] if len(first.shape) == 3 else second.shape[0]
    if first.dtype != "bfloat16" or draft.gpu.capability[0] != 9:
        raise _UnknownFormError
    draft.outputs()
    # Pointers, strides and sizes of each group, then CUTLASS's 512 bytes per multiprocessor.
    draft.temporary(60 * n_groups)
    draft.temporary(512 * draft.gpu.n_multiprocessors)


# Lists of tensors


def _count_chunks(tensors: Argument) -> tuple[int, int]:
    """Return the number of tensors of a list, and the chunks of the longest."""
    given = [
        t for t in (tensors if isinstance(tensors, tuple) else ()) if isinstance(t, TensorMeta)
    ]
    return len(given), max((_ceil_div(t.n_elements, 65536) for t in given), default=0)


@_rule("_foreach_norm")
def _plan_foreach_norm(draft: _Draft) -> None:
    n_tensors, n_chunks = _count_chunks(draft.argument(0))
    draft.temporary(n_tensors * n_chunks * 4)
    draft.outputs()


@_rule("_foreach_max")
def _plan_foreach_max(draft: _Draft) -> None:
    tensors = draft.argument(0)
    n_tensors, n_chunks = _count_chunks(tensors)
    first = tensors[0] if isinstance(tensors, tuple) and tensors else None
    if not isinstance(first, TensorMeta):
        raise _UnknownFormError
    draft.outputs()
    draft.temporary(n_tensors * n_chunks * first.item_bytes)


# Convolutions, with cuDNN: which algorithm it takes is not known, so its workspace is estimated


@dataclass(frozen=True, slots=True)
class _Convolution:
    """A convolution: its tensors as the forward pass has them."""

    tensor: TensorMeta
    weight: TensorMeta
    n_result: int
    groups: int
    transposed: bool
    #: Whether every window is one element: a product of matrices.
    is_pointwise: bool
    #: Whether windows do not overlap.
    is_patchwise: bool

    @property
    def is_depthwise(self) -> bool:
        """Whether each channel is convolved by itself."""
        return self.groups > 1 and self.groups == self.tensor.shape[1] and not self.transposed

    @property
    def is_channels_last(self) -> bool:
        """Whether cuDNN is given channels-last tensors."""
        return _is_channels_last(self.tensor) or _is_channels_last(self.weight)

    def transform_bytes(self) -> int:
        """Return the bytes of input, result and weight in the layout that the kernels read."""
        item = self.tensor.item_bytes
        # Kernels for half precision read 8 channels at once.
        padding = 8 if item == 2 else 1
        n_elements = self.n_result
        for tensor in (self.tensor, self.weight):
            channels = tensor.shape[1]
            if tensor is self.tensor or _product(tensor.shape[2:]) > 1:
                n_elements += tensor.n_elements // max(1, channels) * _round_up(channels, padding)
        return n_elements * item

    def is_read_in_place(self) -> bool:
        """Return whether kernels read contiguous or channels-last tensors as they are.

        For contiguous tensors they do where a changed layout gains little: windows of one element,
        unless there are many channels over odd rows, and few elements of input channels.
        """
        if self.is_channels_last:
            return True
        n_channels, n_window = self.tensor.shape[1], _product(self.weight.shape[2:])
        if self.is_pointwise:
            n_rows = self.weight.shape[0]
            intensity = n_channels * n_rows // max(1, n_channels + n_rows)
            return _product(self.tensor.shape[2:]) % 4 == 0 or intensity < 320
        return n_channels <= 4 and (n_window <= 9 or self.is_patchwise)


def _read_convolution(
    draft: _Draft, tensor: TensorMeta, weight: TensorMeta, first: int, n_result: int
) -> _Convolution:
    """Return the convolution with the stride as argument ``first``."""
    stride = _int_tuple(draft.argument(first)) or (1,)
    groups = draft.argument(first + 5)
    return _Convolution(
        tensor,
        weight,
        n_result,
        groups if isinstance(groups, int) else 1,
        draft.argument(first + 3) is True,
        _product(weight.shape[2:]) == 1 and set(stride) == {1},
        weight.shape[2:] == stride,
    )


@_rule("convolution", "_convolution", "cudnn_convolution")
def _plan_convolution(draft: _Draft) -> None:
    tensor, weight = draft.needed(0), draft.needed(1)
    if len(tensor.shape) != len(weight.shape) or not draft.operation.allocated:
        raise _UnknownFormError
    n_result = draft.operation.allocated[0].n_bytes // tensor.item_bytes
    convolution = _read_convolution(draft, tensor, weight, 3, n_result)
    if convolution.is_depthwise and tensor.item_bytes == 4:
        draft.contiguous(None if _is_channels_last(tensor) else tensor)
        draft.outputs()
        draft.estimate(_tensor_bytes(tensor))
        return
    draft.outputs()
    if convolution.is_channels_last:
        _make_channels_last(draft, weight)
        _make_channels_last(draft, tensor)
    else:
        draft.contiguous(weight)
        draft.contiguous(tensor)
    _add_convolution_workspace(draft, convolution)


def _make_channels_last(draft: _Draft, tensor: TensorMeta) -> int | None:
    """Allocate a channels-last copy of ``tensor`` if needed; return its number."""
    n_dims = len(tensor.shape)
    order = (0, *range(2, n_dims), 1)
    if _is_contiguous([tensor.shape[d] for d in order], [tensor.stride[d] for d in order]):
        return None
    return draft.temporary(_tensor_bytes(tensor))


def _add_convolution_workspace(
    draft: _Draft, convolution: _Convolution, partial_bytes: int = 0
) -> int:
    """Allocate cuDNN's workspace, estimated; return its number."""
    transform = convolution.transform_bytes()
    # Layouts transformed, or window by window gathered, with room for parts of the result.
    draft.estimate(2 * transform + 32 * _tensor_bytes(convolution.weight) + 8 * MIB)
    if not convolution.is_read_in_place():
        return draft.temporary(transform + partial_bytes + 16)
    if partial_bytes and convolution.is_pointwise and not convolution.is_channels_last:
        return draft.temporary(min(transform, partial_bytes))
    # Single precision keeps a table of offsets.
    has_table = convolution.is_pointwise and convolution.tensor.item_bytes == 4
    return draft.temporary(partial_bytes or (400 if has_table else 0))


@_rule("convolution_backward")
def _plan_convolution_backward(draft: _Draft) -> None:
    gradient, tensor, weight = (draft.needed(index) for index in range(3))
    mask = draft.argument(10)
    if not isinstance(mask, tuple) or len(tensor.shape) != len(weight.shape):
        raise _UnknownFormError
    wants_input, wants_weight, wants_bias = (item is True for item in mask)
    convolution = _read_convolution(draft, tensor, weight, 4, gradient.n_elements)
    positions = iter(range(len(draft.operation.allocated)))
    if convolution.is_depthwise and tensor.item_bytes == 4:
        draft.estimate(10 * _tensor_bytes(tensor))
        for wanted in (wants_input, wants_weight):
            if wanted:
                draft.output(next(positions, -1))
    else:
        copied = (
            _make_channels_last(draft, gradient)
            if convolution.is_channels_last
            else draft.contiguous(gradient)
        )
        if wants_input:
            draft.output(next(positions, -1))
            weight_copy = (
                _make_channels_last(draft, weight) if convolution.is_channels_last else None
            )
            workspace = _add_convolution_workspace(draft, convolution)
            draft.free(workspace, *([] if weight_copy is None else [weight_copy]))
        if wants_weight:
            draft.output(next(positions, -1))
            partial_bytes = _plan_partial_weights(convolution, draft.gpu)
            tensor_copy = (
                _make_channels_last(draft, tensor)
                if convolution.is_channels_last
                else draft.contiguous(tensor)
            )
            workspace = _add_convolution_workspace(draft, convolution, partial_bytes)
            draft.free(workspace, *([] if tensor_copy is None else [tensor_copy]))
        if copied is not None:
            draft.free(copied)
    if wants_bias:
        draft.output(next(positions, -1))
        _reduce(draft, gradient, tuple(d for d in range(len(gradient.shape)) if d != 1))


def _plan_partial_weights(convolution: _Convolution, gpu: GpuFacts) -> int:
    """Return the bytes of partial sums of a weight's gradient.

    The product is shared out by images, for windows of one element, else along the positions until
    every multiprocessor has a tile of it.
    """
    rows = convolution.weight.shape[0]
    if convolution.is_pointwise and convolution.is_read_in_place():
        n_shares = convolution.tensor.shape[0]
    else:
        tile = 128 if rows > 64 else 64
        columns = convolution.weight.n_elements // max(1, rows)
        n_shares = gpu.n_multiprocessors // (_ceil_div(rows, tile) * _ceil_div(columns, tile))
    return n_shares * convolution.weight.n_elements * 4 if n_shares > 2 else 0


# Recurrent networks with cuDNN


@_rule("_cudnn_rnn")
def _plan_cudnn_rnn(draft: _Draft) -> None:
    reserve = len(draft.operation.allocated) - 1
    trains = draft.argument(12) is True
    draft.outputs(*range(reserve if trains else reserve + 1))
    _add_rnn_workspace(draft)
    if trains:
        draft.output(reserve)


@_rule("_cudnn_rnn_backward")
def _plan_cudnn_rnn_backward(draft: _Draft) -> None:
    draft.outputs()
    _add_rnn_workspace(draft)


def _add_rnn_workspace(draft: _Draft) -> None:
    """Allocate cuDNN's workspace of a recurrent network, estimated."""
    tensor = draft.needed(0)
    largest = max((use.n_bytes for use in draft.operation.allocated), default=0)
    draft.temporary(16 * MIB + 2 * largest)
    draft.estimate(48 * MIB + 8 * (largest + _tensor_bytes(tensor)))


#: Operators that were seen to allocate their outputs in order, and nothing else.
_WITHOUT_TEMPORARIES: Final = frozenset(
    # Names without their overloads; as quoted names it would be 200 lines.
    """
    _foreach_add _foreach_add_ _foreach_addcdiv _foreach_addcdiv_ _foreach_addcmul
    _foreach_addcmul_ _foreach_clamp_min_ _foreach_copy_ _foreach_div _foreach_div_ _foreach_lerp
    _foreach_lerp_ _foreach_mul _foreach_mul_ _foreach_neg _foreach_neg_ _foreach_pow
    _foreach_reciprocal _foreach_reciprocal_ _foreach_sqrt _foreach_sqrt_ _foreach_sub
    _foreach_sub_ _foreach_zero_ _fused_adam_ _fused_adamw_ _fused_sgd_
    _local_scalar_dense _log_softmax _log_softmax_backward_data _reshape_alias _softmax _to_copy
    _unsafe_view abs add add_ addcdiv addcdiv_ addcmul addcmul_ alias arange as_strided as_strided_
    avg_pool2d avg_pool2d_backward bernoulli_ bitwise_and bitwise_not bitwise_or cat clamp clamp_
    clamp_min clamp_min_ clone constant_pad_nd copy_ cos detach detach_ div div_ elu empty
    empty_like empty_strided eq eq_ exp exp_ expand fill fill_ flip floor_divide full full_like
    gather ge gelu gelu_backward glu glu_backward gt hardswish hardswish_ histc index_add
    index_add_ index_select le leaky_relu leaky_relu_backward lerp lerp_ lift_fresh lift_fresh_copy
    log log1p log_ logical_and logical_not logical_or lt masked_fill masked_fill_
    max_pool2d_with_indices max_pool2d_with_indices_backward maximum minimum mse_loss_backward mul
    mul_ native_dropout_backward ne neg neg_ new_empty new_empty_strided new_full new_ones new_zeros
    nll_loss2d_backward nll_loss_backward nll_loss_forward normal_ ones ones_like permute pow pow_
    reciprocal reciprocal_ relu relu_ repeat rsqrt rsqrt_ rsub scalar_tensor scatter scatter_
    scatter_add scatter_add_ select select_backward sigmoid sigmoid_ sigmoid_backward silu silu_
    silu_backward sin slice slice_backward split split_with_sizes sqrt sqrt_ squeeze stack sub sub_
    t tanh tanh_ tanh_backward threshold_backward transpose tril triu unbind uniform_ unsqueeze
    upsample_bilinear2d upsample_bilinear2d_backward upsample_nearest2d upsample_nearest2d_backward
    view where zero_ zeros zeros_like
    """.split()  # noqa: SIM905
)
