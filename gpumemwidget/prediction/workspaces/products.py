"""Rules of attention, and the libraries of matrix products."""

from __future__ import annotations

from typing import Final

from gpumemwidget.prediction.operations import Operation, TensorMeta
from gpumemwidget.prediction.workspaces.draft import (
    FLOATS,
    Draft,
    count_elements,
    is_contiguous,
    round_up,
    rule,
    transpose,
)

# Attention


@rule(
    "_scaled_dot_product_flash_attention_backward", "_scaled_dot_product_cudnn_attention_backward"
)
def _plan_attention_backward(draft: Draft) -> None:
    query, key = draft.require_tensor(1), draft.require_tensor(2)
    batch, heads, length, head = query.shape
    for index in (0, 4) if "flash" in draft.operation.name else ():
        tensor = draft.require_tensor(index)
        if not is_contiguous(*transpose(tensor, 1, 2)):
            draft.copy(tensor)
    draft.outputs()
    # The gradient of the query is added up in float32, with a sum for each row.
    draft.temporary(batch * heads * round_up(length, 128) * (round_up(head, 32) + 1) * 4)
    if key.shape[1] != heads:
        # Those of keys and values are first made for each head of the query.
        draft.temporary(2 * batch * heads * key.shape[2] * head * query.item_bytes)


@rule("_scaled_dot_product_efficient_attention_backward")
def _plan_efficient_attention_backward(draft: Draft) -> None:
    gradient, query, value = (draft.require_tensor(index) for index in (0, 1, 3))
    n_rows = count_elements(query.shape[:-1])
    if not is_contiguous(*transpose(gradient, 1, 2)):
        draft.copy(gradient)
    draft.outputs()
    head = max(query.shape[-1], value.shape[-1])
    # Partial gradients of the query are kept in float32, in tiles of rows and columns.
    n_columns = 64 if head <= 64 else round_up(head, 128)
    n_bytes = count_elements(query.shape[:2]) * round_up(query.shape[2], 64) * n_columns * 4
    if query.dtype == "float32":
        product = draft.temporary(n_rows * value.shape[-1] * 4)
        draft.free(product)
    draft.temporary(
        n_bytes + n_rows * 4, least=n_bytes // 2, most=4 * n_bytes if head > 128 else 2 * n_bytes
    )


# Products of matrices


def list_blas_libraries(operation: Operation) -> tuple[str, ...]:
    """Return which of ``cublas`` and ``cublaslt`` an operator takes a workspace of."""
    base = operation.base_name
    if not any(use.n_bytes for use in operation.allocated) and not base.endswith("_"):
        return ()
    if base in ("addmm", "_addmm_activation") and _is_fused_addmm(operation):
        return ("cublas", "cublaslt")
    return ("cublas",) if base.rstrip("_") in _BLAS else ()


#: Operators that multiply matrices with cuBLAS.
_BLAS: Final = frozenset(
    {"addmm", "_addmm_activation", "mm", "bmm", "baddbmm", "addbmm", "mv", "addmv", "dot", "linear"}
)


def _is_fused_addmm(operation: Operation) -> bool:
    """Return whether ``addmm`` adds its bias within cuBLASLt's matrix product."""
    tensors = [argument for argument in operation.arguments if isinstance(argument, TensorMeta)]
    if len(tensors) < 3 or dict(operation.options).get("beta", 1) != 1:
        return False
    bias, _, second = tensors[:3]
    return (
        bias.dtype in FLOATS
        and len(bias.shape) == 1
        and bias.shape[0] == second.shape[1]
        and bias.stride == (1,)
        and min(second.shape) > 1
    )
