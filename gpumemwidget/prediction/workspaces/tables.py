"""Operators whose temporaries follow from the size of an argument: a row each, and a few rules."""

from __future__ import annotations

from typing import Final, NamedTuple

from gpumemwidget.prediction.operations import TensorMeta
from gpumemwidget.prediction.workspaces.draft import (
    Draft,
    UnknownFormError,
    count_bytes,
    rule,
)


class Share(NamedTuple):
    """Temporaries as a multiple of the largest tensor that an operator is given or returns."""

    expected: float
    at_most: float


#: As recorded on an H200 with PyTorch 2.11. Without a row a step's reserved peak moves by less than
#: 0.5 %, but one call may take many times its results.
SHARES: Final = {
    "_safe_softmax": Share(0.25, 0.5),
    "_softmax_backward_data": Share(1, 1),
    "_unique2": Share(1, 2.25),
    "binary_cross_entropy_with_logits": Share(2, 2),
    "count_nonzero": Share(2.25, 9),
    "cumprod": Share(0, 1),
    "cumsum": Share(0, 1),
    "huber_loss": Share(1, 1),
    "masked_scatter": Share(2, 4),
    "mse_loss": Share(1, 1),
    # Keys of 8 bytes for each number, twice, and twice again while they are sorted.
    "randperm": Share(5, 5.5),
    "smooth_l1_loss": Share(1, 1),
    "topk": Share(0, 1),
}

#: Arguments that are copied if they are not contiguous, before and after the results are made.
_COPIED: Final[dict[str, tuple[tuple[int, ...], tuple[int, ...]]]] = {
    "_log_softmax": ((), (0,)),
    "_softmax": ((), (0,)),
    "native_layer_norm": ((0,), ()),
    "native_layer_norm_backward": ((1,), (0,)),
}


@rule(*_COPIED)
def _plan_copies(draft: Draft) -> None:
    before, after = _COPIED[draft.operation.base_name]
    for index in before:
        draft.contiguous(draft.require_tensor(index))
    draft.outputs()
    for index in after:
        draft.contiguous(draft.require_tensor(index))


@rule("native_dropout", "nll_loss2d_forward")
def _plan_second_output_first(draft: Draft) -> None:
    # The mask, or the total weight, is made before the result.
    draft.outputs(1, 0)


@rule("sort", "sort.stable")
def _plan_sort(draft: Draft) -> None:
    tensor, dim = draft.require_tensor(0), draft.argument(1, "dim")
    draft.outputs()
    length = tensor.shape[dim if type(dim) is int else -1] if tensor.shape else 1
    # Short rows are sorted in place; others with copies of the elements and of their places.
    if length > 4096:
        n_bytes = count_bytes(tensor) + 8 * tensor.n_elements
        share = 1.7 if length == tensor.n_elements else 2.7
        draft.temporary(int(share * n_bytes), least=n_bytes, most=5 * n_bytes)


@rule("index")
def _plan_index(draft: Draft) -> None:
    _plan_masks(draft)
    draft.outputs()


@rule("index_put", "index_put_", "_index_put_impl_", "_unsafe_index_put")
def _plan_index_put(draft: Draft) -> None:
    draft.outputs()
    _plan_masks(draft)
    if draft.argument(3, "accumulate") is True:
        values = draft.require_tensor(2)
        draft.contiguous(values)
        # The indices are sorted, so that equal ones are added up together.
        indices = _list_indices(draft)
        n_bytes = 8 * max((index.n_elements for index in indices), default=0)
        several_bytes = count_bytes(values) if len(indices) > 1 else 0
        draft.temporary(6 * n_bytes, least=0, most=8 * n_bytes + several_bytes)


def _plan_masks(draft: Draft) -> None:
    """Allocate the places of what masks select, as ``nonzero()`` finds them: all, at most."""
    for index in _list_indices(draft):
        if index.dtype in ("bool", "uint8"):
            n_bytes = 8 * index.n_elements * len(index.shape)
            draft.temporary(n_bytes, least=0)


def _list_indices(draft: Draft) -> list[TensorMeta]:
    indices = draft.argument(1)
    given = indices if isinstance(indices, tuple) else ()
    return [index for index in given if isinstance(index, TensorMeta)]


@rule("embedding_dense_backward")
def _plan_embedding_backward(draft: Draft) -> None:
    gradient, indices = draft.require_tensor(0), draft.require_tensor(1)
    n_weights = draft.argument(2)
    if not isinstance(n_weights, int):
        raise UnknownFormError
    draft.contiguous(gradient)
    draft.contiguous(indices)
    draft.outputs()
    n = indices.n_elements
    if n > 3072:
        # The indices are sorted; rows of equal ones are added up in float32, ten at a time.
        n_rows = n // 10 + min(n, n_weights)
        n_bytes = 8 * count_bytes(indices)
        draft.temporary(n_bytes + n_rows * gradient.shape[-1] * 4, least=0)
