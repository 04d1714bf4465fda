"""How a path that holds memory is cut: the one line that a person types, or does."""

from __future__ import annotations

from gpumemwidget.owners.paths import RootKind
from gpumemwidget.records import MemoryKind

__all__ = ["describe_cut"]

_BY_KIND: dict[MemoryKind | None, str] = {
    "cuBLAS workspace": "%memrelease --cublas",
    "CUDA-graph pool": "delete the graph, or call its reset()",
    "compile cache": "%memrelease --compile",
}
_BY_ROOT: dict[RootKind, str] = {
    "exception": "%memrelease --exceptions",
    "thread": "let the function return, or set its variable to None",
}
_CODE = ("'s closure: ", "'s default: ")
_OPTIMIZER = (".param_groups", ".state")


def describe_cut(root: RootKind, steps: tuple[str, ...], *, kind: MemoryKind | None = None) -> str:
    """What a person does so that this path holds the memory no more.

    Args:
        root: where the path begins.
        steps: the path in pieces, its root first.
        kind: what the memory is for, where that decides.
    """
    told = _BY_KIND.get(kind)
    if told is None and steps[0].startswith("context variable "):
        told = f"{steps[0].removeprefix('context variable ')}.set(None)"
    told = told or _BY_ROOT.get(root)
    if told is None and root == "nowhere":
        told = _cut_nowhere(steps[0])
    elif told is None and root == "out":
        told = f"%memrelease {steps[0]}" if steps[0].startswith("Out[") else "%memrelease --out"
    elif told is None and root == "name" and len(steps) == 1:
        told = f"%memrelease {steps[0]}"
    if told is None and root == "module":
        told = _cut_module(steps)
    return told or _cut_within(steps) or _cut_end(steps)


def _cut_module(steps: tuple[str, ...]) -> str:
    """As of a name, but the notebook may not have imported the module."""
    told = _cut_within(steps) or _cut_end(steps)
    module = steps[0].rpartition(".")[0]
    is_code = "…" not in told and told.startswith(("del ", f"{module}."))
    return f"import {module}; {told}" if is_code and module else told


def _cut_nowhere(word: str) -> str:
    if word.startswith("rubbish"):
        return "import gc; gc.collect()"
    if "lent" in word:
        return "delete the array or the file that it shows"
    return (
        "no name does: torch.clear_autocast_cache() where an autocast was left entered; else what "
        "holds it in C++ has to end, or the kernel"
    )


def _cut_within(steps: tuple[str, ...]) -> str | None:
    """Where something on the way tells more than the path's end."""
    for number, step in enumerate(steps):
        holder = "".join(steps[:number])
        if step == "'s graph":
            return f"call backward(), or drop {holder} (keep {holder}.detach() or .item())"
        if step.startswith(_CODE):
            return f"delete the function {holder}"
        if step == "'s cache":
            return f"{holder}.cache_clear()"
        if step.startswith(": ") and "() line " in step:
            return f"{holder}.close()"
        if step in _OPTIMIZER:
            return f"release {holder} along: an optimizer holds what it trains"
    return None


def _cut_end(steps: tuple[str, ...]) -> str:
    *front, last = steps
    if last == ".grad":
        return f"{''.join(steps)} = None"
    if last in {".__class__", "[…]"} and front:
        # An instance keeps its class; a place that has no name goes with the whole.
        return f"del {''.join(front)}"
    return f"del {''.join(steps)}"
