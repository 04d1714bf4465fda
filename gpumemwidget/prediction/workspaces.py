"""Plan what operators allocate inside: temporaries, workspaces and copies of their inputs.

The operators of a run are planned one after the other, each by its rule or by its row in a table.
The rules follow the public source of the kernels (``aten/src/ATen/native/cuda``,
``native/cudnn``) as of PyTorch 2.11 and were checked on an H200.
"""

from __future__ import annotations

from dataclasses import replace
from math import prod
from typing import Final

from gpumemwidget.prediction import kernel_rules, recurrent  # noqa: F401 - they have rules
from gpumemwidget.prediction.operations import (
    RULES,
    Argument,
    GpuFacts,
    Operation,
    PlanBuilder,
    Step,
    TensorMeta,
    UnknownFormError,
    WorkspacePlan,
    count_bytes,
    is_contiguous,
    round_up,
    rule,
    transpose,
)


class WorkspacePlanner:
    """Plans for the operators of a run, called in their order.

    It remembers which threads have a cuBLAS workspace: the first operator of a thread that uses
    cuBLAS allocates it, and it stays. Autograd's backward runs on a thread of its own. Of the
    workspaces that the process has already, the first is the forward pass's.
    """

    def __init__(self, gpu: GpuFacts, n_workspaces: int = 0) -> None:
        self._gpu = gpu
        self._threads_with_workspace = {*("forward", "backward")[:n_workspaces]}
        #: By the ``id`` of an operation: a run that is noted once more has the same ones.
        self._plans: dict[int, tuple[Operation, WorkspacePlan]] = {}

    def plan(self, operation: Operation) -> WorkspacePlan:
        """Return the allocations and frees within ``operation``, kept workspaces included."""
        if id(operation) not in self._plans:
            self._plans[id(operation)] = (operation, plan_operation(operation, self._gpu))
        plan = self._plans[id(operation)][1]
        if not _uses_cublas(operation):
            return plan
        thread = "backward" if operation.phase == "backward" else "forward"
        if thread in self._threads_with_workspace:
            return plan
        self._threads_with_workspace.add(thread)
        return replace(plan, steps=(*plan.steps, Step("kept", 0, self._gpu.cublas_bytes)))


def _uses_cublas(operation: Operation) -> bool:
    base = operation.base_name
    of_cublas = (
        *("addmm", "_addmm_activation", "mm", "bmm", "baddbmm", "addbmm", "mv", "addmv", "dot"),
        "linear",
    )
    returns_something = any(use.n_bytes for use in operation.allocated) or base.endswith("_")
    return returns_something and base.rstrip("_") in of_cublas


# -- The rule of an operator -----------------------------------------------------------------------


def plan_operation(operation: Operation, gpu: GpuFacts) -> WorkspacePlan:
    """Return the allocations and frees within ``operation`` by rule, without kept workspaces."""
    base = operation.base_name
    found = RULES.get(operation.short_name) or RULES.get(base)
    builder = PlanBuilder(operation, gpu)
    if found is not None:
        try:
            found(builder)
        except UnknownFormError:
            found = None
            builder = PlanBuilder(operation, gpu)
    share = _SHARES.get(base)
    is_known = found is not None or share is not None or base in _WITHOUT_TEMPORARIES
    if found is None:
        builder.outputs()
        if share is not None:
            n_bytes = max(
                *(_count_all_bytes(argument) for argument in operation.arguments),
                *(use.n_bytes for use in operation.allocated),
                0,
            )
            expected, at_most = share
            builder.temporary(int(expected * n_bytes), most=int(at_most * n_bytes))
        elif not is_known and any(use.n_bytes for use in operation.allocated):
            n_bytes = _count_all_bytes(operation.arguments)
            n_bytes += sum(use.n_bytes for use in operation.allocated)
            # The eight that were seen to have temporaries stay below (``im2col`` copies its input,
            # ``linalg_qr`` its input and results).
            builder.temporary(0, most=n_bytes + (64 << 10))
    return builder.finish(known=is_known)


def _count_all_bytes(argument: Argument) -> int:
    if isinstance(argument, TensorMeta):
        return count_bytes(argument)
    if isinstance(argument, tuple):
        return sum(_count_all_bytes(item) for item in argument)
    return 0


