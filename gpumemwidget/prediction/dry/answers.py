"""Answer operators whose results depend on values, or are others on the device than of fakes."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from typing import Any

from gpumemwidget.prediction.dry.known_values import KnownValues
from gpumemwidget.prediction.dry.tracker import find_user_line, format_line

#: Folders in which PyTorch itself reads values that decide nothing here.
_OWN_READERS = ("/torch/optim/", "/torch/amp/")
_FAILURE_MARKS = ("aten::isnan", "aten::isinf")
_KEEPS_MARK = (
    "aten::any",
    "aten::_is_any_true",
    "aten::sum",
    "aten::max",
    "aten::logical_or",
    "aten::bitwise_or",
    "aten::_to_copy",
    "aten::add",
    "aten::stack",
    "aten::cat",
    "aten::clone",
)
#: Random numbers, one for each parameter of their distribution.
_DRAWN = (
    *("aten::_standard_gamma", "aten::_standard_gamma_grad", "aten::_sample_dirichlet"),
    *("aten::_dirichlet_grad", "aten::binomial", "aten::poisson"),
)


class Answers:
    """Answers operators in the place of their fakes; what depends on values is an assumption.

    Args:
        torch: the imported module ``torch``.
        known: the values that are known.
        assumptions: gets a sentence for each place.
    """

    def __init__(self, torch: Any, known: KnownValues, assumptions: list[str]) -> None:
        self._torch = torch
        self._known = known
        self._numbers = torch.int64
        self._assumptions = assumptions
        #: Tensors that are taken to be false: those that say whether something went wrong, as of
        #: ``isnan``, and whether a number is the very one that it is compared with.
        self._marks: Any = torch.utils.weak.WeakIdKeyDictionary()
        #: Called with an operator's arguments.
        self._answers: dict[str, Callable[..., Any]] = {
            "aten::_local_scalar_dense": self._read_value,
            "aten::equal": self._are_equal,
            "aten::nonzero": self._find_nonzero,
            "aten::masked_select": self._select,
            "aten::_unique2": self._list_unique,
            "aten::_unique": self._list_unique,
            "aten::unique_dim": self._list_unique_rows,
            "aten::unique_consecutive": self._list_unique_runs,
            "aten::bincount": self._count_bins,
            **dict.fromkeys(_DRAWN, lambda tensor, *_: tensor.new_empty(tensor.shape)),
            "aten::_pack_padded_sequence": self._pack,
            "aten::_ctc_loss": self._lose_by_ctc,
            "aten::_ctc_loss_backward": lambda _, scores, *__: scores.new_empty(scores.shape),
            "torchvision::nms": self._keep_boxes,
            "aten::_thnn_fused_lstm_cell": _run_lstm_cell,
            "aten::_thnn_fused_lstm_cell_backward_impl": _run_lstm_cell_backward,
            "aten::_thnn_fused_gru_cell": _run_gru_cell,
            "aten::_thnn_fused_gru_cell_backward": _run_gru_cell_backward,
            "aten::_cudnn_rnn": self._run_recurrent,
            "aten::_cudnn_rnn_backward": self._run_recurrent_backward,
        }
        #: Called with what calls an operator on fakes, and with its arguments.
        self._corrections: dict[str, Callable[..., Any]] = {
            "aten::index": self._index,
            "aten::index_add": self._add_selected_gradients,
            "aten::index_put": self._add_gradients,
            "aten::index_put_": self._skip_masks,
            "aten::_index_put_impl_": self._skip_masks,
            "aten::repeat_interleave": self._repeat,
            "aten::mse_loss": self._keep_all_losses,
            "aten::smooth_l1_loss": self._keep_all_losses,
            "aten::binary_cross_entropy": self._keep_all_weighted_losses,
        }

    def answer(
        self, operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any], call: Callable[[], Any]
    ) -> Any:
        """Call an operator, or answer for it where its fake does not know the result.

        Args:
            operator: a ``torch._ops.OpOverload``.
            args: what it is called with.
            kwargs: what it is called with by keyword.
            call: calls it, on fake tensors.
        """
        name = operator._schema.name  # noqa: SLF001 - has no public name
        if (answer := self._answers.get(name)) is not None:
            result = answer(*args, **kwargs)
        elif (correct := self._corrections.get(name)) is not None:
            result = correct(call, *args, **kwargs)
        else:
            result = call()
        self._mark(name, args, result)
        return result

    # -- What is false -----------------------------------------------------------------------------

    def _mark(self, name: str, args: tuple[Any, ...], result: Any) -> None:
        """Remember which tensors are taken to be false, and what is made of them."""
        tensor = self._torch.Tensor
        if name in _FAILURE_MARKS or (name == "aten::eq" and result.dim() == 0):
            self._marks[result] = True
        elif name == "aten::_amp_foreach_non_finite_check_and_unscale_":
            self._marks[args[1]] = True
            self._assume("gradients were taken not to overflow: the scaler lets each update happen")
        elif name in _KEEPS_MARK and len(self._marks):
            given = args[0] if isinstance(args[0], (list, tuple)) else args
            if isinstance(result, tensor) and any(
                isinstance(each, tensor) and each in self._marks for each in given
            ):
                self._marks[result] = True

    # -- Values ------------------------------------------------------------------------------------

    def _read_value(self, tensor: Any) -> Any:
        if self._is_known(tensor):
            return self._known.compute(tensor, lambda values: values.item())
        failed = tensor in self._marks
        if tensor.dtype == self._torch.bool:
            value: Any = not failed
        elif tensor.dtype.is_floating_point:
            value = 0.0 if failed else 1.0
        else:
            value = 1j if tensor.dtype.is_complex else 0
        self._assume_here(f"a value that is read from a tensor was taken to be {value}")
        return value

    def read_array(self, tensor: Any) -> Any:
        """Return the values of a tensor as a NumPy array; unknown ones are zero."""
        torch = self._torch
        if tensor.requires_grad:
            raise RuntimeError(
                "Can't call numpy() on Tensor that requires grad. Use tensor.detach().numpy()."
            )
        if tensor.device.type != "cpu":
            raise TypeError(
                f"can't convert {tensor.device} device type tensor to numpy. Use Tensor.cpu()."
            )
        if self._is_known(tensor):
            return self._known.compute(tensor, lambda values: values.clone().numpy())
        self._assume_here("values that are read as an array were taken to be 0")
        with torch.utils._mode_utils.no_dispatch():  # noqa: SLF001 - has no public name
            # Memory that nobody writes to is not taken.
            return torch.zeros(tuple(tensor.shape), dtype=tensor.dtype).numpy()

    def _are_equal(self, one: Any, other: Any) -> bool:
        if self._is_known(one) and self._is_known(other):
            values = self._known.read(other)
            return bool(self._known.compute(one, values.equal))
        self._assume_here("two tensors that are compared were taken to be equal")
        return True

    def _assume_here(self, sentence: str) -> None:
        frame = sys._getframe(1)  # noqa: SLF001 - the public ones are slow
        walked: Any = frame
        while walked is not None:
            name = walked.f_code.co_filename.replace("\\", "/")
            if any(part in name for part in _OWN_READERS):
                return
            walked = walked.f_back
        line = find_user_line(frame)
        where = "in backward" if line is None else format_line(*line)
        self._assume(f"{where}: {sentence}")

    def _assume(self, sentence: str) -> None:
        if sentence not in self._assumptions:
            self._assumptions.append(sentence)

    # -- Sizes -------------------------------------------------------------------------------------

    def _find_nonzero(self, tensor: Any) -> Any:
        n = tensor.numel()
        if self._is_known(tensor):
            n = self._known.compute(tensor, lambda values: int(values.count_nonzero()))
        else:
            self._assume_here(f"all {n} entries of a tensor were taken to be nonzero, the most")
        return self._torch.empty_strided(
            (n, tensor.dim()), (1, n), dtype=self._torch.int64, device=tensor.device
        )

    def _is_known(self, tensor: Any) -> bool:
        return self._known.read(tensor) is not None

    def _select(self, tensor: Any, mask: Any) -> Any:
        n = math.prod(self._torch.broadcast_shapes(tensor.shape, mask.shape))
        if self._is_known(mask):
            n_selected = self._known.compute(mask, lambda values: int(values.sum()))
            n = n // max(mask.numel(), 1) * n_selected
        else:
            self._assume_here(f"a mask was taken to select all {n} entries, the most")
        return tensor.new_empty((n,))

    def _replace_masks(self, indices: Any) -> tuple[list[Any], bool]:
        """Return indices with each mask as the indices of all that it could select."""
        torch = self._torch
        replaced: list[Any] = []
        found = False
        for index in indices:
            if index is not None and index.dtype in (torch.bool, torch.uint8):
                found = True
                n = index.numel()
                if self._is_known(index):
                    n = self._known.compute(index, lambda values: int(values.sum()))
                replaced += [
                    torch.empty((n,), dtype=torch.int64, device=index.device)
                    for _ in range(index.dim())
                ]
            else:
                replaced.append(index)
        return replaced, found

    def _index(self, call: Callable[[], Any], tensor: Any, indices: Any) -> Any:
        replaced, found = self._replace_masks(indices)
        if not found:
            return call()
        if not all(each is None or self._is_known(each) for each in indices):
            self._assume_here("a mask was taken to select all entries, the most")
        return self._torch.ops.aten.index.Tensor(tensor, replaced)

    def _add_gradients(
        self, call: Callable[[], Any], tensor: Any, indices: Any, values: Any, *others: Any
    ) -> Any:
        """Put values into a copy; autograd's own gradients of ``index`` go into the tensor itself.

        To a subclass of tensors, as fake ones are, autograd does not write
        (``index_backward`` in https://github.com/pytorch/pytorch/blob/main/torch/csrc/autograd/FunctionsManual.cpp).
        """
        if self._is_gradient_of("IndexBackward0"):
            return tensor
        return self._skip_masks(call, tensor, indices, values, *others)

    def _add_selected_gradients(
        self, call: Callable[[], Any], tensor: Any, *_: Any, **__: Any
    ) -> Any:
        """Add rows to a copy; autograd's own gradients of ``index_select`` go into the tensor."""
        return tensor if self._is_gradient_of("IndexSelectBackward0") else call()

    def _is_gradient_of(self, name: str) -> bool:
        """Return whether autograd computes the gradients of the node of this name."""
        node = self._torch._C._current_autograd_node()  # noqa: SLF001 - has no public name
        return node is not None and node.name() == name

    def _skip_masks(
        self, call: Callable[[], Any], tensor: Any, indices: Any, *_: Any, **__: Any
    ) -> Any:
        if not self._replace_masks(indices)[1]:
            return call()
        return tensor

    def _list_unique(
        self,
        tensor: Any,
        _sorted: bool = True,
        return_inverse: bool = False,
        return_counts: bool = False,
    ) -> Any:
        n = tensor.numel()
        if self._is_known(tensor):
            n = self._known.compute(tensor, lambda values: values.unique().numel())
        else:
            self._assume_here(f"all {n} entries of a tensor were taken to differ, the most")
        inverse = tensor.new_empty(tensor.shape if return_inverse else (0,), dtype=self._numbers)
        counts = tensor.new_empty((n if return_counts else 0,), dtype=self._numbers)
        return tensor.new_empty((n,)), inverse, counts

    def _list_unique_rows(self, tensor: Any, dim: int, *_: Any) -> Any:
        n = tensor.shape[dim]
        self._assume_here(f"all {n} rows of a tensor were taken to differ, the most")
        inverse, counts = [tensor.new_empty((n,), dtype=self._numbers) for _ in range(2)]
        return tensor.new_empty(tensor.shape), inverse, counts

    def _list_unique_runs(self, tensor: Any, *flags: bool, dim: int | None = None) -> Any:
        if len(flags) > 2 or dim is not None:
            return self._list_unique_rows(tensor, flags[2] if dim is None else dim)
        return self._list_unique(tensor, True, *flags)

    def _repeat(self, call: Callable[[], Any], *args: Any, output_size: int | None = None) -> Any:
        if output_size is not None or not isinstance(args[-1], self._torch.Tensor):
            return call()
        repeats = args[0]
        n = repeats.numel()
        if self._is_known(repeats):
            n = self._known.compute(repeats, lambda values: int(values.sum()))
        else:
            self._assume_here("each entry was taken to be repeated once")
        return repeats.new_empty((n,))

    def _count_bins(self, tensor: Any, weights: Any = None, minlength: int = 0) -> Any:
        n = max(minlength, 1)
        if self._is_known(tensor) and tensor.numel():
            n = max(minlength, self._known.compute(tensor, lambda values: int(values.max())) + 1)
        else:
            self._assume_here(f"bincount was taken to return {n} counts")
        dtype = self._numbers if weights is None else self._torch.float64
        return tensor.new_empty((n,), dtype=dtype)

    def _pack(self, data: Any, lengths: Any, batch_first: bool) -> Any:
        n_batch, n_steps = data.shape[:2] if batch_first else data.shape[1::-1]
        sizes = [n_batch] * n_steps
        if self._is_known(lengths):
            known = self._known.compute(lengths, lambda values: values.tolist())
            sizes = [sum(length > k for length in known) for k in range(max(known))]
        else:
            self._assume_here(f"all packed sequences were taken to be {n_steps} long, the most")
        packed = data.new_empty((sum(sizes), *data.shape[2:]))
        # PyTorch's C++ code reads the sizes: they are no fake.
        return packed, self._known.make(sizes)

    def _lose_by_ctc(self, scores: Any, targets: Any, _: Any, lengths: Any, *__: Any) -> Any:
        """Return the losses of CTC, and what is kept for backward."""
        if isinstance(lengths, self._torch.Tensor) and self._is_known(lengths):
            lengths = self._known.compute(lengths, lambda values: values.tolist())
        if isinstance(lengths, self._torch.Tensor):
            longest = targets.shape[-1]
            self._assume_here(f"the longest target was taken to be {longest} long, the most")
        else:
            longest = max(lengths, default=0)
        n_times, n_batch = scores.shape[:2]
        kept = scores.new_empty((n_batch, n_times, 2 * longest + 1))
        return scores.new_empty((n_batch,)), kept

    def _keep_boxes(self, boxes: Any, *_: Any) -> Any:
        n = boxes.shape[0]
        self._assume_here(f"all {n} boxes were taken to be kept (nms), the most")
        return boxes.new_empty((n,), dtype=self._numbers)

    # -- What the device's kernels return otherwise than their fakes -------------------------------

    def _keep_all_losses(
        self, call: Callable[[], Any], tensor: Any, target: Any, reduction: int = 1, *_: Any
    ) -> Any:
        """Return a loss in a storage for all its elements, as the kernels of CUDA do."""
        result = call()
        shape = self._torch.broadcast_shapes(tensor.shape, target.shape)
        return result.new_empty(shape).as_strided((), ()) if reduction else result

    def _keep_all_weighted_losses(
        self, call: Callable[[], Any], tensor: Any, target: Any, _: Any = None, reduction: int = 1
    ) -> Any:
        return self._keep_all_losses(call, tensor, target, reduction)

    def _run_recurrent(  # noqa: PLR0917 - the operator's own signature
        self,
        tensor: Any,
        weights: Any,
        _n_weights: int,
        buffer: Any,
        _hidden: Any,
        cell: Any,
        mode: int,
        size: int,
        projection: int,
        n_layers: int,
        batch_first: bool,
        dropout: float,
        train: bool,
        bidirectional: bool,
        batch_sizes: Any,
        _dropout_state: Any = None,
    ) -> Any:
        """Return what cuDNN does, with what it keeps for backward."""
        n_ways = 2 if bidirectional else 1
        width = projection or size
        if batch_sizes:
            n_tokens, n_batch = tensor.shape[0], batch_sizes[0]
            shape: tuple[int, ...] = (n_tokens, width * n_ways)
        else:
            n_tokens = tensor.shape[0] * tensor.shape[1]
            n_batch = tensor.shape[0 if batch_first else 1]
            shape = (*tensor.shape[:2], width * n_ways)
        state = (n_layers * n_ways, n_batch, width)
        # Measured of 445 networks on an H200 with cuDNN 9.19, all exact: for each word what
        # backward reads of a layer (5 states of an LSTM, 6 of a GRU) and what goes between
        # layers. Each direction marks what was dropped of both with bits, padding included.
        n_times = len(batch_sizes) or n_tokens // max(1, n_batch)
        n_states = {2: 5, 3: 6}.get(mode, 1) * n_layers + n_layers - 1
        kept = n_ways * size * n_tokens * n_states * tensor.element_size()
        if dropout:
            kept += (n_layers - 1) * n_times * n_batch * size * n_ways**2 // 8
        kept = -(-kept // 32) * 32 + 256
        if tensor.dtype not in self._torch.backends.cudnn.CUDNN_TENSOR_DTYPES:
            # PyTorch flattens no such weights on the device: each call copies them into a buffer.
            buffer = tensor.new_empty((sum(weight.numel() for weight in weights),))
        return (
            _make_time_first(tensor, shape)
            if batch_first and not batch_sizes
            else tensor.new_empty(shape),
            tensor.new_empty(state),
            tensor.new_empty((0,) if cell is None else (*state[:2], size)),
            tensor.new_empty((kept if train else 0,), dtype=self._torch.uint8),
            buffer,
        )

    def _run_recurrent_backward(
        self,
        tensor: Any,
        weights: Any,
        _n_weights: int,
        _buffer: Any,
        hidden: Any,
        cell: Any,
        *others: Any,
        **_: Any,
    ) -> Any:
        """Return gradients as cuDNN does: those of the weights lie in one buffer."""
        flat = tensor.new_empty((sum(weight.numel() for weight in weights),))
        gradients = []
        start = 0
        for weight in weights:
            gradients.append(flat[start : start + weight.numel()].view(weight.shape))
            start += weight.numel()
        of_cell = self._torch.empty((0,), device=tensor.device) if cell is None else cell
        batch_first = others[8] and not others[12]
        return (
            _make_time_first(tensor, tensor.shape)
            if batch_first
            else tensor.new_empty(tensor.shape),
            hidden.new_empty(hidden.shape),
            of_cell.new_empty(of_cell.shape),
            gradients,
        )


# https://github.com/pytorch/pytorch/blob/main/aten/src/ATen/native/cuda/RNN.cu


def _run_lstm_cell(gates: Any, _hidden_gates: Any, cell: Any, *_: Any) -> Any:
    kept = gates.new_empty(gates.shape)
    return cell.new_empty(cell.shape), cell.new_empty(cell.shape), kept


def _run_lstm_cell_backward(
    _of_hidden: Any, _of_cell: Any, cell: Any, _new_cell: Any, kept: Any, has_bias: bool
) -> Any:
    of_bias = kept.new_empty(kept.shape[-1:] if has_bias else (0,))
    return kept.new_empty(kept.shape), cell.new_empty(cell.shape), of_bias


def _run_gru_cell(_gates: Any, _hidden_gates: Any, hidden: Any, *_: Any) -> Any:
    kept = hidden.new_empty((*hidden.shape[:-1], 5 * hidden.shape[-1]))
    return hidden.new_empty(hidden.shape), kept


def _run_gru_cell_backward(gradient: Any, kept: Any, has_bias: bool) -> Any:
    shape = (*kept.shape[:-1], kept.shape[-1] // 5 * 3)
    gates = [kept.new_empty(shape) for _ in range(2)]
    biases = [kept.new_empty(shape[-1:] if has_bias else (0,)) for _ in range(2)]
    return (*gates, gradient.new_empty(gradient.shape), *biases)


def _make_time_first(like: Any, shape: Any) -> Any:
    """Return a batch of this shape whose times come first in memory, as cuDNN writes them."""
    return like.new_empty((shape[1], shape[0], *shape[2:])).transpose(0, 1)
