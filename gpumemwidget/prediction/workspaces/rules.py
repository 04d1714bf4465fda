"""The rule of an operator, found by its name."""

from __future__ import annotations

from typing import Final

from gpumemwidget.prediction.operations import Argument, Operation, TensorMeta
from gpumemwidget.prediction.workspaces import (  # noqa: F401 - they register their rules
    cudnn,
    products,
    reductions,
    sorting,
)
from gpumemwidget.prediction.workspaces.draft import RULES, Draft, UnknownFormError, count_bytes
from gpumemwidget.prediction.workspaces.plans import Bound, GpuFacts, WorkspacePlan

#: The bytes that an operator without a rule takes at most beyond its arguments and outputs: the
#: eight that were seen to have temporaries stay below (``im2col`` copies its input, ``linalg_qr``
#: its input and results).
_UNKNOWN_BYTES: Final = 64 << 10


def plan_operation(operation: Operation, gpu: GpuFacts, bound: Bound = "expected") -> WorkspacePlan:
    """Return the allocations and frees within ``operation`` by rule, without kept workspaces.

    Args:
        operation: the operator.
        gpu: what it runs on.
        bound: which figures are planned where they are estimated.
    """
    name = operation.name.removeprefix("aten::")
    base = name.partition(".")[0]
    rule = RULES.get(name) or RULES.get(base)
    draft = Draft(operation, gpu)
    if rule is not None:
        try:
            rule(draft)
        except UnknownFormError:
            rule = None
            draft = Draft(operation, gpu)
    is_known = rule is not None or base in _WITHOUT_TEMPORARIES
    if rule is None:
        draft.outputs()
        if not is_known and any(use.n_bytes for use in operation.allocated):
            n_bytes = _count_all_bytes(operation.arguments)
            n_bytes += sum(use.n_bytes for use in operation.allocated)
            draft.temporary(0, most=n_bytes + _UNKNOWN_BYTES)
    return draft.finish(known=is_known, bound=bound)


def _count_all_bytes(argument: Argument) -> int:
    """Return the bytes of the tensors in an argument, those of lists included."""
    if isinstance(argument, TensorMeta):
        return count_bytes(argument)
    if isinstance(argument, tuple):
        return sum(_count_all_bytes(each) for each in argument)
    return 0


#: Operators that were seen to allocate their outputs, and at most 0.1 MiB beside them.
_WITHOUT_TEMPORARIES: Final = frozenset(
    # Names without their overloads; as quoted names it would be 200 lines.
    """
    _embedding_bag _foreach_add _foreach_add_ _foreach_addcdiv _foreach_addcdiv_ _foreach_addcmul
    _foreach_addcmul_ _foreach_clamp_min_ _foreach_copy_ _foreach_div _foreach_div_ _foreach_lerp
    _foreach_lerp_ _foreach_max _foreach_mul _foreach_mul_ _foreach_neg _foreach_neg_ _foreach_norm
    _foreach_pow _foreach_reciprocal _foreach_reciprocal_ _foreach_sqrt _foreach_sqrt_ _foreach_sub
    _foreach_sub_ _foreach_zero_ _fused_adam_ _fused_adamw_ _fused_sgd_ _grouped_mm
    _local_scalar_dense _log_softmax_backward_data _reshape_alias _to_copy _unsafe_view abs add
    add_ addcdiv addcdiv_ addcmul addcmul_ alias arange as_strided as_strided_ avg_pool2d
    avg_pool2d_backward bernoulli_ bitwise_and bitwise_not bitwise_or cat clamp clamp_ clamp_min
    clamp_min_ clone constant_pad_nd copy_ cos detach detach_ div div_ elu elu_backward empty
    empty_like empty_strided eq eq_ exp exp_ expand fill fill_ flip floor_divide full full_like
    gather ge gelu gelu_backward glu glu_backward gt hardswish hardswish_ histc index_add
    index_add_ index_select le leaky_relu leaky_relu_backward lerp lerp_ lift_fresh lift_fresh_copy
    log log1p log_ logical_and logical_not logical_or lt masked_fill masked_fill_
    max_pool2d_with_indices max_pool2d_with_indices_backward maximum minimum mse_loss_backward mul
    mul_ native_batch_norm native_batch_norm_backward native_dropout_backward
    native_group_norm native_group_norm_backward ne neg neg_ new_empty new_empty_strided new_full
    new_ones new_zeros nll_loss2d_backward nll_loss_backward nll_loss_forward
    normal_ ones ones_like permute pow pow_ rand_like randint randn_like reciprocal reciprocal_
    relu relu_ repeat rsqrt rsqrt_ rsub scalar_tensor scatter scatter_ scatter_add scatter_add_
    select select_backward sigmoid sigmoid_ sigmoid_backward silu silu_ silu_backward sin slice
    slice_backward split split_with_sizes sqrt sqrt_ squeeze stack sub sub_ t tanh tanh_
    tanh_backward threshold_backward transpose tril triu unbind uniform_ unsqueeze
    upsample_bilinear2d upsample_nearest2d view where zero_ zeros zeros_like
    """.split()  # noqa: SIM905
)
