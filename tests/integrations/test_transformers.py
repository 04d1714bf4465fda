"""The callback in the real ``transformers.Trainer``: what it logs, and how its recording ends."""

from __future__ import annotations

import copy
import json
import pickle
from collections.abc import Iterator
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

import gpumemwidget
from gpumemwidget.backends.hardware import Hardware
from gpumemwidget.errors import BackendError
from gpumemwidget.model.processes import ProcessState
from gpumemwidget.testing import simulate_gpus
from gpumemwidget.testing.machine import SimulatedMachine
from tests.jupyter.notebook import open_notebook
from tests.remote.programs import ROOT, RUN, load_one, run_python, write_script

pytestmark = pytest.mark.slow

MIB, GIB = 1 << 20, 1 << 30
PEAK = "memory/allocated_peak_bytes"


@pytest.fixture
def models() -> Any:
    """The models and the trainer, where the library is installed."""
    pytest.importorskip("transformers")
    return import_module("tests.integrations.transformers_models")


@pytest.fixture
def gpus() -> Iterator[SimulatedMachine]:
    """A GPU of 8 GiB, of which 1 MiB is in use."""
    with simulate_gpus(total_bytes=8 * GIB) as machine:
        machine.allocate(MIB)
        yield machine


def _load(folder: Path) -> ProcessState:
    (path,) = folder.glob("*.jsonl")
    return load_one(path)


def _list_ends(state: ProcessState) -> dict[str, str]:
    """Return how the last span of each name ended."""
    return {span.name: span.status for span in state.spans}


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
    assert len(within) == 6
    for row in within:
        assert all(figures["memory/host_resident_peak_bytes"] > MIB for figures in row)
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
    models.MemoryCallback().add_to(trainer)

    trainer.train()

    assert [row[PEAK] for row in trainer.state.log_history[:3]] == [MIB, GIB + MIB, MIB]
    assert [row[PEAK] for row in other.state.log_history] == [MIB] * 5


def test_two_callbacks_of_one_trainer(models: Any, tmp_path: Path, gpus: SimulatedMachine) -> None:
    """The second does not hide the peak that the first has read."""
    callbacks = [models.MemoryCallback(folder=tmp_path / name) for name in ("first", "second")]
    trainer = models.make_trainer(
        tmp_path, *callbacks, work=lambda _: gpus.free(gpus.allocate(GIB))
    )

    trainer.train()

    assert [row[PEAK] for row in trainer.state.log_history[:4]] == [GIB + MIB] * 4
    assert _load(tmp_path / "first").status == "ended"


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
    spans = _load(tmp_path / "memory").spans
    assert sum(span.n_spans for span in spans if span.name == "training step") == 4


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

    first, second = (_load(tmp_path / name / "memory") for name in ("first", "second"))
    assert (first.status, second.status) == ("failed", "ended")
    assert first.error == "GpuMemError: the training did not report its end"
    assert _list_ends(first)["training step"] == _list_ends(first)["epoch"] == "error"
    assert set(_list_ends(second).values()) == {"ok"}


def test_a_failed_training_can_be_closed_where_its_error_is_caught(
    models: Any, tmp_path: Path
) -> None:
    """It ends with the error then, and a recording of the program's own may begin."""

    def fail(_: int) -> None:
        raise RuntimeError("no such batch")

    trainer = models.make_trainer(tmp_path, work=fail)
    callback = models.MemoryCallback(every_steps=1).add_to(trainer)

    try:
        trainer.train()
    except RuntimeError:
        callback.close()

    with gpumemwidget.record(tmp_path / "own.gpumem.jsonl"):
        pass
    state = _load(tmp_path / "memory")
    assert (state.status, state.error) == ("failed", "RuntimeError: no such batch")
    assert _list_ends(state)["training step"] == "error"


def test_a_running_training_is_not_closed(models: Any, tmp_path: Path) -> None:
    """``close`` ends one that is over alone."""
    trainer = models.make_trainer(tmp_path, work=lambda _: callback.close())
    callback = models.MemoryCallback().add_to(trainer)

    trainer.train()

    assert all("memory/host_resident_peak_bytes" in row for row in trainer.state.log_history)
    assert _load(tmp_path / "memory").status == "ended"


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

    spans = {span.name: span for span in _load(tmp_path / "memory").spans}
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

    trainer = models.make_trainer(tmp_path, work=work, auto_find_batch_size=True)
    models.MemoryCallback().add_to(trainer)

    trainer.train()

    states = [load_one(path) for path in (tmp_path / "memory").glob("*.jsonl")]
    assert sorted(state.status for state in states) == ["ended", "failed"]


_NOTEBOOK = """
import gpumemwidget
from gpumemwidget.integrations.transformers import MemoryCallback
from gpumemwidget.testing import simulate_gpus
from pathlib import Path
from tests.integrations.transformers_models import make_trainer

gpus = simulate_gpus(total_bytes=8 << 30)
trainer = make_trainer(Path("out"), work=lambda number: gpus.allocate(number << 30))
MemoryCallback(every_steps=1).add_to(trainer)
"""


