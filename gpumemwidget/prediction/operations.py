"""Records of a dry run: the operators that a step calls, and the memory that each would take."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any, TypeAlias

from gpumemwidget.model.devices import Frame
from gpumemwidget.model.ownership import MemoryKind
from gpumemwidget.model.predictions import Phase


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
        return prod(self.shape)


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
    #: Storages on the device that were freed between this operator and the next one.
    freed: Sequence[int]
    #: Storages on the device that this operator has allocated, in their order.
    allocated: tuple[StorageUse, ...]
    phase: Phase
    #: The path of the innermost module that was called: ``transformer.h.3.mlp``; ``""``: none.
    module: str
    #: The user's lines that were running, innermost first: without those of libraries.
    frames: tuple[Frame, ...]

    @property
    def short_name(self) -> str:
        """The name without ``aten::``: ``sum.dim_IntList``."""
        return self.name.removeprefix("aten::")

    @property
    def base_name(self) -> str:
        """The name without ``aten::`` and overload: ``sum``."""
        return self.short_name.partition(".")[0]


@dataclass(frozen=True, slots=True)
class StorageRole:
    """The purpose of a storage, and what the user calls it."""

    kind: MemoryKind
    #: ``model.transformer.wte.weight``, ``batch.input_ids``; ``""`` if it has no name.
    path: str


@dataclass(frozen=True, slots=True)
class DryRun:
    """Some runs of a step, carried out without computing or allocating anything."""

    operations: tuple[Operation, ...]
    #: For each run of the step the number of operations until its end.
    step_ends: tuple[int, ...]
    #: Storages on the device before the first step, with their bytes: parameters, the batch.
    initial: tuple[StorageUse, ...]
    #: Assumptions, a sentence each.
    assumptions: tuple[str, ...]
    #: Storages that are known to be a parameter, a gradient, a batch …, by their number.
    roles: Mapping[int, StorageRole] = field(default_factory=dict)
    #: Addresses of the storages of ``initial`` on the real device, by number; those that are
    #: on the CPU are missing.
    addresses: Mapping[int, int] = field(default_factory=dict)
    #: Places of operations whose result takes the memory of their first tensor.
    sums_in_place: frozenset[int] = frozenset()


@dataclass(slots=True)
class Copies:
    """Copies of the user's objects that a dry run is about to run, and that may be changed."""

    torch: Any
    step: Callable[..., object]
    #: Modules that are in no other one, each with what the user calls it.
    roots: Sequence[tuple[str, Any]]
    optimizers: Sequence[Any]
