"""Ways to fit a step into memory, each predicted: remedies, and the largest batch.

A remedy is a change to the copies of a dry run, which is then repeated. A batch is searched for by
predicting sizes, and only a size that was predicted is the answer.
"""

from __future__ import annotations

import importlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from gpumemwidget.errors import BadInputError, PredictionError
from gpumemwidget.model.predictions import PredictedRemedy, PredictionRecord
from gpumemwidget.prediction.forecast import Target, forecast
from gpumemwidget.prediction.operations import Copies, DryRun
from gpumemwidget.tracing.sources import Source, Sources


@dataclass(frozen=True, slots=True)
class Change:
    """A way to need less memory."""

    name: str
    #: The line to write.
    command: str
    #: Changes the copies before the step runs.
    prepare: Callable[[Copies], None]
    #: The batch has half of its size in each call of the step.
    halves: bool = False


@dataclass(frozen=True, slots=True)
class ModuleList:
    """Modules of one class that follow each other, as the layers of a transformer."""

    #: What the user calls the model.
    root: str
    #: The list's path in the model, and those of the modules.
    path: str
    paths: tuple[str, ...]
    #: The modules' paths as operators name them.
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
            if list(children[0][1].children()):
                paths = tuple([f"{path}.{name}" if path else name for name, _ in children])
                places = tuple([f"{lead}{path_within}" for path_within in paths])
                lists.append(ModuleList(root_name, path, paths, places))
    dtypes = {str(parameter.dtype) for _, root in copies.roots for parameter in root.parameters()}
    return Outline(tuple(lists), dtypes == {"torch.float32"})


def list_remedies(
    record: PredictionRecord,
    target: Target,
    run: DryRun,
    outline: Outline,
    *,
    run_dry: Callable[..., DryRun],
    halves: Mapping[int, tuple[int, ...]],
) -> PredictionRecord:
    """Return the prediction of a step with its remedies, those first that save most.

    Args:
        record: the prediction.
        target: the device.
        run: what the step does as it is.
        outline: what the step's modules are like.
        run_dry: carries the step out once more, with options of ``carry_out``.
        halves: the shapes of half a batch; empty where there is no batch.
    """
    found: list[PredictedRemedy] = []
    untried: list[str] = []

    def judge(name: str, command: str, run: DryRun, place: Target) -> None:
        changed = forecast(run, place, Sources(Source("", "", "cell", "")))
        n_bytes = changed.reserved.expected
        saved_bytes = record.reserved.expected - n_bytes
        # Less than a hundredth is not worth a line.
        if saved_bytes > 0.01 * record.reserved.expected:
            peaks = (saved_bytes, n_bytes, changed.allocated.expected)
            found.append(PredictedRemedy(name, command, *peaks, changed.fits))

    for change in _list_changes(run, outline, has_batch=bool(halves)):
        try:
            changed = run_dry(prepare=change.prepare, shapes=halves if change.halves else None)
        except PredictionError as exc:
            untried.append(f"{change.name}: {exc}")
            continue
        judge(change.name, change.command, changed, target)
    if (expandable := target.make_expandable()) is not None:
        command = "%env PYTORCH_ALLOC_CONF=expandable_segments:True  # before torch is imported"
        judge("expandable segments", command, run, expandable)
    ranked = sorted(found, key=lambda remedy: -remedy.saved_bytes)
    return replace(record, remedies=tuple(ranked), untried=tuple(untried))


# -- What is worth trying --------------------------------------------------------------------------


def _list_changes(run: DryRun, outline: Outline, *, has_batch: bool) -> Iterator[Change]:
    forward = [operation for operation in run.operations if operation.phase == "forward"]
    if any(operation.phase == "backward" for operation in run.operations):
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
        yield Change(
            "no_grad",
            "with torch.no_grad():",
            lambda copies: _run_within(copies, copies.torch.no_grad),
        )
    is_cast = any(
        result.dtype in ("bfloat16", "float16")
        for operation in forward
        for result in operation.results
    )
    if outline.is_float32 and not is_cast:
        yield Change(
            "bfloat16 autocast",
            'with torch.autocast("cuda", torch.bfloat16):',
            lambda copies: _run_within(
                copies, lambda: copies.torch.autocast("cuda", copies.torch.bfloat16)
            ),
        )


def _find_blocks(run: DryRun, outline: Outline) -> ModuleList | None:
    """Return the list of like modules that keep most for backward, if any keeps something."""
    freed = {number: operation.phase for operation in run.operations for number in operation.freed}
    kept: Counter[str] = Counter()
    for operation in run.operations:
        if operation.phase == "forward" and operation.module:
            kept[operation.module] += sum(
                use.n_bytes for use in operation.allocated if freed.get(use.storage) == "backward"
            )

    def count(modules: ModuleList) -> int:
        return sum(
            n_bytes
            for place, n_bytes in kept.items()
            if any(f"{place}.".startswith(f"{prefix}.") for prefix in modules.places)
        )

    best = max(outline.lists, key=count, default=None)
    return best if best is not None and count(best) else None


