"""Records of a dry run: the operators that a step calls, and the memory that each would take."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

#: What a step does: ``forward`` is all that is neither of the others.
Phase: TypeAlias = Literal["forward", "backward", "optimizer"]


@dataclass(frozen=True, slots=True)
class TensorMeta:
    """A tensor that an operator is called with, or returns."""

    #: ``float32``, ``bfloat16``.
    dtype: str
    shape: tuple[int, ...]
    #: In elements.
    stride: tuple[int, ...]
    #: ``cuda`` for what is on the device of the prediction, else ``cpu``.
    device: str
    #: The storage: the same number for tensors that share one, in the whole dry run.
    storage: int
    #: Bytes per element.
    item_bytes: int

    @property
    def n_elements(self) -> int:
        """The number of elements."""
        n_elements = 1
        for size in self.shape:
            n_elements *= size
        return n_elements


#: An argument: a tensor, a list of arguments, a number, a text, or the text of anything else.
Argument: TypeAlias = "TensorMeta | tuple[Argument, ...] | int | float | bool | str | None"


@dataclass(frozen=True, slots=True)
class StorageUse:
    """A storage on the device that an operator has allocated."""

    storage: int
    n_bytes: int


@dataclass(frozen=True, slots=True)
class Operation:
    """An operator that a dry run has called."""

    #: ``aten::addmm``.
    name: str
    arguments: tuple[Argument, ...]
    #: Arguments given by keyword, in their order.
    options: tuple[tuple[str, Argument], ...]
    results: tuple[TensorMeta, ...]
    #: Storages on the device that were freed after the operator before this one.
    freed: tuple[int, ...]
    #: Storages on the device that this operator has allocated, in their order.
    allocated: tuple[StorageUse, ...]
    phase: Phase
    #: The path of the innermost module that was called: ``transformer.h.3.mlp``; ``""``: none.
    module: str
    #: The file and the number of the user's line; ``None`` where no Python line runs, as in
    #: backward.
    line: tuple[str, int] | None


@dataclass(frozen=True, slots=True)
class DryRun:
    """Some runs of a step, carried out without computing or allocating anything."""

    operations: tuple[Operation, ...]
    #: For each run of the step the number of operations until its end.
    step_ends: tuple[int, ...]
    #: Storages on the device that stood before, with their bytes: parameters, buffers, the batch.
    initial: tuple[StorageUse, ...]
    #: Storages freed after the last operation.
    freed_last: tuple[int, ...]
    #: What was taken for granted, a sentence each.
    assumptions: tuple[str, ...]
