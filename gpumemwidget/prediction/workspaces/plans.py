"""Plans of what an operator allocates inside, and the facts of a GPU that decide them."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Final, Literal, TypeAlias

from gpumemwidget.backends.cuda.library_memory import count_cublas_bytes, count_dropout_bytes
from gpumemwidget.model.devices import Chip

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
    def has_workspace_per_product(self) -> bool:
        """Return whether each matrix product allocates its own workspace, and frees it.

        Others keep one for each thread. https://github.com/pytorch/pytorch/pull/194311
        """
        keeps = os.environ.get("TORCH_CUBLAS_WORKSPACE_CACHE") == "1"
        return self.torch_version >= (2, 15) and not keeps

    @property
    def cublas_bytes(self) -> int:
        """The size of the cuBLAS workspace of a thread, in bytes."""
        return count_cublas_bytes(self.capability[0])

    @property
    def dropout_bytes(self) -> int:
        """The size of the random state of cuDNN's dropout, in bytes."""
        return count_dropout_bytes(self.n_multiprocessors, self.threads_per_multiprocessor)


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

    def count_peak(self, bound: Bound = "expected") -> int:
        """Return the most bytes of temporaries that live at once."""
        live: dict[int, int] = {}
        peak = 0
        for step in self.steps:
            if step.kind == "temporary":
                live[step.index] = step.read_bytes(bound)
                peak = max(peak, sum(live.values()))
            elif step.kind == "free":
                del live[step.index]
        return peak
