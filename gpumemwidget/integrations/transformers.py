"""A callback for ``transformers.Trainer``, and what builds on it (TRL's trainers, for example)."""

# ruff: noqa: ARG002, SLF001 - the parameters are the library's; sys._getframe is the one way up

from __future__ import annotations

import os
import sys
from itertools import dropwhile
from pathlib import Path
from traceback import walk_stack
from types import FrameType
from typing import Any

from transformers import TrainerCallback

from gpumemwidget.errors import BadInputError, name_type
from gpumemwidget.integrations.meter import TrainingLoop, TrainingMeter


class MemoryCallback(TrainerCallback):  # type: ignore[misc]  # the library may have no types
    """Records epochs, evaluations and every N-th step, and logs the exact peaks between two logs.

    ``memory/allocated_peak_bytes`` and ``memory/reserved_peak_bytes`` are in the trainer's log, and
    so in W&B, MLflow and TensorBoard, while ``train`` runs. The recording goes beside the
    checkpoints; where the process is recorded already (``gpumemwidget run``) the spans are there.
    As the trainer has no event for a training that fails, the recording ends with the notebook's
    cell or the program then, with the error and the card of an OOM; or when the next one begins,
    or with ``close()``.

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
        #: The dictionary of the last log, and the peaks that were added to it.
        self._logged: tuple[dict[str, Any], dict[str, int]] = {}, {}

    def add_to(self, trainer: Any) -> MemoryCallback:
        """Put this before the trainer's other callbacks, and in place of a ``MemoryCallback``.

        Loggers get its figures then; with ``Trainer(callbacks=[MemoryCallback()])`` they do not.
        """
        handler = getattr(trainer, "callback_handler", None)
        if handler is None:
            raise BadInputError(f"{name_type(trainer)} is no Trainer: it has no callback_handler")
        others = [known for known in handler.callbacks if not isinstance(known, MemoryCallback)]
        handler.callbacks[:] = [self, *others]
        return self

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Begin the recording, on each process."""
        folder = self._folder or Path(args.output_dir or ".", "memory")
        self._meter.open(folder, TrainingLoop(_find_loop(), state))

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """End the recording."""
        self._clear_log()
        self._meter.close()

    def close(self) -> None:
        """End the recording of a training that is over; where its error is caught, with that.

        A training that goes on, or has ended already, is left as it is.
        """
        self._clear_log()
        self._meter.end_if_over()

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
        """Begin the span of an evaluation with its first batch: there is no earlier event."""
        self._meter.begin("evaluation")

    def on_evaluate(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """End the span of an evaluation."""
        self._clear_log()
        self._meter.end("evaluation")

    on_predict = on_evaluate  #: A prediction begins as an evaluation does, too.

    def on_log(self, args: Any, state: Any, control: Any, logs: Any, **_: Any) -> None:
        """Add the peaks since the last log to this one, and to the trainer's history."""
        self._clear_log()
        added = {name: n for name, n in self._meter.read_peaks().items() if name not in logs}
        self._logged = logs, added
        for figures in (logs, *state.log_history[-1:]):
            figures.update(added)

    def _clear_log(self) -> None:
        """Remove the peaks from the last log: ``evaluate`` or ``train`` returns its dictionary."""
        logs, added = self._logged
        for name in added:
            logs.pop(name, None)
        self._logged = {}, {}


def _find_loop() -> FrameType:
    """Return the frame that sent the running event through the trainer's handler of callbacks."""
    caller = sys._getframe(2)
    stack = (frame for frame, _ in walk_stack(caller))
    from_handler = dropwhile(lambda frame: not _is_handler(frame), stack)
    return next(dropwhile(_is_handler, from_handler), caller)


def _is_handler(frame: FrameType) -> bool:
    return bool(frame.f_globals.get("__name__") == TrainerCallback.__module__)
