"""Records of a dry run: the operators that a step calls, and plans of what each allocates inside.

The facts of a GPU that decide the plans are here, and what rules write them with.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any, Final, Literal, TypeAlias

from gpumemwidget.backends.libraries import count_cublas_bytes
from gpumemwidget.model.devices import Chip, Frame
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


# -- Plans of what an operator allocates inside ----------------------------------------------------

#: The kind of a step of a plan. ``kept`` is allocated and never freed.
StepKind: TypeAlias = Literal["output", "temporary", "free", "kept"]

#: The figure of an estimate that is simulated.
Bound: TypeAlias = Literal["least", "expected", "most"]

MIB: Final = 1 << 20


@dataclass(frozen=True, slots=True)
class GpuFacts(Chip):
    """Facts of a GPU and of PyTorch that decide the size of workspaces."""

    #: Version of PyTorch: ``(2, 11)``.
    torch_version: tuple[int, int]

    @property
    def is_measured(self) -> bool:
        """Return whether the rules were checked on such a GPU, with such a release of PyTorch."""
        return self == H200

    @property
    def cublas_bytes(self) -> int:
        """The size of the cuBLAS workspace of a thread, in bytes."""
        return count_cublas_bytes(self.capability[0])


#: An NVIDIA H200 with PyTorch 2.11, which the rules were checked on.
H200: Final = GpuFacts((9, 0), 132, 2048, (2, 11))


@dataclass(frozen=True, slots=True)
class Step:
    """An allocation or a free within an operator."""

    kind: StepKind
    #: ``output``: the position in ``Operation.allocated``; ``temporary``, ``free``: the number of
    #: the temporary within the operator; ``kept``: 0.
    index: int
    #: Bytes allocated, before the allocator rounds; 0 for a free.
    n_bytes: int
    #: Bounds of an estimated size; ``None`` where ``n_bytes`` is certain.
    least_bytes: int | None = None
    most_bytes: int | None = None

    def read_bytes(self, bound: Bound) -> int:
        """Return the bytes that are allocated: 0 for a temporary that is left out."""
        n_bytes = None
        if bound != "expected":
            n_bytes = self.least_bytes if bound == "least" else self.most_bytes
        return self.n_bytes if n_bytes is None else n_bytes


@dataclass(frozen=True, slots=True)
class WorkspacePlan:
    """The allocations and frees within an operator, in order.

    Temporaries that no step frees are freed at the operator's end. An output without a step is no
    allocation on the device: the fake operator shows a tensor where the real one has none.
    """

    steps: tuple[Step, ...]
    #: ``False`` where no rule knows the operator: only its outputs are planned.
    is_known: bool

    @property
    def is_estimated(self) -> bool:
        """Return whether the bounds of a step differ."""
        return any(step.most_bytes is not None for step in self.steps)


# -- A plan that a rule writes ---------------------------------------------------------------------


class PlanBuilder:
    """A plan being written: the steps so far, with their bounds."""

    def __init__(self, operation: Operation, gpu: GpuFacts) -> None:
        self.operation = operation
        self.gpu = gpu
        self._steps: list[Step] = []
        self._n_temporaries = 0
        self._options = dict(operation.options)

    def argument(self, index: int, option: str = "") -> Argument:
        """Return the argument at ``index``, else that of the name ``option``, else None."""
        if index < len(self.operation.arguments):
            return self.operation.arguments[index]
        return self._options.get(option)

    def tensor(self, index: int) -> TensorMeta | None:
        """Return the argument at ``index`` if it is a tensor."""
        argument = self.argument(index)
        return argument if isinstance(argument, TensorMeta) else None

    def require_tensor(self, index: int) -> TensorMeta:
        """Return the tensor at ``index``.

        Raises:
            UnknownFormError: no tensor is there.
        """
        tensor = self.tensor(index)
        if tensor is None:
            raise UnknownFormError
        return tensor

    def output(self, index: int) -> None:
        """Allocate an output, if there is one of this number."""
        allocated = self.operation.allocated
        if 0 <= index < len(allocated) and allocated[index].n_bytes:
            self._steps.append(Step("output", index, allocated[index].n_bytes))

    def outputs(self, *order: int) -> None:
        """Allocate outputs in ``order``; without one, all of them in their own."""
        for index in order or range(len(self.operation.allocated)):
            self.output(index)

    def temporary(self, n_bytes: int, least: int | None = None, most: int | None = None) -> int:
        """Allocate a temporary, and return its number.

        Args:
            n_bytes: its size, as expected.
            least: the lower bound of an estimated size; without one, ``n_bytes``.
            most: the upper bound of an estimated size; without one, ``n_bytes``.
        """
        lower, upper = n_bytes if least is None else least, n_bytes if most is None else most
        if not self.gpu.is_measured:
            # Another kernel may do without what one was only estimated to take.
            is_estimate = least is not None or most is not None
            # Kernels differ in how many blocks share their work.
            lower, upper = 0 if is_estimate else lower // 2, 2 * upper
        return self._add(n_bytes, lower, upper)

    def copy(self, tensor: TensorMeta) -> int:
        """Allocate a copy of a tensor, of a certain size on every GPU; return its number."""
        n_bytes = count_bytes(tensor)
        return self._add(n_bytes, n_bytes, n_bytes)

    def _add(self, n_bytes: int, least: int, most: int) -> int:
        number = self._n_temporaries
        self._n_temporaries += 1
        least, most = min(n_bytes, least), max(n_bytes, most)
        bounds = () if least == most else (least, most)
        self._steps.append(Step("temporary", number, n_bytes, *bounds))
        return number

    def free(self, *numbers: int | None) -> None:
        """Free temporaries; ``None``: one that was not needed."""
        self._steps += [Step("free", number, 0) for number in numbers if number is not None]

    def contiguous(self, tensor: TensorMeta | None) -> int | None:
        """Allocate a contiguous copy of ``tensor`` if it is not contiguous; return its number."""
        if tensor is None or is_contiguous(tensor.shape, tensor.stride):
            return None
        return self.copy(tensor)

    def finish(self, *, known: bool) -> WorkspacePlan:
        """Return the plan, without what is freed at the operator's end anyway."""
        steps = self._steps
        while steps and steps[-1].kind == "free":
            steps.pop()
        return WorkspacePlan(tuple(steps), known)


