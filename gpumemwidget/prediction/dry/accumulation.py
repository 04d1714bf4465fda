"""Find the gradients that autograd adds up in place.

Where several paths lead to one tensor, autograd adds up its gradients: in the memory of the sum so
far if nothing else uses that, else in new memory. With fake tensors, which are a subclass, it
always takes new memory
(https://github.com/pytorch/pytorch/blob/main/torch/csrc/autograd/input_buffer.cpp).
"""

from __future__ import annotations

from collections.abc import Sequence

from gpumemwidget.prediction.operations import Operation, TensorMeta


def find_sums_in_place(
    operations: Sequence[Operation], freed_last: tuple[int, ...]
) -> frozenset[int]:
    """Return the places of additions whose result takes the memory of their first tensor.

    An addition in backward counts as autograd's if its first tensor is freed right after it. A
    view shares its storage with its base, so autograd does not write to it.
    """
    #: The tensors that operators have allocated, by their storages.
    owners: dict[int, TensorMeta] = {}
    found = set()
    ends = [*(operation.freed for operation in operations[1:]), freed_last]
    for place, (operation, freed_next) in enumerate(zip(operations, ends, strict=True)):
        if _is_in_place(operation, freed_next, owners):
            found.add(place)
        allocated = {use.storage for use in operation.allocated}
        returns_itself = operation.name.partition(".")[0].endswith("_")
        for tensor in operation.results:
            if tensor.storage in allocated:
                owners[tensor.storage] = tensor
            elif owners.get(tensor.storage) == tensor and not returns_itself:
                # A view looks like the tensor.
                del owners[tensor.storage]
    return frozenset(found)


def _is_in_place(
    operation: Operation, freed_next: tuple[int, ...], owners: dict[int, TensorMeta]
) -> bool:
    if (
        operation.name != "aten::add.Tensor"
        or operation.phase != "backward"
        or operation.options
        or len(operation.arguments) != 2
        or len(operation.allocated) != 1
    ):
        return False
    total, result = operation.arguments[0], operation.results[0]
    return (
        isinstance(total, TensorMeta)
        and total.storage in freed_next
        and owners.get(total.storage) == total
        and (total.dtype, total.shape) == (result.dtype, result.shape)
    )
