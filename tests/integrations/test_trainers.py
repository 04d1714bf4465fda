"""What the callbacks of all trainers promise, with the real libraries where they are installed."""

from __future__ import annotations

import copy
import json
import pickle
from pathlib import Path
from typing import Any

import pytest

from gpumemwidget.backends.hardware import Hardware
from gpumemwidget.errors import BackendError, BadInputError
from gpumemwidget.testing import DeviceFullError
from gpumemwidget.testing.machine import SimulatedMachine
from tests.integrations.common import (
    GIB,
    HOST_PEAK,
    MIB,
    PEAK,
    count_spans,
    do_nothing,
    list_ends,
    load,
)
from tests.remote.programs import run_python, write_script

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]


def test_a_training_is_logged_and_recorded(
    models: Any, tmp_path: Path, gpus: SimulatedMachine
) -> None:
    """The exact peak of each step, to the last digit; spans beside the checkpoints."""
    # float32 can't hold this.
    n_bytes = 12 * GIB + 512

    def work(number: int) -> None:
        if number == 2:
            gpus.free(gpus.allocate(n_bytes))

    rows = models.train(tmp_path, models.MemoryCallback(every_steps=4), work)

    assert [row[PEAK] for row in rows] == [MIB, MIB + n_bytes, *[MIB] * 6]
    assert all(row[HOST_PEAK] > MIB for row in rows)
    state = load(tmp_path / "memory")
    assert (state.status, set(list_ends(state).values())) == ("ended", {"ok"})
    counts = count_spans(state)
    assert (counts["epoch"], counts["training step"], counts[models.EVALUATION]) == (1, 2, 1)


@pytest.mark.parametrize(
    ("error", "status"), [(RuntimeError, "error"), (KeyboardInterrupt, "interrupted")]
)
def test_a_training_that_fails_ends_with_its_error(
    models: Any, tmp_path: Path, error: type[BaseException], status: str
) -> None:
    """So do its spans."""

    def fail(number: int) -> None:
        if number == 3:
            raise error

    # Lightning makes an exit of Ctrl-C.
    with pytest.raises((error, SystemExit)):
        models.train(tmp_path, models.MemoryCallback(every_steps=1), fail)

    state = load(tmp_path / "memory")
    assert (state.status, state.error) == ("failed", error.__name__)
    ends = list_ends(state)
    assert (ends["training step"], ends["epoch"]) == (status, status)


@pytest.mark.parametrize("every_steps", [1, None])
def test_the_recording_has_the_card_of_an_oom(
    models: Any, tmp_path: Path, gpus: SimulatedMachine, every_steps: int | None
) -> None:
    """Once, also where its step is no span."""
    callback = models.MemoryCallback(every_steps=every_steps)

    with pytest.raises(DeviceFullError):
        models.train(tmp_path, callback, lambda number: gpus.allocate(number * 20 * GIB))

    state = load(tmp_path / "memory")
    assert state.error.startswith("DeviceFullError: CUDA out of memory.")
    assert [card.event.state.info.device for card in state.ooms] == ["cuda:0"]


def test_a_training_within_a_training_leaves_it_running(models: Any, tmp_path: Path) -> None:
    """The outer one goes on to log peaks; the spans of both are in its recording."""
    inner: list[dict[str, float]] = []

    def work(number: int) -> None:
        if number == 4:
            inner.extend(models.train(tmp_path / "inner", models.MemoryCallback()))

    outer = models.train(tmp_path / "outer", models.MemoryCallback(every_steps=1), work)

    assert [HOST_PEAK in row for row in (*inner, *outer)] == [True] * 16
    state = load(tmp_path / "outer" / "memory")
    assert (state.status, set(list_ends(state).values())) == ("ended", {"ok"})
    assert list((tmp_path / "inner").rglob("*.jsonl")) == []


@pytest.mark.parametrize(
    "make_copy", [copy.deepcopy, lambda callback: pickle.loads(pickle.dumps(callback))]
)
def test_a_copy_records_by_itself(models: Any, tmp_path: Path, make_copy: Any) -> None:
    """A copy of a new callback, of one that was used, and of one that runs, which does not run."""
    callback = make_copy(models.MemoryCallback(every_steps=4))
    copies: list[Any] = []

    models.train(tmp_path / "new", callback)
    used = make_copy(callback)
    models.train(tmp_path / "used", used, lambda _: copies.append(copy.deepcopy(used)))
    models.train(tmp_path / "running", copies[-1])

    for name in ("new", "used", "running"):
        state = load(tmp_path / name / "memory")
        assert (state.status, count_spans(state)["training step"]) == ("ended", 2)


def test_a_folder_that_cannot_be_made_is_no_failure_of_the_training(
    models: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is reported in one line, and the peaks are logged all the same."""
    (tmp_path / "file").write_text("", encoding="utf-8")
    callback = models.MemoryCallback(folder=tmp_path / "file" / "memory", every_steps=1)

    rows = [row for _ in range(2) for row in models.train(tmp_path, callback)]

    assert [HOST_PEAK in row for row in rows] == [True] * 16
    (line,) = [line for line in capsys.readouterr().err.splitlines() if "gpumemwidget" in line]
    assert line.startswith("gpumemwidget: beginning the recording failed (FileError: ")
    assert line.endswith("; the training goes on")


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

    models.train(tmp_path, models.MemoryCallback(), do_nothing)

    assert load(tmp_path / "memory").status == "ended"
    line = "gpumemwidget: reading the peaks failed (BackendError: the driver is gone); the training"
    assert capsys.readouterr().err.count(line) == 1


def test_a_number_of_steps_that_is_none(models: Any) -> None:
    """One line with the value."""
    with pytest.raises(BadInputError, match="every_steps is 0: give a number from 1 on"):
        models.MemoryCallback(every_steps=0)


@pytest.mark.gpu
def test_a_training_that_runs_out_of_memory_on_a_gpu(models: Any, tmp_path: Path) -> None:
    """Steps have their exact peaks, PyTorch's own stays, and the card is beside the checkpoints."""
    script = write_script(
        tmp_path,
        f"""
        import json, torch
        from pathlib import Path
        from {models.__name__} import MemoryCallback, train

        torch.cuda.set_per_process_memory_fraction(
            (6 << 30) / torch.cuda.get_device_properties(0).total_memory
        )
        logged = []

        def work(number):
            n_bytes = (5 - number) << 30 if number < 4 else 8 << 30
            torch.empty(n_bytes, dtype=torch.uint8, device=0)

        try:
            callback = MemoryCallback(every_steps=1)
            train(Path("out"), callback, work, on_gpu=True, logged=logged)
        finally:
            print(json.dumps([torch.cuda.max_memory_allocated(), *logged]))
        """,
    )

    ended = run_python(tmp_path, script, timeout_s=300, env={"CUDA_VISIBLE_DEVICES": "0"})

    own, *rows = json.loads(ended.out.splitlines()[-1])
    peaks = [row[PEAK] for row in rows]
    assert [peak // GIB for peak in peaks] == [4, 3, 2], ended.err
    assert own == peaks[0]
    state = load(tmp_path / "out" / "memory")
    assert (state.status, state.error.split(":")[0]) == ("failed", "OutOfMemoryError")
    assert [card.event.state.info.device for card in state.ooms] == ["cuda:0"]
    assert (list_ends(state)["training step"], list_ends(state)["epoch"]) == ("error", "error")