#: Operators that were seen to allocate their outputs, and less than a mebibyte beside them; flash
#: attention up to 8 MiB, where few rows attend to many.
_WITHOUT_TEMPORARIES: Final = frozenset(
    # Names without their overloads; as quoted names it would be 200 lines.
    """
    _addmm_activation _embedding_bag _foreach_add _foreach_add_ _foreach_addcdiv _foreach_addcdiv_
    _foreach_addcmul _foreach_addcmul_ _foreach_clamp_min_ _foreach_copy_ _foreach_div _foreach_div_
    _foreach_lerp _foreach_lerp_ _foreach_max _foreach_mul _foreach_mul_ _foreach_neg _foreach_neg_
    _foreach_norm _foreach_pow _foreach_reciprocal _foreach_reciprocal_ _foreach_sqrt _foreach_sqrt_
    _foreach_sub _foreach_sub_ _foreach_zero_ _fused_adam_ _fused_adamw_ _fused_sgd_ _grouped_mm
    _local_scalar_dense _log_softmax_backward_data _reshape_alias
    _scaled_dot_product_cudnn_attention _scaled_dot_product_efficient_attention
    _scaled_dot_product_flash_attention _to_copy _unsafe_view abs add add_ addcdiv addcdiv_ addcmul
    addcmul_ addmm alias arange as_strided as_strided_ avg_pool2d avg_pool2d_backward baddbmm
    bernoulli_ binary_cross_entropy bitwise_and bitwise_not bitwise_or bmm cat clamp clamp_
    clamp_min clamp_min_ clone constant_pad_nd copy_ cos cudnn_batch_norm cudnn_batch_norm_backward
    detach detach_ div div_ elu elu_backward embedding empty empty_like empty_strided eq eq_ exp
    exp_ expand fill fill_ flip floor_divide full full_like gather ge gelu gelu_backward glu
    glu_backward gt hardswish hardswish_ histc index_add index_add_ index_select le leaky_relu
    leaky_relu_backward lerp lerp_ lift_fresh lift_fresh_copy log log1p log_ logical_and logical_not
    logical_or lt masked_fill masked_fill_ max max_pool2d_with_indices
    max_pool2d_with_indices_backward maximum min minimum mm mse_loss_backward mul mul_
    native_batch_norm native_batch_norm_backward native_dropout_backward
    native_group_norm native_group_norm_backward ne neg neg_ new_empty new_empty_strided new_full
    new_ones new_zeros nll_loss2d_backward nll_loss_backward nll_loss_forward
    nonzero normal_ ones ones_like permute pow pow_ prod rand_like randint randn_like reciprocal
    reciprocal_ relu relu_ repeat rsqrt rsqrt_ rsub scalar_tensor scatter scatter_ scatter_add
    scatter_add_ select select_backward sigmoid sigmoid_ sigmoid_backward silu silu_ silu_backward
    sin slice slice_backward split split_with_sizes sqrt sqrt_ squeeze stack sub sub_ t tanh tanh_
    tanh_backward threshold_backward transpose tril triu unbind uniform_ unsqueeze
    upsample_bilinear2d upsample_bilinear2d_backward upsample_nearest2d upsample_nearest2d_backward
    view where zero_ zeros zeros_like
    """.split()  # noqa: SIM905
)


#: Temporaries as a multiple of the largest tensor that an operator is given or returns: expected,
#: and at most. As recorded on an H200 with PyTorch 2.11. Without a row a step's reserved peak moves
#: by less than 0.5 %, but one call may take many times its results.
_SHARES: Final[dict[str, tuple[float, float]]] = {
    "_safe_softmax": (0.25, 0.5),
    "_softmax_backward_data": (1, 1),
    "_unique2": (1, 2.25),
    "binary_cross_entropy_with_logits": (2, 2),
    "count_nonzero": (2.25, 9),
    "cumprod": (0, 1),
    "cumsum": (0, 1),
    "huber_loss": (1, 1),
    "masked_scatter": (2, 4),
    "mse_loss": (1, 1),
    # Keys of 8 bytes for each number, twice, and twice again while they are sorted.
    "randperm": (5, 5.5),
    "smooth_l1_loss": (1, 1),
    "topk": (0, 1),
}


# -- Short rules -----------------------------------------------------------------------------------

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
    n_rows = prod(query.shape[:-1])
    if not is_contiguous(*transpose(gradient, 1, 2)):
        plan.copy(gradient)
    plan.outputs()
    head = max(query.shape[-1], value.shape[-1])
    # Partial gradients of the query are kept in float32, in tiles of rows and columns.
    n_columns = 64 if head <= 64 else round_up(head, 128)
    n_bytes = prod(query.shape[:2]) * round_up(query.shape[2], 64) * n_columns * 4
    plan.temporary(
        n_bytes + n_rows * 4, least=n_bytes // 2, most=4 * n_bytes if head > 128 else 2 * n_bytes
    )
