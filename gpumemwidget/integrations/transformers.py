"""A callback for ``transformers.Trainer``, and what builds on it (TRL's trainers, for example)."""

# ruff: noqa: ARG002 - the parameters are the library's

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from transformers import TrainerCallback

from gpumemwidget.errors import BadInputError, name_type
from gpumemwidget.integrations.meter import UNREPORTED, TrainingMeter


class MemoryCallback(TrainerCallback):  # type: ignore[misc]  # the library may have no types
    """Records epochs, evaluations and every N-th step, and logs the exact peaks between two logs.

    ``memory/allocated_peak_bytes`` and ``memory/reserved_peak_bytes`` are in the trainer's log, and
    so in W&B, MLflow and TensorBoard. The recording goes beside the checkpoints; where the process
    is recorded already (``gpumemwidget run``) the spans are there.

    As a context manager it records the block, with the error and the card of an OOM that end it.
    Without, it records each ``train``; as the trainer has no event for a training that fails, the
    recording of such a training ends with the program, or when another training begins.

    Args:
        every_steps: record each step whose number is a multiple of this; ``None`` for none.
        folder: where the recording goes; ``None``: ``memory`` in the trainer's ``output_dir``.

    Raises:
        BadInputError: ``every_steps`` is no positive number.

    Example:
        ``with MemoryCallback(every_steps=100).add_to(trainer): trainer.train()``
    """

    def __init__(
        self, *, every_steps: int | None = None, folder: str | os.PathLike[str] | None = None
    ) -> None:
        self._folder = folder
        self._default_folder: Path | None = None
        self._meter = TrainingMeter(every_steps)
        #: The dictionary of the last log, and the names that were added to it.
        self._logged: tuple[dict[str, Any], tuple[str, ...]] = {}, ()

    def add_to(self, trainer: Any) -> MemoryCallback:
        """Put this before the trainer's other callbacks, and in place of a ``MemoryCallback``.

        Loggers get its figures then; with ``Trainer(callbacks=[MemoryCallback()])`` they do not.
        """
        handler = getattr(trainer, "callback_handler", None)
        if handler is None:
            raise BadInputError(f"{name_type(trainer)} is no Trainer: it has no callback_handler")
        others = [known for known in handler.callbacks if not isinstance(known, MemoryCallback)]
        handler.callbacks[:] = [self, *others]
        self._default_folder = Path(trainer.args.output_dir or ".", "memory")
        return self

    def __enter__(self) -> MemoryCallback:
        """Begin the recording of a block."""
        folder = self._folder or self._default_folder
        if folder is None:
            raise BadInputError("no folder is known to record into: call add_to(trainer) first")
        self._meter.open(folder, is_block=True)
        return self

    def __exit__(self, _kind: Any, error: BaseException | None, _traceback: Any) -> None:
        """End the recording, with the error that ended the block."""
        self._clear_log()
        self._meter.close(error)

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Begin the recording, on each process, unless a block has one."""
        if self._meter.is_block:
            # What is still open belongs to a training that failed.
            self._meter.end_spans(UNREPORTED)
        else:
            self._meter.open(self._folder or Path(args.output_dir or ".", "memory"))

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """End the recording, unless a block has one."""
        self._clear_log()
        if self._meter.is_block:
            self._meter.end_spans()
        else:
            self._meter.close()

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Begin the span of an epoch."""
        self._meter.begin("epoch", int(state.epoch or 0) + 1)

    def on_epoch_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """End the span of an epoch."""
        self._meter.end("epoch")

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Begin the span of every N-th step; an evaluation that failed, and was caught, ends."""
        self._meter.end("evaluation")
        self._meter.begin_step(state.global_step + 1)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """End the span of a step."""
        self._meter.end("training step")

    def on_prediction_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Begin the span of an evaluation after its first batch: there is no earlier event."""
        if self._meter.is_open:
            self._meter.begin("evaluation")

    def on_evaluate(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """End the span of an evaluation."""
        self._clear_log()
        self._meter.end("evaluation")

    on_predict = on_evaluate  #: A prediction begins as an evaluation does, too.

    def on_log(self, args: Any, state: Any, control: Any, logs: Any, **_: Any) -> None:
        """Add the peaks since the last log to this one, and to the trainer's history."""
        self._clear_log()
        peaks = self._meter.read_peaks()
        self._logged = logs, tuple(peaks)
        for figures in (logs, *state.log_history[-1:]):
            figures.update(peaks)

    def _clear_log(self) -> None:
        """Remove the peaks from the last log: ``evaluate`` or ``train`` returns its dictionary."""
        logs, names = self._logged
        for name in names:
            logs.pop(name, None)
