"""A callback for ``transformers.Trainer``, and what builds on it (TRL's trainers, for example)."""

# ruff: noqa: ARG002 - the parameters are the library's

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from transformers import TrainerCallback

from gpumemwidget.errors import BadInputError, name_type
from gpumemwidget.integrations.meter import TrainingMeter


class MemoryCallback(TrainerCallback):  # type: ignore[misc]  # the library may have no types
    """Records epochs, evaluations and every N-th step, and logs the exact peaks between two logs.

    ``memory/allocated_peak_bytes`` and ``memory/reserved_peak_bytes`` are in the trainer's log, and
    so in W&B, MLflow and TensorBoard. The recording goes beside the checkpoints; of an OOM it has
    the card. Where the process is recorded already (``gpumemwidget run``) the spans are there.

    Args:
        every_steps: record each step whose number is a multiple of this; ``None`` for none.
        folder: where the recording goes; ``None``: ``memory`` in the trainer's ``output_dir``.

    Raises:
        BadInputError: ``every_steps`` is no positive number.

    Example:
        ``MemoryCallback(every_steps=100).add_to(trainer)``, then ``trainer.train()``.
    """

    def __init__(
        self, *, every_steps: int | None = None, folder: str | os.PathLike[str] | None = None
    ) -> None:
        self._folder = folder
        self._meter = TrainingMeter(every_steps)
        self._evaluates = False

    def add_to(self, trainer: Any) -> MemoryCallback:
        """Put this before the trainer's other callbacks, so that loggers get its figures too.

        With ``Trainer(callbacks=[MemoryCallback()])`` only those that come after it do.
        """
        handler = getattr(trainer, "callback_handler", None)
        if handler is None:
            raise BadInputError(f"{name_type(trainer)} is no Trainer: it has no callback_handler")
        handler.callbacks.insert(0, self)
        return self

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Begin the recording, on each process."""
        self._evaluates = False
        folder = Path(args.output_dir or ".", "memory") if self._folder is None else self._folder
        self._meter.open(folder)

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """End the recording."""
        self._meter.close()

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Begin the span of an epoch."""
        self._meter.begin("epoch", int(state.epoch or 0) + 1)

    def on_epoch_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """End the span of an epoch."""
        self._meter.end("epoch")

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Begin the span of every N-th step."""
        self._meter.begin_step(state.global_step + 1)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """End the span of a step."""
        self._meter.end("training step")

    def on_prediction_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Begin the span of an evaluation with its first batch: there is no earlier event."""
        if not self._evaluates:
            self._evaluates = True
            self._meter.begin("evaluation")

    def on_evaluate(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """End the span of an evaluation."""
        self._evaluates = False
        self._meter.end("evaluation")

    def on_predict(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """End the span of a prediction, which begins as an evaluation does."""
        self.on_evaluate(args, state, control)

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        """Add the peaks since the last log to this one, and to the trainer's history."""
        if not isinstance(logs, dict):
            return
        peaks = self._meter.read_peaks()
        logs.update(peaks)
        if state.log_history:
            state.log_history[-1].update(peaks)
