"""Rules of reductions: one with few results is split between blocks that share a buffer.

The buffers reached 132 MiB in recorded steps, for the gradients of biases and of scales.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Final

from gpumemwidget.prediction.operations import Argument, TensorMeta
from gpumemwidget.prediction.plans import (
    PlanBuilder,
    ceil_div,
    list_reduced_dims,
    rule,
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
        is_reduced = d in reduced
        dims.append(_ReductionDim(shape[d], stride[d], 0 if is_reduced else output_stride))
        output_stride *= 1 if is_reduced else shape[d]
    dims.sort(key=lambda dim: (dim.output_stride > 0, dim.output_stride, dim.input_stride))
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


def allocate_reduction(
    plan: PlanBuilder,
    tensor: TensorMeta,
    dims: Argument = None,
    *,
    accumulator_bytes: int = 4,
) -> None:
    """Allocate the staging buffer and the semaphores of a reduction, if it has them.

    A reduction with few outputs and many inputs each is shared by several blocks, which pass their
    partial results through global memory.
    """
    if not tensor.n_elements:
        return
    found = _iterate_reduction(tensor.shape, tensor.stride, list_reduced_dims(tensor, dims))
    n_reduced = sum(dim.output_stride == 0 for dim in found)
    n_outputs = prod(dim.size for dim in found if dim.output_stride)
    n_inputs = tensor.n_elements // n_outputs
    along_input = n_reduced == len(found) or found[0].input_stride < found[n_reduced].input_stride
    width, height = (n_inputs, n_outputs) if along_input else (n_outputs, n_inputs)
    n_vector = 1 if along_input else _count_vector(found, n_reduced)
    if not along_input:
        width //= n_vector
    elif found and found[0].input_stride == n_reduced == 1 and width >= 128:
        width //= 4  # elements that a thread loads at once
    n_max = 512 // n_vector
    # The greatest powers of two that are not above.
    block_x_most, block_y_most = (
        min(1 << max(0, n.bit_length() - 1), n_max) for n in (width, height)
    )
    block_x = min(block_x_most, 32)
    block_y = min(block_y_most, n_max // block_x)
    block_x = min(block_x_most, n_max // block_y)
    step_input, step_output = (block_x, 1) if along_input else (1, block_x)
    if ceil_div(n_inputs, step_input) < min(block_y * 16, 256):
        return
    n_values = ceil_div(n_inputs, step_input * block_y)
    grid = ceil_div(n_outputs // n_vector, step_output)
    n_threads = plan.gpu.threads_per_multiprocessor // (block_x * block_y)
    most_blocks = plan.gpu.n_multiprocessors * n_threads
    if n_values < 256 or grid > most_blocks:
        return
    n_shares = max(
        min(ceil_div(most_blocks, grid), ceil_div(n_values, 16)), ceil_div(n_values, 256)
    )
    if n_shares > 1:
        n_bytes = accumulator_bytes * n_outputs * n_shares
        plan.temporary(n_bytes if along_input else n_bytes * block_x * n_vector)
        plan.temporary(4 * grid)


def _count_vector(dims: Sequence[_ReductionDim], n_reduced: int) -> int:
    """Return how many results that lie side by side a thread computes at once."""
    if dims[n_reduced].input_stride != 1:
        return 1
    n_vector = 4
    strides = (dim.input_stride for i, dim in enumerate(dims) if i != n_reduced)
    for n in (dims[n_reduced].size, *strides):
        while n % n_vector:
            n_vector //= 2
    return n_vector


#: The place of the dimensions among a reduction's arguments; ``None``: all are reduced.
_PLACE_OF_DIMS: Final[dict[str, int | None]] = {
    **dict.fromkeys(("sum", "mean", "any", "all"), None),
    **dict.fromkeys(("sum.dim_IntList", "nansum", "mean.dim", "amax", "amin", "prod.dim_int"), 1),
    **dict.fromkeys(("any.dim", "any.dims", "all.dim", "all.dims", "logsumexp"), 1),
    **dict.fromkeys(("argmax", "argmin", "max.dim", "min.dim"), 1),
    **dict.fromkeys(("var", "std", "var_mean", "std_mean"), 1),
    **dict.fromkeys(("linalg_vector_norm", "norm"), 2),
}
#: Reductions that pass on a value and its position, or a mean, a sum of squares and two counts.
_WIDE: Final = ("argmax", "argmin", "max", "min", "var", "std", "var_mean", "std_mean")


@rule(*_PLACE_OF_DIMS)
def _plan_reduction_operator(plan: PlanBuilder) -> None:
    tensor = plan.require_tensor(0)
    name, base = plan.operation.short_name, plan.operation.base_name
    place = _PLACE_OF_DIMS[name if name in _PLACE_OF_DIMS else base]
    if base == "logsumexp":
        plan.copy(tensor)
    plan.outputs()
    if base in ("sum", "nansum") and tensor.dtype in ("bool", "uint8", "int8", "int16", "int32"):
        # Summed up as int64.
        tensor = replace(tensor, dtype="int64", item_bytes=8)
        plan.copy(tensor)
    accumulator_bytes = 8 if tensor.dtype in ("float64", "int64") else 4
    if base in _WIDE:
        accumulator_bytes = 16
    elif base in ("any", "all"):
        accumulator_bytes = 1
    dims = None if place is None else plan.argument(place, "dim")
    allocate_reduction(plan, tensor, dims, accumulator_bytes=accumulator_bytes)
