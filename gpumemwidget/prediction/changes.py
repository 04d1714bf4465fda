"""Ways to need less memory, each as a change to the copies of a dry run, which is then repeated."""

from __future__ import annotations

import importlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from gpumemwidget.prediction.operations import DryRun


@dataclass(slots=True)
class Copies:
    """Copies of the user's objects that a dry run is about to run, and that may be changed."""

    torch: Any
    step: Callable[..., object]
    #: Modules that are in no other one, each with what the user calls it.
    roots: Sequence[tuple[str, Any]]
    optimizers: Sequence[Any]


@dataclass(frozen=True, slots=True)
class Change:
    """A way to need less memory.

    Attributes:
        name: what the report calls it.
        command: the line to write.
        prepare: changes the copies before the step runs.
        halves: the batch has half of its size in each call of the step.
    """

    name: str
    command: str
    prepare: Callable[[Copies], None] = lambda _: None
    halves: bool = False


@dataclass(frozen=True, slots=True)
class ModuleList:
    """Modules of one class that follow each other, as the layers of a transformer.

    Attributes:
        name: what the user calls the list: ``model.transformer.h``.
        paths: of each module what the user calls it.
        places: of each module the path that operators name.
    """

    name: str
    paths: tuple[str, ...]
    places: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Outline:
    """The structure of a step's modules, to choose changes by."""

    lists: tuple[ModuleList, ...]
    #: All parameters are float32.
    is_float32: bool


def outline(copies: Copies) -> Outline:
    """Return what a step's modules are like."""
    lists = []
    for root_name, root in copies.roots:
        lead = f"{root_name}." if len(copies.roots) > 1 else ""
        for path, module in root.named_modules():
            children = list(module.named_children())
            if len(children) < 2 or len({type(child) for _, child in children}) > 1:
                continue
            # A layer without layers keeps its inputs, and nothing else.
            if not list(children[0][1].children()):
                continue
            within = [f"{path}.{name}" if path else name for name, _ in children]
            lists.append(
                ModuleList(
                    f"{root_name}.{path}" if path else root_name,
                    tuple([f"{root_name}.{each}" for each in within]),
                    tuple([f"{lead}{each}" for each in within]),
                )
            )
    dtypes = {str(each.dtype) for _, root in copies.roots for each in root.parameters()}
    return Outline(tuple(lists), dtypes == {"torch.float32"})


def list_changes(run: DryRun, outline: Outline, *, has_batch: bool) -> Iterator[Change]:
    """Yield the changes that may help.

    Args:
        run: what the step does as it is.
        outline: what the step's modules are like.
        has_batch: an argument of the step is a batch.
    """
    learns = any(each.phase == "backward" for each in run.operations)
    names = Counter(each.name for each in run.operations)
    updates = [each for each in run.operations if each.phase == "optimizer"]
    if learns:
        blocks = _find_blocks(run, outline)
        if blocks is not None:
            yield _checkpoint(blocks)
        if has_batch:
            yield Change(
                "half the batch, gradients accumulated over two",
                "loss = loss / 2; loss.backward()  # for each half, and then optimizer.step()",
                _accumulate,
                halves=True,
            )
    else:
        yield Change("no_grad", "with torch.no_grad():", _forbid_gradients)
    if outline.is_float32 and not _is_cast(run):
        yield Change(
            "bfloat16 autocast",
            'with torch.autocast("cuda", torch.bfloat16):',
            _cast,
        )
    if any("_foreach_" in each.name for each in updates):
        yield Change("optimizer without foreach", "foreach=False", _set_foreach)
        if any("adam" in name or "lerp" in name or "addcdiv" in name for name in names):
            yield Change("fused optimizer", "fused=True", _set_fused)


# -- What is worth trying --------------------------------------------------------------------------


def _find_blocks(run: DryRun, outline: Outline) -> ModuleList | None:
    """Return the list of like modules that keep most for backward, if any keeps something."""
    kept = _count_kept(run)

    def count(modules: ModuleList) -> int:
        return sum(
            n_bytes
            for place, n_bytes in kept.items()
            if any(place == each or place.startswith(f"{each}.") for each in modules.places)
        )

    best = max(outline.lists, key=count, default=None)
    return best if best is not None and count(best) else None


def _count_kept(run: DryRun) -> Counter[str]:
    """Return the bytes that each module's forward keeps for backward, over all runs of the step."""
    freed = {number: each.phase for each in run.operations for number in each.freed}
    kept: Counter[str] = Counter()
    for each in run.operations:
        if each.phase == "forward" and each.module:
            for use in each.allocated:
                if freed.get(use.storage) == "backward":
                    kept[each.module] += use.n_bytes
    return kept


def _is_cast(run: DryRun) -> bool:
    """Return whether a part of forward is computed in another type already."""
    return any(
        result.dtype in ("bfloat16", "float16")
        for each in run.operations
        if each.phase == "forward"
        for result in each.results
    )


# -- The changes -----------------------------------------------------------------------------------


def _checkpoint(modules: ModuleList) -> Change:
    def prepare(copies: Copies) -> None:
        checkpoint = importlib.import_module("torch.utils.checkpoint").checkpoint
        roots = dict(copies.roots)
        for path in modules.paths:
            name = next(each for each in roots if path.startswith(f"{each}."))
            module = roots[name].get_submodule(path[len(name) + 1 :])
            module.forward = _recompute(checkpoint, module.forward)

    command = (
        f"for block in {modules.name}: block.forward = "
        "functools.partial(torch.utils.checkpoint.checkpoint, block.forward, use_reentrant=False)"
    )
    return Change(f"checkpointing of {modules.name}", command, prepare)


def _recompute(checkpoint: Any, forward: Any) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        return checkpoint(forward, *args, use_reentrant=False, **kwargs)

    return run


def _cast(copies: Copies) -> None:
    _run_within(copies, lambda: copies.torch.autocast("cuda", copies.torch.bfloat16))


def _forbid_gradients(copies: Copies) -> None:
    _run_within(copies, copies.torch.no_grad)


def _run_within(copies: Copies, make: Callable[[], Any]) -> None:
    step = copies.step

    def run(*args: Any, **kwargs: Any) -> object:
        with make():
            return step(*args, **kwargs)

    copies.step = run


def _accumulate(copies: Copies) -> None:
    """Run the step for both halves of a batch, and update only after the second one."""
    step = copies.step
    held = [(each, each.step, each.zero_grad) for each in copies.optimizers]

    def run(*args: Any, **kwargs: Any) -> object:
        for optimizer, _, _ in held:
            optimizer.step = lambda *_args, **_kwargs: None
        step(*args, **kwargs)
        for optimizer, update, _ in held:
            optimizer.step, optimizer.zero_grad = update, lambda *_args, **_kwargs: None
        result = step(*args, **kwargs)
        for optimizer, _, clear in held:
            optimizer.zero_grad = clear
        return result

    copies.step = run


def _set_foreach(copies: Copies) -> None:
    _set_options(copies, foreach=False, fused=False)


def _set_fused(copies: Copies) -> None:
    _set_options(copies, foreach=False, fused=True)


def _set_options(copies: Copies, **options: bool) -> None:
    for optimizer in copies.optimizers:
        for group in (optimizer.defaults, *optimizer.param_groups):
            group.update({name: value for name, value in options.items() if name in group})
