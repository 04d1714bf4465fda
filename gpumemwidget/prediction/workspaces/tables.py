"""Operators whose temporaries follow from the size of an argument: a row each, or a short rule."""

from __future__ import annotations

from typing import Final, NamedTuple

from gpumemwidget.prediction.operations import TensorMeta
from gpumemwidget.prediction.workspaces.plans import (
    PlanBuilder,
    UnknownFormError,
    count_bytes,
    count_elements,
    is_contiguous,
    round_up,
    rule,
    transpose,
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
def _plan_copies(plan: PlanBuilder) -> None:
    before, after = _COPIED[plan.operation.base_name]
    for index in before:
        plan.contiguous(plan.require_tensor(index))
    plan.outputs()
    for index in after:
        plan.contiguous(plan.require_tensor(index))


@rule("native_dropout", "nll_loss2d_forward")
def _plan_second_output_first(plan: PlanBuilder) -> None:
    # The mask, or the total weight, is made before the result.
    plan.outputs(1, 0)


@rule("sort", "sort.stable")
def _plan_sort(plan: PlanBuilder) -> None:
    tensor, dim = plan.require_tensor(0), plan.argument(1, "dim")
    plan.outputs()
    length = tensor.shape[dim if type(dim) is int else -1] if tensor.shape else 1
    # Short rows are sorted in place; others with copies of the elements and of their places.
    if length > 4096:
        n_bytes = count_bytes(tensor) + 8 * tensor.n_elements
        share = 1.7 if length == tensor.n_elements else 2.7
        plan.temporary(int(share * n_bytes), least=n_bytes, most=5 * n_bytes)


@rule("index")
def _plan_index(plan: PlanBuilder) -> None:
    _plan_masks(plan)
    plan.outputs()


@rule("index_put", "index_put_", "_index_put_impl_", "_unsafe_index_put")
def _plan_index_put(plan: PlanBuilder) -> None:
    plan.outputs()
    _plan_masks(plan)
    if plan.argument(3, "accumulate") is True:
        values = plan.require_tensor(2)
        plan.contiguous(values)
        # The indices are sorted, so that equal ones are added up together.
        indices = _list_indices(plan)
        n_bytes = 8 * max((index.n_elements for index in indices), default=0)
        several_bytes = count_bytes(values) if len(indices) > 1 else 0
        plan.temporary(6 * n_bytes, least=0, most=8 * n_bytes + several_bytes)


def _plan_masks(plan: PlanBuilder) -> None:
    """Allocate the places of what masks select, as ``nonzero()`` finds them: all, at most."""
    for index in _list_indices(plan):
        if index.dtype in ("bool", "uint8"):
            n_bytes = 8 * index.n_elements * len(index.shape)
            plan.temporary(n_bytes, least=0)


def _list_indices(plan: PlanBuilder) -> list[TensorMeta]:
    indices = plan.argument(1)
    given = indices if isinstance(indices, tuple) else ()
    return [index for index in given if isinstance(index, TensorMeta)]


@rule("embedding_dense_backward")
def _plan_embedding_backward(plan: PlanBuilder) -> None:
    gradient, indices = plan.require_tensor(0), plan.require_tensor(1)
    n_weights = plan.argument(2)
    if not isinstance(n_weights, int):
        raise UnknownFormError
    plan.contiguous(gradient)
    plan.contiguous(indices)
    plan.outputs()
    n = indices.n_elements
    if n > 3072:
        # The indices are sorted; rows of equal ones are added up in float32, ten at a time.
        n_rows = n // 10 + min(n, n_weights)
        n_bytes = 8 * count_bytes(indices)
        plan.temporary(n_bytes + n_rows * gradient.shape[-1] * 4, least=0)


# -- Attention -------------------------------------------------------------------------------------


@rule(
    "_scaled_dot_product_flash_attention_backward", "_scaled_dot_product_cudnn_attention_backward"
)
def _plan_attention_backward(plan: PlanBuilder) -> None:
    query, key = plan.require_tensor(1), plan.require_tensor(2)
    batch, heads, length, head = query.shape
    for index in (0, 4) if "flash" in plan.operation.name else ():
        tensor = plan.require_tensor(index)
        if not is_contiguous(*transpose(tensor, 1, 2)):
            plan.copy(tensor)
    plan.outputs()
    # The gradient of the query is added up in float32, with a sum for each row.
    plan.temporary(batch * heads * round_up(length, 128) * (round_up(head, 32) + 1) * 4)
    if key.shape[1] != heads:
        # Those of keys and values are first made for each head of the query.
        plan.temporary(2 * batch * heads * key.shape[2] * head * query.item_bytes)


@rule("_scaled_dot_product_efficient_attention_backward")
def _plan_efficient_attention_backward(plan: PlanBuilder) -> None:
    gradient, query, value = (plan.require_tensor(index) for index in (0, 1, 3))
    n_rows = count_elements(query.shape[:-1])
    if not is_contiguous(*transpose(gradient, 1, 2)):
        plan.copy(gradient)
    plan.outputs()
    head = max(query.shape[-1], value.shape[-1])
    # Partial gradients of the query are kept in float32, in tiles of rows and columns.
    n_columns = 64 if head <= 64 else round_up(head, 128)
    n_bytes = count_elements(query.shape[:2]) * round_up(query.shape[2], 64) * n_columns * 4
    if query.dtype == "float32":
        product = plan.temporary(n_rows * value.shape[-1] * 4)
        plan.free(product)
    plan.temporary(
        n_bytes + n_rows * 4, least=n_bytes // 2, most=4 * n_bytes if head > 128 else 2 * n_bytes
    )
