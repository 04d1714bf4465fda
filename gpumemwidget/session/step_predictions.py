"""Predict the memory that a step would take, for the device that it would run on."""

from __future__ import annotations

import ast
import functools
import importlib
import linecache
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from types import CodeType, FunctionType, MethodType
from typing import Any

from gpumemwidget.backends.hardware import Hardware
from gpumemwidget.backends.hooks import find_torch
from gpumemwidget.errors import BadInputError, PredictionError, name_type
from gpumemwidget.model.predictions import PredictedRemedy, PredictionRecord
from gpumemwidget.prediction.dry.dry_run import MAX_STEPS, carry_out
from gpumemwidget.prediction.forecast import Target, forecast
from gpumemwidget.prediction.operations import DryRun
from gpumemwidget.prediction.remedies import (
    Outline,
    find_shapes,
    list_remedies,
    measure,
    outline,
    search,
)
from gpumemwidget.prediction.targets import find_absent_target, find_present_target
from gpumemwidget.report.render.output import Report, ShowsReport
from gpumemwidget.session.interrupts import raise_lost_interrupts, run_to_end
from gpumemwidget.session.session import borrow_plain_hardware, find_session
from gpumemwidget.tracing.sources import Source, Sources, find_block_sources


class Prediction(ShowsReport):
    """The memory that a step would take; ``gpumemwidget.predict()`` makes it.

    It displays itself as the report. All amounts are in bytes.

    Attributes:
        record: all of it: the device, the bounds, the owners at the peak, what was assumed.
    """

    def __init__(self, record: PredictionRecord) -> None:
        self.record = record

    @property
    def allocated_peak_bytes(self) -> int:
        """Return the expected ``torch.cuda.max_memory_allocated()``."""
        return self.record.allocated.expected

    @property
    def reserved_peak_bytes(self) -> int:
        """Return the expected ``torch.cuda.max_memory_reserved()``, which decides what fits."""
        return self.record.reserved.expected

    @property
    def fits(self) -> bool | None:
        """Return whether the step fits; ``None``: too close to say, or no device to compare."""
        return self.record.fits

    @property
    def remedies(self) -> tuple[PredictedRemedy, ...]:
        """Return what would need less, each predicted with that one change, the best first.

        They are tried where the step does not fit, or with ``remedies=True``.
        """
        return self.record.remedies

    def _report(self) -> Report:
        from gpumemwidget.report.prediction import report_prediction  # noqa: PLC0415 - when used

        return report_prediction(self.record)


class LargestBatch(ShowsReport):
    """The largest size of a batch that fits; ``gpumemwidget.largest_batch()`` makes it.

    It displays itself as the report.

    Attributes:
        size: the size, which was predicted to fit; 0 where no size that was tried does.
        predictions: what was predicted, by size, ascending.
    """

    def __init__(
        self,
        size: int,
        dim: int,
        predictions: Mapping[int, Prediction],
        asked: int | None = None,
    ) -> None:
        self.size = size
        self._asked = asked
        self.dim = dim
        self.predictions = dict(sorted(predictions.items()))

    def _report(self) -> Report:
        from gpumemwidget.report.prediction import report_sizes  # noqa: PLC0415 - when used

        records = {size: prediction.record for size, prediction in self.predictions.items()}
        return report_sizes(self.size, self.dim, records, asked=self._asked)


@raise_lost_interrupts()
def predict(
    step: Callable[..., object],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    *,
    device: str | None,
    on: str | int | None,
    steps: int | None,
    remedies: bool | None,
) -> Prediction:
    """Return what a step would take; see ``gpumemwidget.predict``."""
    torch = _check(step, steps)
    outlines: list[Outline] = []
    with ExitStack() as stack:
        target = _find_target(torch, stack, device=device, on=on)

        def run_dry(**options: Any) -> DryRun:
            return _run_dry(step, args, kwargs, target, steps=steps, **options)

        run = run_dry(prepare=lambda copies: outlines.append(outline(copies)))
        record = forecast(run, target, _find_sources(step))
        if remedies is False or (remedies is None and record.fits is not False):
            return Prediction(record)
        halves = _halve_batch(torch, (*args, *kwargs.values()))
        return Prediction(
            list_remedies(record, target, run, outlines[0], run_dry=run_dry, halves=halves)
        )


