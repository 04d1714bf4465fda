"""Recurrent networks as on the device: cuDNN's operators and fused cells, and what they allocate.

On the CPU, where PyTorch's C++ code takes a step's tensors to be, it computes step by step.
https://github.com/pytorch/pytorch/blob/main/aten/src/ATen/native/cudnn/RNN.cpp
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any

from gpumemwidget.prediction.operations import (
    MIB,
    PlanBuilder,
    TensorMeta,
    UnknownFormError,
    is_contiguous,
    rule,
    transpose,
)

Function = Callable[..., Any]

#: cuDNN's numbers of kinds of networks (``cudnnRNNMode_t``) are the places of PyTorch's names.
_MODES = ("rnn_relu", "rnn_tanh", "lstm", "gru")
_LSTM, _GRU = _MODES.index("lstm"), _MODES.index("gru")


# -- What cuDNN allocates --------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Network:
    """A recurrent network as cuDNN has it.

    Its memory is made of states, each what one direction of a layer gives for a word: so many for
    every word, and so many for every sequence and layer. How many was measured on an H200 with
    cuDNN 9.19, of 469 networks of one to three layers in float32, float16 and bfloat16. What is
    kept for backward is exact, the workspace to 6 % but for small networks.
    """

    mode: int
    #: Elements of a state, and of a state as it is returned (``proj_size``).
    size: int
    width: int
    n_layers: int
    #: 2 if bidirectional, else 1.
    n_directions: int
    #: Sequences, times, and words of all sequences.
    n_batch: int
    n_times: int
    n_words: int
    #: Elements of a word, and bytes of an element.
    input_size: int
    item_bytes: int
    is_packed: bool
    is_batch_first: bool
    trains: bool
    #: True if outputs are dropped between layers.
    drops: bool

    @property
    def is_lstm(self) -> bool:
        return self.mode == _LSTM

    def count_kept_bytes(self) -> int:
        """Return the bytes that forward keeps for backward.

        For each word these are what backward reads of a layer, and what goes between layers. Each
        direction marks what was dropped of both with bits, padding included.
        """
        n_states = {_LSTM: 5, _GRU: 6}.get(self.mode, 1) * self.n_layers + self.n_layers - 1
        n_bytes = self.n_directions * self.size * self.n_words * n_states * self.item_bytes
        if self.drops:
            n_marks = (self.n_layers - 1) * self.n_times * self.n_batch * self.size
            n_bytes += n_marks * self.n_directions**2 // 8
        return -(-n_bytes // 32) * 32 + 256

    def count_workspace_bytes(self, weights: Sequence[Any]) -> int:
        """Return the bytes of a call's workspace; in training forward takes as much as backward."""
        matrices: int = sum(prod(weight.shape) for weight in weights if len(weight.shape) == 2)
        # 8 MiB for each layer, and the weights, do not depend on the words.
        n_bytes = matrices * self.item_bytes + 8 * MIB * self.n_layers * self.n_directions + 256
        if not self.is_packed:
            n_bytes += 8 * self.n_batch
        forward, backward = self._count_forward_bytes(), self._count_backward_bytes()
        return n_bytes + (max(forward, backward) if self.trains else forward)

    @property
    def may_run_persistently(self) -> bool:
        """Return whether PyTorch may ask for kernels that keep weights in the multiprocessors.

        They take up to 2.44 times as much.
        """
        is_single = self.item_bytes == 2 and self.n_layers == self.n_directions == 1
        most = 1024 if is_single else 384
        return not self.is_packed and self.size <= most and self.item_bytes < 8

    def _count_forward_bytes(self) -> int:
        both = self.n_directions == 2
        n_gates = {_LSTM: 4, _GRU: 3}.get(self.mode, 1)
        n_words = n_states = n_gates * self.n_directions + (4 if both else 0)
        if self.drops and not both:
            n_words += 1
        if self.is_lstm:
            n_states += 2 * self.n_directions
        n_bytes = self._count_bytes(n_words, n_states)
        return n_bytes if self.is_packed else n_bytes + self._copied_bytes

    def _count_backward_bytes(self) -> int:
        both = self.n_directions == 2
        # The gradients of a layer's input; those of later layers are as wide as a state.
        n_wide = max(self.input_size, 0 if both and self.n_layers == 1 else self.size)
        n_bytes = (4 if both else 1) * n_wide * self.n_words * self.item_bytes
        if both:
            n_bytes += self._count_bytes(4, 14 if self.is_lstm else 6)
        else:
            n_bytes += self._count_bytes(0, 5 if self.is_lstm else 1)
            # Several layers run at once, some times apart: 3 to 6 for each layer and two more.
            n_apart = 4 * (self.n_layers + 2) * self.n_batch if self.n_layers > 1 else self.n_words
            n_bytes += min(self.n_words, n_apart) * self.size * self.item_bytes
        if not self.is_packed:
            # Gradients are copied as well, but for those of an LSTM's last cells.
            n_bytes += 2 * self._copied_bytes
            if self.is_lstm:
                n_bytes -= self._count_bytes(0, 2 * self.n_directions)
        return n_bytes

    @property
    def _copied_bytes(self) -> int:
        """The bytes of copies of input, output and states, where sequences are not packed."""
        n_states = (4 if self.is_lstm else 2) * self.n_directions
        copied = self.n_words * self.input_size * self.item_bytes
        return copied + self._count_bytes(self.n_directions, n_states)

    def _count_bytes(self, n_words: int, n_states: int) -> int:
        """Return the bytes of so many states for every word, and for every sequence and layer."""
        n_states = n_words * self.n_words + n_states * self.n_layers * self.n_batch
        return n_states * self.size * self.item_bytes


