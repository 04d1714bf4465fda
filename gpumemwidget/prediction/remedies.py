"""Predict a step again with each change that may help, and return what each would save."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace

from gpumemwidget.errors import PredictionError
from gpumemwidget.model.predictions import PredictedRemedy, PredictionRecord
from gpumemwidget.prediction.changes import Change
from gpumemwidget.prediction.forecast import Target, forecast
from gpumemwidget.prediction.operations import DryRun
from gpumemwidget.tracing.sources import Source, Sources

#: Minimum share of the reserved peak that a remedy saves, to be worth a line.
_WORTH = 0.01
_EXPANDABLE = (
    "expandable segments",
    "%env PYTORCH_ALLOC_CONF=expandable_segments:True  # before torch is imported",
)


def list_remedies(
    record: PredictionRecord,
    target: Target,
    run: DryRun,
    changes: Iterable[Change],
    *,
    run_dry: Callable[..., DryRun],
    halves: Mapping[int, tuple[int, ...]],
) -> PredictionRecord:
    """Return a prediction with its remedies, those first that save most.

    Args:
        record: the step as it is.
        target: the device.
        run: what the step does as it is.
        changes: what may help.
        run_dry: carries the step out once more, with options of ``carry_out``.
        halves: the shapes of half a batch.
    """
    found: list[PredictedRemedy] = []
    untried: list[str] = []

    def judge(name: str, command: str, run: DryRun, place: Target) -> None:
        changed = forecast(run, place, Sources(Source("", "", "cell", "")))
        saved_bytes = record.reserved.expected - changed.reserved.expected
        if saved_bytes > _WORTH * record.reserved.expected:
            found.append(
                PredictedRemedy(
                    name,
                    command,
                    saved_bytes,
                    changed.reserved.expected,
                    changed.allocated.expected,
                    changed.fits,
                )
            )

    for change in changes:
        try:
            changed = run_dry(prepare=change.prepare, shapes=halves if change.halves else None)
        except PredictionError as exc:
            untried.append(f"{change.name}: {exc}")
            continue
        judge(change.name, change.command, changed, target)
    if target.expandable is not None:
        judge(*_EXPANDABLE, run, target.expandable)
    ranked = sorted(found, key=lambda each: -each.saved_bytes)
    return replace(record, remedies=tuple(ranked), untried=tuple(untried))
