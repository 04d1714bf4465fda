"""Recurrent networks as on the device: cuDNN's operators and fused cells, and what they return.

On the CPU, where PyTorch's C++ code takes a step's tensors to be, it computes step by step.
https://github.com/pytorch/pytorch/blob/main/aten/src/ATen/native/cudnn/RNN.cpp
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

Function = Callable[..., Any]

#: cuDNN's numbers of kinds of networks (``cudnnRNNMode_t``) are the places of PyTorch's names.
_MODES = ("rnn_relu", "rnn_tanh", "lstm", "gru")
_LSTM = _MODES.index("lstm")


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
    """Return the part of a buffer for each weight, with the weight."""
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
    _, buffer, _, cell, mode, size, projection, n_layers, batch_first = others[:9]
    dropout, train, bidirectional, batch_sizes = others[9:13]
    n_ways = 2 if bidirectional else 1
    width = projection or size
    shape = (*tensor.shape[:-1], width * n_ways)
    n_tokens = tensor.shape[:-1].numel()
    n_batch = batch_sizes[0] if batch_sizes else tensor.shape[0 if batch_first else 1]
    state = (n_layers * n_ways, n_batch, width)
    # Measured of 445 networks on an H200 with cuDNN 9.19, all exact: for each word what backward
    # reads of a layer (5 states of an LSTM, 6 of a GRU) and what goes between layers. Each
    # direction marks what was dropped of both with bits, padding included.
    n_times = len(batch_sizes) or n_tokens // max(1, n_batch)
    n_states = {"lstm": 5, "gru": 6}.get(_MODES[mode], 1) * n_layers + n_layers - 1
    n_kept = n_ways * size * n_tokens * n_states * tensor.element_size()
    if dropout:
        n_kept += (n_layers - 1) * n_times * n_batch * size * n_ways**2 // 8
    n_kept = -(-n_kept // 32) * 32 + 256
    if tensor.dtype not in torch.backends.cudnn.CUDNN_TENSOR_DTYPES:
        # PyTorch flattens no such weights on the device: each call copies them into a buffer.
        buffer = tensor.new_empty((sum(weight.numel() for weight in weights),))
    return (
        _make_output(tensor, shape, batch_first=batch_first and not batch_sizes),
        tensor.new_empty(state),
        tensor.new_empty((0,) if cell is None else (*state[:2], size)),
        tensor.new_empty((n_kept if train else 0,), dtype=torch.uint8),
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
