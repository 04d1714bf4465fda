"""The callback in Lightning's real trainer: what it logs, and how its recording ends."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

import gpumemwidget
from gpumemwidget.model.processes import ProcessState
from gpumemwidget.testing.machine import SimulatedMachine
from tests.integrations.common import GIB, MIB, PEAK, count_spans, do_nothing, load
from tests.remote.programs import load_one

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]


@pytest.fixture
def models() -> Any:
    """The module and the trainer, where the library is installed."""
    pytest.importorskip("lightning")
    return import_module("tests.integrations.lightning_models")


def _count_steps(state: ProcessState) -> tuple[int | None, int]:
    """Return the number of the first span of a step, and how many there are."""
    steps = [span for span in state.spans if span.name == "training step"]
    return steps[0].number, sum(span.n_spans for span in steps)


def test_the_peak_of_each_accumulated_batch_is_logged(
    models: Any, tmp_path: Path, gpus: SimulatedMachine
) -> None:
    """Four batches are one step, one span and one log."""

    def work(number: int) -> None:
        if number % 4 == 1:
            gpus.free(gpus.allocate(GIB))

    callback = models.MemoryCallback(every_steps=1)
    trainer = models.make_trainer(
        tmp_path, callback, log_every_n_steps=1, accumulate_grad_batches=4
    )

    rows = models.fit(trainer, work)

    assert [(step, figures[PEAK]) for step, figures in rows] == [(0, GIB + MIB), (1, GIB + MIB)]
    assert _count_steps(load(tmp_path / "memory")) == (1, 2)


def test_two_optimizers_count_one_step_a_batch(
    models: Any, tmp_path: Path, gpus: SimulatedMachine
) -> None:
    """Peaks are logged where Lightning logs, with those of all batches since."""

    def work(number: int) -> None:
        if number in (1, 5):
            gpus.free(gpus.allocate(number * GIB))

    trainer = models.make_trainer(
        tmp_path, models.MemoryCallback(every_steps=4), log_every_n_steps=4
    )

    rows = models.fit(trainer, work, n_optimizers=2)

    assert [(step, figures[PEAK]) for step, figures in rows] == [
        (3, GIB + MIB),
        (7, 5 * GIB + MIB),
    ]
    assert _count_steps(load(tmp_path / "memory")) == (4, 2)


def test_two_callbacks_of_one_trainer(models: Any, tmp_path: Path, gpus: SimulatedMachine) -> None:
    """Each logs the peak, and the one recording ends with the training."""
    callbacks = [models.MemoryCallback(folder=tmp_path / name) for name in ("first", "second")]
    trainer = models.make_trainer(tmp_path, *callbacks, log_every_n_steps=8)

    rows = models.fit(trainer, lambda _: gpus.free(gpus.allocate(GIB)))

    assert [(step, figures[PEAK]) for step, figures in rows] == [(7, GIB + MIB)] * 2
    assert load(tmp_path / "first").status == "ended"


@pytest.mark.parametrize("options", [{"log_every_n_steps": 0}, {"logger": False}])
def test_a_training_without_a_log(models: Any, tmp_path: Path, options: dict[str, Any]) -> None:
    """Nothing is logged; the spans are recorded."""
    trainer = models.make_trainer(tmp_path, models.MemoryCallback(every_steps=4), **options)

    rows = models.fit(trainer)

    assert rows == []
    assert _count_steps(load(tmp_path / "memory")) == (4, 2)


def test_steps_go_on_where_a_checkpoint_ended(models: Any, tmp_path: Path) -> None:
    """The numbers of spans and logs follow those before it."""
    first = models.make_trainer(tmp_path / "first")
    models.fit(first)
    first.save_checkpoint(tmp_path / "half.ckpt")
    callback = models.MemoryCallback(every_steps=4)
    trainer = models.make_trainer(tmp_path / "second", callback, max_epochs=2, log_every_n_steps=4)

    rows = models.fit(trainer, checkpoint=tmp_path / "half.ckpt")

    assert [step for step, _ in rows] == [11, 15]
    assert _count_steps(load(tmp_path / "second" / "memory")) == (12, 2)


def test_other_stages_are_spans_of_a_recording_that_runs(models: Any, tmp_path: Path) -> None:
    """Nothing is logged, and no recording begun, for ``validate`` and ``predict`` alone."""
    trainer = models.make_trainer(tmp_path, models.MemoryCallback(every_steps=1))
    net = models.Net(do_nothing, 1)

    trainer.validate(net, models.make_data(), verbose=False)
    with gpumemwidget.record(tmp_path / "own.gpumem.jsonl", steps=False):
        trainer.validate(net, models.make_data(), verbose=False)
        trainer.predict(net, models.make_data())

    assert trainer.logger.rows == []
    (path,) = tmp_path.rglob("*.jsonl")
    assert count_spans(load_one(path)) == {"validate": 1, "predict": 1}
