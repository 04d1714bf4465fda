"""Caches of torch's own that no name leads to: cuBLAS's workspaces, and what was compiled.

Both are made anew when they are needed, so to clear them frees memory and breaks nothing; what it
costs is said before.
"""

from __future__ import annotations

import sys

from gpumemwidget.backends.hardware import Hardware
from gpumemwidget.errors import BackendError

__all__ = ["clear_caches", "describe_costs"]


def describe_costs(*, cublas: bool, compile_caches: bool) -> tuple[str, ...]:
    """A sentence on each of the caches to be cleared, and on what that costs."""
    costs = []
    if cublas:
        costs.append(
            "cuBLAS workspaces: the next matrix product on each stream makes its own anew; "
            "how much they hold is measured"
        )
    if compile_caches:
        costs.append(
            "compile caches: the next call of each function under torch.compile compiles it anew, "
            "which takes as long as its first call did"
            if _find_dynamo() is not None
            else "compile caches: nothing was compiled in this process"
        )
    return tuple(costs)


def clear_caches(hardware: Hardware, *, cublas: bool, compile_caches: bool) -> str | None:
    """Clear them; what was done and what was not, or ``None`` where nothing was asked for."""
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
            # They stay where they are needed; what else was asked for can be released all the same.
            done.append(str(exc))
    return "; ".join(done) or None


def _find_dynamo() -> object | None:
    """The compiler's front end, where the user (or torch for them) has imported it to the end."""
    dynamo = sys.modules.get("torch._dynamo")
    return dynamo if dynamo is not None and "reset" in vars(dynamo) else None
