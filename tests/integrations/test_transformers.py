"""The callback in the real ``transformers.Trainer``: what it logs, and how its recording ends."""

from __future__ import annotations

from contextlib import suppress
from importlib import import_module
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

import gpumemwidget
from gpumemwidget.errors import BadInputError
from gpumemwidget.testing.machine import SimulatedMachine
from tests.integrations.common import GIB, HOST_PEAK, MIB, PEAK, count_spans, list_ends, load
from tests.remote.programs import RUN, load_one, run_python, write_script

pytestmark = pytest.mark.slow


@pytest.fixture
def models() -> Any:
    """The models and the trainer, where the library is installed."""
    pytest.importorskip("transformers")
    return import_module("tests.integrations.transformers_models")


def test_metrics_stay_the_trainers(models: Any, tmp_path: Path) -> None:
    """The loggers see our figures; what ``evaluate`` and ``train`` return does not have them."""
    from transformers import TrainerCallback

    logged: list[dict[str, float]] = []
    evaluated: list[dict[str, float]] = []

    class Logger(TrainerCallback):
        def on_log(self, *_: Any, logs: dict[str, float], **__: Any) -> None:
            logged.append(dict(logs))

        def on_evaluate(self, *_: Any, metrics: dict[str, float], **__: Any) -> None:
            evaluated.append(metrics)

    trainer = models.make_trainer(tmp_path, Logger(), eval_strategy="epoch")
    models.MemoryCallback().add_to(trainer)

    result = trainer.train()
    alone = trainer.evaluate()
    predicted = trainer.predict(models.DATA)

    for metrics in (*evaluated, result.metrics, alone, predicted.metrics):
        assert not [name for name in metrics if name.startswith("memory/")]
    *within, after = zip(logged, trainer.state.log_history, strict=True)
    assert len(within) == 10
    for row in within:
        assert all(figures[HOST_PEAK] > MIB for figures in row)
    # No training runs then, whose peaks could be measured from its first batch on.
    assert not [name for figures in after for name in figures if name.startswith("memory/")]


def test_trainings_at_once_have_their_own_peaks(
    models: Any, tmp_path: Path, gpus: SimulatedMachine
) -> None:
    """A peak is logged by its training, also where another has begun and ended meanwhile."""
    other = models.make_trainer(tmp_path / "other")
    models.MemoryCallback().add_to(other)

    def work(number: int) -> None:
        if number == 2:
            gpus.free(gpus.allocate(GIB))
            thread = Thread(target=other.train)
            thread.start()
            thread.join()

    trainer = models.make_trainer(tmp_path / "first", work=work)

    # Without the block the second training ends the recording of the first.
    with models.MemoryCallback().add_to(trainer):
        trainer.train()

    assert [row[PEAK] for row in trainer.state.log_history[:3]] == [MIB, GIB + MIB, MIB]
    assert [row[PEAK] for row in other.state.log_history] == [MIB] * 9


def test_a_callback_is_added_once(models: Any, tmp_path: Path) -> None:
    """The last one replaces those before it; each step is one span."""
    first, second = models.MemoryCallback(every_steps=1), models.MemoryCallback(every_steps=1)
    trainer = models.make_trainer(tmp_path, first)

    for callback in (first, second, second):
        callback.add_to(trainer)
    trainer.train()

    ours = [
        known
        for known in trainer.callback_handler.callbacks
        if type(known) is models.MemoryCallback
    ]
    assert ours == [second]
    assert count_spans(load(tmp_path / "memory"))["training step"] == 8


def test_a_failed_training_ends_when_the_next_begins(models: Any, tmp_path: Path) -> None:
    """Its spans end with an error, and the next one has a recording of its own."""

    def fail(number: int) -> None:
        if number == 3:
            raise RuntimeError("no such batch")

    failing = models.make_trainer(tmp_path / "first", work=fail)
    models.MemoryCallback(every_steps=1).add_to(failing)
    trainer = models.make_trainer(tmp_path / "second")
    models.MemoryCallback(every_steps=1).add_to(trainer)

    with suppress(RuntimeError):
        failing.train()
    trainer.train()

    first, second = (load(tmp_path / name / "memory") for name in ("first", "second"))
    assert (first.status, second.status) == ("failed", "ended")
    assert first.error == "GpuMemError: the training did not report its end"
    assert list_ends(first)["training step"] == list_ends(first)["epoch"] == "error"
    assert set(list_ends(second).values()) == {"ok"}


def test_an_evaluation_that_fails_on_its_own_leaves_no_span(models: Any, tmp_path: Path) -> None:
    """It would have no end, and what follows would be within it."""

    def fail(number: int) -> None:
        if number == 2:
            raise RuntimeError("no such batch")

    trainer = models.make_trainer(tmp_path, work=fail, per_device_eval_batch_size=2)
    models.MemoryCallback().add_to(trainer)

    with gpumemwidget.record(tmp_path / "own.gpumem.jsonl"):
        with suppress(RuntimeError):
            trainer.evaluate()
        with gpumemwidget.span("own work"):
            pass

    names = [span.name for span in load_one(tmp_path / "own.gpumem.jsonl").spans]
    assert "own work" in names
    assert "evaluation" not in names