def _read_network(shape: Sequence[int], item_bytes: int, arguments: Sequence[Any]) -> _Network:
    """Return the network of a call by its arguments from ``mode`` to ``batch_sizes``."""
    mode, size, projection, n_layers, batch_first, dropout, trains, bidirectional, sizes = arguments
    batch_sizes = tuple(sizes or ())
    n_words = prod(shape[:-1])
    n_batch = batch_sizes[0] if batch_sizes else shape[0 if batch_first else 1]
    return _Network(
        mode=mode,
        size=size,
        width=projection or size,
        n_layers=n_layers,
        n_directions=2 if bidirectional else 1,
        n_batch=n_batch,
        n_times=len(batch_sizes) or n_words // max(1, n_batch),
        n_words=n_words,
        input_size=shape[-1],
        item_bytes=item_bytes,
        is_packed=bool(batch_sizes),
        is_batch_first=bool(batch_first) and not batch_sizes,
        trains=bool(trains),
        drops=n_layers > 1 and bool(trains) and bool(dropout),
    )


@rule("_cudnn_rnn")
def _plan_forward(plan: PlanBuilder) -> None:
    if plan.argument(10) is True:
        _copy_time_first(plan, plan.require_tensor(0))
    # Output and last states, then a copy of weights that do not lie in one buffer.
    plan.outputs(0, 1, 2, 4)
    _allocate_workspace(plan, first=6)
    # The reserve, which backward reads; in inference it has no bytes.
    plan.output(3)


@rule("_cudnn_rnn_backward")
def _plan_backward(plan: PlanBuilder) -> None:
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
    plan.free(_allocate_workspace(plan, first=10))
    plan.free(*reversed(copies))
    if is_batch_first:
        _copy_time_first(plan, tensor)
    plan.output(weights)
    _allocate_workspace(plan, first=10)


def _copy_time_first(plan: PlanBuilder, tensor: TensorMeta) -> int | None:
    """Allocate a copy of a batch with its times first, if needed; return its number."""
    return None if is_contiguous(*transpose(tensor, 0, 1)) else plan.copy(tensor)