# -- The changes -----------------------------------------------------------------------------------


def _checkpoint(modules: ModuleList) -> Change:
    def prepare(copies: Copies) -> None:
        checkpoint = importlib.import_module("torch.utils.checkpoint").checkpoint
        root = dict(copies.roots)[modules.root]
        for path in modules.paths:
            module = root.get_submodule(path)
            module.forward = partial(checkpoint, module.forward, use_reentrant=False)

    name = f"{modules.root}.{modules.path}" if modules.path else modules.root
    command = (
        f"for block in {name}: block.forward = "
        "functools.partial(torch.utils.checkpoint.checkpoint, block.forward, use_reentrant=False)"
    )
    return Change(f"checkpointing of {name}", command, prepare)


def _run_within(copies: Copies, make: Callable[[], Any]) -> None:
    step = copies.step

    def run(*args: Any, **kwargs: Any) -> object:
        with make():
            return step(*args, **kwargs)

    copies.step = run


def _accumulate(copies: Copies) -> None:
    """Run the step for both halves of a batch, and update only after the second one."""
    step = copies.step
    held = [(optimizer, optimizer.step, optimizer.zero_grad) for optimizer in copies.optimizers]

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


# -- The largest batch -----------------------------------------------------------------------------


def find_shapes(torch: Any, batch: object, dim: int, size: int) -> dict[int, tuple[int, ...]]:
    """Return the shapes of a batch's tensors at another size, by their ``id``.

    Those tensors change that are as long in the dimension as the batch is; see ``measure``.
    """
    now = measure(torch, batch, dim)
    shapes = {}
    for tensor in _list_tensors(torch, batch, 0):
        if tensor.dim() > dim and tensor.shape[dim] == now:
            shape = list(tensor.shape)
            shape[dim] = size
            shapes[id(tensor)] = tuple(shape)
    return shapes


def measure(torch: Any, batch: object, dim: int) -> int:
    """Return the size of a batch in a dimension: that of its first tensor that has it.

    Raises:
        BadInputError: no tensor of the batch has the dimension.
    """
    for tensor in _list_tensors(torch, batch, 0):
        if tensor.dim() > dim and tensor.shape[dim] > 0:
            return int(tensor.shape[dim])
    raise BadInputError(
        f"the batch has no tensor with a dimension {dim} that is not empty: give a tensor, or a "
        "list, a tuple or a dictionary of tensors"
    )


def _list_tensors(torch: Any, value: object, depth: int) -> Iterator[Any]:
    if isinstance(value, torch.Tensor):
        yield value
    elif depth < 8:
        if isinstance(value, Mapping):
            items: Any = value.values()
        elif isinstance(value, (list, tuple)):
            items = value
        else:
            items = vars(value).values() if hasattr(value, "__dict__") else ()
        for item in list(items):
            yield from _list_tensors(torch, item, depth + 1)


def search(begin: int, room: int, predict: Callable[[int], tuple[int, bool]]) -> int:
    """Return the largest size that was predicted to fit; 0 if none did.

    Memory grows nearly in proportion to the size, so the next size comes from the line through the
    last two.

    Args:
        begin: the first size.
        room: bytes that there are.
        predict: returns the bytes that a size needs, and whether it surely fits.
    """
    needs: dict[int, int] = {}
    fits: dict[int, bool] = {}
    size = begin
    for _ in range(14):
        needs[size], fits[size] = predict(size)
        low = max((size for size, is_so in fits.items() if is_so), default=0)
        high = min((size for size, is_so in fits.items() if not is_so), default=None)
        # A hundredth of the size is close enough.
        if high is not None and high - low <= max(1, low // 100):
            break
        size = _choose_next(needs, fits, room)
    return max((size for size, is_so in fits.items() if is_so), default=0)


def _choose_next(needs: Mapping[int, int], fits: Mapping[int, bool], room: int) -> int:
    """Return a size between those that bracket the answer, where the room is likely to end."""
    good = sorted(size for size, is_so in fits.items() if is_so)
    bad = sorted(size for size, is_so in fits.items() if not is_so)
    low = good[-1] if good else 0
    top = bad[0] - 1 if bad else 8 * max(low, 1)
    if len(needs) == 1:
        return min(2 * low, top) if good else max(1, top // 2)
    # A size that does not fit was predicted for an endless device, which gives nothing back.
    first, second = good[-2:] if len(good) > 1 else sorted(needs)[:2]
    slope = (needs[second] - needs[first]) / (second - first)
    guess = (low + top + 1) // 2
    if slope > 0:
        guess = int(second + (room - needs[second]) / slope)
    # A full allocator gives its cache back, so the line may lead to one end again and again.
    margin = max(1, (top + 1 - low) // 8) if bad else 1
    return min(max(guess, low + margin), top + 1 - margin)