class UnknownFormError(Exception):
    """An operator is called in a form that its rule does not know."""


Rule: TypeAlias = Callable[[PlanBuilder], None]
RULES: Final[dict[str, Rule]] = {}


def rule(*names: str) -> Callable[[Rule], Rule]:
    """Register the decorated rule for operators; a name without overload means all of them."""

    def register(rule: Rule) -> Rule:
        for name in names:
            RULES[name] = rule
        return rule

    return register


# -- Shapes and strides ----------------------------------------------------------------------------


def count_bytes(tensor: TensorMeta) -> int:
    """Return the bytes of the elements of ``tensor``."""
    return tensor.n_elements * tensor.item_bytes


def ceil_div(dividend: int, divisor: int) -> int:
    """Return the quotient, rounded up."""
    return -(-dividend // divisor)


def round_up(n: int, multiple: int) -> int:
    """Return the least multiple of ``multiple`` that is not below ``n``."""
    return ceil_div(n, multiple) * multiple


def is_contiguous(shape: Sequence[int], stride: Sequence[int]) -> bool:
    """Return whether a tensor of this shape and stride is laid out row by row."""
    expected = 1
    for size, step in zip(reversed(shape), reversed(stride), strict=True):
        if size != 1:
            if step != expected:
                return prod(shape) == 0
            expected *= size
    return True


def is_channels_last(tensor: TensorMeta) -> bool:
    """Return whether PyTorch takes ``tensor`` as laid out with its channels (dimension 1) last.

    https://github.com/pytorch/pytorch/blob/main/c10/core/MemoryFormat.h
    """
    n_dims = len(tensor.shape)
    if n_dims not in (4, 5) or tensor.stride[1] == 0:
        return False
    least = 0
    for d in (1, *range(n_dims - 1, 1, -1), 0):
        step, size = tensor.stride[d], tensor.shape[d]
        if size == 0 or step < least or (d == 0 and least == tensor.stride[1]):
            return False
        least = step * size
    return True


def transpose(tensor: TensorMeta, first: int, second: int) -> tuple[list[int], list[int]]:
    """Return the shape and the strides of ``tensor`` with two dimensions exchanged."""
    shape, stride = list(tensor.shape), list(tensor.stride)
    for sizes in (shape, stride):
        sizes[first], sizes[second] = sizes[second], sizes[first]
    return shape, stride


def read_ints(argument: Argument) -> tuple[int, ...] | None:
    """Return the integers of an argument: an integer or a list; None for anything else."""
    if isinstance(argument, int) and not isinstance(argument, bool):
        return (argument,)
    if isinstance(argument, tuple):
        return tuple(item for item in argument if isinstance(item, int))
    return None


def list_reduced_dims(tensor: TensorMeta, dims: Argument) -> frozenset[int]:
    """Return the dimensions that a reduction over ``dims`` reduces: all, for none given."""
    n_dims = len(tensor.shape)
    given = read_ints(dims)
    return (
        frozenset(dim % n_dims for dim in given) if given and n_dims else frozenset(range(n_dims))
    )
