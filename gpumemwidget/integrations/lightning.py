"""A callback for PyTorch Lightning."""

# ruff: noqa: ARG002 - the parameters are the library's

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
    """Records epochs, validations and every N-th step, and logs the exact peaks.

    ``memory/allocated_peak_bytes`` and ``memory/reserved_peak_bytes`` go to the trainer's loggers
    as often as its other figures (``log_every_n_steps``). The recording goes beside the
    checkpoints; of an OOM it has the card. Where the process is recorded already (``gpumemwidget
    run``) the spans are there.

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
        folder = self._folder
        self._meter.open(Path(trainer.default_root_dir, "memory") if folder is None else folder)

    def on_fit_end(self, trainer: Any, pl_module: Any) -> None:
        """End the recording."""
        self._meter.close()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """End the recording, which has the card of an OOM by now."""
        self._meter.close()

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        """Begin the span of an epoch."""
        self._meter.begin("epoch", trainer.current_epoch + 1)

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        """End the span of an epoch."""
        self._meter.end("epoch")

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        """Begin the span of a validation."""
        self._meter.begin("validation")

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        """End the span of a validation."""
        self._meter.end("validation")

    def on_train_batch_start(
        self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int
    ) -> None:
        """Begin the span of every N-th step."""
        self._meter.begin_step(trainer.global_step + 1)

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """End the span of a step, and log the peaks since the last log where one is due."""
        self._meter.end("training step")
        if trainer.global_step % trainer.log_every_n_steps == 0:
            for name, n_bytes in self._meter.read_peaks().items():
                pl_module.log(name, n_bytes, on_step=True, on_epoch=False)
