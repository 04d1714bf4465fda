"""A callback for PyTorch Lightning."""

# ruff: noqa: ARG002, SLF001 - the parameters are the library's; so are its conditions for a log

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

try:
    from lightning.pytorch.callbacks import Callback
except ImportError:  # Lightning's package had another name before 2.0, and still has it too.
    from pytorch_lightning.callbacks import Callback

from gpumemwidget.integrations.meter import TrainingMeter


class MemoryCallback(Callback):  # type: ignore[misc]  # the library may have no types
    """Records epochs, validations and every N-th step of ``fit``, and logs the exact peaks.

    ``memory/allocated_peak_bytes`` and ``memory/reserved_peak_bytes`` go to the trainer's loggers
    when its other figures do (``log_every_n_steps``). The recording goes beside the checkpoints; it
    has the card of an OOM. Where the process is recorded already (``gpumemwidget run``) the spans
    are there, with those of ``validate``, ``test`` and ``predict``.

    Args:
        every_steps: record each step whose number is a multiple of this; ``None`` for none.
        folder: where the recording goes; ``None``: ``memory`` in the trainer's
            ``default_root_dir``.

    Raises:
        BadInputError: ``every_steps`` is no positive number.

    Example:
        ``Trainer(callbacks=[MemoryCallback(every_steps=100)])``
    """

    def __init__(
        self, *, every_steps: int | None = None, folder: str | os.PathLike[str] | None = None
    ) -> None:
        self._folder = folder
        self._meter = TrainingMeter(every_steps)

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """Begin the recording, on each process."""
        self._meter.open(self._folder or Path(trainer.default_root_dir, "memory"), is_block=True)

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """End the recording, also where a tuner ended ``fit`` early."""
        self._meter.close()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """End the recording and its spans with the error, and with the card of an OOM."""
        self._meter.close(exception)

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        """Begin the span of an epoch."""
        self._meter.begin("epoch", trainer.current_epoch + 1)

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        """End the span of an epoch."""
        self._meter.end("epoch")

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        """Begin a span with the name of the stage: validate, sanity_check, test or predict."""
        self._meter.begin(trainer.state.stage.value)

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        """End the span of the stage."""
        self._meter.end(trainer.state.stage.value)

    on_test_start = on_predict_start = on_validation_start
    on_test_end = on_predict_end = on_validation_end

    def on_train_batch_start(
        self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int
    ) -> None:
        """Begin the span of every N-th step, with the first of the batches that it accumulates."""
        self._meter.begin_step(_count_steps(trainer) + 1)

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """End the span of a step, and log the peaks since the last log where Lightning logs."""
        if trainer.fit_loop._should_accumulate():
            return
        self._meter.end("training step")
        if trainer.loggers and trainer._logger_connector.should_update_logs:
            peaks = self._meter.read_peaks()
            for logger in trainer.loggers:
                # pl_module.log would round to float32.
                logger.log_metrics(peaks, step=_count_steps(trainer))


def _count_steps(trainer: Any) -> int:
    """Return the trained steps as Lightning's log counts them: once for all optimizers."""
    return int(trainer.fit_loop.epoch_loop._batches_that_stepped)
