"""Clear torch's own caches, to which no variable leads: cuBLAS workspaces, and compiled code.

Both are made anew when they are needed, so to clear them frees memory and breaks nothing; what it
costs is said before.
"""

from __future__ import annotations

import sys

from gpumemwidget.backends.cuda.backend import keeps_workspaces
from gpumemwidget.backends.hardware import Hardware
from gpumemwidget.errors import BackendError
from gpumemwidget.ownership.graph.torch_reader import find_torch


def describe_costs(*, cublas: bool, compile_caches: bool) -> tuple[str, ...]:
    """A sentence on each of the caches to be cleared, and on what that costs."""
    costs = []
    if cublas:
        torch = find_torch()
        is_cuda = torch is not None and hasattr(torch._C, "_cuda_memoryStats")  # noqa: SLF001 - the sign of a CUDA build
        costs.append(
            "cuBLAS workspaces: the next matrix product on each stream makes its own anew; "
            "how much they hold is measured"
            if torch is None or not is_cuda or keeps_workspaces(torch)
            else f"cuBLAS workspaces: PyTorch {torch.__version__} takes them for each operation "
            "and keeps none, so there is nothing to free"
        )
    if compile_caches:
        costs.append(
            "compile caches: the next call of each function under torch.compile compiles it anew, "
            "which takes as long as its first call did"
            if _find_dynamo() is not None
            else "compile caches: nothing was compiled in this process"
        )
    return tuple(costs)


def clear_caches(hardware: Hardware, *, cublas: bool, compile_caches: bool) -> tuple[str, ...]:
    """Clear the caches that were asked for; return a sentence on each."""
    done = []
    if compile_caches:
        dynamo = _find_dynamo()
        if dynamo is None:
            done.append("nothing was compiled in this process")
        else:
            dynamo.reset()  # type: ignore[attr-defined]
            done.append("torch._dynamo.reset(): the next call compiles anew")
    if cublas:
        try:
            done.append(hardware.release_workspaces())
        except BackendError as exc:
            # Workspaces that are in use stay; what else was asked for can be released all the same.
            done.append(str(exc))
    return tuple(done)


def _find_dynamo() -> object | None:
    """The compiler's front end, where the user (or torch for them) has imported it to the end."""
    dynamo = sys.modules.get("torch._dynamo")
    return dynamo if dynamo is not None and "reset" in vars(dynamo) else None
