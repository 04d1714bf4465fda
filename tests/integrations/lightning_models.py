"""A small module and its Lightning trainer, for the tests of the callback."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.loggers.logger import Logger

from gpumemwidget.integrations.lightning import MemoryCallback
from tests.integrations.common import do_nothing

#: The name of the span of an evaluation.
EVALUATION = "validate"

__all__ = ["EVALUATION", "MemoryCallback", "Net", "fit", "make_data", "make_trainer", "train"]


class Log(Logger):
    """A logger that keeps the rows with our figures: the step, and the figures."""

    name = "log"
    version = 0

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[tuple[int | None, dict[str, float]]] = []

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        ours = {name: value for name, value in metrics.items() if name.startswith("memory/")}
        if ours:
            self.rows.append((step, ours))

    def log_hyperparams(self, *_args: Any, **_kwargs: Any) -> None:
        """Keep nothing."""


class Net(pl.LightningModule):
    """A model of one layer that calls ``work`` with the number of each batch, from 1 on."""

    def __init__(self, work: Callable[[int], object], n_optimizers: int) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(8, 2)
        self.work = work
        self.n_optimizers = n_optimizers
        self.automatic_optimization = n_optimizers == 1

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor | None:
        self.work(batch_idx + 1)
        loss = self.layer(batch).sum()
        if self.automatic_optimization:
            return loss
        self.manual_backward(loss)
        for optimizer in self.optimizers():
            optimizer.step()
        return None

    def validation_step(self, batch: torch.Tensor, _: int) -> None:
        self.layer(batch)

    def predict_step(self, batch: torch.Tensor, _: int) -> torch.Tensor:
        return self.layer(batch)

    def configure_optimizers(self) -> list[torch.optim.Optimizer]:
        return [torch.optim.SGD(self.parameters(), 0.1) for _ in range(self.n_optimizers)]


def make_data() -> torch.utils.data.DataLoader[Any]:
    """Eight batches."""
    return torch.utils.data.DataLoader(torch.ones(8, 8))


def make_trainer(folder: Path, *callbacks: pl.Callback, **options: Any) -> pl.Trainer:
    """A trainer of one epoch on the CPU, with a ``Log``."""
    defaults = {
        "max_epochs": 1,
        "logger": Log(),
        "enable_checkpointing": False,
        "accelerator": "cpu",
    }
    return pl.Trainer(
        default_root_dir=folder,
        callbacks=list(callbacks),
        enable_progress_bar=False,
        enable_model_summary=False,
        **defaults | options,
    )


def fit(
    trainer: pl.Trainer,
    work: Callable[[int], object] = do_nothing,
    *,
    n_optimizers: int = 1,
    checkpoint: Path | None = None,
) -> list[tuple[int | None, dict[str, float]]]:
    """Train, and return what was logged of memory."""
    trainer.fit(Net(work, n_optimizers), make_data(), make_data(), ckpt_path=checkpoint)
    return getattr(trainer.logger, "rows", [])


def train(
    folder: Path,
    callback: MemoryCallback,
    work: Callable[[int], object] = do_nothing,
    *,
    on_gpu: bool = False,
    logged: list[dict[str, float]] | None = None,
) -> list[dict[str, float]]:
    """Train an epoch, evaluate, and return what was logged of memory after each batch.

    ``logged`` has it also where the training fails.
    """
    rows = [] if logged is None else logged
    options = {"accelerator": "gpu", "devices": 1} if on_gpu else {}
    trainer = make_trainer(folder, callback, log_every_n_steps=1, **options)
    try:
        fit(trainer, work)
    finally:
        rows += [figures for _, figures in trainer.logger.rows]
    return rows
