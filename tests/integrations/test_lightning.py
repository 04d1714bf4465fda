"""The callback in Lightning's real trainer: what it logs, and how its recording ends."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from gpumemwidget.model.processes import ProcessState
from gpumemwidget.testing import DeviceFullError, simulate_gpus
from gpumemwidget.testing.machine import SimulatedMachine
from tests.remote.programs import load_one

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

MIB, GIB = 1 << 20, 1 << 30
PEAK = "memory/allocated_peak_bytes"


@pytest.fixture
def models() -> Any:
    """The module and the trainer, where the library is installed."""
    pytest.importorskip("lightning")
    return import_module("tests.integrations.lightning_models")


@pytest.fixture
def gpus() -> Iterator[SimulatedMachine]:
    """A GPU of 64 GiB, of which 1 MiB is in use."""
    with simulate_gpus(total_bytes=64 * GIB) as machine:
        machine.allocate(MIB)
        yield machine


def _load(folder: Path) -> ProcessState:
    (path,) = folder.glob("*.jsonl")
    return load_one(path)


def _count_steps(state: ProcessState) -> tuple[int | None, int]:
    """Return the number of the first span of a step, and how many there are."""
    steps = [span for span in state.spans if span.name == "training step"]
    return steps[0].number, sum(span.n_spans for span in steps)


@pytest.mark.parametrize(
    ("error", "raised", "status"),
    [(RuntimeError, RuntimeError, "error"), (KeyboardInterrupt, SystemExit, "interrupted")],
)
def test_a_training_that_fails_ends_with_its_error(
    models: Any,
    tmp_path: Path,
    error: type[BaseException],
    raised: type[BaseException],
    status: str,
) -> None:
    """So do its spans."""

    def fail(number: int) -> None:
        if number == 3:
            raise error

    trainer = models.make_trainer(tmp_path, models.MemoryCallback(every_steps=1))

    with pytest.raises(raised):
        models.fit(trainer, fail)

    state = _load(tmp_path / "memory")
    assert (state.status, state.error) == ("failed", error.__name__)
    last = {span.name: span.status for span in state.spans}
    assert (last["training step"], last["epoch"]) == (status, status)


@pytest.mark.parametrize("every_steps", [1, None])
def test_the_recording_has_the_card_of_an_oom(
    models: Any, tmp_path: Path, gpus: SimulatedMachine, every_steps: int | None
) -> None:
    """Once, also where its step is no span."""
    trainer = models.make_trainer(tmp_path, models.MemoryCallback(every_steps=every_steps))

    with pytest.raises(DeviceFullError):
        models.fit(trainer, lambda number: gpus.allocate(number * 20 * GIB))

    state = _load(tmp_path / "memory")
    assert state.error.startswith("DeviceFullError: CUDA out of memory.")
    assert [card.event.state.info.device for card in state.ooms] == ["cuda:0"]


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
    assert _count_steps(_load(tmp_path / "memory")) == (1, 2)


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
    assert _count_steps(_load(tmp_path / "memory")) == (4, 2)


def test_two_callbacks_of_one_trainer(models: Any, tmp_path: Path, gpus: SimulatedMachine) -> None:
    """Each logs the peak, and the one recording ends with the training."""
    callbacks = [models.MemoryCallback(folder=tmp_path / name) for name in ("first", "second")]
    trainer = models.make_trainer(tmp_path, *callbacks, log_every_n_steps=8)

    rows = models.fit(trainer, lambda _: gpus.free(gpus.allocate(GIB)))

    assert [(step, figures[PEAK]) for step, figures in rows] == [(7, GIB + MIB)] * 2
    assert _load(tmp_path / "first").status == "ended"


def test_a_training_within_a_training_leaves_it_running(models: Any, tmp_path: Path) -> None:
    """The outer one goes on to log peaks; the spans of both are in its recording."""
    inner = models.make_trainer(tmp_path / "inner", models.MemoryCallback(), log_every_n_steps=8)
    inner_rows: list[Any] = []

    def work(number: int) -> None:
        if number == 4:
            inner_rows.extend(models.fit(inner))

    callback = models.MemoryCallback(every_steps=1)
    outer = models.make_trainer(tmp_path / "outer", callback, log_every_n_steps=1)

    rows = models.fit(outer, work)

    assert [step for step, _ in rows] == list(range(8))
    assert [step for step, _ in inner_rows] == [7]
    state = _load(tmp_path / "outer" / "memory")
    assert (state.status, {span.status for span in state.spans}) == ("ended", {"ok"})


@pytest.mark.parametrize("options", [{"log_every_n_steps": 0}, {"logger": False}])
def test_a_training_without_a_log(models: Any, tmp_path: Path, options: dict[str, Any]) -> None:
    """Nothing is logged; the spans are recorded."""
    trainer = models.make_trainer(tmp_path, models.MemoryCallback(every_steps=4), **options)

    rows = models.fit(trainer)

    assert rows == []
    assert _count_steps(_load(tmp_path / "memory")) == (4, 2)


def test_bytes_are_logged_exactly(models: Any, tmp_path: Path, gpus: SimulatedMachine) -> None:
    """All digits of a number that float32 can't hold."""
    n_bytes = 12 * GIB + 512
    trainer = models.make_trainer(tmp_path, models.MemoryCallback(), log_every_n_steps=8)

    ((_, figures),) = models.fit(trainer, lambda _: gpus.free(gpus.allocate(n_bytes)))

    assert figures[PEAK] == n_bytes + MIB


@pytest.mark.parametrize(
    "make_copy", [copy.deepcopy, lambda callback: pickle.loads(pickle.dumps(callback))]
)
def test_a_copy_records_by_itself(models: Any, tmp_path: Path, make_copy: Any) -> None:
    """Of a new callback, and of one that was used."""
    callback = make_copy(models.MemoryCallback(every_steps=4))

    for name in ("first", "second"):
        models.fit(models.make_trainer(tmp_path / name, callback))
        callback = make_copy(callback)

    for name in ("first", "second"):
        assert _count_steps(_load(tmp_path / name / "memory")) == (4, 2)


def test_steps_go_on_where_a_checkpoint_ended(models: Any, tmp_path: Path) -> None:
    """The numbers of spans and logs follow those before it."""
    first = models.make_trainer(tmp_path / "first")
    models.fit(first)
    first.save_checkpoint(tmp_path / "half.ckpt")
    callback = models.MemoryCallback(every_steps=4)
    trainer = models.make_trainer(tmp_path / "second", callback, max_epochs=2, log_every_n_steps=4)

    rows = models.fit(trainer, checkpoint=tmp_path / "half.ckpt")

    assert [step for step, _ in rows] == [11, 15]
    assert _count_steps(_load(tmp_path / "second" / "memory")) == (12, 2)


def test_only_fit_is_measured(models: Any, tmp_path: Path) -> None:
    """Nothing is logged and no file written for ``validate`` and ``predict`` alone."""
    trainer = models.make_trainer(tmp_path, models.MemoryCallback(every_steps=1))
    net = models.Net(models.do_nothing, 1)

    trainer.validate(net, models.make_data(), verbose=False)
    trainer.predict(net, models.make_data())

    assert trainer.logger.rows == []
    assert list(tmp_path.rglob("*.jsonl")) == []