@raise_lost_interrupts()
def find_largest_batch(
    step: Callable[..., object],
    args: tuple[Any, ...],
    batch: object,
    *,
    dim: int,
    device: str | None,
    on: str | int | None,
    steps: int | None,
    asked: int | None = None,
    hint: str = "",
) -> LargestBatch:
    """Return the largest size of a batch with which a step fits; see ``largest_batch``.

    The ``asked`` size is predicted, too. A step that fails with another size is refused with the
    ``hint``.
    """
    torch = _check(step, steps)
    if type(dim) is not int or dim < 0:
        raise BadInputError(f"dim={dim!r} is no dimension: give 0, 1, …")
    begin = measure(torch, batch, dim)
    predictions: dict[int, Prediction] = {}
    with ExitStack() as stack:
        target = _find_target(torch, stack, device=device, on=on)
        room = target.device.available_bytes
        if room is None:
            raise BadInputError(
                "there is no GPU to compare with: name one, as in --on T4 (in code: on='T4')"
            )

        def predict_size(size: int) -> tuple[int, bool]:
            shapes = find_shapes(torch, batch, dim, size)
            try:
                run = _run_dry(step, args, {}, target, steps=steps, shapes=shapes)
            except PredictionError as exc:
                advice = hint if size != begin else ""
                raise PredictionError(f"{advice}With a batch of {size:,}: {exc}") from None
            found = predictions[size] = Prediction(forecast(run, target, _find_sources(step)))
            return found.record.reserved.at_most, found.fits is True

        size = search(begin, room, predict_size)
        # The search ends within a percent of the largest size.
        if asked is not None and predict_size(asked)[1]:
            size = max(size, asked)
    return LargestBatch(size, dim, predictions, asked)


# -- Cells -----------------------------------------------------------------------------------------

#: The filename of the code that ``%%memfit`` makes of a cell, as messages name it.
_CELL_FILENAME = "<the cell>"


def predict_cell(
    source: str,
    transform: Callable[[str], str],
    names: dict[str, Any],
    *,
    batch: Sequence[str],
    size: int | None,
    dim: int,
    device: str | None,
    on: str | int | None,
    steps: int | None,
    remedies: bool | None,
) -> Prediction | LargestBatch:
    """Return what a cell would take, or the largest size of a batch that it names.

    ``source`` is the cell as it was typed, of which ``transform`` makes Python; when it runs, its
    peak is compared. ``batch`` has the names of inputs and labels, whose ``size`` is predicted in
    any case, along ``dim``. All else is as in ``gpumemwidget.predict``.

    Raises:
        BadInputError: there is no such name or device, or the cell is no Python that can be
            carried out without running it.
        PredictionError: the cell does what can't be carried out without computing.
    """
    step = _make_step(source, transform, names)
    if not batch:
        found = predict(step, (), {}, device=device, on=on, steps=steps, remedies=remedies)
        session = find_session()
        if session is not None and on is None:
            peak_bytes, _ = found.record.runs[0]
            session.monitor.expectations.add(
                source, found.record.device.name, peak_bytes, found.remedies
            )
        return found
    for name in batch:
        if name not in names:
            raise BadInputError(f"there is no variable {name!r}: name the one that holds the batch")
    values = [names[name] for name in batch]
    return find_largest_batch(
        *(step, (), values[0] if len(values) == 1 else values),
        dim=dim,
        asked=size,
        device=device,
        on=on,
        steps=steps,
        hint=_name_rest(step, batch, dim),
    )


def _make_step(cell: str, transform: Callable[[str], str], names: dict[str, Any]) -> FunctionType:
    """Return a function that does what a cell would, with the user's names as its globals.

    Its lines have the numbers that the notebook shows, where the magic's line is the first.
    """
    # IPython drops the blank lines at the beginning.
    n_blank = cell[: len(cell) - len(cell.lstrip())].count("\n")
    source = "\n" * (1 + n_blank) + transform(cell)
    try:
        tree = ast.parse(source)
        code = compile(
            tree, _CELL_FILENAME, "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT, dont_inherit=True
        )
    except SyntaxError as exc:
        raise BadInputError(f"line {exc.lineno}: {exc.msg}") from None
    except ValueError as exc:  # a null byte
        raise BadInputError(f"the cell is no Python: {exc}") from None
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and node.id == "get_ipython":
            raise BadInputError(
                f"line {node.lineno} is a magic or a command of the shell, which would run for "
                "real: leave it out of the cell to predict it"
            )
    _refuse_await(tree)
    lines = source.splitlines(keepends=True)
    linecache.cache[_CELL_FILENAME] = (len(source), None, lines, _CELL_FILENAME)
    function = FunctionType(code, names, "the cell")
    function.__qualname__ = function.__name__
    return function


def _refuse_await(tree: ast.Module) -> None:
    """Refuse a cell whose own code waits; functions that it defines may."""
    waiting: list[ast.AST] = [tree]
    while waiting:
        node = waiting.pop()
        if isinstance(node, (ast.Await, ast.AsyncFor, ast.AsyncWith)):
            raise BadInputError(
                f"line {node.lineno} waits for something (await): put the rest into a cell of its "
                "own to predict it"
            )
        if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            waiting.extend(ast.iter_child_nodes(node))


def _name_rest(step: FunctionType, batch: Sequence[str], dim: int) -> str:
    """Return a sentence on what is as long as a batch, and was not named as a part of it."""
    torch: Any = find_torch()
    lengths: dict[str, int] = {}
    for name in dict.fromkeys((*batch, *step.__code__.co_names)):
        value = step.__globals__.get(name)
        if torch is not None and isinstance(value, (torch.Tensor, Mapping, list, tuple)):
            with suppress(BadInputError):
                lengths[name] = measure(torch, value, dim)
    size = lengths.get(batch[0])
    others = [name for name in lengths if name not in batch and lengths[name] == size]
    if not others:
        return ""
    verb = "has" if len(others) == 1 else "have"
    length = "first length" if dim == 0 else f"length in dimension {dim}"
    return (
        f"{' and '.join(others)} {verb} the same {length} as {batch[0]}: use --batch "
        f"{','.join((*batch, *others))}. "
    )


