"""Plan the operators of a run one after the other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from gpumemwidget.backends.cuda.library_memory import count_cublaslt_bytes
from gpumemwidget.prediction.operations import Operation
from gpumemwidget.prediction.workspaces.cudnn import takes_dropout_state
from gpumemwidget.prediction.workspaces.plans import Bound, GpuFacts, Step, WorkspacePlan
from gpumemwidget.prediction.workspaces.products import list_blas_libraries
from gpumemwidget.prediction.workspaces.rules import plan_operation


class WorkspacePlanner:
    """Plans for the operators of a run, called in their order.

    It remembers which threads have a cuBLAS workspace: the first operator of a thread that uses
    cuBLAS allocates it, and it stays. Autograd's backward runs on a thread of its own. So does the
    random state of cuDNN's dropout, which the first recurrent network with dropout allocates.
    """

    def __init__(self, gpu: GpuFacts, *, bound: Bound = "expected") -> None:
        """Create a planner for a process that has not used cuBLAS yet.

        Args:
            gpu: what the operators run on.
            bound: which figures are planned where they are estimated.
        """
        self._gpu = gpu
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
