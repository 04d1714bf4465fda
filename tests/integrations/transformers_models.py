"""A small model and its ``transformers.Trainer``, for the tests of the callback."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import Trainer, TrainingArguments

from gpumemwidget.integrations.transformers import MemoryCallback
from tests.integrations.common import do_nothing

DATA = [{"x": torch.ones(8), "labels": torch.tensor(1)} for _ in range(8)]
#: The name of the span of an evaluation.
EVALUATION = "evaluation"

__all__ = ["DATA", "EVALUATION", "MemoryCallback", "Net", "make_trainer", "train"]


class Net(torch.nn.Module):
    """A model of one layer that calls ``work`` with the number of each batch, from 1 on."""

    def __init__(self, work: Callable[[int], object] = do_nothing) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(8, 2)
        self.work = work
        self.n_batches = 0

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        self.n_batches += 1
        self.work(self.n_batches)
        logits = self.layer(x)
        return {"loss": torch.nn.functional.cross_entropy(logits, labels), "logits": logits}


def make_trainer(
    folder: Path, *callbacks: object, work: Callable[[int], object] = do_nothing, **options: Any
) -> Trainer:
    """A trainer of one epoch: eight batches on the CPU, and a log after each step."""
    defaults = {
        "num_train_epochs": 1,
        "per_device_train_batch_size": 1,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "use_cpu": True,
        "disable_tqdm": True,
    }
    arguments = TrainingArguments(str(folder), **(defaults | options))
    return Trainer(
        Net(work), arguments, train_dataset=DATA, eval_dataset=DATA, callbacks=list(callbacks)
    )


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
    trainer = make_trainer(folder, work=work, use_cpu=not on_gpu, eval_strategy="epoch")
    try:
        with callback.add_to(trainer):
            trainer.train()
    finally:
        rows += [row for row in trainer.state.log_history if "grad_norm" in row]
    return rows