# -- The step, the batch and the device ------------------------------------------------------------


def _halve_batch(torch: Any, values: Sequence[object]) -> dict[int, tuple[int, ...]]:
    """Return the shapes of half a batch, by the tensors' ``id``; empty where there is no batch.

    The batch are the tensors among the arguments, in containers too, that are as long as the first.
    """
    batch = [value for value in values if isinstance(value, (torch.Tensor, Mapping, list, tuple))]
    try:
        size = measure(torch, batch, 0)
    except BadInputError:
        return {}
    return find_shapes(torch, batch, 0, size // 2) if size > 1 else {}


def _check(step: object, steps: object) -> Any:
    """Return torch, where the arguments can be used."""
    if not callable(step):
        raise BadInputError(
            f"a {name_type(step)} can't be called: give a function, as predict(step, x)"
        )
    if steps is not None and (type(steps) is not int or not 1 <= steps <= MAX_STEPS):
        raise BadInputError(f"steps={steps!r} is no whole number from 1 to {MAX_STEPS}")
    torch: Any = find_torch()
    if torch is None:
        raise PredictionError("torch is not imported yet. Import it and build the step first.")
    # Fake tensors import it, and SymPy with it, which takes a second. After a Ctrl-C in the midst
    # of that neither could be imported again, for torch.compile no more than for a prediction.
    run_to_end(importlib.import_module, "torch._dynamo")
    return torch


def _find_target(
    torch: Any,
    stack: ExitStack,
    *,
    device: str | None,
    on: str | int | None,
) -> Target:
    session = find_session()
    if on is not None:
        return find_absent_target(torch, on)
    hardware = stack.enter_context(borrow_plain_hardware()) if session is None else session.hardware
    return find_present_target(torch, hardware, _name_device(torch, hardware, device))


def _name_device(torch: Any, hardware: Hardware, device: object) -> str:
    """Return the name, ``cuda:1``, of a device of this machine; refuse any other."""
    wanted = "cuda:0" if device is None else device
    try:
        found = torch.device("cuda", wanted) if type(wanted) is int else torch.device(wanted)
    except (RuntimeError, TypeError):
        found = None
    if found is None or found.type != "cuda":
        raise BadInputError(
            f"device={device!r} is no device of CUDA: give 'cuda:0', or a GPU that is not here, "
            "as in --on T4 (in code: on='T4')"
        )
    name = f"cuda:{found.index or 0}"
    here = [info.device for info in hardware.list_all_devices() if info.device.startswith("cuda:")]
    if here and name not in here:
        raise BadInputError(f"there is no {name} here: give one of {', '.join(here)}")
    return name


def _run_dry(
    step: Callable[..., object],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    target: Target,
    **options: Any,
) -> DryRun:
    name = target.device.name
    device = name if name.startswith("cuda") else "cuda"
    capability = target.facts.capability
    try:
        run = carry_out(step, args, kwargs, device=device, capability=capability, **options)
    except PredictionError as exc:
        raise PredictionError(_name_cells(str(exc))) from None
    return replace(run, assumptions=tuple(map(_name_cells, run.assumptions)))


def _name_cells(text: str) -> str:
    """Return a sentence with the numbers of cells instead of their files."""
    session = find_session()
    numbers = {} if session is None else session.shell.read_cell_numbers()
    for filename, number in numbers.items():
        text = text.replace(filename.strip("<>"), f"In [{number}]")
    # The files of other cells' code, as ipykernel and IPython call them.
    files = r"\S*[\\/]ipykernel_\d+[\\/]\d+\.py|ipython-input-[\w-]+"
    return re.sub(files, "an earlier cell", text)


def _find_sources(step: Callable[..., object]) -> Sources:
    """Return the sources of a step's lines: the cell or the file that defines it."""
    code = _find_code(step)
    session = find_session()
    numbers = {} if session is None else session.shell.read_cell_numbers()
    if code is None:
        return Sources(Source("the step", "", "cell", ""), cells=numbers)
    if code.co_filename == _CELL_FILENAME:
        text = "".join(linecache.getlines(_CELL_FILENAME))
        return Sources(Source("the cell", _CELL_FILENAME, "cell", text), cells=numbers)
    return find_block_sources(code.co_filename, numbers)


def _find_code(step: Any) -> CodeType | None:
    while isinstance(step, functools.partial):
        step = step.func
    if isinstance(step, (FunctionType, MethodType)):
        code: CodeType | None = getattr(step, "__code__", None)
        return code
    # A module's own code is its forward.
    for name in ("forward", "__call__"):
        method = getattr(type(step), name, None)
        if isinstance(method, FunctionType):
            return method.__code__
    return None
