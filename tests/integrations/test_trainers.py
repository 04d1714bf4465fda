"""The callbacks of trainers, with the real libraries: skipped where these are not installed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.remote.programs import load_one, run_python, write_script

pytestmark = pytest.mark.slow

_TRANSFORMERS = """
import json, sys, torch
from transformers import Trainer, TrainerCallback, TrainingArguments
from gpumemwidget.integrations.transformers import MemoryCallback

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(8, 2)
    def forward(self, x, labels):
        loss = torch.nn.functional.cross_entropy(self.layer(x), labels)
        return {"loss": loss, "logits": self.layer(x)}

class Logger(TrainerCallback):
    seen = []
    def on_log(self, args, state, control, logs=None, **_):
        self.seen.append(dict(logs))

data = [{"x": torch.ones(8), "labels": torch.tensor(1)} for _ in range(8)]
options = TrainingArguments(
    "out", num_train_epochs=2, per_device_train_batch_size=2, logging_steps=2, save_strategy="no",
    eval_strategy="epoch", report_to=[], use_cpu=True, disable_tqdm=True,
)
trainer = Trainer(Net(), options, train_dataset=data, eval_dataset=data, callbacks=[Logger()])
MemoryCallback(every_steps=4).add_to(trainer)
trainer.train()
print(json.dumps([Logger.seen, trainer.state.log_history]))
"""
_LIGHTNING = """
import json, lightning.pytorch as pl, torch
from lightning.pytorch.loggers import CSVLogger
from gpumemwidget.integrations.lightning import MemoryCallback

class Net(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(8, 2)
    def training_step(self, batch, _):
        return self.layer(batch).sum()
    def validation_step(self, batch, _):
        self.layer(batch)
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

data = torch.utils.data.DataLoader(torch.ones(8, 8), batch_size=2)
trainer = pl.Trainer(
    accelerator="cpu", max_epochs=2, default_root_dir="out", log_every_n_steps=2,
    logger=CSVLogger("out"), callbacks=[MemoryCallback(every_steps=4)],
    enable_progress_bar=False, enable_model_summary=False,
)
trainer.fit(Net(), data, data)
"""


def _list_spans(folder: Path) -> dict[str, int]:
    (path,) = folder.glob("*.jsonl")
    state = load_one(path)
    assert (state.status, state.n_unread) == ("ended", 0)
    counts: dict[str, int] = {}
    for span in state.spans:
        counts[span.name] = counts.get(span.name, 0) + span.n_spans
    return counts


def test_transformers_trainer(tmp_path: Path) -> None:
    """Peaks in each log, for other callbacks too; the spans are beside the checkpoints."""
    pytest.importorskip("transformers")
    script = write_script(tmp_path, _TRANSFORMERS)

    ended = run_python(tmp_path, script, timeout_s=300)

    assert ended.status == 0, ended.err
    seen, history = json.loads(ended.out.splitlines()[-1])
    assert len(seen) == len(history) >= 5
    for logs in (*seen, *history):
        assert logs["memory/host_resident_peak_bytes"] > 1 << 20
    spans = _list_spans(tmp_path / "out" / "memory")
    assert (spans["epoch"], spans["evaluation"], spans["training step"]) == (2, 2, 2)


def test_lightning_trainer(tmp_path: Path) -> None:
    """Peaks in the logger's file; the spans are in the root folder."""
    pytest.importorskip("lightning")
    script = write_script(tmp_path, _LIGHTNING)

    ended = run_python(tmp_path, script, timeout_s=300)

    assert ended.status == 0, ended.err
    (metrics,) = tmp_path.rglob("metrics.csv")
    head, *rows = metrics.read_text(encoding="utf-8").splitlines()
    assert "memory/host_resident_peak_bytes" in head.split(",")
    assert len(rows) == 4
    spans = _list_spans(tmp_path / "out" / "memory")
    assert spans["epoch"] == 2
    assert spans["training step"] == 2
    assert spans["validation"] >= 2


@pytest.mark.parametrize("module", ["transformers", "lightning"])
def test_a_number_of_steps_that_is_none(module: str) -> None:
    """One line with the value."""
    pytest.importorskip(module)
    from importlib import import_module

    from gpumemwidget.errors import BadInputError

    callback = import_module(f"gpumemwidget.integrations.{module}").MemoryCallback
    with pytest.raises(BadInputError, match="every_steps is 0: give a number from 1 on"):
        callback(every_steps=0)
