"""Plan the operators of a run one after the other, each by the rule of its name."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from gpumemwidget.prediction.operations import Argument, Operation, TensorMeta
from gpumemwidget.prediction.workspaces import (  # noqa: F401 - they register their rules
    cudnn,
    reductions,
    tables,
)
from gpumemwidget.prediction.workspaces.plans import (
    RULES,
    GpuFacts,
    PlanBuilder,
    Step,
    UnknownFormError,
    WorkspacePlan,
    count_bytes,
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

    def plan(self, operation: Operation) -> WorkspacePlan:
        """Return the allocations and frees within ``operation``, kept workspaces included."""
        plan = plan_operation(operation, self._gpu)
        if not _uses_cublas(operation):
            return plan
        if self._gpu.has_workspace_per_product:
            numbers = [step.index for step in plan.steps if step.kind == "temporary"]
            step = Step("temporary", max(numbers, default=-1) + 1, self._gpu.cublas_bytes)
            return replace(plan, steps=(*plan.steps, step))
        thread = "backward" if operation.phase == "backward" else "forward"
        if thread in self._threads_with_workspace:
            return plan
        self._threads_with_workspace.add(thread)
        return replace(plan, steps=(*plan.steps, Step("kept", 0, self._gpu.cublas_bytes)))


#: Operators that multiply matrices with cuBLAS.
_BLAS: Final = frozenset(
    {"addmm", "_addmm_activation", "mm", "bmm", "baddbmm", "addbmm", "mv", "addmv", "dot", "linear"}
)


def _uses_cublas(operation: Operation) -> bool:
    base = operation.base_name
    returns_something = any(use.n_bytes for use in operation.allocated) or base.endswith("_")
    return returns_something and base.rstrip("_") in _BLAS


# -- The rule of an operator -----------------------------------------------------------------------


#: The bytes that an operator without a rule takes at most beyond its arguments and outputs: the
#: eight that were seen to have temporaries stay below (``im2col`` copies its input, ``linalg_qr``
#: its input and results).
_UNKNOWN_BYTES: Final = 64 << 10


def plan_operation(operation: Operation, gpu: GpuFacts) -> WorkspacePlan:
    """Return the allocations and frees within ``operation`` by rule, without kept workspaces."""
    base = operation.base_name
    rule = RULES.get(operation.short_name) or RULES.get(base)
    builder = PlanBuilder(operation, gpu)
    if rule is not None:
        try:
            rule(builder)
        except UnknownFormError:
            rule = None
            builder = PlanBuilder(operation, gpu)
    share = tables.SHARES.get(base)
    is_known = rule is not None or share is not None or base in _WITHOUT_TEMPORARIES
    if rule is None:
        builder.outputs()
        if share is not None:
            n_bytes = max(
                *(_count_all_bytes(argument) for argument in operation.arguments),
                *(use.n_bytes for use in operation.allocated),
                0,
            )
            builder.temporary(int(share.expected * n_bytes), most=int(share.at_most * n_bytes))
        elif not is_known and any(use.n_bytes for use in operation.allocated):
            n_bytes = _count_all_bytes(operation.arguments)
            n_bytes += sum(use.n_bytes for use in operation.allocated)
            builder.temporary(0, most=n_bytes + _UNKNOWN_BYTES)
    return builder.finish(known=is_known)


def _count_all_bytes(argument: Argument) -> int:
    """Return the bytes of the tensors in an argument, those of lists included."""
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
