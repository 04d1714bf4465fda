"""Rules of matrix products, attention and the optimizers' lists of tensors."""

from __future__ import annotations

import math
from typing import Final

from gpumemwidget.prediction.operations import Operation, TensorMeta
from gpumemwidget.prediction.workspaces.draft import (
    FLOATS,
    Draft,
    UnknownFormError,
    ceil_div,
    count_elements,
    is_contiguous,
    is_dense,
    round_up,
    rule,
    transpose,
)
from gpumemwidget.prediction.workspaces.plans import GpuFacts

# Attention


def _plan_flash_splits(n_rows: int, length_q: int, length_k: int, head: int, gpu: GpuFacts) -> int:
    """Return the parts that flash attention splits keys and values into."""
    block_n = 256 if head <= 64 else 128 if head <= 128 else 64
    n_blocks = ceil_div(length_k, block_n)
    n_tiles = n_rows * ceil_div(length_q, 64)
    n_places = gpu.n_multiprocessors * 2
    if n_tiles >= 0.8 * n_places:
        return 1
    efficiencies = {}
    for n in range(1, min(128, n_places, n_blocks) + 1):
        if n == 1 or ceil_div(n_blocks, n) != ceil_div(n_blocks, n - 1):
            n_waves = n_tiles * n / n_places
            efficiencies[n] = n_waves / math.ceil(n_waves)
    best = max(efficiencies.values(), default=0.0)
    return next((n for n, value in efficiencies.items() if value >= 0.85 * best), 1)


@rule("_scaled_dot_product_flash_attention")
def _plan_flash_attention(draft: Draft) -> None:
    query, key = draft.needed(0), draft.needed(1)
    batch, heads, length_q, head = query.shape
    draft.outputs(0, 1)
    if not draft.argument(3, "dropout_p"):
        n_splits = _plan_flash_splits(batch * heads, length_q, key.shape[2], head, draft.gpu)
        if n_splits > 1:
            rows = n_splits * batch * heads * length_q
            draft.temporary(rows * 4)
            draft.temporary(rows * round_up(head, 32) * 4)
    draft.outputs(*range(2, len(draft.operation.allocated)))


@rule("_scaled_dot_product_flash_attention_backward")
def _plan_flash_attention_backward(draft: Draft) -> None:
    gradient, query, key, result = (draft.needed(index) for index in (0, 1, 2, 4))
    batch, heads, length_q, head = query.shape
    for tensor in (gradient, result):
        if not is_contiguous(*transpose(tensor, 1, 2)):
            draft.copy(tensor)
    draft.outputs()
    rows = batch * heads * round_up(length_q, 128)
    draft.temporary(rows * 4)
    draft.temporary(rows * round_up(head, 32) * 4)
    if key.shape[1] != heads:
        for _ in range(2):
            draft.temporary(batch * heads * key.shape[2] * head * query.item_bytes)


@rule("_scaled_dot_product_efficient_attention")
def _plan_efficient_attention(draft: Draft) -> None:
    query, value = draft.needed(0), draft.needed(2)
    # The seed and the offset of the dropout are on the CPU, whatever a fake tensor says.
    draft.outputs(0, 1)
    if query.dtype != "float32" and value.shape[-1] > 128:
        draft.temporary(count_elements(query.shape[:-1]) * value.shape[-1] * 4)


@rule("_scaled_dot_product_efficient_attention_backward")
def _plan_efficient_attention_backward(draft: Draft) -> None:
    gradient, query, key, value = (draft.needed(index) for index in range(4))
    batch, heads, length_q, _ = query.shape
    rows = batch * heads * length_q
    if not is_contiguous(*transpose(gradient, 1, 2)):
        draft.copy(gradient)
    draft.outputs()
    if query.dtype == "float32":
        product = draft.temporary(rows * value.shape[-1] * 4)
        total = draft.temporary(rows * 4)
        draft.temporary(rows * 4)
        draft.free(total, product)
    else:
        draft.temporary(rows * 4)
    head = max(query.shape[-1], value.shape[-1])
    n_columns = 64 if head <= 64 else round_up(head, 128)
    n_tile_rows = 128 if head > 64 and head <= 128 and query.dtype != "float32" else 64
    tile_bytes = n_tile_rows * n_columns * 4 + 16
    n_bytes = batch * heads * ceil_div(length_q, n_tile_rows) * tile_bytes
    if head > 128:
        keys_bytes = 2 * batch * heads * round_up(key.shape[2], 128) * n_columns * 4
        expected = n_bytes if query.dtype == "float32" else n_bytes + keys_bytes
        # How many keys a block takes at once was seen to differ: half as many, or twice.
        draft.temporary(expected, least=expected // 2, most=2 * expected)
    elif head <= 32:
        draft.temporary(n_bytes, most=2 * n_bytes)
    else:
        draft.temporary(n_bytes)


@rule("_scaled_dot_product_cudnn_attention")
def _plan_cudnn_attention(draft: Draft) -> None:
    if len(draft.operation.allocated) < 3:
        raise UnknownFormError
    draft.outputs(*range(2, len(draft.operation.allocated)), 0, 1)
    draft.temporary(256)


@rule("_scaled_dot_product_cudnn_attention_backward")
def _plan_cudnn_attention_backward(draft: Draft) -> None:
    query, key = draft.needed(1), draft.needed(2)
    batch, heads, length_q, head = query.shape
    draft.outputs()
    n_bytes = batch * heads * length_q * (head + 1) * 4 + 256
    if key.shape[1] != heads:
        n_bytes += 2 * batch * heads * key.shape[2] * head * query.item_bytes
    draft.temporary(n_bytes)


# Products of matrices


def _needs_clone(matrix: TensorMeta) -> bool:
    """Return whether cuBLAS takes a copy of a matrix: neither rows nor columns are dense."""
    if len(matrix.shape) < 2:
        return False
    rows, columns = matrix.shape[-2:]
    row_step, column_step = matrix.stride[-2:]
    if len(matrix.shape) == 2 and is_dense(matrix):
        return False
    return not (
        (column_step == 1 and row_step >= max(1, columns))
        or (row_step == 1 and column_step >= max(1, rows))
    )


@rule("mm", "bmm", "addmm", "baddbmm", "_addmm_activation")
def _plan_matrix_product(draft: Draft) -> None:
    draft.outputs()
    first = 0 if draft.operation.name.partition(".")[0] in ("aten::mm", "aten::bmm") else 1
    for index in (first, first + 1):
        matrix = draft.needed(index)
        if _needs_clone(matrix):
            draft.copy(matrix)


# Lists of tensors


def list_blas_libraries(operation: Operation) -> tuple[str, ...]:
    """Return which of ``cublas`` and ``cublaslt`` an operator takes a workspace of."""
    base = operation.name.removeprefix("aten::").partition(".")[0]
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
