"""Rules of the operators with the largest workspaces: reductions and convolutions.

A reduction with few results is split between blocks that share a buffer; such buffers reached
132 MiB in recorded steps, for the gradients of biases and of scales.

Convolutions are carried out by cuDNN, which chooses its algorithms by itself, so most of its
workspaces are estimated. The rules follow what its kernels need: tensors in the layout that they
read, padded to whole vectors of channels, and partial sums where several multiprocessors share a
result. The bounds enclose the 318 signatures of convolutions that were recorded on an H200 with
cuDNN 9.19.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Final, TypeAlias

from gpumemwidget.prediction.operations import (
    MIB,
    Argument,
    GpuFacts,
    PlanBuilder,
    TensorMeta,
    UnknownFormError,
    ceil_div,
    is_channels_last,
    is_contiguous,
    list_reduced_dims,
    read_ints,
    round_up,
    rule,
)

# -- Reductions, after Reduce.cuh of ATen's CUDA kernels ------------------------------------------


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
    if base.startswith(("arg", "max", "min", "var", "std")):
        # They pass on a value and its position, or a mean, a sum of squares and two counts.
        accumulator_bytes = 16
    elif base in ("any", "all"):
        accumulator_bytes = 1
    dims = None if place is None else plan.argument(place, "dim")
    allocate_reduction(plan, tensor, dims, accumulator_bytes=accumulator_bytes)


# -- Convolutions ----------------------------------------------------------------------------------

#: Bytes of the partial sums of a tile of 128 by 128 results, the most that a multiprocessor holds.
_TILE_BYTES = 128 * 128 * 4
#: The most bytes of partial sums of a result that several multiprocessors share: two tiles on each
#: of 132 was the most that was seen.
_SHARED_BYTES = 256 * _TILE_BYTES

#: Sizes of a workspace: expected, least, most.
_Estimate: TypeAlias = tuple[int, int, int]


@dataclass(frozen=True, slots=True)
class _Convolution:
    """A convolution as cuDNN has it: of a transposed one, the image is the result of the call."""

    item_bytes: int
    #: Elements of all images, and of all results.
    n_image: int
    n_result: int
    n_images: int
    image_channels: int
    result_channels: int
    groups: int
    #: Elements of a window.
    n_window: int
    stride: tuple[int, ...]
    #: True if the elements of a window lie far apart, as in atrous spatial pyramid pooling.
    is_spread: bool
    #: True if every window is one element: a product of matrices.
    is_pointwise: bool
    #: True if windows touch without overlap.
    is_patchwise: bool
    #: True if cuDNN is given channels-last tensors.
    is_channels_last: bool

    @property
    def is_read_in_place(self) -> bool:
        """Return whether kernels read channels-last tensors as they are."""
        return self.is_channels_last and not self.is_spread

    @property
    def is_depthwise(self) -> bool:
        """Return whether each channel is convolved by itself."""
        return self.groups > 1 and self.groups == self.image_channels

    @property
    def is_half(self) -> bool:
        return self.item_bytes == 2

    @property
    def n_weight(self) -> int:
        return self.result_channels * self.image_channels // self.groups * self.n_window

    @property
    def n_positions(self) -> int:
        """The windows of all images."""
        return self.n_result // max(1, self.result_channels)

    @property
    def has_few_channels(self) -> bool:
        """Return whether tensor cores gain nothing: other kernels read contiguous tensors."""
        return self.image_channels * self.result_channels <= 512

    @property
    def image_bytes(self) -> int:
        return self.n_image * self.item_bytes

    @property
    def result_bytes(self) -> int:
        return self.n_result * self.item_bytes

    @property
    def weight_bytes(self) -> int:
        """The bytes of the weight in the kernels' layout; 0 where it is that already."""
        return 0 if self.n_window == 1 else self.n_weight * self.item_bytes

    @property
    def transform_bytes(self) -> int:
        """The bytes of images, results and weight in the layout that the kernels read.

        Kernels for half precision, and for groups, read 8 channels at once.
        """
        vector = 8 if self.is_half or self.groups > 1 else 1

        def pad(n_bytes: int, channels: int) -> int:
            n_channels = max(1, channels // self.groups)
            return n_bytes // n_channels * round_up(n_channels, vector)

        of_results = pad(self.result_bytes, self.result_channels)
        return of_results + pad(self.image_bytes + self.weight_bytes, self.image_channels)


def _read_convolution(
    plan: PlanBuilder, tensor: TensorMeta, weight: TensorMeta, first: int, n_outer: int
) -> _Convolution:
    """Return the convolution of a tensor, with the stride as argument ``first``.

    Its result in forward has ``n_outer`` elements.
    """
    stride = read_ints(plan.argument(first)) or (1,)
    groups = plan.argument(first + 5)
    n_groups = groups if isinstance(groups, int) and groups > 0 else 1
    is_transposed = plan.argument(first + 3) is True
    n_window = prod(weight.shape[2:])
    return _Convolution(
        item_bytes=tensor.item_bytes,
        n_image=n_outer if is_transposed else tensor.n_elements,
        n_result=tensor.n_elements if is_transposed else n_outer,
        n_images=tensor.shape[0],
        image_channels=weight.shape[1] * n_groups,
        result_channels=weight.shape[0],
        groups=n_groups,
        n_window=n_window,
        stride=stride,
        # In place with dilations of up to 4, and not of 12.
        is_spread=n_window > 1 and max(read_ints(plan.argument(first + 2)) or (1,)) > 8,
        is_pointwise=n_window == 1 and set(stride) == {1},
        is_patchwise=n_window > 1 and weight.shape[2:] == stride,
        is_channels_last=is_channels_last(tensor) or is_channels_last(weight),
    )


@rule("convolution", "_convolution", "cudnn_convolution")
def _plan_convolution(plan: PlanBuilder) -> None:
    tensor, weight = plan.require_tensor(0), plan.require_tensor(1)
    if len(tensor.shape) != len(weight.shape) or not plan.operation.allocated:
        raise UnknownFormError
    n_outer = plan.operation.allocated[0].n_bytes // tensor.item_bytes
    convolution = _read_convolution(plan, tensor, weight, 3, n_outer)
    is_transposed = plan.argument(6) is True
    if convolution.is_depthwise and not is_transposed and not convolution.is_channels_last:
        # A kernel of PyTorch's own, see DepthwiseConv2d.cu:
        # https://github.com/pytorch/pytorch/tree/main/aten/src/ATen/native/cuda
        plan.contiguous(tensor)
        plan.outputs()
        return
    copy = _make_channels_last if convolution.is_channels_last else PlanBuilder.contiguous
    copy(plan, tensor)
    plan.outputs()
    if not (convolution.is_channels_last and convolution.is_depthwise):
        copy(plan, weight)
    plan.temporary(*_estimate_copies(convolution, is_gradient=is_transposed))


def _make_channels_last(plan: PlanBuilder, tensor: TensorMeta) -> int | None:
    """Allocate a channels-last copy of ``tensor`` if needed; return its number."""
    n_dims = len(tensor.shape)
    order = (0, *range(2, n_dims), 1)
    if is_contiguous([tensor.shape[d] for d in order], [tensor.stride[d] for d in order]):
        return None
    return plan.copy(tensor)


def _estimate_copies(convolution: _Convolution, *, is_gradient: bool) -> _Estimate:
    transform = convolution.transform_bytes + 16
    most = transform + _SHARED_BYTES + MIB
    if convolution.is_pointwise and not convolution.is_read_in_place:
        return 0, 0, max(MIB, transform)
    is_direct = _is_direct(convolution, is_gradient=is_gradient)
    if convolution.is_read_in_place or (is_direct and not convolution.is_channels_last):
        return 0, 0, most
    if convolution.is_channels_last:
        # Gradients of images are written as they are.
        return transform - (convolution.image_bytes if is_gradient else 0), 0, most
    if is_gradient:
        return transform, 0, most
    written_in_place = convolution.image_bytes + convolution.weight_bytes + 16
    if not convolution.is_half and _writes_in_place(convolution):
        return written_in_place, min(written_in_place, convolution.result_bytes), transform
    return transform, written_in_place, most


def _is_direct(convolution: _Convolution, *, is_gradient: bool) -> bool:
    """Return whether a kernel without tensor cores takes contiguous tensors: of few channels."""
    if is_gradient:
        is_small = not convolution.is_half and len(convolution.stride) == 2
        return convolution.image_channels <= 4 and is_small
    if convolution.is_half:
        return False
    if convolution.is_patchwise and convolution.image_channels <= 32:
        return True
    is_small = convolution.n_window <= 16 and len(convolution.stride) == 2
    return convolution.has_few_channels and is_small and convolution.groups == 1


def _writes_in_place(convolution: _Convolution) -> bool:
    """Return whether a kernel of single precision writes contiguous results itself.

    It was seen to where there are many positions and at least a tile of rows, and the weight stays
    in the cache.
    """
    if convolution.groups > 1 or convolution.result_channels < 64:
        return False
    return (
        convolution.n_positions >= 10_000
        and convolution.n_weight <= 131_072
        and convolution.image_channels % 4 == 0
    )


def _estimate_weight_gradient(convolution: _Convolution, gpu: GpuFacts) -> _Estimate:
    if convolution.is_depthwise:
        return _estimate_depthwise_weight_gradient(convolution, gpu)
    transform = convolution.transform_bytes + 16
    partial = _count_partial_bytes(convolution, gpu)
    most = transform + 4 * gpu.n_multiprocessors * _TILE_BYTES
    if convolution.n_window == 9 and not convolution.is_half:
        # Winograd's algorithm, seen for a few sizes, transforms 36 elements for each 16.
        most = max(most, 5 * transform // 2)
    if convolution.is_read_in_place:
        return partial, 0, most
    if convolution.is_pointwise and convolution.result_channels % 4 == 0:
        # A product for each image, added up afterwards: where that takes less.
        by_image = convolution.n_images * convolution.n_weight * 4
        if by_image <= transform + partial:
            return by_image, by_image, most if convolution.has_few_channels else by_image + 512
    return transform + partial, 0, most


def _count_partial_bytes(convolution: _Convolution, gpu: GpuFacts) -> int:
    """Return the bytes of partial sums of a weight's gradient.

    The sum runs over all positions. It is shared out until every multiprocessor has a tile of the
    result, but into parts of no fewer than 1,024 positions; of 6,144 in half precision.
    """
    if convolution.is_channels_last and convolution.is_spread and not convolution.is_half:
        return convolution.n_positions // 2048 * convolution.n_weight * 4
    rows, columns = convolution.result_channels, convolution.image_channels // convolution.groups
    tile = n_columns = 128 if rows > 64 else 64
    # Small tiles leave a multiprocessor room for four blocks.
    n_blocks = gpu.n_multiprocessors * (4 if max(rows, columns) <= 32 else 1)
    vector = 8 if convolution.is_half else 4
    if columns < vector:
        # The first layer of a network: its few channels are padded to a vector.
        columns, tile, n_columns, n_blocks = vector, 64, 256, gpu.n_multiprocessors
    n_tiles = ceil_div(rows, tile) * ceil_div(columns * convolution.n_window, n_columns)
    n_least = 6144 if convolution.is_half else 1024
    n_shares = min(n_blocks // n_tiles, convolution.n_positions // n_least)
    if n_shares <= 2:
        return 0
    if n_columns > tile:
        return n_shares * rows * columns * convolution.n_window * 4
    return n_shares * n_tiles * tile * tile * 4


def _estimate_depthwise_weight_gradient(convolution: _Convolution, gpu: GpuFacts) -> _Estimate:
    """Return the workspace of a depthwise weight's gradient, from channels-last tensors."""
    by_image = 16 * convolution.n_images * convolution.n_weight * 4
    if convolution.is_half:
        return by_image, 0, 2 * by_image
    # Channels are padded to a vector of 4, and a fourth of the multiprocessors sums up each.
    padded = 4 * (convolution.image_bytes + convolution.result_bytes)
    n_shares = gpu.n_multiprocessors // 4
    padded += (n_shares + 1) * 16 * convolution.n_weight * convolution.item_bytes
    is_padded = convolution.n_window >= 25 and convolution.n_positions >= 8192
    return padded if is_padded else 0, 0, padded


@rule("convolution_backward")
def _plan_convolution_backward(plan: PlanBuilder) -> None:
    gradient, tensor, weight = (plan.require_tensor(index) for index in range(3))
    mask = plan.argument(10)
    if not isinstance(mask, tuple) or len(tensor.shape) != len(weight.shape):
        raise UnknownFormError
    positions = iter(range(len(plan.operation.allocated)))
    at_input, at_weight, at_bias = (next(positions, -1) if item is True else -1 for item in mask)
    convolution = _read_convolution(plan, tensor, weight, 4, gradient.n_elements)
    is_transposed = plan.argument(7) is True
    is_last = convolution.is_channels_last
    if convolution.is_depthwise and not is_transposed and not is_last:
        # A kernel of PyTorch's own, which makes the gradient of the weight first.
        plan.contiguous(gradient)
        plan.contiguous(tensor)
        plan.output(at_weight)
        plan.output(at_input)
    else:
        copy = _make_channels_last if is_last else PlanBuilder.contiguous
        tensor_copy, gradient_copy = copy(plan, tensor), copy(plan, gradient)
        if at_input >= 0:
            plan.output(at_input)
            copies_weight = is_last and not convolution.is_depthwise
            weight_copy = _make_channels_last(plan, weight) if copies_weight else None
            estimate = _estimate_copies(convolution, is_gradient=not is_transposed)
            plan.free(plan.temporary(*estimate), weight_copy)
        if at_weight >= 0:
            plan.output(at_weight)
            estimate = _estimate_weight_gradient(convolution, plan.gpu)
            plan.free(plan.temporary(*estimate))
        plan.free(gradient_copy, tensor_copy)
    if at_bias >= 0:
        plan.output(at_bias)
        allocate_reduction(plan, gradient, tuple(d for d in range(len(gradient.shape)) if d != 1))
