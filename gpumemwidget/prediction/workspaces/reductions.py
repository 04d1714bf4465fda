"""Rules of reductions, losses, softmax and normalisation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from gpumemwidget.prediction.operations import Argument, TensorMeta
from gpumemwidget.prediction.workspaces.draft import (
    FLOATS,
    ITEM_BYTES,
    Draft,
    UnknownFormError,
    ceil_div,
    count_bytes,
    count_elements,
    floor_power_of_2,
    is_channels_last,
    is_contiguous,
    is_dense,
    list_reduced_dims,
    read_ints,
    rule,
)
from gpumemwidget.prediction.workspaces.plans import GpuFacts

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
    if count_elements(shape) == 0:
        return None
    dims = _iterate_reduction(shape, stride, reduced)
    n_reduced = sum(dim.output_stride == 0 for dim in dims)
    n_outputs = count_elements(dim.size for dim in dims if dim.output_stride)
    n_inputs = count_elements(dim.size for dim in dims) // n_outputs
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
    block_x_most, block_y_most = (min(floor_power_of_2(n), n_max) for n in (width, height))
    block_x = min(block_x_most, 32)
    block_y = min(block_y_most, n_max // block_x)
    block_x = min(block_x_most, n_max // block_y)
    step_input, step_output = (block_x, 1) if along_input else (1, block_x)
    if ceil_div(n_inputs, step_input) < min(block_y * 16, 256):
        return None
    step_input *= block_y
    n_values = ceil_div(n_inputs, step_input)
    grid = ceil_div(n_outputs // n_vector if n_vector > 1 else n_outputs, step_output)
    most_blocks = gpu.n_multiprocessors * (gpu.threads_per_multiprocessor // (block_x * block_y))
    if n_values < 256 or grid > most_blocks:
        return None
    n_shares = max(
        min(ceil_div(most_blocks, grid), ceil_div(n_values, 16)), ceil_div(n_values, 256)
    )
    if n_shares == 1:
        return None
    staging = accumulator_bytes * n_outputs * n_shares
    if not along_input:
        staging *= block_x * n_vector
    return staging, 4 * grid


def allocate_reduction(
    draft: Draft,
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
        list_reduced_dims(tensor, dims),
        draft.gpu,
        accumulator_bytes=accumulator_bytes,
        n_unrolled=n_unrolled,
    )
    if plan is None:
        return ()
    # Beyond 32-bit offsets ATen splits the reduction, with a buffer for the parts.
    if tensor.n_elements * tensor.item_bytes >= 2**31:
        draft.temporary(0, most=sum(plan) + count_bytes(tensor) // 2)
    return tuple(draft.temporary(n_bytes) for n_bytes in plan)


def read_accumulator_bytes(dtype: str) -> int:
    """Return the bytes in which a reduction adds up elements of ``dtype``."""
    return 8 if dtype in ("float64", "int64") else 4


def dense_like(tensor: TensorMeta, dtype: str | None = None) -> TensorMeta:
    """Return a contiguous tensor of the shape of ``tensor``."""
    dtype = dtype or tensor.dtype
    stride = []
    step = 1
    for size in reversed(tensor.shape):
        stride.append(step)
        step *= max(1, size)
    return TensorMeta(
        dtype, tensor.shape, tuple(reversed(stride)), tensor.device, -1, ITEM_BYTES.get(dtype, 4)
    )


def empty_like(tensor: TensorMeta, dtype: str | None = None) -> TensorMeta:
    """Return what ``empty_like(tensor)`` makes: its strides where they are dense."""
    if dtype is None or dtype == tensor.dtype:
        return tensor if is_dense(tensor) else dense_like(tensor)
    converted = replace(tensor, dtype=dtype, item_bytes=ITEM_BYTES.get(dtype, 4))
    return converted if is_dense(tensor) else dense_like(converted)


@rule("sum", "sum.dim_IntList", "nansum")
def _plan_sum(draft: Draft) -> None:
    tensor = draft.needed(0)
    draft.outputs()
    dims = draft.argument(1, "dim")
    if tensor.dtype not in FLOATS:
        # Integers are summed as int64, from a converted copy.
        if tensor.dtype != "int64":
            tensor = empty_like(tensor, "int64")
            draft.copy(tensor)
    elif dict(draft.operation.options).get("dtype", f"torch.{tensor.dtype}") not in (
        f"torch.{tensor.dtype}",
        "torch.float32",
        None,
    ):
        raise UnknownFormError
    allocate_reduction(draft, tensor, dims, accumulator_bytes=read_accumulator_bytes(tensor.dtype))


@rule("count_nonzero")
def _plan_count_nonzero(draft: Draft) -> None:
    draft.outputs()
    counted = empty_like(draft.needed(0), "int64")
    if draft.needed(0).dtype != "bool":
        draft.temporary(draft.needed(0).n_elements)
    draft.copy(counted)
    allocate_reduction(draft, counted, draft.argument(1), accumulator_bytes=8)


@rule("mean", "mean.dim", "amax", "amin", "max", "min", "linalg_vector_norm", "norm")
def _plan_float_reduction(draft: Draft) -> None:
    tensor = draft.needed(0)
    if draft.tensor(1) is not None:
        draft.outputs()
        return
    draft.outputs()
    base = draft.operation.name.removeprefix("aten::").partition(".")[0]
    dims = draft.argument(2 if base in ("linalg_vector_norm", "norm") else 1, "dim")
    allocate_reduction(draft, tensor, dims, accumulator_bytes=read_accumulator_bytes(tensor.dtype))


@rule("prod", "prod.dim_int")
def _plan_prod(draft: Draft) -> None:
    tensor = draft.needed(0)
    if tensor.dtype not in FLOATS:
        raise UnknownFormError
    draft.outputs()
    allocate_reduction(
        draft, tensor, draft.argument(1), accumulator_bytes=read_accumulator_bytes(tensor.dtype)
    )


@rule("any", "all")
def _plan_any(draft: Draft) -> None:
    draft.outputs()
    tensor = draft.needed(0)
    dims = draft.argument(1, "dim") if "." in draft.operation.name else None
    allocate_reduction(draft, tensor, dims, accumulator_bytes=1)


@rule("argmax", "argmin", "max.dim", "min.dim")
def _plan_arg_reduction(draft: Draft) -> None:
    tensor = draft.needed(0)
    draft.outputs()
    # The largest element and its position.
    allocate_reduction(draft, tensor, draft.argument(1, "dim"), accumulator_bytes=16)


@rule("var", "std", "var_mean", "std_mean")
def _plan_variance(draft: Draft) -> None:
    tensor = draft.needed(0)
    if tensor.dtype == "float64":
        raise UnknownFormError
    draft.outputs()
    # The mean, the sum of squares and the count twice.
    allocate_reduction(draft, tensor, draft.argument(1, "dim"), accumulator_bytes=16, n_unrolled=2)


@rule("logsumexp")
def _plan_logsumexp(draft: Draft) -> None:
    tensor = draft.needed(0)
    if tensor.dtype not in FLOATS or not draft.operation.allocated:
        raise UnknownFormError
    reduced_bytes = draft.operation.allocated[0].n_bytes
    dims = draft.argument(1)
    item = read_accumulator_bytes(tensor.dtype)
    draft.temporary(reduced_bytes)
    draft.free(*reversed(allocate_reduction(draft, tensor, dims, accumulator_bytes=item)))
    magnitude = draft.temporary(reduced_bytes)
    infinite = draft.temporary(reduced_bytes // tensor.item_bytes)
    draft.free(infinite, magnitude)
    shifted = empty_like(tensor)
    draft.copy(shifted)
    draft.outputs()
    allocate_reduction(draft, shifted, dims, accumulator_bytes=item)


# Losses


def _reduction_mode(draft: Draft, index: int) -> int:
    mode = draft.argument(index, "reduction")
    return mode if isinstance(mode, int) else 1


@rule("mse_loss", "smooth_l1_loss")
def _plan_pointwise_loss(draft: Draft) -> None:
    tensor, target = draft.needed(0), draft.needed(1)
    if _reduction_mode(draft, 2) == 0:
        draft.outputs()
        return
    if tensor.shape != target.shape:
        raise UnknownFormError
    losses = empty_like(tensor)
    # The result is first given the storage of all losses, and keeps it as a scalar.
    draft.output(0, count_bytes(losses))
    draft.copy(losses)
    allocate_reduction(draft, losses)


@rule("huber_loss")
def _plan_huber_loss(draft: Draft) -> None:
    tensor = draft.needed(0)
    if _reduction_mode(draft, 2) == 0:
        draft.outputs()
        return
    losses = empty_like(tensor)
    draft.copy(losses)
    draft.outputs()
    allocate_reduction(draft, losses)


@rule("binary_cross_entropy")
def _plan_binary_cross_entropy(draft: Draft) -> None:
    tensor = draft.needed(0)
    if _reduction_mode(draft, 3) == 0:
        draft.outputs()
        return
    losses = empty_like(tensor)
    # The mean is written into the storage of the losses.
    draft.output(0, count_bytes(losses))
    draft.temporary(tensor.item_bytes)
    allocate_reduction(draft, losses)


@rule("binary_cross_entropy_with_logits")
def _plan_binary_cross_entropy_with_logits(draft: Draft) -> None:
    tensor = draft.needed(0)
    if draft.tensor(2) is not None or draft.tensor(3) is not None:
        raise UnknownFormError
    losses = empty_like(tensor)
    if _reduction_mode(draft, 4) == 0:
        draft.copy(losses)
        draft.outputs()
        return
    draft.copy(losses)
    draft.copy(losses)
    draft.outputs()
    allocate_reduction(draft, losses)


# Softmax, and resized images


@rule("_softmax", "_log_softmax")
def _plan_softmax(draft: Draft) -> None:
    # https://github.com/pytorch/pytorch/blob/main/aten/src/ATen/native/cuda/SoftMax.cu
    draft.outputs()
    draft.contiguous(draft.needed(0))


@rule("upsample_bilinear2d_backward", "upsample_nearest2d_backward")
def _plan_upsample_backward(draft: Draft) -> None:
    # https://github.com/pytorch/pytorch/blob/main/aten/src/ATen/native/cuda/UpSampleNearest2d.cu
    gradient = draft.needed(0)
    draft.outputs()
    if not is_channels_last(gradient):
        draft.contiguous(gradient)


@rule("_softmax_backward_data")
def _plan_softmax_backward(draft: Draft) -> None:
    gradient, result = draft.needed(0), draft.needed(1)
    if not is_contiguous(gradient.shape, gradient.stride):
        raise UnknownFormError
    draft.outputs()
    draft.temporary(max(count_bytes(gradient), count_bytes(result)))


@rule("_safe_softmax")
def _plan_safe_softmax(draft: Draft) -> None:
    tensor = draft.needed(0)
    dim = draft.argument(1)
    if not isinstance(dim, int) or not tensor.shape:
        raise UnknownFormError
    draft.outputs()
    # Masks of the elements and of the rows; and a zero to fill these with.
    draft.temporary(tensor.n_elements)
    draft.temporary(tensor.n_elements // max(1, tensor.shape[dim]))
    draft.temporary(tensor.item_bytes)


# Normalisation


@rule("native_layer_norm")
def _plan_layer_norm(draft: Draft) -> None:
    draft.contiguous(draft.needed(0))
    draft.outputs()


@rule("native_layer_norm_backward")
def _plan_layer_norm_backward(draft: Draft) -> None:
    gradient, tensor = draft.needed(0), draft.needed(1)
    normalized = read_ints(draft.argument(2)) or ()
    draft.contiguous(tensor)
    draft.outputs()
    draft.contiguous(gradient)
    n_columns = count_elements(normalized)
    n_rows = tensor.n_elements // max(1, n_columns)
    if n_rows > 65536 and n_columns // 32 < draft.gpu.n_multiprocessors // 2:
        # The gradients of scale and shift are added up in parts, one per block of rows.
        draft.temporary(0, most=2 * 4 * n_columns * ceil_div(n_rows, 256))


@rule("nll_loss2d_forward", "native_dropout")
def _plan_second_output_first(draft: Draft) -> None:
    # native_dropout makes its mask, and nll_loss2d its total weight, before the result.
    draft.outputs(1, 0)
