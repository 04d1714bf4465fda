"""Plan the operators of a run one after the other, from measurements and rules."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Final

from gpumemwidget.backends.cuda.library_memory import count_cublaslt_bytes
from gpumemwidget.prediction.operations import Argument, Operation, TensorMeta
from gpumemwidget.prediction.workspaces.cudnn import takes_dropout_state
from gpumemwidget.prediction.workspaces.plans import (
    Bound,
    GpuFacts,
    Step,
    WorkspacePlan,
    peak_of_temporaries,
)
from gpumemwidget.prediction.workspaces.products import list_blas_libraries
from gpumemwidget.prediction.workspaces.rules import plan_operation

#: Maximum number of operators that ``MeasuredWorkspaces`` holds.
MAX_MEASURED: Final = 20_000


def describe_signature(operation: Operation) -> str:
    """Return the text that is the same for calls with equal workspaces.

    It holds the operator's name, its arguments with shapes, strides and dtypes, and its options.
    """
    return json.dumps(
        [
            operation.name,
            [_describe(argument) for argument in operation.arguments],
            [[name, _describe(option)] for name, option in operation.options],
        ],
        separators=(",", ":"),
    )


def _describe(argument: Argument) -> Any:
    if isinstance(argument, TensorMeta):
        return {"t": [argument.dtype, argument.shape, argument.stride, argument.device]}
    if isinstance(argument, tuple):
        return [_describe(item) for item in argument]
    return argument


class MeasuredWorkspaces:
    """Temporaries seen in real runs, by the GPU and the signature of the operator.

    The oldest entry goes when there are more than ``max_entries``.
    """

    def __init__(self, max_entries: int = MAX_MEASURED) -> None:
        """Create an empty table of at most ``max_entries`` operators."""
        self._max_entries = max_entries
        self._steps: dict[tuple[GpuFacts, str], tuple[Step, ...]] = {}
        #: The names of operators that were seen: most others are told by these alone.
        self._names: set[str] = set()

    def __len__(self) -> int:
        """Return the number of operators in the table."""
        return len(self._steps)

    def add(self, operation: Operation, gpu: GpuFacts, steps: Sequence[Step]) -> None:
        """Remember the steps that ``operation`` was seen to take on a GPU.

        Allocations that are kept are left out: they belong to the thread's first use of cuBLAS.
        """
        key = (gpu, describe_signature(operation))
        self._names.add(operation.name)
        self._steps.pop(key, None)
        self._steps[key] = tuple(step for step in steps if step.kind != "kept")
        while len(self._steps) > self._max_entries:
            del self._steps[next(iter(self._steps))]

    def find(self, operation: Operation, gpu: GpuFacts) -> tuple[Step, ...] | None:
        """Return the steps measured on such a GPU for an operator of this signature, if any."""
        if operation.name not in self._names:
            return None
        return self._steps.get((gpu, describe_signature(operation)))


class WorkspacePlanner:
    """Plans for the operators of a run, called in their order.

    It remembers which threads have a cuBLAS workspace: the first operator of a thread that uses
    cuBLAS allocates it, and it stays. Autograd's backward runs on a thread of its own. So does the
    random state of cuDNN's dropout, which the first recurrent network with dropout allocates.
    """

    def __init__(
        self,
        gpu: GpuFacts,
        measured: MeasuredWorkspaces | None = None,
        *,
        bound: Bound = "expected",
    ) -> None:
        """Create a planner for a process that has not used cuBLAS yet.

        Args:
            gpu: what the operators run on.
            measured: temporaries that were seen; they take precedence over rules.
            bound: which figures are planned where they are estimated.
        """
        self._gpu = gpu
        self._measured = measured
        self._bound: Bound = bound
        self._kept: set[tuple[str, str]] = set()

    def mark_kept(self, sizes: Sequence[int]) -> None:
        """State what the process keeps already: the sizes of blocks that no tensor is in.

        A library's first workspace is the forward pass's, a second one the backward pass's.
        """
        for library, n_bytes in (
            ("cublas", self._gpu.cublas_bytes),
            ("cublaslt", count_cublaslt_bytes()),
        ):
            threads = ("forward", "backward")[: sizes.count(n_bytes)]
            self._kept.update((thread, library) for thread in threads)
        if self._gpu.dropout_bytes in sizes:
            self._kept.add(("", "dropout"))

    def plan(self, operation: Operation) -> WorkspacePlan:
        """Return the allocations and frees within ``operation``, kept workspaces included."""
        plan = plan_operation(operation, self._gpu, self._bound)
        measured = None if self._measured is None else self._measured.find(operation, self._gpu)
        if measured is not None and _has_outputs_of(measured, plan):
            peak_bytes = peak_of_temporaries(measured)
            plan = WorkspacePlan(measured, "measured", peak_bytes, peak_bytes)
        if takes_dropout_state(operation) and ("", "dropout") not in self._kept:
            self._kept.add(("", "dropout"))
            state = Step("kept", 0, self._gpu.dropout_bytes)
            plan = replace(plan, steps=(state, *plan.steps))
        libraries = list_blas_libraries(operation)
        if self._gpu.has_workspace_per_product and libraries:
            numbers = [step.index for step in plan.steps if step.kind == "temporary"]
            made = Step("temporary", max(numbers, default=-1) + 1, self._gpu.cublas_bytes)
            return replace(plan, steps=(*plan.steps, made))
        thread = "backward" if operation.phase == "backward" else "forward"
        kept = []
        for library in libraries:
            if (thread, library) not in self._kept:
                self._kept.add((thread, library))
                is_cublas = library == "cublas"
                n_bytes = self._gpu.cublas_bytes if is_cublas else count_cublaslt_bytes()
                kept.append(Step("kept", 0, n_bytes))
        return replace(plan, steps=plan.steps + tuple(kept)) if kept else plan


def _has_outputs_of(measured: Sequence[Step], plan: WorkspacePlan) -> bool:
    """Return whether measured and planned steps allocate the same outputs."""
    return {step.index for step in measured if step.kind == "output"} == {
        step.index for step in plan.steps if step.kind == "output"
    }