def test_a_block_records_all_that_is_in_it(
    models: Any, tmp_path: Path, gpus: SimulatedMachine
) -> None:
    """A training that failed, one that did not, and an evaluation with its peak."""

    def work(number: int) -> None:
        if number == 3:
            raise RuntimeError("no such batch")
        gpus.free(gpus.allocate(GIB))

    trainer = models.make_trainer(tmp_path, work=work)
    with models.MemoryCallback(every_steps=1).add_to(trainer):
        with suppress(RuntimeError):
            trainer.train()
        trainer.train()
        trainer.evaluate()

    assert trainer.state.log_history[-1][PEAK] == GIB + MIB
    state = load(tmp_path / "memory")
    counts = count_spans(state)
    assert (counts["epoch"], counts["training step"], counts["evaluation"]) == (2, 11, 1)
    assert [span.status for span in state.spans if span.name == "epoch"] == ["error", "ok"]
    assert (state.status, state.error) == ("ended", "")


def test_a_block_needs_a_folder(models: Any) -> None:
    """One line with the next step."""
    with pytest.raises(BadInputError, match=r"call add_to\(trainer\) first"):
        models.MemoryCallback().__enter__()


def test_an_evaluation_that_fails_within_a_training_ends_with_the_next_step(
    models: Any, tmp_path: Path
) -> None:
    """Its error is caught there, and the training goes on."""
    from transformers import TrainerCallback

    def fail(number: int) -> None:
        if number == 4:
            raise RuntimeError("no such batch")

    class Evaluator(TrainerCallback):
        def on_step_end(self, _args: Any, state: Any, *_: Any, **__: Any) -> None:
            if state.global_step == 2:
                with suppress(RuntimeError):
                    trainer.evaluate()

    trainer = models.make_trainer(tmp_path, Evaluator(), work=fail, per_device_eval_batch_size=2)
    models.MemoryCallback(every_steps=3).add_to(trainer)

    trainer.train()

    spans = {span.name: span for span in load(tmp_path / "memory").spans}
    evaluation = spans["evaluation"]
    assert evaluation.start_s + evaluation.duration_s <= spans["training step"].start_s


def test_batch_sizes_that_are_tried_have_a_recording_each(
    models: Any, tmp_path: Path, gpus: SimulatedMachine
) -> None:
    """``auto_find_batch_size`` begins a training anew within ``train``."""
    import torch

    def work(number: int) -> None:
        if number == 1:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 16.00 GiB.")

    trainer = models.make_trainer(
        tmp_path, work=work, auto_find_batch_size=True, per_device_train_batch_size=2
    )
    models.MemoryCallback().add_to(trainer)

    trainer.train()

    states = [load_one(path) for path in (tmp_path / "memory").glob("*.jsonl")]
    assert sorted(state.status for state in states) == ["ended", "failed"]


@pytest.mark.usefixtures("models")
@pytest.mark.parametrize("caught", ["MemoryError", "()"])
def test_a_failed_training_ends_with_its_program(tmp_path: Path, caught: str) -> None:
    """With the error that ended the program and the card of an OOM, also without a block."""
    script = write_script(
        tmp_path,
        f"""
        from contextlib import suppress
        from pathlib import Path
        from gpumemwidget.integrations.transformers import MemoryCallback
        from tests.integrations.transformers_models import make_trainer

        def fail(number):
            raise MemoryError("no such room")

        trainer = make_trainer(Path("out"), work=fail)
        MemoryCallback(every_steps=1).add_to(trainer)
        with suppress({caught}):
            trainer.train()
        """,
    )

    run_python(tmp_path, script, timeout_s=300)

    state = load(tmp_path / "out" / "memory")
    expected = ("failed", "MemoryError: no such room") if caught == "()" else ("ended", "")
    assert (state.status, state.error) == expected
    assert len(state.ooms) == (caught == "()")
    assert (list_ends(state)["training step"], list_ends(state)["epoch"]) == ("error", "error")


@pytest.mark.usefixtures("models")
def test_a_recorded_program_has_one_recording(tmp_path: Path) -> None:
    """``gpumemwidget run`` has the spans of a training, and the card of its OOM."""
    script = write_script(
        tmp_path,
        """
        from pathlib import Path
        import torch
        from gpumemwidget.integrations.transformers import MemoryCallback
        from tests.integrations.transformers_models import make_trainer

        trainer = make_trainer(Path("out"), work=lambda number: torch.empty(1 << (number * 16)))
        MemoryCallback(every_steps=1).add_to(trainer)
        trainer.train()
        """,
    )

    run_python(tmp_path, *RUN, script, timeout_s=300)

    (path,) = tmp_path.rglob("*.jsonl")
    state = load_one(path)
    assert (list_ends(state)["training step"], list_ends(state)["epoch"]) == ("error", "error")
    assert [card.event.state.info.device for card in state.ooms] == ["host"]
