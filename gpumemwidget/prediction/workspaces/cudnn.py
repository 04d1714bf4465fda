"""Rules of convolutions and recurrent networks, which cuDNN carries out.

cuDNN chooses its algorithms by itself, so most of its workspaces are estimated. The rules follow
what its kernels need: tensors in the layout that they read, padded to whole vectors of channels,
and partial sums where several multiprocessors share a result. The bounds enclose the 318 signatures
of convolutions that were recorded on an H200 with cuDNN 9.19.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from gpumemwidget.prediction.operations import TensorMeta
from gpumemwidget.prediction.workspaces.plans import (
    MIB,
    GpuFacts,
    PlanBuilder,
    UnknownFormError,
    ceil_div,
    count_bytes,
    count_elements,
    is_channels_last,
    is_contiguous,
    read_ints,
    round_up,
    rule,
    transpose,
)
from gpumemwidget.prediction.workspaces.reductions import allocate_reduction

#: Bytes of the partial sums of a tile of 128 by 128 results, the most that a multiprocessor holds.
_TILE_BYTES = 128 * 128 * 4

#: cuDNN's numbers of kinds of recurrent networks (``cudnnRNNMode_t``).
_LSTM, _GRU = 2, 3

#: Sizes of a workspace: expected, least, most.
_Estimate: TypeAlias = tuple[int, int, int]


# Convolutions


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

    def image_bytes(self, vector: int = 1) -> int:
        """Return the bytes of the images, channels padded to multiples of ``vector``."""
        return self._pad(self.n_image, self.image_channels, vector)

    def result_bytes(self, vector: int = 1) -> int:
        """Return the bytes of the results, channels padded to multiples of ``vector``."""
        return self._pad(self.n_result, self.result_channels, vector)

    def _pad(self, n_elements: int, channels: int, vector: int) -> int:
        n_channels = max(1, channels // self.groups)
        return n_elements // n_channels * round_up(n_channels, vector) * self.item_bytes

    def weight_bytes(self, vector: int = 1) -> int:
        """Return the bytes of the weight in the kernels' layout; 0 where it is that already."""
        if self.n_window == 1:
            return 0
        n_channels = max(1, self.image_channels // self.groups)
        return self.n_weight // n_channels * round_up(n_channels, vector) * self.item_bytes

    def transform_bytes(self) -> int:
        """Return the bytes of images, results and weight in the layout that the kernels read.

        Kernels for half precision, and for groups, read 8 channels at once.
        """
        vector = 8 if self.is_half or self.groups > 1 else 1
        return self.image_bytes(vector) + self.result_bytes(vector) + self.weight_bytes(vector)


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
    n_window = count_elements(weight.shape[2:])
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
        _plan_plain_depthwise(plan, convolution, tensor)
        return
    copy = _make_channels_last if convolution.is_channels_last else PlanBuilder.contiguous
    copy(plan, tensor)
    plan.outputs()
    if not (convolution.is_channels_last and convolution.is_depthwise):
        copy(plan, weight)
    _allocate_estimate(plan, _estimate_copies(convolution, is_gradient=is_transposed))


def _plan_plain_depthwise(plan: PlanBuilder, convolution: _Convolution, tensor: TensorMeta) -> None:
    """Plan a depthwise convolution of contiguous tensors, with a kernel of PyTorch's own.

    https://github.com/pytorch/pytorch/blob/main/aten/src/ATen/native/cuda/DepthwiseConv2d.cu
    """
    plan.contiguous(tensor)
    plan.outputs()
    if convolution.is_half:
        # For some sizes cuDNN's kernels are taken in half precision.
        plan.temporary(0, most=convolution.transform_bytes())


def _make_channels_last(plan: PlanBuilder, tensor: TensorMeta) -> int | None:
    """Allocate a channels-last copy of ``tensor`` if needed; return its number."""
    n_dims = len(tensor.shape)
    order = (0, *range(2, n_dims), 1)
    if is_contiguous([tensor.shape[d] for d in order], [tensor.stride[d] for d in order]):
        return None
    return plan.copy(tensor)


def _allocate_estimate(plan: PlanBuilder, estimate: _Estimate) -> int:
    """Allocate a workspace of cuDNN's; return its number."""
    expected, least, most = estimate
    return plan.temporary(expected, least=min(least, expected), most=max(most, expected))


def _limit_shares(n_bytes: int) -> int:
    """Return the most bytes of partial sums of a result of ``n_bytes``.

    Results too small for all multiprocessors are shared among several, by up to four each; two
    tiles on each of 132 multiprocessors was the most that was seen.
    """
    return min(4 * n_bytes, 256 * _TILE_BYTES)


def _estimate_copies(convolution: _Convolution, *, is_gradient: bool) -> _Estimate:
    """Return the workspace of a convolution's result, or of the gradient of its image."""
    transform = convolution.transform_bytes() + 16
    n_results = convolution.n_image if is_gradient else convolution.n_result
    most = transform + _limit_shares(n_results * 4) + MIB
    if convolution.is_pointwise and not convolution.is_read_in_place:
        return 0, 0, max(MIB, transform)
    is_direct = _is_direct(convolution, is_gradient=is_gradient)
    if convolution.is_read_in_place or (is_direct and not convolution.is_channels_last):
        return 0, 0, most
    if convolution.is_channels_last:
        # Gradients of images are written as they are.
        return transform - (convolution.image_bytes() if is_gradient else 0), 0, most
    if is_gradient:
        may_differ = convolution.has_few_channels or convolution.groups > 1
        return transform, 0 if may_differ else transform, most
    written_in_place = convolution.image_bytes() + convolution.weight_bytes() + 16
    if not convolution.is_half and _writes_in_place(convolution):
        return written_in_place, min(written_in_place, convolution.result_bytes()), transform
    return transform, written_in_place, most


def _is_direct(convolution: _Convolution, *, is_gradient: bool) -> bool:
    """Return whether a kernel without tensor cores takes contiguous tensors: of few channels."""
    if is_gradient:
        is_small = not convolution.is_half and len(convolution.stride) == 2
        return convolution.image_channels <= 4 and is_small
    if convolution.is_half:
        is_small = convolution.n_window <= 9 or convolution.is_patchwise
        return convolution.image_channels <= 4 and is_small
    if convolution.is_patchwise and convolution.image_channels <= 32:
        return True
    is_small = convolution.n_window <= 16 and len(convolution.stride) == 2
    return convolution.has_few_channels and is_small and convolution.groups == 1


def _writes_in_place(convolution: _Convolution) -> bool:
    """Return whether a kernel of single precision writes contiguous results itself.

    It was seen to where there are many positions and at least a tile of rows, and the weight stays
    in the cache; or where windows do not overlap.
    """
    if convolution.groups > 1 or convolution.result_channels < 64:
        return False
    return convolution.is_patchwise or (
        convolution.n_positions >= 10_000
        and convolution.n_weight <= 131_072
        and convolution.image_channels % 4 == 0
    )


def _estimate_weight_gradient(convolution: _Convolution, gpu: GpuFacts) -> _Estimate:
    """Return the workspace of the gradient of a convolution's weight."""
    if convolution.is_depthwise:
        return _estimate_depthwise_weight_gradient(convolution, gpu)
    transform = convolution.transform_bytes() + 16
    partial = _count_partial_bytes(convolution, gpu)
    limit = 4 * gpu.n_multiprocessors * _TILE_BYTES
    most = transform + max(2 * partial, limit)
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
    may_differ = (
        (convolution.has_few_channels and convolution.n_window <= 16)
        or convolution.image_channels <= 4
        or convolution.groups > 1
        or convolution.is_channels_last
    )
    return transform + partial, 0 if may_differ else transform, most


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
    padded = 4 * (convolution.image_bytes() + convolution.result_bytes())
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
        if convolution.is_half:
            transform = convolution.transform_bytes()
            plan.temporary(0, most=transform + _limit_shares(convolution.n_image * 4))
    else:
        copy = _make_channels_last if is_last else PlanBuilder.contiguous
        tensor_copy, gradient_copy = copy(plan, tensor), copy(plan, gradient)
        if at_input >= 0:
            plan.output(at_input)
            copies_weight = is_last and not convolution.is_depthwise
            weight_copy = _make_channels_last(plan, weight) if copies_weight else None
            estimate = _estimate_copies(convolution, is_gradient=not is_transposed)
            plan.free(_allocate_estimate(plan, estimate), weight_copy)
        if at_weight >= 0:
            plan.output(at_weight)
            estimate = _estimate_weight_gradient(convolution, plan.gpu)
            plan.free(_allocate_estimate(plan, estimate))
        plan.free(gradient_copy, tensor_copy)
    if at_bias >= 0:
        plan.output(at_bias)
        allocate_reduction(plan, gradient, tuple(d for d in range(len(gradient.shape)) if d != 1))


# Recurrent networks


@rule("_cudnn_rnn")
def _plan_cudnn_rnn(plan: PlanBuilder) -> None:
    if plan.argument(10) is True:
        _copy_time_first(plan, plan.require_tensor(0))
    # Output and last states, then a copy of weights that do not lie in one buffer.
    plan.outputs(0, 1, 2, 4)
    _allocate_rnn_workspace(plan, first=6)
    # The reserve, which backward reads; in inference it has no bytes.
    plan.output(3)


@rule("_cudnn_rnn_backward")
def _plan_cudnn_rnn_backward(plan: PlanBuilder) -> None:
    tensor, hidden = plan.require_tensor(0), plan.require_tensor(4)
    is_batch_first = plan.argument(14) is True
    for index in (8, 9):
        # Gradients of the last states that nobody gave are zeros.
        if plan.tensor(index) is None and (index == 8 or plan.tensor(5) is not None):
            plan.copy(hidden)
    copies = []
    if is_batch_first:
        copies = [_copy_time_first(plan, batch) for batch in (tensor, plan.tensor(7)) if batch]
    weights = len(plan.operation.allocated) - 1
    plan.outputs(*range(weights))
    plan.free(_allocate_rnn_workspace(plan, first=10))
    plan.free(*reversed(copies))
    if is_batch_first:
        _copy_time_first(plan, tensor)
    plan.output(weights)
    _allocate_rnn_workspace(plan, first=10)


def _copy_time_first(plan: PlanBuilder, tensor: TensorMeta) -> int | None:
    """Allocate a copy of a batch with its times first, if needed; return its number."""
    if is_contiguous(*transpose(tensor, 0, 1)):
        return None
    return plan.copy(tensor)


@dataclass(frozen=True, slots=True)
class _Recurrent:
    """A recurrent network as cuDNN has it.

    Its workspace is made of states, each what one direction of a layer gives for a word: so many
    for every word (``n_words`` below), and so many for every sequence and layer (``n_states``). How
    many was measured on an H200 with cuDNN 9.19, of 469 networks of one to three layers in float32,
    float16 and bfloat16: but for small ones, nearly all are met exactly, the others to 6 %.
    """

    #: cuDNN's number of the kind of network: ``_LSTM``, ``_GRU``, or that of a plain one.
    mode: int
    #: Elements of a state.
    size: int
    n_layers: int
    #: 2 if bidirectional, else 1.
    n_directions: int
    #: Sequences, and words of all sequences.
    n_batch: int
    n_words: int
    #: Elements of a word, and bytes of an element.
    input_size: int
    item_bytes: int
    weight_bytes: int
    is_packed: bool
    #: True if outputs are dropped between layers.
    drops: bool

    @property
    def fixed_bytes(self) -> int:
        """The bytes that do not depend on the words: 8 MiB for each layer, and the weights."""
        n_bytes = self.weight_bytes + 8 * MIB * self.n_layers * self.n_directions + 256
        return n_bytes if self.is_packed else n_bytes + 8 * self.n_batch

    @property
    def may_run_persistently(self) -> bool:
        """Return whether PyTorch may ask for kernels that keep weights in the multiprocessors.

        They take up to 2.44 times as much.
        https://github.com/pytorch/pytorch/blob/main/aten/src/ATen/native/cudnn/RNN.cpp
        """
        is_single = self.item_bytes == 2 and self.n_layers == self.n_directions == 1
        most = 1024 if is_single else 384
        return not self.is_packed and self.size <= most and self.item_bytes < 8

    def count_forward_bytes(self) -> int:
        """Return the bytes of the workspace of forward."""
        n_gates = {_LSTM: 4, _GRU: 3}.get(self.mode, 1)
        both, is_lstm = self.n_directions == 2, self.mode == _LSTM
        n_words = n_states = n_gates * self.n_directions + (4 if both else 0)
        if self.drops and not both:
            n_words += 1
        if is_lstm:
            n_states += 2 * self.n_directions
        n_bytes = self._count_bytes(n_words, n_states)
        return n_bytes if self.is_packed else n_bytes + self._copied_bytes

    def count_backward_bytes(self) -> int:
        """Return the bytes of the workspace of backward."""
        both, is_lstm = self.n_directions == 2, self.mode == _LSTM
        # The gradients of a layer's input; those of later layers are as wide as a state.
        n_wide = max(self.input_size, 0 if both and self.n_layers == 1 else self.size)
        n_bytes = (4 if both else 1) * n_wide * self.n_words * self.item_bytes
        if both:
            n_bytes += self._count_bytes(4, 14 if is_lstm else 6)
        else:
            n_bytes += self._count_bytes(0, 5 if is_lstm else 1)
            # Several layers run at once, some times apart: 3 to 6 for each layer and two more.
            n_apart = 4 * (self.n_layers + 2) * self.n_batch if self.n_layers > 1 else self.n_words
            n_bytes += min(self.n_words, n_apart) * self.size * self.item_bytes
        if not self.is_packed:
            # Gradients are copied as well, but for those of an LSTM's last cells.
            n_bytes += 2 * self._copied_bytes
            if is_lstm:
                n_bytes -= self._count_bytes(0, 2 * self.n_directions)
        return n_bytes

    @property
    def _copied_bytes(self) -> int:
        """The bytes of copies of input, output and states, where sequences are not packed."""
        n_states = (4 if self.mode == _LSTM else 2) * self.n_directions
        copied = self.n_words * self.input_size * self.item_bytes
        return copied + self._count_bytes(self.n_directions, n_states)

    def _count_bytes(self, n_words: int, n_states: int) -> int:
        """Return the bytes of so many states for every word, and for every sequence and layer."""
        n_states = n_words * self.n_words + n_states * self.n_layers * self.n_batch
        return n_states * self.size * self.item_bytes


def _read_recurrent(plan: PlanBuilder, first: int) -> _Recurrent:
    """Return the network of a call, with its mode as argument ``first``."""
    tensor, weights = plan.require_tensor(0), plan.argument(1)
    mode, size, _, n_layers, batch_first, dropout, trains, bidirectional, sizes = [
        plan.argument(first + i) for i in range(9)
    ]
    matrices = [
        weight
        for weight in (weights if isinstance(weights, tuple) else ())
        if isinstance(weight, TensorMeta) and len(weight.shape) == 2
    ]
    if not (isinstance(mode, int) and isinstance(size, int) and isinstance(n_layers, int)):
        raise UnknownFormError
    if not size or not n_layers or not matrices:
        raise UnknownFormError
    batch_sizes = read_ints(sizes)
    return _Recurrent(
        mode=mode,
        size=size,
        n_layers=n_layers,
        n_directions=2 if bidirectional is True else 1,
        n_batch=batch_sizes[0] if batch_sizes else tensor.shape[0 if batch_first is True else 1],
        n_words=tensor.n_elements // max(1, tensor.shape[-1]),
        input_size=tensor.shape[-1],
        item_bytes=tensor.item_bytes,
        weight_bytes=sum(count_bytes(matrix) for matrix in matrices),
        is_packed=bool(batch_sizes),
        drops=n_layers > 1 and trains is True and bool(dropout),
    )


def _allocate_rnn_workspace(plan: PlanBuilder, first: int) -> int:
    """Allocate the workspace of a recurrent network, with its mode as argument ``first``.

    In training forward allocates as much as backward would.
    """
    network = _read_recurrent(plan, first)
    n_bytes = network.count_forward_bytes()
    if plan.argument(first + 6) is True:
        n_bytes = max(n_bytes, network.count_backward_bytes())
    n_bytes += network.fixed_bytes
    most = n_bytes * 5 // 2 if network.may_run_persistently else n_bytes * 5 // 4
    return plan.temporary(n_bytes, least=n_bytes * 4 // 5, most=most)
