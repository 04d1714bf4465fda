"""Rules of convolutions, batch norm and recurrent networks, which cuDNN carries out."""

from __future__ import annotations

from dataclasses import dataclass

from gpumemwidget.prediction.operations import TensorMeta
from gpumemwidget.prediction.workspaces.draft import (
    Draft,
    UnknownFormError,
    ceil_div,
    count_bytes,
    count_elements,
    is_channels_last,
    is_contiguous,
    read_ints,
    round_up,
    rule,
)
from gpumemwidget.prediction.workspaces.plans import MIB, GpuFacts
from gpumemwidget.prediction.workspaces.reductions import allocate_reduction


@rule("cudnn_batch_norm", "cudnn_batch_norm_backward")
def _plan_cudnn_batch_norm(draft: Draft) -> None:
    tensor = draft.needed(0)
    draft.outputs()
    if is_channels_last(tensor):
        # cuDNN's kernel for channels-last tensors adds up parts per multiprocessor.
        n_bytes = 4 * tensor.shape[1] * draft.gpu.n_multiprocessors * 4
        draft.temporary(min(n_bytes, count_bytes(tensor) // 16))
        draft.estimate(n_bytes)


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
        return is_channels_last(self.tensor) or is_channels_last(self.weight)

    def transform_bytes(self) -> int:
        """Return the bytes of input, result and weight in the layout that the kernels read."""
        item = self.tensor.item_bytes
        # Kernels for half precision read 8 channels at once.
        padding = 8 if item == 2 else 1
        n_elements = self.n_result
        for tensor in (self.tensor, self.weight):
            channels = tensor.shape[1]
            if tensor is self.tensor or count_elements(tensor.shape[2:]) > 1:
                n_elements += tensor.n_elements // max(1, channels) * round_up(channels, padding)
        return n_elements * item

    def is_read_in_place(self) -> bool:
        """Return whether kernels read contiguous or channels-last tensors as they are.

        For contiguous tensors they do where a changed layout gains little: windows of one element,
        unless there are many channels over odd rows, and few elements of input channels.
        """
        if self.is_channels_last:
            return True
        n_channels, n_window = self.tensor.shape[1], count_elements(self.weight.shape[2:])
        if self.is_pointwise:
            n_rows = self.weight.shape[0]
            intensity = n_channels * n_rows // max(1, n_channels + n_rows)
            return count_elements(self.tensor.shape[2:]) % 4 == 0 or intensity < 320
        return n_channels <= 4 and (n_window <= 9 or self.is_patchwise)


def _read_convolution(
    draft: Draft, tensor: TensorMeta, weight: TensorMeta, first: int, n_result: int
) -> _Convolution:
    """Return the convolution with the stride as argument ``first``."""
    stride = read_ints(draft.argument(first)) or (1,)
    groups = draft.argument(first + 5)
    return _Convolution(
        tensor,
        weight,
        n_result,
        groups if isinstance(groups, int) else 1,
        draft.argument(first + 3) is True,
        count_elements(weight.shape[2:]) == 1 and set(stride) == {1},
        weight.shape[2:] == stride,
    )


@rule("convolution", "_convolution", "cudnn_convolution")
def _plan_convolution(draft: Draft) -> None:
    tensor, weight = draft.needed(0), draft.needed(1)
    if len(tensor.shape) != len(weight.shape) or not draft.operation.allocated:
        raise UnknownFormError
    n_result = draft.operation.allocated[0].n_bytes // tensor.item_bytes
    convolution = _read_convolution(draft, tensor, weight, 3, n_result)
    if convolution.is_depthwise and tensor.item_bytes == 4:
        draft.contiguous(None if is_channels_last(tensor) else tensor)
        draft.outputs()
        draft.estimate(count_bytes(tensor))
        return
    draft.outputs()
    if convolution.is_channels_last:
        _make_channels_last(draft, weight)
        _make_channels_last(draft, tensor)
    else:
        draft.contiguous(weight)
        draft.contiguous(tensor)
    _add_convolution_workspace(draft, convolution)


def _make_channels_last(draft: Draft, tensor: TensorMeta) -> int | None:
    """Allocate a channels-last copy of ``tensor`` if needed; return its number."""
    n_dims = len(tensor.shape)
    order = (0, *range(2, n_dims), 1)
    if is_contiguous([tensor.shape[d] for d in order], [tensor.stride[d] for d in order]):
        return None
    return draft.temporary(count_bytes(tensor))


def _add_convolution_workspace(
    draft: Draft, convolution: _Convolution, partial_bytes: int = 0
) -> int:
    """Allocate cuDNN's workspace, estimated; return its number."""
    transform = convolution.transform_bytes()
    # Layouts transformed, or window by window gathered, with room for parts of the result.
    draft.estimate(2 * transform + 32 * count_bytes(convolution.weight) + 8 * MIB)
    if not convolution.is_read_in_place():
        return draft.temporary(transform + partial_bytes + 16)
    if partial_bytes and convolution.is_pointwise and not convolution.is_channels_last:
        return draft.temporary(min(transform, partial_bytes))
    # Single precision keeps a table of offsets.
    has_table = convolution.is_pointwise and convolution.tensor.item_bytes == 4
    return draft.temporary(partial_bytes or (400 if has_table else 0))


@rule("convolution_backward")
def _plan_convolution_backward(draft: Draft) -> None:
    gradient, tensor, weight = (draft.needed(index) for index in range(3))
    mask = draft.argument(10)
    if not isinstance(mask, tuple) or len(tensor.shape) != len(weight.shape):
        raise UnknownFormError
    wants_input, wants_weight, wants_bias = (item is True for item in mask)
    convolution = _read_convolution(draft, tensor, weight, 4, gradient.n_elements)
    positions = iter(range(len(draft.operation.allocated)))
    if convolution.is_depthwise and tensor.item_bytes == 4:
        draft.estimate(10 * count_bytes(tensor))
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
        allocate_reduction(draft, gradient, tuple(d for d in range(len(gradient.shape)) if d != 1))


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
        n_shares = gpu.n_multiprocessors // (ceil_div(rows, tile) * ceil_div(columns, tile))
    return n_shares * convolution.weight.n_elements * 4 if n_shares > 2 else 0


# Recurrent networks with cuDNN


@rule("_cudnn_rnn")
def _plan_cudnn_rnn(draft: Draft) -> None:
    reserve = len(draft.operation.allocated) - 1
    trains = draft.argument(12) is True
    draft.outputs(*range(reserve if trains else reserve + 1))
    _add_rnn_workspace(draft)
    if trains:
        draft.output(reserve)


@rule("_cudnn_rnn_backward")
def _plan_cudnn_rnn_backward(draft: Draft) -> None:
    draft.outputs()
    _add_rnn_workspace(draft)


def _add_rnn_workspace(draft: Draft) -> None:
    """Allocate cuDNN's workspace of a recurrent network, estimated."""
    tensor = draft.needed(0)
    largest = max((use.n_bytes for use in draft.operation.allocated), default=0)
    draft.temporary(16 * MIB + 2 * largest)
    draft.estimate(48 * MIB + 8 * (largest + count_bytes(tensor)))