def _allocate_workspace(plan: PlanBuilder, first: int) -> int:
    """Allocate the workspace of a network, with its mode as argument ``first``."""
    tensor, weights = plan.require_tensor(0), plan.argument(1)
    arguments = [plan.argument(first + k) for k in range(9)]
    numbers = [arguments[k] for k in (0, 1, 3)]
    if not isinstance(weights, tuple) or not all(isinstance(n, int) for n in numbers):
        raise UnknownFormError
    network = _read_network(tensor.shape, tensor.item_bytes, arguments)
    given = [weight for weight in weights if isinstance(weight, TensorMeta)]
    n_bytes = network.count_workspace_bytes(given)
    most = n_bytes * 5 // 2 if network.may_run_persistently else n_bytes * 5 // 4
    return plan.temporary(n_bytes, least=n_bytes * 4 // 5, most=most)


# -- What calls the device's operators -------------------------------------------------------------


def list_recurrent_overrides(torch: Any) -> dict[Any, Function]:
    """Return what calls the device's operators for recurrent networks, by PyTorch's operator."""
    aten = torch.ops.aten
    overrides: dict[Any, Function] = {}
    for name in ("lstm_cell", "gru_cell"):
        overrides[getattr(aten, name).default] = _make_cell(torch, name)
    for mode, name in enumerate(_MODES):
        packet = getattr(aten, name)
        overrides[packet.input], overrides[packet.data] = _make_network(torch, mode)
    return overrides


def _make_cell(torch: Any, name: str) -> Function:
    # https://github.com/pytorch/pytorch/blob/main/aten/src/ATen/native/RNN.cpp
    fused = getattr(torch.ops.aten, f"_thnn_fused_{name}").default

    def cell(tensor: Any, states: Any, of_input: Any, of_state: Any, *biases: Any) -> Any:
        is_lstm = isinstance(states, (list, tuple))
        hidden, carried = states if is_lstm else (states, states)
        gates = torch.matmul(tensor, of_input.t()), torch.matmul(hidden, of_state.t())
        results = fused(*gates, carried, *(*biases, None, None)[:2])
        return results[:2] if is_lstm else results[0]

    return cell


def _make_network(torch: Any, mode: int) -> tuple[Function, Function]:
    """Return what calls cuDNN for a network, with a batch and with a packed sequence."""

    def run(  # noqa: PLR0917 - the operator's own signature
        tensor: Any,
        states: Any,
        weights: Any,
        has_biases: bool,
        n_layers: int,
        dropout: float,
        train: bool,
        bidirectional: bool,
        batch_first: bool = False,
        sizes: Sequence[int] = (),
    ) -> Any:
        is_lstm = mode == _LSTM
        hidden, cell = states if is_lstm else (states, None)
        size = hidden.shape[2] if cell is None else cell.shape[2]
        projection = hidden.shape[2] if hidden.shape[2] != size else 0
        # A step that was built on the CPU may have made its input there.
        tensor = tensor.to(weights[0].device)
        n_weights = (4 if has_biases else 2) + (1 if projection else 0)
        # On the device the weights lie in one buffer already (``flatten_parameters``).
        buffer = tensor.new_empty((0,))
        if torch.is_autocast_enabled("cuda") and weights[0].dtype != torch.float16:
            buffer, weights = _copy_weights(torch, weights)
            tensor, hidden = tensor.to(torch.float16), hidden.to(torch.float16)
            cell = None if cell is None else cell.to(torch.float16)
        output, hidden, cell, *_ = torch.ops.aten._cudnn_rnn.default(  # noqa: SLF001
            *(tensor, weights, n_weights, buffer, hidden, cell, mode, size, projection),
            *(n_layers, batch_first, dropout, train, bidirectional, list(sizes), None),
        )
        return (output, hidden, cell) if is_lstm else (output, hidden)

    run_any: Function = run

    def run_packed(tensor: Any, batch_sizes: Any, *others: Any) -> Any:
        return run_any(tensor, *others, sizes=batch_sizes.tolist())

    return run_any, run_packed


def _copy_weights(torch: Any, weights: Any) -> tuple[Any, list[Any]]:
    """Return a buffer in half precision with copies of the weights, and the copies."""
    # https://github.com/pytorch/pytorch/blob/main/aten/src/ATen/cudnn/AutocastRNN.cpp
    n_elements = sum(weight.numel() for weight in weights)
    buffer = torch.zeros(n_elements, dtype=torch.float16, device=weights[0].device)
    # No views for autograd: a write to one would copy the gradients of the whole buffer.
    return buffer, [part.data.copy_(weight) for part, weight in _split_buffer(buffer, weights)]


def _split_buffer(buffer: Any, weights: Any) -> list[tuple[Any, Any]]:
    parts = buffer.split([weight.numel() for weight in weights])
    return [(part.view(w.shape), w) for part, w in zip(parts, weights, strict=True)]


# -- What the device's operators return ------------------------------------------------------------


def list_recurrent_answers(torch: Any) -> dict[str, Function]:
    """Return what gives the results of the device's operators, by their names."""
    return {
        "aten::_thnn_fused_lstm_cell": _run_lstm_cell,
        "aten::_thnn_fused_lstm_cell_backward_impl": _run_lstm_cell_backward,
        "aten::_thnn_fused_gru_cell": _run_gru_cell,
        "aten::_thnn_fused_gru_cell_backward": _run_gru_cell_backward,
        "aten::_cudnn_rnn": partial(_run_network, torch),
        "aten::_cudnn_rnn_backward": partial(_run_network_backward, torch),
    }


# https://github.com/pytorch/pytorch/blob/main/aten/src/ATen/native/cuda/RNN.cu


def _run_lstm_cell(gates: Any, _hidden_gates: Any, cell: Any, *_: Any) -> Any:
    return cell.new_empty(cell.shape), cell.new_empty(cell.shape), gates.new_empty(gates.shape)


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


def _run_network(torch: Any, tensor: Any, weights: Any, *others: Any) -> Any:
    """Return what cuDNN does, with what it keeps for backward."""
    buffer, cell = others[1], others[3]
    network = _read_network(tensor.shape, tensor.element_size(), others[4:13])
    state = (network.n_layers * network.n_directions, network.n_batch)
    shape = (*tensor.shape[:-1], network.width * network.n_directions)
    if tensor.dtype not in torch.backends.cudnn.CUDNN_TENSOR_DTYPES:
        # PyTorch flattens no such weights on the device: each call copies them into a buffer.
        buffer = tensor.new_empty((sum(weight.numel() for weight in weights),))
    n_kept = network.count_kept_bytes() if network.trains else 0
    return (
        _make_output(tensor, shape, batch_first=network.is_batch_first),
        tensor.new_empty((*state, network.width)),
        tensor.new_empty((0,) if cell is None else (*state, network.size)),
        tensor.new_empty((n_kept,), dtype=torch.uint8),
        buffer,
    )


def _run_network_backward(torch: Any, tensor: Any, weights: Any, *others: Any, **_: Any) -> Any:
    """Return gradients as cuDNN does: those of the weights lie in one buffer."""
    _, _, hidden, cell = others[:4]
    batch_first = others[12] and not others[16]
    buffer = tensor.new_empty((sum(weight.numel() for weight in weights),))
    of_cell = torch.empty((0,), device=tensor.device) if cell is None else cell
    return (
        _make_output(tensor, tensor.shape, batch_first=batch_first),
        hidden.new_empty(hidden.shape),
        of_cell.new_empty(of_cell.shape),
        [part for part, _ in _split_buffer(buffer, weights)],
    )


def _make_output(like: Any, shape: Any, *, batch_first: bool) -> Any:
    """Return a batch of this shape, whose times come first in memory, as cuDNN writes them."""
    if not batch_first:
        return like.new_empty(shape)
    return like.new_empty((shape[1], shape[0], *shape[2:])).transpose(0, 1)
