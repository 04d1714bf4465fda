"""Find what makes a path let go of the memory that it holds."""

from __future__ import annotations

from gpumemwidget.model.ownership import Fix, FixKind, MemoryKind, RootKind
from gpumemwidget.ownership.labels import PathStep, StepKind, spell_steps

_BY_MEMORY: dict[MemoryKind, FixKind] = {
    "cuBLAS workspace": FixKind.RELEASE_CUBLAS,
    "CUDA-graph pool": FixKind.DELETE_CUDA_GRAPH,
    "compile cache": FixKind.RELEASE_COMPILED,
}
_BY_ROOT: dict[RootKind, FixKind] = {
    "exception": FixKind.RELEASE_EXCEPTIONS,
    "thread": FixKind.END_FUNCTION,
}
_BY_UNNAMED: dict[StepKind, FixKind] = {
    StepKind.RUBBISH: FixKind.COLLECT,
    StepKind.LENDER: FixKind.DELETE_LENDER,
}
#: Steps whose holder decides, not what it leads to.
_BY_STEP: dict[StepKind, FixKind] = {
    StepKind.GRAPH: FixKind.DROP_GRAPH,
    StepKind.FUNCTION: FixKind.DELETE_FUNCTION,
    StepKind.CACHE: FixKind.CLEAR_CACHE,
    StepKind.FRAME: FixKind.CLOSE_GENERATOR,
    StepKind.OPTIMIZER_TABLE: FixKind.RELEASE_OPTIMIZER,
}


def find_fix(root: RootKind, steps: tuple[PathStep, ...], *, kind: MemoryKind | None = None) -> Fix:
    """Return what a person does so that a path no longer holds memory.

    Args:
        root: where the path begins.
        steps: the whole path.
        kind: what the memory is for; caches of torch's own are told by it.
    """
    begin = steps[0]
    if kind in _BY_MEMORY:
        return Fix(_BY_MEMORY[kind])
    if begin.kind is StepKind.CONTEXT_VARIABLE:
        return Fix(FixKind.SET_CONTEXT_VARIABLE, begin.name)
    if root in _BY_ROOT:
        return Fix(_BY_ROOT[root])
    if root == "nowhere":
        return Fix(_BY_UNNAMED.get(begin.kind, FixKind.END_UNSEEN))
    if root == "out":
        return Fix(FixKind.RELEASE_DISPLAYED, begin.text)
    # The notebook may not have imported the module.
    return _find_on_way(steps, begin.text.rpartition(".")[0] if root == "module" else "")


def _find_on_way(steps: tuple[PathStep, ...], module: str) -> Fix:
    for number, step in enumerate(steps):
        if step.kind in _BY_STEP:
            return Fix(_BY_STEP[step.kind], spell_steps(steps[:number]), module)
        if step.kind is StepKind.TRACEBACK:
            # A frame keeps its variables as long as the exception is kept.
            steps = steps[:number]
            break
    if len(steps) == 1 and not module:
        return Fix(FixKind.RELEASE_ROW, steps[0].text)
    last = steps[-1].kind
    if last is StepKind.GRADIENT:
        return Fix(FixKind.CLEAR_GRADIENT, spell_steps(steps), module)
    if last in (StepKind.CLASS, StepKind.UNNAMED) and len(steps) > 1:
        # An instance keeps its class; a place that has no name goes with the whole.
        steps = steps[:-1]
    return Fix(FixKind.DELETE, spell_steps(steps), module)