@pytest.mark.usefixtures("models")
def test_a_failed_training_ends_with_its_cell(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The recording has the error and the card of its OOM, and another one may begin."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    with open_notebook(tmp_path) as notebook:
        notebook.run(_NOTEBOOK)

        failed = notebook.run("trainer.train()")
        after = notebook.run("with gpumemwidget.record('other.gpumem.jsonl'): pass")

        assert (failed.status, after.status) == ("error", "ok"), after.text
        assert notebook.evaluate("len(get_ipython().events.callbacks['post_run_cell'])") == 0
    state = _load(tmp_path / "out" / "memory")
    assert state.status == "failed"
    assert state.error.startswith("DeviceFullError: CUDA out of memory.")
    assert [card.event.state.info.device for card in state.ooms] == ["cuda:0"]
    assert (_list_ends(state)["training step"], _list_ends(state)["epoch"]) == ("error", "error")


@pytest.mark.usefixtures("models")
@pytest.mark.parametrize("caught", ["RuntimeError", "()"])
def test_a_failed_training_ends_with_its_program(tmp_path: Path, caught: str) -> None:
    """With the error that ended the program, or, where that was caught, without one."""
    script = write_script(
        tmp_path,
        f"""
        from contextlib import suppress
        from pathlib import Path
        from gpumemwidget.integrations.transformers import MemoryCallback
        from tests.integrations.transformers_models import make_trainer

        def fail(number):
            raise RuntimeError("no such batch")

        trainer = make_trainer(Path("out"), work=fail)
        MemoryCallback(every_steps=1).add_to(trainer)
        with suppress({caught}):
            trainer.train()
        """,
    )

    run_python(tmp_path, script, timeout_s=300)

    state = _load(tmp_path / "out" / "memory")
    assert state.status == "failed"
    assert state.error == (
        "RuntimeError: no such batch"
        if caught == "()"
        else "GpuMemError: the training did not report its end"
    )
    assert (_list_ends(state)["training step"], _list_ends(state)["epoch"]) == ("error", "error")


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
    assert (_list_ends(state)["training step"], _list_ends(state)["epoch"]) == ("error", "error")
    assert [card.event.state.info.device for card in state.ooms] == ["host"]


@pytest.mark.parametrize(
    "make_copy", [copy.deepcopy, lambda callback: pickle.loads(pickle.dumps(callback))]
)
def test_a_copy_records_by_itself(models: Any, tmp_path: Path, make_copy: Any) -> None:
    """Also one that is made while the training runs, and one that was used before."""
    from transformers import TrainerCallback

    callback = make_copy(models.MemoryCallback(every_steps=2))
    copies: list[Any] = []

    class Copier(TrainerCallback):
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            copies.append(make_copy(callback))

    callback.add_to(trainer := models.make_trainer(tmp_path / "first", Copier()))
    trainer.train()
    copies[-1].add_to(trainer := models.make_trainer(tmp_path / "second"))
    for _ in range(2):
        trainer.train()

    states = [load_one(path) for path in tmp_path.rglob("*.jsonl")]
    assert [state.status for state in states] == ["ended"] * 3
    for state in states:
        assert [s.n_spans for s in state.spans if s.name == "training step"] == [1, 1]


@pytest.mark.usefixtures("models")
def test_other_cells_leave_a_running_training_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A cell of a subshell ends meanwhile, and so does a cell that the training itself runs."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    with open_notebook(tmp_path) as notebook:
        notebook.run("""
from pathlib import Path
from threading import Event
from gpumemwidget.integrations.transformers import MemoryCallback
from tests.integrations.transformers_models import make_trainer

others_ended = Event()

def work(number):
    if number == 2:
        get_ipython().run_cell("1 + 1")
        print("waiting", flush=True)
        others_ended.wait(60)

trainer = make_trainer(Path("out"), work=work)
MemoryCallback(every_steps=1).add_to(trainer)
""")
        subshell = notebook.create_subshell()
        training = notebook.start("trainer.train()")
        notebook.wait_for_output(training, "waiting")

        other = notebook.run("1 + 1", subshell=subshell)
        notebook.run("others_ended.set()", subshell=subshell)
        ended = notebook.finish(training)

        assert (other.status, ended.status) == ("ok", "ok")
        assert (
            notebook.evaluate(
                "['memory/host_resident_peak_bytes' in row for row in trainer.state.log_history]"
            )
            == [True] * 5
        )
    state = _load(tmp_path / "out" / "memory")
    assert state.status == "ended"
    assert sum(span.n_spans for span in state.spans if span.name == "training step") == 4


def test_a_training_within_a_training_leaves_it_running(models: Any, tmp_path: Path) -> None:
    """The outer one goes on to log peaks; the spans of both are in its recording."""
    inner = models.make_trainer(tmp_path / "inner")
    models.MemoryCallback().add_to(inner)

    def work(number: int) -> None:
        if number == 2:
            inner.train()

    outer = models.make_trainer(tmp_path / "outer", work=work)
    models.MemoryCallback(every_steps=1).add_to(outer)

    outer.train()

    for trainer in (inner, outer):
        assert all("memory/host_resident_peak_bytes" in row for row in trainer.state.log_history)
    state = _load(tmp_path / "outer" / "memory")
    assert (state.status, set(_list_ends(state).values())) == ("ended", {"ok"})
    assert list((tmp_path / "inner").rglob("*.jsonl")) == []


def test_a_failed_training_does_not_get_the_error_of_another_program_part(
    models: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``sys.last_value`` counts where it came out of the training alone."""

    def fail(_: int) -> None:
        raise RuntimeError("no such batch")

    failing = models.make_trainer(tmp_path / "first", work=fail)
    models.MemoryCallback().add_to(failing)
    trainer = models.make_trainer(tmp_path / "second")
    models.MemoryCallback().add_to(trainer)
    monkeypatch.setattr("sys.last_value", ValueError("of another part"), raising=False)

    with suppress(RuntimeError):
        failing.train()
    trainer.train()

    error = _load(tmp_path / "first" / "memory").error
    assert error == "GpuMemError: the training did not report its end"


def test_a_folder_that_cannot_be_made_is_no_failure_of_the_training(
    models: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is reported in one line, and the peaks are logged all the same."""
    (tmp_path / "file").write_text("", encoding="utf-8")
    trainer = models.make_trainer(tmp_path)
    models.MemoryCallback(folder=tmp_path / "file" / "memory", every_steps=1).add_to(trainer)

    for _ in range(2):
        trainer.train()

    reported = [line for line in capsys.readouterr().err.splitlines() if "gpumemwidget" in line]
    assert len(reported) == 1
    assert reported[0].startswith("gpumemwidget: beginning the recording failed (FileError: ")
    assert reported[0].endswith("; the training goes on")
    assert all("memory/host_resident_peak_bytes" in row for row in trainer.state.log_history)


@pytest.mark.parametrize("broken", ["start_span", "read_exact"])
def test_peaks_that_cannot_be_read_are_no_failure_of_the_training(
    models: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    broken: str,
) -> None:
    """It is reported in one line, and the recording ends with the training."""

    def fail(_: object) -> None:
        raise BackendError("the driver is gone")

    monkeypatch.setattr(Hardware, broken, fail)
    trainer = models.make_trainer(tmp_path)
    models.MemoryCallback().add_to(trainer)

    trainer.train()

    assert _load(tmp_path / "memory").status == "ended"
    line = "gpumemwidget: reading the peaks failed (BackendError: the driver is gone); the training"
    assert capsys.readouterr().err.count(line) == 1


@pytest.mark.usefixtures("models")
def test_a_hook_that_the_user_removed_is_no_failure_of_the_training(tmp_path: Path) -> None:
    """``events.reset_all`` removes ours, too."""
    script = write_script(
        tmp_path,
        """
        from pathlib import Path
        from IPython.core.interactiveshell import InteractiveShell
        from gpumemwidget.integrations.transformers import MemoryCallback
        from tests.integrations.transformers_models import make_trainer

        events = InteractiveShell.instance().events
        remove = lambda _: events.callbacks.update(post_run_cell=[])
        trainer = make_trainer(Path("out"), work=remove)
        MemoryCallback().add_to(trainer)
        trainer.train()
        """,
    )

    ended = run_python(tmp_path, script, timeout_s=300)

    assert (ended.status, "gpumemwidget:" in ended.err) == (0, False), ended.err
    assert _load(tmp_path / "out" / "memory").status == "ended"


@pytest.mark.gpu
@pytest.mark.usefixtures("models")
def test_a_training_on_a_gpu(tmp_path: Path) -> None:
    """The peak of each step is logged, PyTorch's own stays, and an OOM has its card."""
    script = write_script(
        tmp_path,
        """
        import json, torch
        from pathlib import Path
        from gpumemwidget.integrations.transformers import MemoryCallback
        from tests.integrations.transformers_models import make_trainer

        def work(number):
            torch.empty((5 - number) << 30 if number < 4 else 1 << 50, dtype=torch.uint8, device=0)

        trainer = make_trainer(Path("out"), work=work, use_cpu=False)
        MemoryCallback(every_steps=1).add_to(trainer)
        try:
            trainer.train()
        finally:
            name = "memory/allocated_peak_bytes"
            peaks = [figures[name] for figures in trainer.state.log_history]
            print(json.dumps([torch.cuda.max_memory_allocated(), *peaks]))
        """,
    )

    ended = run_python(tmp_path, script, timeout_s=300, env={"CUDA_VISIBLE_DEVICES": "0"})

    own, *peaks = json.loads(ended.out.splitlines()[-1])
    assert [peak // GIB for peak in peaks] == [4, 3, 2]
    assert own == peaks[0]
    state = _load(tmp_path / "out" / "memory")
    assert state.error.startswith("OutOfMemoryError")
    assert [card.event.state.info.device for card in state.ooms] == ["cuda:0"]
