"""Add up gradients in place, as autograd does with tensors that have memory.

Where several paths lead to one tensor, autograd adds up its gradients: in the memory of the sum so
far if nothing else uses that, else in new memory. With fake tensors, which are a subclass, it
always takes new memory
(https://github.com/pytorch/pytorch/blob/main/torch/csrc/autograd/input_buffer.cpp).
"""

from __future__ import annotations

from dataclasses import replace

from gpumemwidget.prediction.operations import DryRun, Operation, TensorMeta, change_storages


def accumulate_in_place(run: DryRun) -> DryRun:
    """Return a dry run whose gradients are added up in place where autograd does so.

    An addition in backward counts as autograd's if its first tensor is freed right after it. A
    view shares its storage with its base, so autograd does not write to it.
    """
    #: The storages that sums were put into, by those that the fakes had.
    renamed: dict[int, int] = {}
    #: The tensors that operators have allocated, by their storages.
    owners: dict[int, TensorMeta] = {}
    operations: list[Operation] = []
    ends = [each.freed for each in run.operations[1:]] + [run.freed_last]
    kept: set[int] = set()
    for operation, freed_next in zip(run.operations, ends, strict=True):
        if not _is_in_place(operation, freed_next, owners):
            _note_owners(operation, owners)
            operations.append(operation)
            continue
        total, result = operation.arguments[0], operation.results[0]
        assert isinstance(total, TensorMeta)
        # The result lives on in the storage that would be freed.
        renamed[result.storage] = total.storage
        kept.add(total.storage)
        owners[result.storage] = result
        operations.append(replace(operation, allocated=()))
    if not renamed:
        return run
    return replace(
        run,
        operations=tuple(_rename(each, renamed, kept) for each in operations),
        freed_last=_list_freed(run.freed_last, renamed, kept),
        roles={_follow(storage, renamed): role for storage, role in run.roles.items()},
    )


def _note_owners(operation: Operation, owners: dict[int, TensorMeta]) -> None:
    """Remember which tensors an operation has allocated; forget those that a view looks like."""
    allocated = {use.storage for use in operation.allocated}
    returns_itself = operation.name.partition(".")[0].endswith("_")
    for tensor in operation.results:
        if tensor.storage in allocated:
            owners[tensor.storage] = tensor
        elif owners.get(tensor.storage) == tensor and not returns_itself:
            del owners[tensor.storage]


def _is_in_place(
    operation: Operation, freed_next: tuple[int, ...], owners: dict[int, TensorMeta]
) -> bool:
    """Return whether an operation is an addition whose result is put into its first tensor."""
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


def _list_freed(freed: tuple[int, ...], renamed: dict[int, int], kept: set[int]) -> tuple[int, ...]:
    """Return the storages that are freed: not those that a sum lives on in."""
    return tuple(_follow(storage, renamed) for storage in freed if storage not in kept)


def _follow(storage: int, renamed: dict[int, int]) -> int:
    while storage in renamed:
        storage = renamed[storage]
    return storage


def _rename(operation: Operation, renamed: dict[int, int], kept: set[int]) -> Operation:
    """Return an operation with the storages of sums where they were put."""
    renumbered = change_storages(operation, lambda storage: _follow(storage, renamed))
    if not operation.freed:
        return renumbered
    return replace(renumbered, freed=_list_freed(operation.freed, renamed, kept))
